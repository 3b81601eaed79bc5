"""Questions, and the generated world that they can be asked of.

Table of contents:

* `world`: entities, facts, snapshots, passages, questions.
* `world_tokenizer`: the world's Hugging Face tokenizer, one token a word.
* `demonstrations`: the expert that writes warm-start episodes and probes.
"""
