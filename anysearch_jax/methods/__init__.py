"""The compared systems. Each is a value; one driver plays and trains them."""
