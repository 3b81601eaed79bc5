"""Sampling episodes.

Table of contents:

* `episode`: the episode as a pure state machine: events in, requests out.
* `driver`: the asyncio shell that answers those requests, for many episodes.
* `engine`: the in-process engine; `kv_store` its caches and jitted calls,
  `sampling` one token from logits, `stops` stop texts over decoded text.
"""
