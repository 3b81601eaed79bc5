"""The engine over SGLang servers: token ids in, token ids and log-probs out.

A turn is one request. Servers cache prefixes by their tokens (RadixAttention,
https://arxiv.org/abs/2312.07104), so all samples of a question go to the same
server while it is up (`health`). This module decides from the sampled ids where
a turn ends, as the in-process engine does, because the server's own search for
stop texts misses some.

Where adapters are trained and servers can load them (`adapters`), the base is
loaded once and each version is an adapter. An episode then keeps the version of
its first turn while servers hold that, and a turn has tokens of one version.

Each turn has a seed of its own by `types.Address`. Only servers that run with
--enable-deterministic-inference follow it; others sample anew each time.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import logging
import pathlib
import re
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.host import disk, json_files, loop, processes
from anysearch_jax.policy import decoder, experts, hf
from anysearch_jax.rollout.sglang import adapters, delta, health
from anysearch_jax.rollout.sglang import reply as sglang_reply
from anysearch_jax.rollout.sglang import server as sglang_server

_log = logging.getLogger(__name__)


class SglangEngine:
  """`types.Engine` over one or several SGLang servers.

  In a run of several processes, each one creates an engine, and all of them
  call `set_params` together.

  Args:
    policy: its weights are loaded into the servers immediately, or with the
      first turn (`sglang.colocated`); without any, the caller sets them first.
    config: addresses of the servers, deadlines and retries.
    sampling: how tokens are drawn, unless a request says otherwise.
    seed: of the run, part of the seeds of all turns.
    dtype: of the weights in the folders that the servers load.
    async_level: of the run, for the number of adapters that servers hold.
    records: whether turns have the experts that their tokens chose.

  Attributes:
    counters: `requests`, `sampled_tokens`, `dropped_tokens` (sampled after a
      turn's end), `prefilled_tokens`, `shared_tokens` (of contexts that were
      cached), `retries`, `unscored` (see `scores`), `handover_bytes` and
      `handover_ms` (of new weights), and the counters of `health.Fleet`.
    max_context: the longest context an episode may reach, in tokens.
    adapts: whether servers get adapters only, over a base.

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
    seed: int = 0,
    dtype: Any = jnp.bfloat16,
    async_level: int = 0,
    records: bool = False,
  ):
    # Keep no reference to the weights: the servers hold their own copy.
    self._policy = policy._replace(params={})
    self._config = config
    self._sampling, self._seed = sampling, seed
    self._dtype = dtype
    self.counters: Counter[str] = Counter()
    a = policy.architecture
    self._records = records and bool(a.experts)
    # Of each episode's newest turn, to be sent only those of new tokens.
    self._chosen: dict[types.Address, tuple[tuple[int, ...], np.ndarray]] = {}
    self._client, make = sglang_server.connect(config, self.counters)
    self._run = processes.on_main(lambda: secrets.token_hex(4))
    self._serial = itertools.count()
    # All weights in order. The last ones may still be loading; whole ones
    # before `_current` are no longer served.
    self._handed: list[adapters.Sampled] = []
    self._current = 0
    # With adapters: their base, when it is written; what each episode began
    # with; the turns that run.
    self._base: sglang_server.Weights | None = None
    self._held = adapters.held(async_level)
    self._began: dict[types.Address, adapters.Sampled] = {}
    self._running: Counter[str] = Counter()
    gateway = config.gateway
    urls = (gateway,) if gateway else config.urls
    self._folder = sglang_server.folder(config.weights, urls)
    ram = sglang_server.folder("", urls)
    self._sender = (
      delta.Sender(self._folder, ram.with_name(ram.name + "-last"))
      if config.deltas
      else None
    )
    self._fleet = health.Fleet(
      () if gateway else urls,
      make,
      gateway=make(gateway) if gateway else None,
      run=self._run,
      wait=config.wait,
      counters=self.counters,
    )
    self._servers = self._fleet.servers
    try:
      # The first process alone gives back what a killed run released.
      self.max_context = processes.on_main(
        lambda: loop.run(self._fleet.start())
      )
      if not processes.is_main():
        loop.run(self._fleet.start())
      processes.on_main(self._check_records)
      self.adapts = processes.on_main(self._can_adapt)
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
    With adapters, running turns end as they began.

    Args:
      params: laid out as the policy's, on any mesh.
      version: of `params`, recorded with every token from then on.

    Raises:
      types.EngineError: a server did not load the weights, or no server was
        available in time. Then only replies with the old weights count.
    """
    name = self._name(version)
    path = self._folder / name
    policy = self._policy._replace(params=params)
    if not self.adapts:
      self._hand_over_whole(policy, name, version)
      return
    base = self._base or self._whole(self._folder / f"{name}.base", name)

    def write_adapter() -> list[pathlib.Path]:
      written = [path]
      with disk.translate_errors(path):
        if self._base is None:
          self._clean(None)
          bare = policy.architecture.without_lora()
          whole = policy._replace(architecture=bare)
          hf.save(base.path, whole, dtype=self._dtype)
          written.append(base.path)
        hf.save_adapter(path, policy, base=base.path.name, dtype=self._dtype)
      return written

    self._hand_over(self._adapted(base, name, path), version, write_adapter)

  def load_folder(self, folder: pathlib.Path, version: int) -> None:
    """Loads whole weights, or a PEFT folder over the policy's own folder.

    See `set_params`. The folder must stay unchanged, where every server can
    read it, while servers hold that version. It is not removed here.
    """
    path, sender = pathlib.Path(folder).absolute(), self._sender
    weights = self._whole(path, self._name(version))
    if (path / adapters.FILE).is_file():
      sender = None
      if not self.adapts or not (source := self._policy.source):
        raise types.EngineError(
          f"{path}: found adapters, which the servers cannot load over a "
          "base; expected whole weights. Start the trainers again."
        )
      base = self._base or weights._replace(path=source.absolute())
      weights = self._adapted(base, weights.name, path)
    elif sender is not None:
      by_delta = (path / delta.DELTA).is_file()
      weights = self._sent(weights, path.name, by_delta=by_delta)

    def write() -> list[pathlib.Path]:
      if sender is None:
        return [path]
      if sender.begins:
        self._clean(None)
      with disk.translate_errors(self._folder):
        return [sender.forward(path)]

    self._hand_over(weights, version, write)

  def _hand_over_whole(
    self, policy: hf.Policy, name: str, version: int
  ) -> None:
    """Writes all weights of a policy, or what changed, and hands them over."""
    path, sender = self._folder / name, self._sender
    by_delta = sender is not None and not sender.begins
    weights = self._sent(self._whole(path, name), name, by_delta=by_delta)

    def save(path: pathlib.Path) -> None:
      with disk.translate_errors(path):
        hf.save(path, policy, dtype=self._dtype)

    def write() -> list[pathlib.Path]:
      if sender is None or sender.begins:
        self._clean(None)  # First: there may be no room for two folders.
      if sender is None:
        save(path)
        return [path]
      with disk.translate_errors(path):
        return [sender.send(name, save, writes=processes.is_main())]

    self._hand_over(weights, version, write)

  def _name(self, version: int) -> str:
    """Returns a new name for weights of a version."""
    return f"{self._run}.{next(self._serial)}-{version}"

  def _whole(self, path: pathlib.Path, name: str) -> sglang_server.Weights:
    """Returns plain weights; servers of a quantised policy cannot take them."""
    source = self._policy.source
    config = json_files.read(source / "config.json") if source else {}
    if config.get("quantization_config"):
      raise types.EngineError(
        f"{source}: found quantised weights, expected plain ones: servers that "
        "began with quantised ones cannot load trained ones. Have transformers "
        "load it by Mxfp4Config(dequantize=True), then call save_pretrained."
      )
    return sglang_server.Weights(path, name, self._config.deadline)

  def _sent(
    self, weights: sglang_server.Weights, name: str, *, by_delta: bool
  ) -> sglang_server.Weights:
    """Returns weights at the path that servers load, once they are sent."""
    if not by_delta:
      return weights._replace(path=self._folder / name)
    return weights._replace(path=delta.COPIES / name, sender=self._sender)

  def _adapted(
    self, base: sglang_server.Weights, name: str, path: pathlib.Path
  ) -> sglang_server.Weights:
    """Returns a base with a new adapter and those that turns may still need."""
    before = [x.adapter for x in self._handed if x.weights == base.name]
    kept = [
      adapter
      for i, adapter in enumerate(before, start=1)
      if adapter is not None
      and (adapter.path / adapters.FILE).is_file()  # Not removed by trainers.
      and (i + self._held > len(before) + 1 or self._running[adapter.name])
    ]
    return base._replace(adapters=(*kept, adapters.Adapter(name, path)))

  def _check_records(self) -> None:
    """Raises EngineError if a server does not return experts as it must."""
    for server in (member.server for member in loop.run(self._fleet.up())):
      # What comes back from host memory has lost its record.
      kept = not server.info.get("enable_hierarchical_cache")
      found = server.info.get("enable_return_routed_experts") is True and kept
      if self._records and not found:
        raise server.error(
          "it does not return the experts of all tokens, as objective.router "
          "needs: start it with --enable-return-routed-experts, without "
          "--enable-hierarchical-cache."
        )

  def _can_adapt(self) -> bool:
    """Returns whether servers get adapters only; logs why not."""
    lora = self._policy.architecture.lora
    if lora is None:
      return False
    for server in (member.server for member in loop.run(self._fleet.up())):
      if why := adapters.refusal(server.info, lora.rank, lora.targets):
        _log.warning(
          "SGLang servers get whole weights with the adapters merged into "
          "them, not the adapters alone, because of %s: %s.",
          *(server.url, why),
        )
        return False
    return True

  def _hand_over(
    self,
    weights: sglang_server.Weights,
    version: int,
    write: Callable[[], list[pathlib.Path]],
  ) -> None:
    """Loads weights into all servers, after `write` has made their folders.

    It returns what they are sent. Meanwhile no health check loads weights into
    a server.
    """
    started = time.monotonic()
    self._handed.append(weights.sampled(version))
    before = self._fleet.present(None)
    try:
      written = processes.barrier_call(write)
      if processes.is_main():
        self._count(written)
      processes.on_main(lambda: loop.run(self._fleet.hand_over(weights)))
      self._fleet.present(weights)  # Of the other processes.
      processes.on_main(lambda: loop.run(self._fleet.up()))
    except BaseException:
      self._handed.pop()
      self._fleet.present(before)
      self._clean(before)
      raise
    self._current = len(self._handed) - 1
    self._base = weights._replace(adapters=()) if weights.adapters else None
    kept = {adapter.name for adapter in weights.adapters}
    # The event loop's thread adds to them meanwhile.
    for address, began in list(self._began.items()):
      if began.adapter and began.adapter.name not in kept:
        self._began.pop(address, None)
    self._clean(weights)
    self.counters["handover_ms"] += round(1000 * (time.monotonic() - started))

  async def generate(self, request: types.GenerateRequest) -> types.Generation:
    """Samples one turn. Raises `types.EngineError` if it cannot."""
    self._check_ids(request.token_ids)
    request = request.within(
      self.max_context, "start its servers with a longer --context-length"
    )
    self.counters["requests"] += 1
    return await loop.wait(
      self._fleet.ask(
        request.address,
        functools.partial(self._turn, request),
        deadline=self._config.deadline,
      )
    )

  def release(self, address: types.Address) -> None:
    """Forgets the adapter of an episode; servers evict prefixes themselves."""
    self._began.pop(address, None)
    self._chosen.pop(address, None)
    self._fleet.leave(address)

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
    sampled = self._handed[self._current]
    return processes.on_main(
      lambda: loop.run(
        self._fleet.scores(token_ids, sampled, deadline=self._config.deadline)
      )
    )

  def put_aside(self, part: str, why: str) -> None:
    """Leaves a server out, see `FleetEngine`."""
    loop.run(self._fleet.put_aside(part, why))

  def expect(self, token_ids: Sequence[int], wrong: types.Wrong) -> None:
    """Compares servers that join or return, see `FleetEngine`."""
    self._fleet.expected = self._handed[self._current], token_ids, wrong

  def close(self) -> None:
    """Closes the connections and removes the weights."""
    loop.run(self._fleet.stop())
    self._fleet.present(None)
    self._clean(None)
    if self._sender is not None and processes.is_main():
      self._sender.close()
    loop.run(sglang_server.close(self._client, self._servers))

  def _clean(self, kept: sglang_server.Weights | None) -> None:
    """Removes all folders that this engine has made but those of `kept`."""
    if not processes.is_main() or not self._folder.is_dir():
      return
    paths = {kept.path, *(a.path for a in kept.adapters)} if kept else set()
    if kept and kept.sender:  # What was sent of it, whole or a delta.
      paths.update(self._folder.glob(f"{kept.path.name}*"))
    for path in {*self._folder.iterdir()} - paths:
      if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
      else:
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
      self._folder.rmdir()

  def _count(self, paths: Sequence[pathlib.Path]) -> None:
    """Counts the bytes of files and folders that are handed over."""
    self.counters["handover_bytes"] += sum(
      file.stat().st_size
      for path in paths
      for file in (path.rglob("*") if path.is_dir() else [path])
      if file.is_file()
    )

  async def _turn(
    self, request: types.GenerateRequest, server: sglang_server.Server
  ) -> types.Generation:
    """Samples a turn on a server."""
    first = self._current
    sampled = self._handed[first]
    if sampled.adapter:
      sampled = self._began.setdefault(request.address, sampled)
    name = sampled.adapter.name if sampled.adapter else ""
    self._running[name] += 1
    known = self._known(request)
    body = self._body(request, sampled)
    if known is not None:
      body["return_routed_experts"] = True
      body["routed_experts_start_len"] = len(known)
    try:
      reply = await server.generate(body)
    except types.EngineError as error:
      if not sampled.refused(error):
        raise
      self._began.pop(request.address, None)
      raise sglang_server.UnansweredError(str(error)) from None
    finally:
      self._running[name] -= 1
    # Whole weights may have changed meanwhile, an adapter not.
    served = [sampled] if sampled.adapter else self._handed[first:]
    try:
      read = sglang_reply.read(
        reply,
        prompt=len(request.token_ids),
        most=request.max_tokens,
        vocab_size=self._policy.architecture.vocab_size,
        versions={x.weights: x.version for x in served},
      )
      turn = self._generation(request, read)
      if known is None:
        return turn
      new = len(request.token_ids) + len(read.ids) - 1 - len(known)
      routed = sglang_reply.routed(reply, new, self._policy.architecture)
      ids = request.token_ids + turn.token_ids
      chosen = np.concatenate([known, routed])[: len(ids) - 1]
      self._chosen[request.address] = ids, chosen
      return dataclasses.replace(turn, experts=chosen)
    except types.EngineError as error:
      told = server.error(error)
      if isinstance(error, sglang_reply.NotFiniteError):
        told = sglang_reply.NotFiniteError(str(told))
      elif isinstance(error, sglang_reply.OtherWeightsError):
        if not sglang_server.of_another_run(error.name, self._run):
          told = sglang_server.UnansweredError(str(told))
      raise told from None

  def _known(self, request: types.GenerateRequest) -> np.ndarray | None:
    """Returns the experts of a context's tokens, as far as they are recorded.

    None if they are not to be.
    """
    if not self._records:
      return None
    none = experts.unknown(0, experts.record(self._policy.architecture))
    ids, chosen = self._chosen.get(request.address, ((), none))
    return chosen if request.token_ids[: len(ids)] == ids else none

  def _body(
    self, request: types.GenerateRequest, sampled: adapters.Sampled
  ) -> dict[str, Any]:
    """Returns the body of a request to /generate.

    Stop texts are also sent as regular expressions. A server searches for a
    stop text only in as many last tokens as its encoding has, and may miss it
    if the model spelled it with more. For a regular expression it looks at as
    many tokens as the expression has characters. All sampling parameters are
    sent, so that the defaults of the model's generation_config.json do not
    apply.
    """
    sampling = self._sampling.asked(request)
    place = self._seed, *request.address[:4], request.turn
    seed = hashlib.blake2b(repr(place).encode(), digest_size=7).digest()
    return sampled.body(
      request.token_ids,
      logprob_start_len=-1,
      extra_key=sampled.weights,  # Separates cached prefixes by the weights.
      sampling_params={
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": 0.0,
        "sampling_seed": int.from_bytes(seed),
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
    )

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
