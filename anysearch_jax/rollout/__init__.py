"""Sampling episodes.

* `episode`: the episode as a pure state machine: events in, requests out.
* `driver`: the asyncio shell that answers those requests, for many episodes.
* `searching`: batches and caches searches. `stops`: texts that end a turn.
* `jax_engine`: the in-process engine. `sglang`: SGLang servers over HTTP.
"""
