"""Passage retrieval; of `anysearch_jax`: only `types`, `host` and `policy`.

* `passages`: a corpus on disk, read by line offsets.
* `lexical`: BM25 in memory, for the generated world.
* `analysis`: the terms of a text, by language.
* `bm25`: plain words, and how they rank texts in memory.
* `index`: builds, opens, fuses and measures indexes.
* `encoder`: turns texts into unit vectors, and scores pairs of texts.
* `pipeline`: a retriever in stages: retrieve, fuse, rerank, cut.
* `service`: serves an index over HTTP.
* `clients`: the retrievers that a run asks.
* `recording`: records and replays answers.
"""
