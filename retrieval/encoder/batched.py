"""Calls of a model with texts of any lengths, in few compiled shapes.

Texts are grouped into buckets by length. Every call of a bucket has the same
number of rows, padded if necessary. So each bucket compiles only once, and a
text's result does not depend, to the last bit, on the other texts in the call.
"""

from __future__ import annotations

import collections
import os
import threading
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# Concurrent calls: the single-threaded parts of one overlap with the other.
_CALLS_AT_ONCE = 2
# Up to this many tokens, as in most queries, texts are padded in smaller steps.
_SHORT = 32
# Tokens of a call, for each CPU core or for each accelerator.
_CORE_TOKENS, _DEVICE_TOKENS = 256, 1 << 16
# Up to this many tokens, as passages have, texts are padded in equal steps;
# longer ones to an eighth of the next power of two, so that they need few
# programs.
_FINE = 256
# Scores of attention of a call and a head, which limit the rows of long texts.
_SCORES = 1 << 27


class Shapes(NamedTuple):
  """Shapes of calls, on all devices together.

  Attributes:
    step: row lengths are multiples of it (of half of it for short texts), up to
      the maximum length.
    query_rows: rows of a call for queries; small, because queries seldom come
      in hundreds.
    passage_tokens: tokens of a call for passages, including padding.
    max_tokens: the most tokens of a text.
  """

  step: int
  query_rows: int
  passage_tokens: int
  max_tokens: int

  def length(self, tokens: int) -> int:
    """Returns the padded row length for a text of `tokens` tokens."""
    step = self.step // (2 if tokens <= _SHORT else 1)
    if tokens > _FINE:
      step = max(step, 1 << (tokens - 1).bit_length() >> 3)
    return min(-(-tokens // step) * step, self.max_tokens)

  def rows(self, length: int, *, few: bool) -> int:
    """Returns the rows of a call of rows of `length`; few: for queries."""
    fit = max(1, _SCORES // length**2)
    many = max(1, self.passage_tokens // length)
    return min(self.query_rows if few else many, fit)


def shapes(
  devices: Sequence[jax.Device], max_tokens: int, batch_tokens: int | None
) -> Shapes:
  """Returns the shapes that suit the devices.

  Args:
    devices: devices over which the rows of a call are sharded.
    max_tokens: the most tokens of a text.
    batch_tokens: tokens of a call for passages on each device; None: a default
      for the kind of device.
  """
  if devices[0].platform == "cpu":
    # Small steps: on CPUs arithmetic is expensive and compiling is cheap.
    made = Shapes(
      8, max(2, cores()), _CORE_TOKENS * max(2, cores()), max_tokens
    )
  else:
    made = Shapes(32, 32, _DEVICE_TOKENS, max_tokens)
  if batch_tokens is not None:
    made = made._replace(passage_tokens=batch_tokens)
  return made._replace(passage_tokens=made.passage_tokens * len(devices))


def cores() -> int:
  """Returns the number of cores that this process may use."""
  if hasattr(os, "sched_getaffinity"):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


class BatchedModel:
  """Calls a model with any number of texts; thread-safe.

  Args:
    compute: maps parameters, ids `[B, T]` and lengths `[B]` to float32
      `[B, dim]`. A row of length 0 is padding.
    params: parameters, replicated on every device of `mesh`.
    dim: width of the result for one text.
    mesh: has the axis `data`, over which the rows of a call are sharded.
    shapes: shapes of calls.
  """

  def __init__(
    self,
    compute: Callable[..., jax.Array],
    params: Any,
    *,
    dim: int,
    mesh: jax.sharding.Mesh,
    shapes: Shapes,
  ):
    self._compute, self._params = compute, params
    self._dim, self._shapes, self._devices = dim, shapes, mesh.size
    self._batch = jax.sharding.NamedSharding(mesh, jax.P("data"))
    self._lock = threading.Lock()
    self._programs: dict[tuple[int, int], Callable[..., jax.Array]] = {}

  def programs(self) -> int:
    """Returns the number of compiled programs, one for each shape of call."""
    return len(self._programs)

  def _rows(self, length: int, *, few: bool) -> int:
    """Returns the rows of a call, a multiple of the number of devices."""
    rows = self._shapes.rows(length, few=few)
    return -(-rows // self._devices) * self._devices

  def __call__(
    self, tokens: Sequence[np.ndarray], *, few: bool = False
  ) -> np.ndarray:
    """Returns float32 `[n, dim]`, in the order of the texts.

    Args:
      tokens: int32 ids of each of n texts, at most `shapes.max_tokens`.
      few: whether calls have the few rows of queries.

    Raises:
      ValueError: a result is not finite.
    """
    buckets = collections.defaultdict(list)
    for i, ids in enumerate(tokens):
      buckets[self._shapes.length(len(ids))].append(i)
    calls = []
    for length, members in sorted(buckets.items(), reverse=True):
      rows = self._rows(length, few=few)
      for start in range(0, len(members), rows):
        calls.append(((rows, length), members[start : start + rows]))
    out = np.zeros((len(tokens), self._dim), np.float32)

    def answer(call: tuple[tuple[int, int], list[int]]) -> None:
      shape, some = call
      out[some] = self._call([tokens[i] for i in some], shape)

    if len(calls) > 1:
      with futures.ThreadPoolExecutor(min(_CALLS_AT_ONCE, cores())) as pool:
        list(pool.map(answer, calls))
    elif calls:
      answer(calls[0])
    if not np.isfinite(out).all():
      raise ValueError(
        "The model returned numbers that are not finite. Load it in float32, "
        "or copy its folder again."
      )
    return out

  def _call(
    self, tokens: Sequence[np.ndarray], shape: tuple[int, int]
  ) -> np.ndarray:
    """Returns the results of at most `shape[0]` texts; the rest is padding."""
    ids, lengths = np.zeros(shape, np.int32), np.zeros(shape[0], np.int32)
    for row, some in enumerate(tokens):
      ids[row, : len(some)] = some
      lengths[row] = len(some)
    batch = jax.device_put((ids, lengths), self._batch)
    return np.asarray(self._program(shape)(self._params, *batch))[: len(tokens)]

  def _program(self, shape: tuple[int, int]) -> Callable[..., jax.Array]:
    if shape in self._programs:
      return self._programs[shape]
    with self._lock:
      if shape not in self._programs:
        batch = (
          jax.ShapeDtypeStruct(axes, jnp.int32, sharding=self._batch)
          for axes in (shape, shape[:1])
        )
        self._programs[shape] = (
          jax.jit(self._compute, out_shardings=self._batch)
          .lower(self._params, *batch)
          .compile()
        )
      return self._programs[shape]
