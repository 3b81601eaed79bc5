"""Finding passages; of `anysearch_jax` it imports only `host` and `policy`.

* `passages`: a corpus by line offsets. `lexical`: BM25 of the generated world.
* `index`: indexes, how they are built, opened, fused and measured.
* `encoder`: texts to unit vectors. `service`: an index over HTTP.
* `clients`: retrievers that a run asks. `recording`: answers from before.
"""
