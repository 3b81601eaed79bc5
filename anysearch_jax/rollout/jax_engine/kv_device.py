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
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import decoder
from anysearch_jax.policy.attention import pages as pages_lib
from anysearch_jax.rollout.jax_engine import choices as choices_lib
from anysearch_jax.rollout.jax_engine import kv_memory, kv_store

# Long, because the first call compiles.
_SECONDS = 600.0

T = TypeVar("T")
_Call = tuple[concurrent.futures.Future, Callable[[], Any]]


class KvDevice:
  """Runs the calls of `kv_store`, with rows as NumPy arrays.

  The first call that needs pages allocates them, also after `free`.

  If a call raises, every later call raises the same error: the pages were
  donated to the failed call and are lost.

  The arguments are those of `engine.JaxEngine`, with the mesh of `params`.

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
    self._a, self._config = architecture, config
    self._shards = mesh.shape["data"]
    self._one_device = mesh.size == 1
    self._by_rows = jax.sharding.NamedSharding(mesh, jax.P("data"))
    self._everywhere = jax.sharding.NamedSharding(mesh, jax.P())
    self._seed = jax.device_put(jax.random.key(seed), self._everywhere)
    # What halts the rows of the last decode call, here and on the devices.
    self._halts: tuple[np.ndarray | None, Any] = None, None
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
      kv_memory.pages(config, architecture, shards=self._shards),
      config.page,
      self._model.stored,
      mesh=mesh,
    )
    # None until a call needs them. Only the thread of the calls uses them.
    self._pages: pages_lib.Pools | None = None
    # What decode calls gather, by their number of rows.
    self._rows: dict[int, kv_store.GatheredRows] = {}
    self._broken: BaseException | None = None
    self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
    # A daemon thread, so that a call that hangs cannot keep the process alive.
    # The threads of an executor are joined at interpreter exit.
    threading.Thread(
      target=_serve, args=(self._calls,), name="engine", daemon=True
    ).start()
    # Not at exit, where turns that are cancelled still wait for their calls.
    weakref.finalize(self, self._calls.put, None).atexit = False
    self.set_params(params)

  def set_params(self, params: decoder.Params) -> None:
    """Sets the weights of later calls."""
    # The old ones go first: on a full device there is no room for both.
    self._params: decoder.Params = {}
    self._params = self._model.prepare(params, self._a)
    if self._one_device:
      # Spelled as the sharding of the pages: otherwise the pages that a call
      # returns have another one, and the next call compiles again.
      self._params = jax.device_put(self._params, self._everywhere)

  def copy(self, sources: np.ndarray, targets: np.ndarray) -> None:
    """See `kv_store.copy`; `[pools, R]` each."""

    def call() -> None:
      moved = self._put((tuple(sources), tuple(targets)))
      pages = self._allocated()
      self._pages = kv_store.copy(pages, *moved, model=self._model)
      if self._choices:
        self._choices.copy(sources[0], targets[0])

    self._submit(call)

  def prefill(self, chunks: kv_store.Chunks[np.ndarray]) -> None:
    """See `kv_store.prefill`."""
    params = self._params

    def call() -> None:
      self._pages, chosen = kv_store.prefill(
        params, self._allocated(), self._put(chunks), model=self._model
      )
      if self._choices:
        self._choices.add(chunks.table, chunks.starts, chunks.counts, chosen)

    self._submit(call)

  def decode(
    self,
    turns: kv_store.Turns[np.ndarray],
    halts: np.ndarray,
    *,
    enough: int,
    restricted: bool,
  ) -> concurrent.futures.Future[kv_store.Decoded]:
    """See `kv_store.decode`; returns the sampled tokens as NumPy arrays.

    `halts` stays on the devices while it is the same array.
    """
    params = self._params

    def call() -> kv_store.Decoded:
      if self._halts[0] is not halts:
        self._halts = halts, jax.device_put(halts, self._everywhere)
      pages, lanes = self._allocated(), len(turns.table)
      self._pages, self._rows[lanes], decoded = kv_store.decode(
        params,
        pages,
        self._gathered(pages, turns.table),
        self._put(turns),
        np.int32(enough),
        kv_store.Draws(self._halts[1], self._seed),
        model=self._model,
        steps=self._config.decode_steps,
        restricted=restricted,
      )
      found = jax.device_get(decoded)
      if self._choices:
        rows = turns.table, turns.starts, found.counts, found.experts
        self._choices.add(*rows)
        self._choices.store()
      return found

    return self._submit(call)

  def experts(self, row: kv_memory.Row) -> np.ndarray | None:
    """Returns the experts of a row's cached tokens, or None without a record.

    The last call on the row was `decode`, and has ended.
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

    return self._wait(call, "gave no scores")

  def free(self) -> int:
    """Frees the pages after the calls so far; returns their bytes on a device.

    The next call that needs pages allocates them again, zeroed. Raises
    EngineError if the device does not answer.
    """

    def call() -> int:
      freed, self._pages = self._pages, None
      self._rows.clear()
      size = 0
      for x in jax.tree.leaves(freed):
        size += x.addressable_shards[0].data.nbytes
        x.delete()
      return size

    return self._wait(call, "did not free its pages")

  def drain(self) -> None:
    """Waits at most a minute until no call is running."""
    with contextlib.suppress(Exception):  # Already raised in its waiter.
      self._submit(lambda: None).result(60.0)

  def _put(self, rows: Any) -> Any:
    """Moves the rows of a call to the devices, sharded over `data`.

    A call on one device takes them as they are, ten times faster.
    """
    if self._one_device:
      return rows
    return jax.device_put(rows, self._by_rows)

  def _allocated(self) -> pages_lib.Pools:
    """Returns the pages, for a call that they are donated to."""
    return self._allocate() if self._pages is None else self._pages

  def _gathered(
    self, pages: pages_lib.Pools, table: np.ndarray
  ) -> kv_store.GatheredRows:
    """Returns memory for the rows of a decode call, which is donated to it."""
    lanes, columns = len(table), table.shape[1] // self._model.pools
    if lanes in self._rows:
      return self._rows.pop(lanes)
    return kv_store.empty_rows(
      self._model,
      pages,
      lanes=lanes,
      columns=columns,
      steps=self._config.decode_steps,
    )

  def _wait(self, call: Callable[[], T], failure: str) -> T:
    """Returns the result of a call on the thread of the calls."""
    try:
      return self._submit(call).result(_SECONDS)
    except TimeoutError:
      raise types.EngineError(
        f"The engine's device {failure} within {_SECONDS:g} seconds."
      ) from None

  def _submit(self, call: Callable[[], T]) -> concurrent.futures.Future[T]:
    def run() -> T:
      if self._broken is not None:
        raise self._broken
      try:
        return call()
      except BaseException as error:
        self._broken = error
        raise

    future: concurrent.futures.Future[T] = concurrent.futures.Future()
    self._calls.put((future, run))
    return future


def _serve(calls: queue.SimpleQueue[_Call | None]) -> None:
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
