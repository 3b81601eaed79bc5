"""Ask a policy: one question, a budget, an answer with its sources."""
