"""HTTP calls with deadlines, retries, a circuit breaker and redacted errors."""
