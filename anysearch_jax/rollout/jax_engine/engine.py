"""The in-process JAX engine: turns of many episodes over one paged KV cache.

An episode keeps its pages, and so its KV cache, from its first turn until it is
released; while it searches, other episodes decode. The next turn reuses the
cached prefix of its context; chunked prefill between decode calls appends the
rest, such as an observation. Prompts with a common prefix share pages. While a
decode call runs, the engine hands out the results of the previous call and, if
enough other turns are ready, prepares the next one.

Calls have fixed shapes (`kv_store`), so results do not depend on admission
order, on page numbers or on which episodes run at the same time. Calls with
different numbers of lanes agree only to rounding. Paged caches are described in
https://arxiv.org/abs/2309.06180 (vLLM), chunked prefill in
https://arxiv.org/abs/2308.16369 (Sarathi).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import Counter, deque
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.environment import protocol
from anysearch_jax.host import loop
from anysearch_jax.policy import decoder, hf, sharding
from anysearch_jax.rollout.jax_engine import kv_device, kv_memory, kv_store
from anysearch_jax.rollout.jax_engine import sampling as sampling_lib
from anysearch_jax.rollout.jax_engine import turn as turn_lib

# An episode that was answered needs this many iterations of the event loop to
# request its next turn. Decoding before that would leave lanes empty.
_YIELDS = 8
_PATIENCE = 1.0  # Seconds between looks when no event arrives.
# A decode call ends when this share of its rows has finished, so that waiting
# turns can take their lanes.
_FINISHED = 0.25


class _Flight(NamedTuple):
  """A decode call in progress, and the turns in its lanes."""

  width: int
  lanes: dict[int, turn_lib.Turn]
  decoded: asyncio.Future[kv_store.Decoded]


class JaxEngine:
  """`types.Engine` on the local devices.

  Args:
    policy: what is sampled.
    config: slots, pages and compiled shapes.
    sampling: how tokens are drawn, unless a request says otherwise.
    seed: seed of all draws; `types.Address` is folded into it.
    dtype: compute and cache type.
    mesh: of its parameters; kv heads are sharded over its `tensor` axis, rows
      and pages over `data`. None means one device.
    records: whether turns have the experts that their tokens chose, if the
      policy has any.

  Attributes:
    counters: `sampled_tokens`, `prefilled_tokens`, `shared_tokens` (prefilled
      by other episodes), `reused_tokens` (cached by the episode's own earlier
      turns), `discarded_tokens` (dropped because a context changed),
      `prefill_calls`, `decode_calls`, `preemptions`, `lanes_offered` and
      `lanes_used` (their ratio is the occupancy of decode calls; each lane
      used samples one token).

  Raises:
    ValueError: the shapes cannot work.
  """

  def __init__(
    self,
    policy: hf.Policy,
    *,
    config: config_lib.EngineConfig,
    sampling: config_lib.SamplingConfig,
    seed: int,
    dtype: Any = jnp.float32,
    mesh: jax.sharding.Mesh | None = None,
    records: bool = False,
  ):
    mesh = sharding.mesh() if mesh is None else mesh
    self._shards = mesh.shape["data"]
    kv_memory.validate(config, shards=self._shards)
    self._tokenizer, self._a = policy.tokenizer, policy.architecture
    self._config, self._version = config, 0
    # How many missing tokens of a turn a decode call may take.
    self._given = config.decode_steps if config.exact else 0
    self._sampling = sampling
    self._halting = turn_lib.Halting(
      policy.tokenizer,
      vocab_size=policy.architecture.vocab_size,
      stop=protocol.STOPS,
    )
    self._device = kv_device.KvDevice(
      policy.params,
      policy.architecture,
      config=config,
      seed=seed,
      dtype=dtype,
      mesh=mesh,
      records=records,
    )
    self._memory = kv_memory.KvMemory(config, self._a, shards=self._shards)
    # Turns that wait for a row, and those that have one.
    self._queue: deque[turn_lib.Turn] = deque()
    self._running: list[turn_lib.Turn] = []
    self._server: asyncio.Task | None = None
    self._news = asyncio.Event()
    self.counters: Counter[str] = Counter()

  @property
  def max_context(self) -> int:
    """The longest context an episode may reach, in tokens."""
    return self._config.max_context

  @property
  def pages(self) -> tuple[int, int]:
    """The pages of the KV cache that episodes hold, and all pages."""
    return self._memory.held_pages

  def close(self) -> None:
    """Does nothing: the cache goes with the engine."""

  def set_params(self, params: decoder.Params, version: int) -> None:
    """Sets the weights; RuntimeError if a cache of the old ones is held."""
    self._forget(f"version {version} is set")
    self._device.set_params(params)
    self._version = version

  def free_cache(self) -> int:
    """Frees the KV cache, see `CachingEngine`."""
    self._forget("the cache is freed")
    return self._device.free()

  async def generate(self, request: types.GenerateRequest) -> types.Generation:
    """Samples one turn.

    Its context need not extend that of the episode's last turn.

    Raises:
      types.EngineError: the context leaves no room for a token.
      ValueError: a sampling setting is out of its range, or a stop text empty.
      RuntimeError: another turn of the episode is being sampled.
    """
    sampling = self._sampling.for_request(request)
    stop_bit = await self._halting.bit(request.stop)
    if self._config.exact and sampling_lib.restricts(sampling):
      raise ValueError(
        f"sampling: found top_p {sampling.top_p} and top_k {sampling.top_k}; "
        "expected 1 and 0 with engine.exact, whose one program has neither."
      )
    request = request.within(self.max_context, "raise engine.max_context")
    for turn in (*self._queue, *self._running):
      if turn.request.address == request.address:
        if not turn.future.done():
          raise RuntimeError(
            f"Turn {turn.request.turn} of {request.address} is being sampled; "
            "wait for it or release the episode."
          )
        # Its waiter was cancelled, but a call may still write to its pages.
        self.release(request.address)
    return await self._turn(request, sampling, stop_bit)

  async def _turn(
    self,
    request: types.GenerateRequest,
    sampling: config_lib.SamplingConfig,
    stop_bit: int,
  ) -> types.Generation:
    future = asyncio.get_running_loop().create_future()
    context = list(request.token_ids)
    turn = turn_lib.Turn(request, future, context, sampling, stop_bit)
    self._queue.append(turn)
    self._news.set()
    if self._server is None or self._server.done():
      self._server = asyncio.create_task(self._serve())
    return await future

  def release(self, address: types.Address) -> None:
    """Forgets an episode's cache and its turn, if any."""
    self._queue = deque(t for t in self._queue if t.request.address != address)
    self._running = [t for t in self._running if t.request.address != address]
    self._memory.release(address)
    self._news.set()

  def scores(self, token_ids: Sequence[int]) -> dict[str, list[float]]:
    """Scores a sequence on each data shard, see `ScoringEngine`."""
    found = self._device.score(np.asarray(token_ids, np.int32))
    return {f"part {i}": row.tolist() for i, row in enumerate(found)}

  def score_exactly(
    self, params: decoder.Params, sequences: Sequence[np.ndarray]
  ) -> list[np.ndarray]:
    """Scores sequences, int `[T]` each, by the program that samples.

    Needs `engine.exact`; later turns need `set_params`. Returns float32 `[T -
    1]` of each, to the bit the log-probabilities of sampling all tokens but the
    first under `params`.
    """
    self._forget("sequences are scored")
    self._device.set_params(params)

    async def score(i: int) -> np.ndarray:
      # As a later turn, so that no other shares its prompt.
      known, address = tuple(sequences[i].tolist()), types.Address(0, i, 0)
      request = types.GenerateRequest(address, 1, known, 0, ())
      turn = self._turn(request, self._sampling, await self._halting.bit(()))
      try:
        return np.asarray((await turn).logps, np.float32)
      finally:
        self.release(address)

    async def score_all() -> list[np.ndarray]:
      return await asyncio.gather(*map(score, range(len(sequences))))

    found = loop.run(score_all())
    if self._config.free_kv_while_training:
      self._device.free()
    return found

  def _forget(self, event: str) -> None:
    """Stops sharing what the cache holds, before an event that ends it."""
    if self._memory or self._queue:
      raise RuntimeError(
        f"{len(self._memory)} episodes hold KV caches of policy version "
        f"{self._version}; release them before {event}."
      )
    self._memory.forget_prompts()

  async def _serve(self) -> None:
    """Schedules calls until no turn is left."""
    self._news = asyncio.Event()
    flight: _Flight | None = None
    following: _Flight | None = None
    try:
      while self._queue or self._running or flight:
        for _ in range(_YIELDS):
          await asyncio.sleep(0)
        self._admit()
        self._prefill(full=flight is not None)
        following = self._launch(full=flight is not None)
        if flight is not None:
          self._land(flight, await flight.decoded)
        elif following is None and not self._running:
          # No turn can run until a request or a release arrives.
          self._news.clear()
          with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE):
              await self._news.wait()
        flight = following
    except BaseException as error:
      for left in (flight, following):
        # Cancel calls, or retrieve their errors so that asyncio logs none.
        if left and not left.decoded.cancel() and not left.decoded.cancelled():
          left.decoded.exception()
      if not isinstance(error, Exception):
        # Cancelled: no call may still use the pages when the next one starts.
        self._device.drain()
        raise
      # A bug or an out-of-memory error, not an outage: raise it in all waiters.
      for turn in (*self._queue, *self._running):
        if not turn.future.done():
          turn.future.set_exception(error)
      self._queue.clear()
      self._running.clear()

  def _admit(self) -> None:
    """Admits queued turns in order of arrival while there are pages.

    Once a turn finds no room, no later one may open a row, so none starves.
    """
    room = True
    waiting: deque[turn_lib.Turn] = deque()
    copies: deque[kv_memory.Row] = deque()
    for turn in self._queue:
      address = turn.request.address
      row = self._memory.get(address)
      if row is not None:
        dropped = self._memory.resume(row, turn.context)
        self.counters["discarded_tokens"] += dropped
        self.counters["reused_tokens"] += row.cached
      elif room and not self._memory.filling(turn.context):
        first = turn.request.turn == 0 and not turn.logps
        row = self._memory.open(address, turn.context, prompt=first)
        room = row is not None
        if row is not None:
          self.counters["shared_tokens"] += row.cached
          if row.copied:
            copies.append(row)
      if row is None:
        waiting.append(turn)
      else:
        turn.row = row
        self._running.append(turn)
    self._queue = waiting
    while copies:
      self._copy(copies)

  def _copy(self, rows: deque[kv_memory.Row]) -> None:
    """Makes one call that copies shared partial pages for the first rows."""
    call = self._memory.lanes(self._config.prefill_lanes)
    size = 2, len(rows[0].pages), len(call.table)
    sources, targets = np.full(size, kv_memory.PADDING, np.int32)
    while rows and (lane := call.lane(rows[0])) is not None:
      row = rows.popleft()
      sources[:, lane] = row.copied
      targets[:, lane] = [pages[row.own] for pages in row.pages]
      self._memory.mark_ready(row)
    self._device.copy(sources, targets)

  def _fits(
    self, turn: turn_lib.Turn, tokens: int, busy: Collection[kv_memory.Row]
  ) -> bool:
    """Grows a turn's row to `tokens` tokens; returns whether it could."""
    if self._memory.get(turn.request.address) is not turn.row:
      return False  # Its pages were preempted by an earlier turn in this loop.
    gone = self._memory.grow(turn.row, tokens, busy)
    if gone:
      self.counters["preemptions"] += len(gone)
      # Preempted turns return to the front of the queue and prefill again.
      lost = [t for t in self._running if t.request.address in gone]
      self._queue.extendleft(lost)
      self._running = [t for t in self._running if t not in lost]
    return self._memory.holds(turn.row, tokens)

  def _flying(self) -> set[kv_memory.Row]:
    return {turn.row for turn in self._running if turn.flying}

  def _prefill(self, *, full: bool) -> None:
    """Prefills turns while lanes of the next decode call would stay empty.

    Args:
      full: prefill only if there are enough turns to fill the largest call.
    """
    most = self._config.lanes[-1]
    while not self._given:  # Decode calls prefill otherwise.
      free = [turn for turn in self._running if not turn.flying]
      missing = [turn for turn in free if turn.missing > 0]
      if not missing or len(free) - len(missing) >= most:
        return
      if (full and len(free) < most) or not self._prefill_some(missing):
        return
      self._admit()

  def _prefill_some(self, turns: Sequence[turn_lib.Turn]) -> bool:
    """Makes one prefill call with chunks of missing tokens, oldest turn first.

    Returns:
      False if no turn has room, because running decode calls hold the pages.
    """
    width, chunk = self._config.prefill_lanes, self._config.prefill_chunk
    call = self._memory.lanes(width)
    tokens = np.zeros((width, chunk), np.int32)
    starts, counts = np.zeros((2, width), np.int32)
    busy = self._flying()
    rows: set[kv_memory.Row] = set()
    for turn in turns:
      row, context = turn.row, turn.context
      if not call.room(row) or not self._fits(
        turn, len(context) - 1, busy | rows
      ):
        continue
      most = row.cached + call.room(row) * chunk
      self._memory.advance(row, min(len(context) - 1, most))
      while turn.missing > 0 and (lane := call.lane(row)) is not None:
        ids = context[row.cached : -1][:chunk]
        tokens[lane, : len(ids)] = ids
        starts[lane], counts[lane] = row.cached, len(ids)
        row.cached += len(ids)
        rows.add(row)
    if not rows:
      return False
    self.counters["prefilled_tokens"] += int(counts.sum())
    self.counters["prefill_calls"] += 1
    self._device.prefill(kv_store.Chunks(call.table, tokens, starts, counts))
    for row in rows:
      self._memory.mark_ready(row)
    return True

  def _launch(self, *, full: bool) -> _Flight | None:
    """Starts a decode call for the turns that have run longest, if any.

    Args:
      full: start a call only if it fills all lanes of the largest size.
    """
    free = [turn for turn in self._running if not turn.flying]
    ready = [turn for turn in free if self._given or turn.missing == 0]
    sizes = self._config.lanes
    if full and len(ready) < sizes[-1]:
      return None
    width = next((n for n in sizes if n >= len(ready)), sizes[-1])
    call, busy = self._memory.lanes(width), self._flying()
    lanes: dict[int, turn_lib.Turn] = {}
    for turn in ready:
      row = turn.row
      tokens = min(self._config.decode_steps, turn.missing + turn.left)
      if call.room(row) and self._fits(turn, row.cached + tokens, busy):
        self._memory.advance(row, row.cached + tokens)
        lane = call.lane(row)
        assert lane is not None  # There is room.
        lanes[lane], turn.flying = turn, True
        busy.add(row)
    if not lanes:
      return None
    decoded = self._device.decode(
      turn_lib.decode_rows(call.table, lanes, self._given),
      self._halting.tokens,
      enough=len(lanes) - max(1, int(len(lanes) * _FINISHED)),
      restricted=any(
        sampling_lib.restricts(turn.sampling) for turn in lanes.values()
      ),
    )
    return _Flight(width, lanes, asyncio.wrap_future(decoded))

  def _land(self, flight: _Flight, decoded: kv_store.Decoded) -> None:
    """Hands out the tokens of a decode call."""
    steps = decoded.counts  # Of each lane.
    self.counters.update(
      decode_calls=1,
      lanes_offered=flight.width * int(steps.max()),
      lanes_used=int(steps.sum()),
      sampled_tokens=int(decoded.counts.sum()),
    )
    over = set()
    for lane, turn in flight.lanes.items():
      taken = turn.extend(decoded, lane)
      self.counters["sampled_tokens"] -= taken
      self.counters["prefilled_tokens"] += taken
      # The pages of a row that was released meanwhile are others'.
      if taken and self._memory.get(turn.request.address) is turn.row:
        self._memory.mark_ready(turn.row)
      done = turn.ended(self._tokenizer, self._halting.tokens, self._version)
      if done is not None:
        over.add(id(turn))
        if not turn.future.done():
          experts = self._device.experts(turn.row)
          turn.future.set_result(dataclasses.replace(done, experts=experts))
    self._running = [turn for turn in self._running if id(turn) not in over]
