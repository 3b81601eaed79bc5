"""The in-process JAX engine: turns of many episodes over one paged KV cache.

An episode keeps its pages, and so its KV cache, from its first turn until it is
released; while it searches, other episodes decode. The next turn reuses the
cached prefix of its context; chunked prefill between decode calls appends the
rest, such as an observation. Prompts with a common prefix share pages.

`JaxEngine._schedule` repeats these steps while a turn waits:

1. `_admit` gives queued turns a row, in order of arrival, while pages are free.
2. `_prefill` caches the contexts of turns until a decode call would be full.
3. `_launch` starts a decode call for the turns that have run longest. It
   samples up to `engine.decode_steps` tokens a row, on the device's thread.
4. `_finish_call` hands out the tokens of the previous decode call.

So two decode calls overlap: while one runs, the engine finishes the one before
it and, if enough other turns are ready to fill all lanes, launches the next. A
turn is in at most one of them, because its next input is the last token that it
sampled.

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
_POLL_SECONDS = 1.0  # Between checks of the queue when no event arrives.
# A decode call ends when this share of its rows has finished, so that waiting
# turns can take their lanes.
_FINISHED_SHARE = 0.25
# Scored texts are padded to multiples of this many tokens. Each length has a
# program of its own.
_SCORED_MULTIPLE = 64


class _DecodeCall(NamedTuple):
  """A decode call in progress.

  Attributes:
    width: number of lanes.
    lanes: the turn in each lane; other lanes are padding.
    decoded: the sampled tokens, once the call ends.
  """

  width: int
  lanes: dict[int, turn_lib.Turn]
  decoded: asyncio.Future[kv_store.Decoded]


class JaxEngine:
  """`types.Engine` on the local devices.

  Args:
    policy: the policy to sample.
    config: slots, pages and compiled shapes.
    sampling: how tokens are drawn, unless a request says otherwise.
    seed: seed of all draws; `types.Address` is folded into it.
    dtype: compute and cache type.
    mesh: mesh of the policy's parameters; kv heads are sharded over its
      `tensor` axis, rows and pages over `data`. None means one device.
    records: whether turns report the experts that their tokens chose, if the
      policy has any.

  Attributes:
    counters: counts of events since they were last cleared:
      `sampled_tokens`, `prefilled_tokens`;
      `shared_tokens`: context tokens that other episodes prefilled;
      `reused_tokens`: context tokens that the episode's earlier turns cached;
      `discarded_tokens`: cached tokens dropped because a context changed;
      `prefill_calls`, `decode_calls`, `preemptions`;
      `lanes_offered`, `lanes_used`: lanes of all decode steps, and those of
      them that sampled a token. Their ratio is the occupancy.

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
    self._tokenizer = policy.tokenizer
    self._config = config
    self._version = 0
    # With `engine.exact`, decode calls also prefill: they take up to this many
    # tokens of a turn's context. One program then computes every token.
    self._decode_prefill = config.decode_steps if config.exact else 0
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
    self._memory = kv_memory.KvMemory(
      config, policy.architecture, shards=self._shards
    )
    # Turns that wait for a row, and those that have one.
    self._queue: deque[turn_lib.Turn] = deque()
    self._running: list[turn_lib.Turn] = []
    self._scheduler: asyncio.Task | None = None
    self._has_changed = asyncio.Event()  # A request or a release arrived.
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
    """Sets the weights of later turns.

    Raises:
      RuntimeError: an episode holds a KV cache of the old weights.
    """
    self._forget_prompts(f"version {version} is set")
    self._device.set_params(params)
    self._version = version

  def free_cache(self) -> int:
    """Frees the KV cache, see `CachingEngine`."""
    self._forget_prompts("the cache is freed")
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
    """Queues a turn, and starts the scheduler if none runs."""
    future = asyncio.get_running_loop().create_future()
    turn = turn_lib.Turn(
      request=request,
      future=future,
      context=list(request.token_ids),
      sampling=sampling,
      stop_bit=stop_bit,
    )
    self._queue.append(turn)
    self._has_changed.set()
    if self._scheduler is None or self._scheduler.done():
      self._scheduler = asyncio.create_task(self._schedule())
    return await future

  def release(self, address: types.Address) -> None:
    """Forgets an episode's cache and its turn, if any."""
    self._queue = deque(t for t in self._queue if t.request.address != address)
    self._running = [t for t in self._running if t.request.address != address]
    self._memory.release(address)
    self._has_changed.set()

  def scores(self, token_ids: Sequence[int]) -> dict[str, list[float]]:
    """Scores a sequence on each data shard, see `ScoringEngine`."""
    count = len(token_ids)
    # Attention is causal, so tokens after the last one change no score.
    padded = np.pad(token_ids, (0, -count % _SCORED_MULTIPLE))
    shard_logps = self._device.score(padded.astype(np.int32))[:, : count - 1]
    return {f"part {i}": logps.tolist() for i, logps in enumerate(shard_logps)}

  def score_exactly(
    self, params: decoder.Params, sequences: Sequence[np.ndarray]
  ) -> list[np.ndarray]:
    """Scores sequences by the program that samples; needs `engine.exact`.

    The engine then has `params`: later turns need `set_params`.

    Args:
      params: weights on this engine's mesh.
      sequences: int `[T]` each.

    Returns:
      float32 `[T - 1]` of each sequence: to the bit the log-probabilities of
      sampling all tokens but the first under `params`.
    """
    self._forget_prompts("sequences are scored")
    self._device.set_params(params)

    async def score(i: int) -> np.ndarray:
      address = types.Address(0, i, 0)
      request = types.GenerateRequest(
        address=address,
        turn=1,  # Not 0, so that no other sequence shares its pages.
        token_ids=tuple(sequences[i].tolist()),
        max_tokens=0,
        stop=(),
      )
      turn = self._turn(request, self._sampling, await self._halting.bit(()))
      try:
        return np.asarray((await turn).logps, np.float32)
      finally:
        self.release(address)

    async def score_all() -> list[np.ndarray]:
      return await asyncio.gather(*map(score, range(len(sequences))))

    logps = loop.run(score_all())
    if self._config.free_kv_while_training:
      self._device.free()
    return logps

  def _forget_prompts(self, event: str) -> None:
    """Stops sharing cached prompts, before an event that invalidates them.

    Raises:
      RuntimeError: an episode holds a row.
    """
    if self._memory or self._queue:
      raise RuntimeError(
        f"{len(self._memory)} episodes hold KV caches of policy version "
        f"{self._version}; release them before {event}."
      )
    self._memory.forget_prompts()

  async def _schedule(self) -> None:
    """Schedules calls until no turn is left; see the head of this file."""
    self._has_changed = asyncio.Event()
    call: _DecodeCall | None = None
    next_call: _DecodeCall | None = None
    try:
      while self._queue or self._running or call:
        for _ in range(_YIELDS):
          await asyncio.sleep(0)
        # While a call runs, its turns may soon be ready for the next one. So
        # start another call only if the other turns fill it.
        must_fill = call is not None
        self._admit()
        self._prefill(must_fill=must_fill)
        next_call = self._launch(must_fill=must_fill)
        if call is not None:
          self._finish_call(call, await call.decoded)
        elif next_call is None and not self._running:
          # No turn can run until a request or a release arrives.
          self._has_changed.clear()
          with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_POLL_SECONDS):
              await self._has_changed.wait()
        call = next_call
    except BaseException as error:
      for unfinished in (call, next_call):
        if unfinished is None:
          continue
        # Cancel calls, or retrieve their errors so that asyncio logs none.
        decoded = unfinished.decoded
        if not decoded.cancel() and not decoded.cancelled():
          decoded.exception()
      if not isinstance(error, Exception):
        # Cancelled: no call may still use the pages when the next one starts.
        self._device.drain()
        raise
      # A bug or an out-of-memory error, not an outage: raise it in all waiters.
      for turn in (*self._queue, *self._running):
        if not turn.future.done():
          turn.future.set_exception(loop.error_for_waiter(error))
      self._queue.clear()
      self._running.clear()

  def _admit(self) -> None:
    """Admits queued turns in order of arrival while there are pages.

    A turn of an episode that has a row always runs. Any other turn opens a row.
    Once a turn finds no room, no later one may open a row: otherwise short
    contexts would overtake a long one forever. A turn whose prefix another row
    is prefilling waits for it, to share its pages, and blocks no later turn.
    """
    has_room = True
    waiting: deque[turn_lib.Turn] = deque()
    copying: deque[kv_memory.Row] = deque()
    for turn in self._queue:
      address = turn.request.address
      row = self._memory.get(address)
      if row is not None:
        dropped = self._memory.resume(row, turn.context)
        self.counters["discarded_tokens"] += dropped
        self.counters["reused_tokens"] += row.cached
      elif has_room and not self._memory.is_prefix_filling(turn.context):
        # Only prompts are shared: a preempted turn has sampled tokens.
        is_prompt = turn.request.turn == 0 and not turn.logps
        row = self._memory.open_row(address, turn.context, is_prompt=is_prompt)
        has_room = row is not None
        if row is not None:
          self.counters["shared_tokens"] += row.cached
          if row.copy_sources:
            copying.append(row)
      if row is None:
        waiting.append(turn)
      else:
        turn.row = row
        self._running.append(turn)
    self._queue = waiting
    while copying:
      self._copy_pages(copying)

  def _copy_pages(self, rows: deque[kv_memory.Row]) -> None:
    """Makes one call that copies shared partial pages for the first rows."""
    lanes = self._memory.new_lanes(self._config.prefill_lanes)
    shape = len(rows[0].pages), len(lanes.table)  # pools, width
    # Unused lanes copy the padding page to itself.
    sources = np.full(shape, kv_memory.PADDING, np.int32)
    targets = np.full(shape, kv_memory.PADDING, np.int32)
    while rows and (lane := lanes.assign(rows[0])) is not None:
      row = rows.popleft()
      sources[:, lane] = row.copy_sources
      targets[:, lane] = [pages[row.first_own] for pages in row.pages]
      self._memory.mark_ready(row)
    self._device.copy(sources, targets)

  def _grow_row(
    self, turn: turn_lib.Turn, tokens: int, busy: Collection[kv_memory.Row]
  ) -> bool:
    """Grows a turn's row to `tokens` tokens, if pages can be found.

    Rows in `busy` keep their pages; younger rows may lose theirs.

    Returns:
      Whether the row now has pages for `tokens` tokens.
    """
    if self._memory.get(turn.request.address) is not turn.row:
      return False  # Its pages were preempted by an earlier turn in this loop.
    preempted = self._memory.grow(turn.row, tokens, busy)
    if preempted:
      self.counters["preemptions"] += len(preempted)
      # Preempted turns return to the front of the queue and prefill again.
      requeued = [t for t in self._running if t.request.address in preempted]
      self._queue.extendleft(requeued)
      self._running = [t for t in self._running if t not in requeued]
    return self._memory.has_pages(turn.row, tokens)

  def _idle_turns(self) -> list[turn_lib.Turn]:
    """Returns the turns that have a row and are in no decode call."""
    return [turn for turn in self._running if not turn.is_decoding]

  def _decoding_rows(self) -> set[kv_memory.Row]:
    """Returns the rows that the running decode call writes to."""
    return {turn.row for turn in self._running if turn.is_decoding}

  def _prefill(self, *, must_fill: bool) -> None:
    """Prefills turns while lanes of the next decode call would stay empty.

    Args:
      must_fill: prefill only if there are turns for all lanes of the largest
        call.
    """
    if self._decode_prefill:
      return
    lanes = self._config.lanes[-1]
    while True:
      idle = self._idle_turns()
      incomplete = [turn for turn in idle if turn.missing > 0]
      ready = len(idle) - len(incomplete)
      if not incomplete or ready >= lanes:
        return
      if must_fill and len(idle) < lanes:
        return
      if not self._prefill_call(incomplete):
        return
      # Turns that waited for these pages can share them now.
      self._admit()

  def _prefill_call(self, turns: Sequence[turn_lib.Turn]) -> bool:
    """Makes one prefill call with chunks of missing tokens, oldest turn first.

    A long context takes several lanes, one for each chunk.

    Returns:
      False if no turn has room, because running decode calls hold the pages.
    """
    width = self._config.prefill_lanes
    chunk = self._config.prefill_chunk
    lanes = self._memory.new_lanes(width)
    tokens = np.zeros((width, chunk), np.int32)
    starts = np.zeros(width, np.int32)
    counts = np.zeros(width, np.int32)
    busy = self._decoding_rows()
    rows: set[kv_memory.Row] = set()
    for turn in turns:
      row = turn.row
      end = len(turn.context) - 1
      if not lanes.free_count(row):
        continue
      if not self._grow_row(turn, end, busy | rows):
        continue
      reached = row.cached + lanes.free_count(row) * chunk
      self._memory.slide_windows(row, min(end, reached))
      while turn.missing > 0 and (lane := lanes.assign(row)) is not None:
        ids = turn.context[row.cached : -1][:chunk]
        tokens[lane, : len(ids)] = ids
        starts[lane] = row.cached
        counts[lane] = len(ids)
        row.cached += len(ids)
        rows.add(row)
    if not rows:
      return False
    self.counters["prefilled_tokens"] += int(counts.sum())
    self.counters["prefill_calls"] += 1
    self._device.prefill(
      kv_store.Chunks(
        table=lanes.table, tokens=tokens, starts=starts, counts=counts
      )
    )
    for row in rows:
      self._memory.mark_ready(row)
    return True

  def _launch(self, *, must_fill: bool) -> _DecodeCall | None:
    """Starts a decode call for the turns that have run longest, if any.

    Args:
      must_fill: start a call only if it fills all lanes of the largest size.
    """
    ready = [
      turn
      for turn in self._idle_turns()
      if self._decode_prefill or turn.missing == 0
    ]
    sizes = self._config.lanes
    if must_fill and len(ready) < sizes[-1]:
      return None
    width = next((size for size in sizes if size >= len(ready)), sizes[-1])
    lanes = self._memory.new_lanes(width)
    busy = self._decoding_rows()
    turns: dict[int, turn_lib.Turn] = {}  # By lane.
    for turn in ready:
      row = turn.row
      steps = min(self._config.decode_steps, turn.missing + turn.remaining)
      end = row.cached + steps
      if lanes.free_count(row) and self._grow_row(turn, end, busy):
        self._memory.slide_windows(row, end)
        lane = lanes.assign(row)
        assert lane is not None  # There is room.
        turns[lane] = turn
        turn.is_decoding = True
        busy.add(row)
    if not turns:
      return None
    finished_rows = max(1, int(len(turns) * _FINISHED_SHARE))
    decoded = self._device.decode(
      turn_lib.decode_rows(lanes.table, turns, self._decode_prefill),
      self._halting.tokens,
      enough=len(turns) - finished_rows,
      restricted=any(
        sampling_lib.restricts(turn.sampling) for turn in turns.values()
      ),
    )
    return _DecodeCall(width, turns, asyncio.wrap_future(decoded))

  def _finish_call(self, call: _DecodeCall, decoded: kv_store.Decoded) -> None:
    """Hands out the tokens of a decode call."""
    steps = decoded.counts  # Of each lane.
    self.counters.update(
      decode_calls=1,
      lanes_offered=call.width * int(steps.max()),
      lanes_used=int(steps.sum()),
      sampled_tokens=int(steps.sum()),
    )
    ended = set()
    for lane, turn in call.lanes.items():
      prefilled = turn.extend(decoded, lane)
      self.counters["sampled_tokens"] -= prefilled
      self.counters["prefilled_tokens"] += prefilled
      # The pages of a row that was released meanwhile may belong to others.
      if prefilled and self._memory.get(turn.request.address) is turn.row:
        self._memory.mark_ready(turn.row)
      try:
        turn.tell()
        generation = turn.generation(
          self._tokenizer, self._halting.tokens, self._version
        )
      except Exception as error:  # Ends this turn, and no other one.
        ended.add(id(turn))
        if not turn.future.done():
          turn.future.set_exception(error)
        continue
      if generation is not None:
        ended.add(id(turn))
        if not turn.future.done():
          experts = self._device.experts(turn.row)
          turn.future.set_result(
            dataclasses.replace(generation, experts=experts)
          )
    self._running = [turn for turn in self._running if id(turn) not in ended]
