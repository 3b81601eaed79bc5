"""Published question sets.

* `files`, `cells`: read rows from question files.
* `formats`, `texts`: turn rows into clean questions.
* `preparing`: deduplicates and mixes questions, with `beside`, `leaks` and
  `gold_passages`; `hub` downloads files.
* `prepared`: writes and reads a folder of prepared questions.
* `dataset_iterator`: the position of a run in its training questions.
* `evidence`: the passages and queries that lead to an answer.
"""
