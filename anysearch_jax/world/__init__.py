"""A generated knowledge world, its scripted expert, and the warm start."""
