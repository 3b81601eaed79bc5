"""Documents as an index of passages: read, split, and kept up to date."""
