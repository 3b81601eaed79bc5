"""Other people's questions.

* `files`, `cells`: rows of the files that questions come in.
* `formats`, `texts`: rows to clean questions.
* `preparing`: deduplicates and mixes them, with `beside`, `leaks` and
  `gold_passages`; `hub`: files to download.
* `prepared`: a folder of prepared questions, written and read.
* `dataset_iterator`: where a run is in its training questions.
* `evidence`: the passages and queries that lead to an answer.
"""
