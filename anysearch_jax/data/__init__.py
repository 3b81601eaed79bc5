"""Questions: those of others, and the generated world's.

Table of contents:

* `formats`: rows of the files that questions come in; `files`, which hold them.
* `preparing`: cleaning, deduplicating and mixing; `hub`: files to download.
* `prepared`: a folder of prepared questions, written and read.
* `cursor`: where a run stands in its training questions.
* `world`: entities, facts, snapshots, passages, questions.
* `world_tokenizer`: the world's Hugging Face tokenizer, one token a word.
* `demonstrations`: the expert that writes warm-start episodes and probes.
"""
