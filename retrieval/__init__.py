"""Passage retrieval; of `anysearch_jax`: only `types`, `host` and `policy`."""
