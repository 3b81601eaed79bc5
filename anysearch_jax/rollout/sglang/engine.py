"""The engine over SGLang servers: token ids in, token ids and log-probs out.

A turn is one request. Servers cache prefixes by their tokens (RadixAttention,
https://arxiv.org/abs/2312.07104), so all samples of a question go to the same
server while it is up (`health`). This module decides from the sampled ids where
a turn ends, as the in-process engine does, because the server's own search for
stop texts misses some.

Sampling does not follow `types.Address`: it differs from run to run.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import pathlib
import re
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.host import disk, loop, processes
from anysearch_jax.policy import decoder, hf
from anysearch_jax.rollout.sglang import health
from anysearch_jax.rollout.sglang import reply as sglang_reply
from anysearch_jax.rollout.sglang import server as sglang_server


class SglangEngine:
  """`types.Engine` over one or several SGLang servers.

  In a run of several processes, each one creates an engine, and all of them
  call `set_params` together.

  Args:
    policy: its weights are loaded into the servers immediately, or with the
      first turn (`sglang.colocated`); without any, the caller sets them first.
    config: addresses of the servers, deadlines and retries.
    sampling: how tokens are drawn, unless a request says otherwise.
    dtype: of the weights in the folder that the servers load.

  Attributes:
    counters: `requests`, `sampled_tokens`, `dropped_tokens` (sampled after a
      turn's end), `prefilled_tokens`, `shared_tokens` (of contexts that were
      cached), `retries`, `unscored` (see `scores`), and the counters of
      `health.Fleet`.
    max_context: the longest context an episode may reach, in tokens.

  Raises:
    types.EngineError: a server is unavailable or cannot be used.
    ValueError: the configuration names no server or an invalid one.
  """

  def __init__(
    self,
    policy: hf.Policy,
    *,
    config: config_lib.SglangConfig,
    sampling: config_lib.SamplingConfig,
    dtype: Any = jnp.bfloat16,
  ):
    # Keep no reference to the weights: the servers hold their own copy.
    self._policy = policy._replace(params={})
    self._config = config
    self._sampling = sampling
    self._dtype = dtype
    self.counters: Counter[str] = Counter()
    self._client, self._servers = sglang_server.connect(config, self.counters)
    self._run = processes.on_main(lambda: secrets.token_hex(4))
    self._serial = itertools.count()
    # Names and versions of all weights, in order. The last one may still be
    # loading; those before `_current` are no longer served.
    self._handed: list[tuple[str, int]] = []
    self._current = 0
    self._folder = sglang_server.folder(
      config.weights, (server.url for server in self._servers)
    )
    self._fleet = health.Fleet(
      self._servers, run=self._run, wait=config.wait, counters=self.counters
    )
    try:
      # The first process alone gives back what a killed run released.
      self.max_context = processes.on_main(
        lambda: loop.run(self._fleet.start())
      )
      if not processes.is_main():
        loop.run(self._fleet.start())
      if config.colocated:
        self.free_cache()
      if policy.params:
        self.set_params(policy.params, 0)
    except BaseException:
      self.close()
      raise

  def set_params(self, params: decoder.Params, version: int) -> None:
    """Loads weights into all servers and checks that they serve them.

    Running turns continue with the new weights from the next token, over a KV
    cache that the old weights filled. A server that is unavailable gets the
    weights when it is back: they remain in their folder until the next ones are
    written. After `free_cache` they are loaded with the next turn or `scores`.

    Args:
      params: laid out as the policy's, on any mesh.
      version: of `params`, recorded with every token from then on.

    Raises:
      types.EngineError: a server did not load the weights, or no server was
        available in time. Then only replies with the old weights count.
    """
    path = self._folder / self._name(version)

    def write() -> None:
      if processes.is_main():
        shutil.rmtree(self._folder, ignore_errors=True)
      with disk.translate_errors(path):
        hf.save(path, self._policy._replace(params=params), dtype=self._dtype)

    self._hand_over(path, path.name, version, write)

  def load_folder(self, folder: pathlib.Path, version: int) -> None:
    """Loads a Hugging Face folder into all servers; see `set_params`.

    The folder must stay unchanged, where every server can read it, until the
    next weights are loaded. It is never removed here.
    """
    folder = pathlib.Path(folder).absolute()
    self._hand_over(folder, self._name(version), version)

  def _name(self, version: int) -> str:
    """Returns a new name for weights of a version."""
    return f"{self._run}.{next(self._serial)}-{version}"

  def _hand_over(
    self,
    path: pathlib.Path,
    name: str,
    version: int,
    write: Callable[[], None] = lambda: None,
  ) -> None:
    """Loads the folder at `path` into all servers, after `write` has made it.

    Meanwhile no health check loads weights into a server.
    """
    self._handed.append((name, version))
    loop.run(self._fleet.hold())
    weights = sglang_server.Weights(path, name, self._config.deadline)
    before = self._fleet.present(weights)
    try:
      try:
        write()
        processes.on_main(lambda: loop.run(self._fleet.hand_over(weights)))
      finally:
        loop.run(self._fleet.release())
      processes.on_main(lambda: loop.run(self._fleet.up()))
    except BaseException:
      self._handed.pop()
      self._drop(self._fleet.present(before))
      raise
    self._current = len(self._handed) - 1
    self._drop(before)

  async def generate(self, request: types.GenerateRequest) -> types.Generation:
    """Samples one turn. Raises `types.EngineError` if it cannot."""
    self._check_ids(request.token_ids)
    request = request.within(
      self.max_context, "start its servers with a longer --context-length"
    )
    self.counters["requests"] += 1
    return await loop.wait(
      self._fleet.ask(
        # All samples of a question share a server; questions go round-robin.
        request.address.rollout + request.address.question,
        functools.partial(self._turn, request),
        deadline=self._config.deadline,
      )
    )

  def release(self, address: types.Address) -> None:
    """Does nothing: servers evict the least recently used prefixes."""

  def free_cache(self) -> int:
    """Makes the servers release their GPU memory, see `CachingEngine`.

    The next turn gives it back. Returns 0: servers do not say how much it is.

    Raises:
      types.EngineError: a server refused.
    """
    processes.on_main(lambda: loop.run(self._fleet.lend()))
    return 0

  def scores(self, token_ids: Sequence[int]) -> dict[str, list[float]]:
    """Returns log-probabilities by server, see `ScoringEngine`.

    A server that is down or cannot score is left out and counted as `unscored`.
    Nothing that such a server samples counts either: it samples no turns, or
    its replies name other weights and are refused.
    """
    self._check_ids(token_ids)
    name = self._handed[self._current][0]
    scores = processes.on_main(
      lambda: loop.run(
        self._fleet.scores(token_ids, name=name, deadline=self._config.deadline)
      )
    )
    self.counters["unscored"] += len(self._servers) - len(scores)
    return scores

  def close(self) -> None:
    """Closes the connections and removes the weights."""
    loop.run(self._fleet.stop())
    self._drop(self._fleet.present(None))
    loop.run(sglang_server.close(self._client, self._servers))

  def _drop(self, weights: sglang_server.Weights | None) -> None:
    """Removes these weights' folder and its parent, if this engine made it."""
    if weights is None or weights.path.parent != self._folder:
      return
    if processes.is_main():
      shutil.rmtree(weights.path, ignore_errors=True)
      with contextlib.suppress(OSError):
        self._folder.rmdir()

  async def _turn(
    self, request: types.GenerateRequest, server: sglang_server.Server
  ) -> types.Generation:
    """Samples a turn on a server."""
    first = self._current
    reply = await server.generate(self._body(request, self._handed[first][0]))
    try:
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
      if not sglang_server.of_another_run(error.name, self._run):
        told = sglang_server.UnansweredError(str(told))
      raise told from None
    except types.EngineError as error:
      raise server.error(error) from None

  def _body(self, request: types.GenerateRequest, name: str) -> dict[str, Any]:
    """Returns the body of a request to /generate.

    Stop texts are also sent as regular expressions. A server searches for a
    stop text only in as many last tokens as its encoding has, and may miss it
    if the model spelled it with more. For a regular expression it looks at as
    many tokens as the expression has characters. All sampling parameters are
    sent, so that the defaults of the model's generation_config.json do not
    apply.
    """
    sampling = self._sampling.asked(request)
    return {
      "input_ids": list(request.token_ids),
      "return_logprob": True,
      "logprob_start_len": -1,
      "extra_key": name,  # Separates cached prefixes by the weights' name.
      "sampling_params": {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": 0.0,
        "repetition_penalty": request.repetition_penalty,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "ignore_eos": False,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "max_new_tokens": request.max_tokens,
        "stop": list(request.stop),
        "stop_regex": [re.escape(stop) for stop in request.stop],
        "stop_token_ids": sorted(self._policy.tokenizer.end_of_turn_ids),
      },
    }

  def _generation(
    self, request: types.GenerateRequest, reply: sglang_reply.Reply
  ) -> types.Generation:
    """Returns the turn up to the first token that ends it."""
    decode = self._policy.tokenizer.decode
    ends = self._policy.tokenizer.end_of_turn_ids

    def stopped(count: int) -> bool:
      return request.cut(decode(reply.ids[:count])) is not None

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
      request.cut(text) or text,
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
