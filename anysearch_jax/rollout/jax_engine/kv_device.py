"""The device state of an engine: its weights, its pages, and calls on them.

Calls run one after the other on a separate thread. Episodes therefore continue
during a call, and the next call can be prepared while one runs.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.host import loop
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import decoder
from anysearch_jax.policy.attention import pages as pages_lib
from anysearch_jax.rollout.jax_engine import choices as choices_lib
from anysearch_jax.rollout.jax_engine import kv_memory, kv_store

# How long to wait for a call; long, because the first one compiles.
_CALL_SECONDS = 600.0
# How long `drain` waits for calls that run.
_DRAIN_SECONDS = 60.0

T = TypeVar("T")
_Call = tuple[concurrent.futures.Future, Callable[[], Any]]


class KvDevice:
  """Runs the calls of `kv_store`, with rows as NumPy arrays.

  The first call that needs pages allocates them, also after `free`.

  If a call raises, every later call raises the same error: the pages were
  donated to the failed call and are lost.

  Args:
    params: the policy's weights.
    architecture: the policy's architecture, adapters included.
    config, seed, dtype, records: as of `engine.JaxEngine`.
    mesh: mesh of `params`.

  Raises:
    ValueError: the architecture or the attention cannot run on the mesh.
  """

  def __init__(
    self,
    params: decoder.Params,
    architecture: architecture_lib.Architecture,
    *,
    config: config_lib.EngineConfig,
    seed: int,
    dtype: Any,
    mesh: jax.sharding.Mesh,
    records: bool = False,
  ):
    self._a = architecture
    self._config = config
    self._shards = mesh.shape["data"]
    self._one_device = mesh.size == 1
    self._by_rows = jax.sharding.NamedSharding(mesh, jax.P("data"))
    self._everywhere = jax.sharding.NamedSharding(mesh, jax.P())
    self._seed = jax.device_put(jax.random.key(seed), self._everywhere)
    # `Draws.halts` of the last decode call, here and on the devices.
    self._host_halts: np.ndarray | None = None
    self._device_halts: Any = None
    self._model = kv_store.make_model(
      config, architecture, mesh, dtype=dtype, records=records
    )
    self._choices: choices_lib.Choices | None = None
    if self._model.records:
      self._choices = choices_lib.Choices(
        architecture, config, shards=self._shards
      )
    self._allocate = kv_store.allocator(
      architecture,
      kv_memory.pool_sizes(config, architecture, shards=self._shards),
      config.page,
      self._model.stored,
      mesh=mesh,
    )
    # None until a call needs them. Only the thread of the calls uses them.
    self._pages: pages_lib.Pools | None = None
    # Memory for the rows that decode calls gather, by their number of lanes.
    self._rows: dict[int, kv_store.GatheredRows] = {}
    self._failure: BaseException | None = None
    self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
    # A daemon thread, so that a call that hangs cannot keep the process alive.
    # The threads of an executor are joined at interpreter exit.
    threading.Thread(
      target=_run_calls, args=(self._calls,), name="engine", daemon=True
    ).start()
    # Not at exit, where turns that are cancelled still wait for their calls.
    weakref.finalize(self, self._calls.put, None).atexit = False
    self.set_params(params)

  def set_params(self, params: decoder.Params) -> None:
    """Sets the weights of later calls."""
    # Drop the old weights first: on a full device there is no room for both.
    self._params: decoder.Params = {}
    self._params = self._model.prepare(params, self._a)
    if self._one_device:
      # Spell their sharding as that of the pages. Otherwise the pages that a
      # call returns have another sharding, and the next call compiles again.
      self._params = jax.device_put(self._params, self._everywhere)

  def copy(self, sources: np.ndarray, targets: np.ndarray) -> None:
    """See `kv_store.copy`; `[pools, R]` each."""

    def call() -> None:
      on_devices = self._put((tuple(sources), tuple(targets)))
      pages = self._allocated()
      self._pages = kv_store.copy(pages, *on_devices, model=self._model)
      if self._choices:
        self._choices.copy(sources[0], targets[0])

    self._submit(call)

  def prefill(self, chunks: kv_store.Chunks[np.ndarray]) -> None:
    """See `kv_store.prefill`."""
    params = self._params

    def call() -> None:
      self._pages, expert_ids = kv_store.prefill(
        params, self._allocated(), self._put(chunks), model=self._model
      )
      if self._choices:
        self._choices.add(
          choices_lib.CallRecord(
            table=chunks.table,
            starts=chunks.starts,
            counts=chunks.counts,
            expert_ids=expert_ids,
          )
        )

    self._submit(call)

  def decode(
    self,
    turns: kv_store.Turns[np.ndarray],
    halts: np.ndarray,
    *,
    enough: int,
    restricted: bool,
  ) -> concurrent.futures.Future[kv_store.Decoded]:
    """Queues a `kv_store.decode` call.

    Args:
      turns: the rows.
      halts: uint32 `[V]`, `Draws.halts`; it stays on the devices while it is
        the same array.
      enough: the call ends when at most this many rows are still running.
      restricted: see `sampling.sample`.

    Returns:
      A future of the sampled tokens, as NumPy arrays.
    """
    params = self._params

    def call() -> kv_store.Decoded:
      if self._host_halts is not halts:
        self._host_halts = halts
        self._device_halts = jax.device_put(halts, self._everywhere)
      pages = self._allocated()
      lanes = len(turns.table)
      self._pages, self._rows[lanes], decoded = kv_store.decode(
        params,
        pages,
        self._gathered(pages, turns.table),
        self._put(turns),
        np.int32(enough),
        kv_store.Draws(self._device_halts, self._seed),
        model=self._model,
        steps=self._config.decode_steps,
        restricted=restricted,
      )
      on_host = jax.device_get(decoded)
      if self._choices:
        self._choices.add(
          choices_lib.CallRecord(
            table=turns.table,
            starts=turns.starts,
            counts=on_host.counts,
            expert_ids=on_host.experts,
          )
        )
        self._choices.store()
      return on_host

    return self._submit(call)

  def experts(self, row: kv_memory.Row) -> np.ndarray | None:
    """Returns the experts of a row's cached tokens, or None without a record.

    The last call on the row must be a `decode` that has ended.
    """
    return self._choices.read(row) if self._choices else None

  def score(self, tokens: np.ndarray) -> np.ndarray:
    """See `kv_store.score`; raises EngineError without an answer."""
    params = self._params

    def call() -> np.ndarray:
      scores = kv_store.score(
        params,
        tokens,
        model=self._model,
        size=self._config.page,
        shards=self._shards,
      )
      return jax.device_get(scores)

    return self._wait_for(call, "gave no scores")

  def free(self) -> int:
    """Frees the pages after the calls so far; returns their bytes on a device.

    The next call that needs pages allocates them again, zeroed. Raises
    EngineError if the device does not answer.
    """

    def call() -> int:
      pages = self._pages
      self._pages = None
      self._rows.clear()
      size = 0
      for x in jax.tree.leaves(pages):
        size += x.addressable_shards[0].data.nbytes
        x.delete()
      return size

    return self._wait_for(call, "did not free its pages")

  def drain(self) -> None:
    """Waits at most a minute until no call is running."""
    with contextlib.suppress(Exception):  # Already raised in its waiter.
      self._submit(lambda: None).result(_DRAIN_SECONDS)

  def _put(self, rows: Any) -> Any:
    """Moves the rows of a call to the devices, sharded over `data`.

    On one device the call itself moves them, ten times faster.
    """
    if self._one_device:
      return rows
    return jax.device_put(rows, self._by_rows)

  def _allocated(self) -> pages_lib.Pools:
    """Returns the pages, to donate to a call; allocates them if needed."""
    return self._allocate() if self._pages is None else self._pages

  def _gathered(
    self, pages: pages_lib.Pools, table: np.ndarray
  ) -> kv_store.GatheredRows:
    """Returns memory for the rows of a decode call, which is donated to it."""
    lanes = len(table)
    columns = table.shape[1] // self._model.pools
    if lanes in self._rows:
      return self._rows.pop(lanes)
    return kv_store.empty_rows(
      self._model,
      pages,
      lanes=lanes,
      columns=columns,
      steps=self._config.decode_steps,
    )

  def _wait_for(self, call: Callable[[], T], failure: str) -> T:
    """Returns the result of a call on the thread of the calls."""
    try:
      return self._submit(call).result(_CALL_SECONDS)
    except TimeoutError:
      raise types.EngineError(
        f"The engine's device {failure} within {_CALL_SECONDS:g} seconds."
      ) from None

  def _submit(self, call: Callable[[], T]) -> concurrent.futures.Future[T]:
    """Queues a call on the thread of the calls."""

    def run() -> T:
      if self._failure is not None:
        raise loop.error_for_waiter(self._failure)
      try:
        return call()
      except BaseException as error:
        self._failure = error
        raise

    future: concurrent.futures.Future[T] = concurrent.futures.Future()
    self._calls.put((future, run))
    return future


def _run_calls(calls: queue.SimpleQueue[_Call | None]) -> None:
  """Runs calls in order until it receives None."""
  while (call := calls.get()) is not None:
    future, run = call
    if not future.set_running_or_notify_cancel():
      continue
    try:
      future.set_result(run())
    except BaseException as error:  # `future.result()` raises it.
      future.set_exception(error)
    del call, future, run
