"""Published question sets.

* `files`: reads rows from question files, and downloads them.
* `formats`: turns rows into clean questions.
* `preparing`: deduplicates and mixes questions.
* `prepared`: writes and reads a folder of prepared questions, and calls a
  function of the user's that has them (`data.source=file.py:NAME`).
* `dataset_iterator`: the position of a run in its training questions.
* `evidence`: the passages and queries that lead to an answer.
"""
