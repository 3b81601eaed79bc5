"""Passage retrieval; of `anysearch_jax`: only `types`, `host` and `policy`.

* `passages`: a corpus on disk, read by line offsets.
* `lexical`: BM25 in memory, for the generated world.
* `analysis`: the terms of a text, by language.
* `index`: builds, opens, fuses and measures indexes.
* `encoder`: turns texts into unit vectors.
* `pipeline`: functions over retrievers: fuse, rerank, optional.
* `service`: serves an index over HTTP.
* `http_retriever`, `web_search`: the retrievers that a run asks.
* `recording`: records and replays answers.
"""
