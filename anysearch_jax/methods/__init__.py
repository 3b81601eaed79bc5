"""The compared systems: each one a value, played and trained by one driver."""
