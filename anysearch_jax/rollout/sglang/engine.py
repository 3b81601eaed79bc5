"""The engine over SGLang servers: token ids in, token ids and log-probs out.

A turn is one request. The server keeps the KV cache of what it has seen and
finds it by its tokens, so an episode and all samples of its question stay with
one server while it is up (`sglang_health`). Where a turn ends is decided here,
from the sampled ids, as in the in-process engine: the server's own search for
stop texts misses some.

Sampling is not addressed: the same seeds give other text each time.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import dataclasses
import functools
import itertools
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.host import disk, processes
from anysearch_jax.policy import decoder, hf
from anysearch_jax.rollout import stops
from anysearch_jax.rollout.sglang import health
from anysearch_jax.rollout.sglang import reply as sglang_reply
from anysearch_jax.rollout.sglang import server as sglang_server
from anysearch_jax.rollout.sglang import weights as sglang_weights

# One forward pass of a short prompt, with what the server still works on.
_SCORING_SECONDS = 60.0


class SglangEngine:
  """`types.Engine` over one or several SGLang servers.

  Several processes all make one, and call `set_params` together.

  Args:
    policy: handed to the servers at once, whatever they serve until then.
    config: where they are, and how patient this is with them.
    sampling: how tokens are drawn, one setting an engine.
    version: of the policy, recorded with every token.
    dtype: that weights are handed over in.

  Attributes:
    counters: `requests`, `sampled_tokens`, `dropped_tokens` (sampled after a
      turn's end), `prefilled_tokens`, `shared_tokens` (of contexts that were
      cached), `retries`, `aborted` (turns sampled again after an update),
      `unscored` (see `scores`), and those of `sglang_health.Fleet`.
    max_context: the longest context an episode may reach, in tokens.
    supports_spans: the servers name the weights of every token.
    max_async_level: rollouts that sampling may be ahead of training.

  Raises:
    types.EngineError: a server that is not there, or cannot be used.
    ValueError: a configuration that names none.
  """

  def __init__(
    self,
    policy: hf.Policy,
    *,
    config: config_lib.SglangConfig,
    sampling: config_lib.SamplingConfig,
    version: int = 0,
    dtype: Any = jnp.bfloat16,
  ):
    # Without its weights, which the servers have.
    self._policy = policy._replace(params={})
    self._config = config
    self._sampling = _sampling(sampling)
    self._dtype = dtype
    self.counters: Counter[str] = Counter()
    self._client, self._servers = sglang_server.connect(config, self.counters)
    self._run = processes.by_first(sglang_weights.new_run)
    self._serial = itertools.count()
    # Names of the weights and their versions as they were set; the last may
    # still be on its way, and those before `_current` are gone.
    self._handed: list[tuple[str, int]] = []
    self._current = 0
    self._folder = sglang_weights.folder(
      config.weights, (server.url for server in self._servers)
    )
    self._fleet: health.Fleet | None = None
    self._background = sglang_server.Background()
    try:
      limits = self._background.run(self._connect())
      self.max_context = min(context for context, _ in limits)
      self.supports_spans = all(spans for _, spans in limits)
      self._fleet = health.Fleet(
        self._servers,
        limits=(self.max_context, self.supports_spans),
        run=self._run,
        wait=config.wait,
        counters=self.counters,
      )
      self._background.run(self._fleet.start())
      self.set_params(policy.params, version)
    except BaseException:
      self.close()
      raise

  @property
  def max_async_level(self) -> int:
    """Servers that name one version a reply must not sample over an update."""
    return sys.maxsize if self.supports_spans else 1

  def set_params(self, params: decoder.Params, version: int) -> None:
    """Hands weights to all servers and makes sure that they serve them.

    Turns in progress go on with the new weights from the next token, over a KV
    cache that the old ones filled, or are sampled again where servers cannot
    tell which token is whose. A server that cannot be reached gets the weights
    when it is back: they stay in their folder until the next ones are written.

    Args:
      params: as the policy's, on any mesh.
      version: of them, recorded with every token from then on.

    Raises:
      types.EngineError: a server that did not take them, or none that could be
        reached in time; no reply counts then but of servers that still have
        the old ones.
    """
    name = sglang_weights.name(self._run, next(self._serial), version)
    self._handed.append((name, version))
    path = self._folder / name
    self._background.run(self._fleet.hold())
    before = self._fleet.present(
      health.Weights(path, name, self.supports_spans, self._config.deadline)
    )
    try:
      try:
        if processes.first():
          sglang_weights.remove(self._folder)
        with disk.writing(path):
          hf.save(path, self._policy._replace(params=params), dtype=self._dtype)
        processes.by_first(
          lambda: self._background.run(self._fleet.hand_over())
        )
      finally:
        self._background.run(self._fleet.release())
      processes.by_first(lambda: self._background.run(self._fleet.any_up()))
    except BaseException:
      self._handed.pop()
      self._drop(self._fleet.present(before))
      raise
    self._current = len(self._handed) - 1

  async def generate(self, request: types.GenerateRequest) -> types.Generation:
    """Samples one turn. Raises `types.EngineError` when it cannot."""
    self._check_ids(request.token_ids)
    room = self.max_context - len(request.token_ids)
    if room < 1:
      raise types.EngineError(
        f"The context of {len(request.token_ids)} tokens has no room in the "
        f"servers' {self.max_context}; start them with a longer "
        "--context-length or lower episode.max_context."
      )
    request = dataclasses.replace(
      request, max_tokens=min(request.max_tokens, room)
    )
    self.counters["requests"] += 1
    return await self._background.wait(
      self._fleet.ask(
        # The samples of a question meet, and questions go round the servers.
        request.address.rollout + request.address.question,
        functools.partial(self._turn, request),
        deadline=self._config.deadline,
      )
    )

  def release(self, address: types.Address) -> None:
    """Nothing is held here: a server forgets what it used least recently."""

  def score(self, token_ids: Sequence[int], *, server: int = 0) -> list[float]:
    """Log-probabilities of all tokens but the first, at temperature 1.

    Args:
      token_ids: a context.
      server: which one is asked, by its place among the urls.

    Raises:
      types.EngineError: it cannot be reached, or serves other weights.
    """
    self._check_ids(token_ids)
    return self._background.run(
      sglang_weights.score(
        self._servers[server],
        token_ids,
        name=self._handed[self._current][0],
        deadline=self._config.deadline,
      )
    )

  def scores(self, token_ids: Sequence[int]) -> dict[str, list[float]]:
    """Log-probabilities as `collection.Engine.scores` has them, by server.

    A server that cannot be asked is left out and counted (`unscored`): what it
    samples while it is away, or under other weights' names, does not count.
    """
    self._check_ids(token_ids)
    name = self._handed[self._current][0]

    async def ask() -> list[list[float] | BaseException]:
      return await asyncio.gather(
        *(
          sglang_weights.score(
            server,
            token_ids,
            name=name,
            deadline=min(self._config.deadline, _SCORING_SECONDS),
          )
          for server in self._servers
        ),
        return_exceptions=True,
      )

    def found() -> dict[str, list[float]]:
      out = {}
      for server, scores in zip(self._servers, self._background.run(ask())):
        if isinstance(scores, list):
          out[server.url] = scores
        elif not isinstance(scores, types.EngineError):
          raise scores
      return out

    scores = processes.by_first(found)
    self.counters["unscored"] += len(self._servers) - len(scores)
    return scores

  def close(self) -> None:
    """Ends connections and the thread that holds them."""
    if self._fleet is not None:
      self._fleet.stop()
      self._drop(self._fleet.present(None))
    self._background.close(self._client.aclose)

  def _drop(self, weights: health.Weights | None) -> None:
    """Gives back the room that weights take; those of others stay."""
    if weights is not None and processes.first():
      sglang_weights.remove(weights.path)
      with contextlib.suppress(OSError):
        self._folder.rmdir()

  async def _turn(
    self, request: types.GenerateRequest, server: sglang_server.Server
  ) -> types.Generation:
    """A turn, asked for again where an update of the weights aborted it.

    Runs in the loop of the connections.
    """
    while True:
      first = self._current
      body = self._body(request, self._handed[first][0])
      reply = await server.generate(body)
      try:
        if reason := sglang_reply.aborted(reply):
          if len(self._handed) - 1 == first:
            raise types.EngineError(f"The request was aborted: {reason}.")
          self.counters["aborted"] += 1
          continue
        return self._generation(
          request,
          sglang_reply.read(
            reply,
            prompt=len(request.token_ids),
            most=request.max_tokens,
            vocab_size=self._policy.architecture.vocab_size,
            versions=dict(self._handed[first:]),
          ),
        )
      except sglang_reply.OtherWeightsError as error:
        told = server.error(error)
        if not sglang_weights.of_another_run(error.name, self._run):
          told = sglang_server.UnansweredError(str(told))
        raise told from None
      except types.EngineError as error:
        raise server.error(error) from None

  def _body(self, request: types.GenerateRequest, name: str) -> dict[str, Any]:
    """The request as /generate takes it.

    A server looks for a stop text among as many last tokens as the text has
    when encoded; a regular expression is looked for among as many as it has
    characters. Whatever a model's folder prefers of sampling is overruled.
    """
    return {
      "input_ids": list(request.token_ids),
      "return_logprob": True,
      "logprob_start_len": -1,
      "extra_key": name,  # No prefix of other weights is taken from the cache.
      "sampling_params": {
        **self._sampling,
        "max_new_tokens": request.max_tokens,
        "stop": list(request.stop),
        "stop_regex": [re.escape(stop) for stop in request.stop],
        "stop_token_ids": sorted(self._policy.tokenizer.end_of_turn_ids),
      },
    }

  def _generation(
    self, request: types.GenerateRequest, reply: sglang_reply.Reply
  ) -> types.Generation:
    """The turn up to the first token that ends it."""
    decode = self._policy.tokenizer.decode
    ends = self._policy.tokenizer.end_of_turn_ids

    def stopped(count: int) -> bool:
      return stops.cut(decode(reply.ids[:count]), request.stop) is not None

    count = next(
      (i for i, token in enumerate(reply.ids, 1) if token in ends),
      len(reply.ids),
    )
    if stopped(count):
      finish = types.Finish.STOP
      counts = range(1, count + 1)
      count = counts[bisect.bisect_left(counts, True, key=stopped)]
    elif reply.ids[count - 1] in ends:
      finish = types.Finish.END_OF_TURN
    elif count == request.max_tokens:
      finish = types.Finish.LENGTH
    else:
      raise types.EngineError(
        f"The reply ends after {count} of {request.max_tokens} tokens for "
        f"{dict(reply.reason)}, expected a stop text or one of the end-of-turn "
        f"tokens {sorted(ends)}; start the server with the policy's own folder."
      )
    text = decode(reply.ids[:count])
    self.counters.update(
      sampled_tokens=count,
      dropped_tokens=len(reply.ids) - count,
      prefilled_tokens=max(len(request.token_ids) - reply.cached, 0),
      shared_tokens=reply.cached,
    )
    return types.Generation(
      reply.ids[:count],
      reply.logps[:count],
      stops.cut(text, request.stop) or text,
      finish,
      reply.versions[:count],
    )

  def _check_ids(self, token_ids: Sequence[int]) -> None:
    size = self._policy.architecture.vocab_size
    for token in token_ids:
      if not 0 <= token < size:
        raise ValueError(
          f"Found token {token} in a context, expected ids in [0, {size}); a "
          "server may end itself over it."
        )

  async def _connect(self) -> list[tuple[int, bool]]:
    return await asyncio.gather(*(each.limits() for each in self._servers))


def _sampling(config: config_lib.SamplingConfig) -> Mapping[str, Any]:
  return {
    "temperature": config.temperature,
    "top_p": config.top_p,
    "top_k": config.top_k or -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "ignore_eos": False,
    "skip_special_tokens": False,
    "no_stop_trim": True,
  }
