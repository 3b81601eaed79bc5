"""Samples episodes.

* `episode` is the episode as a pure state machine: events in, requests out.
* `driver` answers those requests for many episodes, with asyncio.
* `control` steers an episode by a rule.
* `searching` batches and caches searches.
* `jax_engine` is the in-process engine. `sglang` is a client of SGLang servers.
  `engines` makes the one that a configuration names.
"""
