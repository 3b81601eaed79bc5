"""Experiments and claims of the project's own studies."""
