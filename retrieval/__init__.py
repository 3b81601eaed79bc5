"""Finding passages; nothing here imports `anysearch_jax`.

* `lexical`: BM25 in process, over passages held in memory.
"""
