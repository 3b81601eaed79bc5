"""The engine over HTTP servers: token ids in, token ids and log-probs out.

A turn is one request. Servers cache prefixes by their tokens (RadixAttention,
https://arxiv.org/abs/2312.07104), so all samples of a question go to the same
server while it is up (`fleet`). This module decides from the sampled ids where
a turn ends, as the in-process engine does, because a server's own search for
stop texts misses some.

If adapters are trained and the servers can load them, the base is loaded once
and each version is an adapter. All tokens of a turn then have one version.

Each turn has a seed derived from its `types.Address`. Servers that sample
deterministically follow it; others sample anew each time.
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
from anysearch_jax.host import disk, json_files, loop
from anysearch_jax.policy import decoder, experts, hf
from anysearch_jax.rollout.servers import delta
from anysearch_jax.rollout.servers import fleet as fleet_lib
from anysearch_jax.rollout.servers import server as server_lib
from anysearch_jax.rollout.servers import weights as weights_lib

_log = logging.getLogger(__name__)

_SEED_BYTES = 7  # Fits into the signed 64 bits that servers take.


class ServersEngine:
  """`types.Engine` over one or several servers.

  In a run of several processes, one process has it; no call is a collective.

  Args:
    policy: the initial policy. Its weights are loaded into the servers
      immediately, or with the first turn (`servers.colocated`). If it has no
      weights, the caller sets them before the first turn.
    dialect: class of the servers: `sglang.SglangServer` or `vllm.VllmServer`.
    config: addresses of the servers, deadlines and retries.
    sampling: how tokens are drawn, unless a request says otherwise.
    seed: the run's seed, part of the seeds of all turns.
    dtype: dtype of the weights in the folders that the servers load.
    records: whether turns report the experts that their tokens chose.

  Attributes:
    counters: `requests`, `sampled_tokens`, `dropped_tokens` (sampled after a
      turn's end), `prefilled_tokens`, `shared_tokens` (of contexts that were
      cached), `retries`, `unscored` (see `scores`), `handover_bytes` and
      `handover_ms` (of new weights), and the counters of `fleet.Fleet`.
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
    dialect: type[server_lib.Server],
    config: config_lib.ServersConfig,
    sampling: config_lib.SamplingConfig,
    seed: int = 0,
    dtype: Any = jnp.bfloat16,
    records: bool = False,
  ):
    # Keep no reference to the weights: the servers hold their own copy.
    self._policy = policy._replace(params={})
    self._config = config
    self._sampling = sampling
    self._seed = seed
    self._dtype = dtype
    self.counters: Counter[str] = Counter()
    self._context_flag = dialect.context_flag
    self._records = records and bool(policy.architecture.experts)
    # The token ids and experts of each episode so far. Servers then send only
    # the experts of later tokens.
    self._episode_experts: dict[
      types.Address, tuple[tuple[int, ...], np.ndarray]
    ] = {}
    self._client, make = server_lib.connect(dialect, config, self.counters)
    self._run = secrets.token_hex(4)
    self._serial = itertools.count()
    # All weights in the order of their hand-overs. The last ones may still be
    # loading; whole weights before `_current` are no longer served.
    self._handed_over: list[weights_lib.Sampled] = []
    self._current = 0
    # With adapters: their base, once it is written, and the number of running
    # turns by the adapter's name.
    self._base: weights_lib.Weights | None = None
    self._running: Counter[str] = Counter()
    urls = (config.gateway,) if config.gateway else config.urls
    self._folder = weights_lib.folder(config.weights, urls)
    # Whole weights are written here. Hosts read this folder, or get deltas
    # between the versions in it.
    self._written = self._folder
    self._sender: delta.Sender | None = None
    if config.deltas:
      ram = weights_lib.folder("", urls)
      self._written = ram.with_name(ram.name + "-last")
      self._sender = delta.Sender(self._folder)
    self._fleet = fleet_lib.Fleet(
      () if config.gateway else urls,
      make,
      gateway=config.gateway,
      router=config.router,
      run=self._run,
      wait=config.wait,
      counters=self.counters,
    )
    try:
      self.max_context = loop.run(self._fleet.start())
      up = [member.server for member in loop.run(self._fleet.up())]
      if self._records:
        for server in up:
          server.check_records()
      self.adapts = self._can_adapt(up)
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
    With adapters, running turns keep the adapter that they began with.

    Args:
      params: laid out as the policy's, on any mesh of this process.
      version: version of `params`, recorded with every later token.

    Raises:
      types.EngineError: a server did not load the weights, or no server was
        available in time. Then only replies with the old weights count.
    """
    name = f"{self._run}.{next(self._serial)}-{version}"
    policy = self._policy._replace(params=params)
    if self.adapts:
      self._hand_over_adapter(policy, name, version)
      return
    path = self._written / name
    weights = self._plain_weights(path, name)
    sender = self._sender
    if sender is not None:
      if sender.is_first:
        weights = weights._replace(path=self._folder / name)
      else:
        # Each host makes this folder from its copy of the last version.
        weights = weights._replace(path=delta.COPIES / name, sender=sender)

    def write() -> list[pathlib.Path]:
      if sender is None or sender.is_first:
        # Before writing, because there may be no room for two folders.
        self._remove_folders(None)
      hf.save(path, policy, dtype=self._dtype)
      return [path if sender is None else sender.send(path)]

    self._hand_over(weights, version, write)

  def _hand_over_adapter(
    self, policy: hf.Policy, name: str, version: int
  ) -> None:
    """Hands over the adapter of a policy, and its base the first time."""
    path = self._folder / name
    base = self._base
    if base is None:
      base = self._plain_weights(self._folder / f"{name}.base", name)

    def write() -> list[pathlib.Path]:
      paths = [path]
      if self._base is None:
        self._remove_folders(None)
        bare = policy.architecture.without_lora()
        base_policy = policy._replace(architecture=bare)
        hf.save(base.path, base_policy, dtype=self._dtype)
        paths.append(base.path)
      hf.save_adapter(path, policy, base=base.path.name, dtype=self._dtype)
      return paths

    # Keep the adapters of running turns, and the newest one for turns that
    # begin during the hand-over.
    adapters_in_use = [
      sampled.adapter
      for sampled in self._handed_over
      if sampled.adapter
      and (
        sampled is self._handed_over[-1] or self._running[sampled.adapter.name]
      )
    ]
    adapters = (*adapters_in_use, weights_lib.Adapter(name, path))
    self._hand_over(base._replace(adapters=adapters), version, write)

  def _plain_weights(
    self, path: pathlib.Path, name: str
  ) -> weights_lib.Weights:
    """Returns whole weights, in a folder that is still to be written.

    Raises:
      types.EngineError: the policy is quantised, so servers cannot take them.
    """
    source = self._policy.source
    config = json_files.read(source / "config.json") if source else {}
    if config.get("quantization_config"):
      raise types.EngineError(
        f"{source}: found quantised weights, expected plain ones: servers that "
        "began with quantised ones cannot load trained ones. Have transformers "
        "load it by Mxfp4Config(dequantize=True), then call save_pretrained."
      )
    return weights_lib.Weights(path, name, self._config.deadline)

  def _can_adapt(self, servers: Sequence[server_lib.Server]) -> bool:
    """Returns whether servers get adapters only; logs why not."""
    lora = self._policy.architecture.lora
    if lora is None:
      return False
    for server in servers:
      if why := server.adapter_refusal(lora.rank, lora.targets):
        _log.warning(
          "The servers get whole weights with the adapters merged into them, "
          "not the adapters alone, because of %s: %s.",
          server.url,
          why,
        )
        return False
    return True

  def _hand_over(
    self,
    weights: weights_lib.Weights,
    version: int,
    write: Callable[[], list[pathlib.Path]],
  ) -> None:
    """Loads weights into all servers.

    Meanwhile no health check loads weights into a server.

    Args:
      weights: the new weights.
      version: the policy's version.
      write: writes their folders; returns the files and folders to be sent.
    """
    started = time.monotonic()
    self._handed_over.append(weights.sampled(version))
    old_weights = self._fleet.current_weights
    self._fleet.current_weights = None
    try:
      with disk.translate_errors(self._folder):
        self._count_bytes(write())
      loop.run(self._fleet.hand_over(weights))
      loop.run(self._fleet.up())
    except BaseException:
      self._handed_over.pop()
      self._fleet.current_weights = old_weights
      self._remove_folders(old_weights)
      raise
    self._current = len(self._handed_over) - 1
    self._base = weights._replace(adapters=()) if weights.adapters else None
    self._remove_folders(weights)
    self.counters["handover_ms"] += round(1000 * (time.monotonic() - started))

  async def generate(self, request: types.GenerateRequest) -> types.Generation:
    """Samples one turn. Raises `types.EngineError` if it cannot."""
    self._check_ids(request.token_ids)
    request = request.within(
      self.max_context,
      f"start its servers with a longer {self._context_flag}",
    )
    self.counters["requests"] += 1
    return await loop.wait(
      self._fleet.sample_turn(
        request.address,
        functools.partial(self._turn, request),
        deadline=self._config.deadline,
      )
    )

  def release(self, address: types.Address) -> None:
    """Forgets an episode; servers evict prefixes themselves."""
    self._episode_experts.pop(address, None)
    self._fleet.end_episode(address)

  def free_cache(self) -> int:
    """Makes the servers release their GPU memory, see `CachingEngine`.

    The next turn restores it. Returns 0: servers do not say how much it is.

    Raises:
      types.EngineError: a server refused.
    """
    loop.run(self._fleet.lend())
    return 0

  def scores(self, token_ids: Sequence[int]) -> dict[str, list[float]]:
    """Returns log-probabilities by server, see `ScoringEngine`.

    A server that is down or cannot score is left out and counted as `unscored`.
    Nothing that such a server samples counts either: it samples no turns, or
    its replies name other weights and are refused.
    """
    self._check_ids(token_ids)
    sampled = self._handed_over[self._current]
    return loop.run(
      self._fleet.scores(token_ids, sampled, deadline=self._config.deadline)
    )

  def put_aside(self, part: str, why: str) -> None:
    """Leaves a server out, see `FleetEngine`."""
    loop.run(self._fleet.put_aside(part, why))

  def expect(self, token_ids: Sequence[int], wrong: types.Wrong) -> None:
    """Compares servers that join or return, see `FleetEngine`."""
    sampled = self._handed_over[self._current]
    self._fleet.reference = fleet_lib.Reference(sampled, token_ids, wrong)

  def close(self) -> None:
    """Closes the connections and removes the weights."""
    loop.run(self._fleet.stop())
    self._fleet.current_weights = None
    self._remove_folders(None)
    loop.run(server_lib.close(self._client))

  def _remove_folders(self, weights: weights_lib.Weights | None) -> None:
    """Removes all that this engine has written but the folders of `weights`."""
    needed: set[pathlib.Path] = set()
    if weights:
      needed = {weights.path, *(adapter.path for adapter in weights.adapters)}
    for folder in {self._folder, self._written}:
      if not folder.is_dir():
        continue
      if (
        weights and self._sender
      ):  # Also the delta or the folder that was sent.
        needed.update(folder.glob(f"{weights.path.name}*"))
      for path in {*folder.iterdir()} - needed:
        if path.is_dir():
          shutil.rmtree(path, ignore_errors=True)
        else:
          path.unlink(missing_ok=True)
      with contextlib.suppress(OSError):
        folder.rmdir()

  def _count_bytes(self, paths: Sequence[pathlib.Path]) -> None:
    """Counts the bytes of files and folders that are handed over."""
    for path in paths:
      files = path.rglob("*") if path.is_dir() else [path]
      self.counters["handover_bytes"] += sum(
        file.stat().st_size for file in files if file.is_file()
      )

  async def _turn(
    self, request: types.GenerateRequest, server: server_lib.Server
  ) -> types.Generation:
    """Samples a turn on a server."""
    first = self._current
    sampled = self._handed_over[first]
    name = sampled.adapter.name if sampled.adapter else ""
    self._running[name] += 1
    recorded = self._recorded_experts(request)
    # `variant` is not part of a draw's address.
    draw = (self._seed, *request.address[:4], request.turn)
    seed = hashlib.blake2b(repr(draw).encode(), digest_size=_SEED_BYTES)
    turn = server_lib.Turn(
      request=request,
      sampled=sampled,
      sampling=self._sampling.for_request(request),
      seed=int.from_bytes(seed.digest()),
      end_of_turn_ids=self._policy.tokenizer.end_of_turn_ids,
      architecture=self._policy.architecture,
      known_experts=None if recorded is None else len(recorded),
    )

    def versions() -> dict[str, int]:
      # Whole weights may have been replaced while the turn ran; an adapter is
      # not, because the request names it.
      candidates = [sampled] if sampled.adapter else self._handed_over[first:]
      return {weights.weights: weights.version for weights in candidates}

    try:
      reply = await server.sample(turn, versions)
    except server_lib.NotFiniteError:
      raise
    except server_lib.OtherWeightsError as error:
      if weights_lib.is_of_another_run(error.name, self._run):
        raise
      raise server_lib.UnansweredError(str(error)) from None
    except types.EngineError as error:
      if not sampled.is_refused_by(error):
        raise
      raise server_lib.UnansweredError(str(error)) from None
    finally:
      self._running[name] -= 1
    try:
      generation = self._generation(request, reply)
    except types.EngineError as error:
      raise server.error(error) from None
    if recorded is None:
      return generation
    ids = request.token_ids + generation.token_ids
    # The reply may go beyond the turn's end.
    turn_experts = np.concatenate([recorded, reply.experts])[: len(ids) - 1]
    self._episode_experts[request.address] = ids, turn_experts
    return dataclasses.replace(generation, experts=turn_experts)

  def _recorded_experts(
    self, request: types.GenerateRequest
  ) -> np.ndarray | None:
    """Returns the experts of a context's first tokens that are recorded.

    They may be those of no token. None if this engine records no experts.
    """
    if not self._records:
      return None
    no_experts = types.unrecorded_experts(
      0, like=experts.record(self._policy.architecture)
    )
    ids, recorded = self._episode_experts.get(request.address, ((), no_experts))
    # A context that does not continue the recorded one starts anew.
    return recorded if request.token_ids[: len(ids)] == ids else no_experts

  def _generation(
    self, request: types.GenerateRequest, reply: server_lib.Reply
  ) -> types.Generation:
    """Returns the turn up to the first token that ends it."""
    decode = self._policy.tokenizer.decode
    ends = self._policy.tokenizer.end_of_turn_ids

    def is_stopped(count: int) -> bool:
      return request.cut(decode(reply.ids[:count])) is not None

    count = next(
      (i for i, token in enumerate(reply.ids, 1) if token in ends),
      len(reply.ids),
    )
    if is_stopped(count):
      finish = types.Finish.STOP
      # The fewest tokens whose text has a stop text.
      counts = range(1, count + 1)
      count = counts[bisect.bisect_left(counts, True, key=is_stopped)]
    elif reply.ids[count - 1] in ends:
      finish = types.Finish.END_OF_TURN
    elif count == request.max_tokens:
      finish = types.Finish.LENGTH
    else:
      raise types.EngineError(
        f"The reply ends after {count} of {request.max_tokens} tokens for "
        f"{reply.reason}, expected a stop text or one of the end-of-turn "
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
      token_ids=reply.ids[:count],
      logps=reply.logps[:count],
      text=request.cut(text) or text,
      finish=finish,
      versions=reply.versions[:count],
    )

  def _check_ids(self, token_ids: Sequence[int]) -> None:
    """Raises ValueError for token ids that the policy does not have."""
    size = self._policy.architecture.vocab_size
    for token in token_ids:
      if not 0 <= token < size:
        raise ValueError(
          f"Found token {token} in a context, expected ids in [0, {size}); a "
          "server may end itself over it."
        )
