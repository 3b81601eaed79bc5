"""Configurations: each file's `get_config()` returns an ExperimentConfig."""
