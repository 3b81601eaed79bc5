"""Passage retrieval; of `anysearch_jax`: only `types`, `host` and `policy`.

* `passages`: a corpus on disk, read by line offsets.
* `lexical`: BM25 in memory, for the generated world.
* `bm25`: how the words of a query rank texts, in memory and in files.
* `index`: builds, opens, fuses and measures indexes.
* `encoder`: turns texts into unit vectors.
* `service`: serves an index over HTTP.
* `clients`: the retrievers that a run asks.
* `recording`: records and replays answers.
"""
