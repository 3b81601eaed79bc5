"""Calls of a model with texts of any lengths, in few compiled shapes.

Texts are grouped into buckets by length. Every call of a bucket has the same
number of rows, padded if necessary. So each bucket compiles only once, and a
text's result does not depend, to the last bit, on the other texts in the call.
The buckets of queries are few, so that all of them can be compiled before the
first search, whose deadline has no room for that.
"""

from __future__ import annotations

import collections
import os
import threading
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import jax
import numpy as np

# Cores that this process may use.
_CORES = len(getattr(os, "sched_getaffinity", lambda pid: [1])(0))
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
# Queries are padded to powers of two above, and compiled ahead up to `_LONGEST`
# tokens, which is what an episode may generate.
_QUERY, _LONGEST = 64, 4096
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

  def length(self, tokens: int, *, few: bool) -> int:
    """Returns the padded row length for a text; few: for a query."""
    if few and tokens > _QUERY:
      return min(1 << (tokens - 1).bit_length(), self.max_tokens)
    step = self.step // (2 if tokens <= _SHORT else 1)
    if tokens > _FINE:
      step = max(step, 1 << (tokens - 1).bit_length() >> 3)
    return min(-(-tokens // step) * step, self.max_tokens)

  def rows(self, length: int, *, few: bool) -> int:
    """Returns the rows of a call of rows of `length`; few: for queries."""
    fit = max(1, _SCORES // length**2)
    many = max(1, self.passage_tokens // length)
    return min(self.query_rows if few else many, fit)


def shapes(devices: Sequence[jax.Device], max_tokens: int) -> Shapes:
  """Returns the shapes that suit devices, which share the rows of a call."""
  # Small steps: on CPUs arithmetic is expensive and compiling is cheap.
  step, rows, tokens = 32, 32, _DEVICE_TOKENS
  if devices[0].platform == "cpu":
    step, rows, tokens = 8, max(2, _CORES), _CORE_TOKENS * max(2, _CORES)
  return Shapes(step, rows, tokens * len(devices), max_tokens)


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
    self._params, self._dim, self._shapes = params, dim, shapes
    self._devices = mesh.size
    self._batch = jax.sharding.NamedSharding(mesh, jax.P("data"))
    self._compute = jax.jit(compute, out_shardings=self._batch)
    self._programs: dict[tuple[int, int], Any] = {}
    self._compiling = threading.Lock()

  def compile_queries(self) -> None:
    """Compiles queries of up to 4096 tokens, before a first one's deadline."""
    longest = min(self._shapes.max_tokens, _LONGEST)
    tokens = range(1, longest + 1)
    for length in {self._shapes.length(n, few=True) for n in tokens}:
      self._program(self._shape(length, few=True))

  def _shape(self, length: int, *, few: bool) -> tuple[int, int]:
    rows = self._shapes.rows(length, few=few)
    return -(-rows // self._devices) * self._devices, length

  def _program(self, shape: tuple[int, int]) -> Any:
    """Returns the program of a call, `[B, T]`."""
    with self._compiling:
      if shape not in self._programs:
        batch = (
          jax.ShapeDtypeStruct(size, np.int32, sharding=self._batch)
          for size in (shape, shape[:1])
        )
        lowered = self._compute.lower(self._params, *batch)
        self._programs[shape] = lowered.compile()
      return self._programs[shape]

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
      buckets[self._shapes.length(len(ids), few=few)].append(i)
    calls = []
    for length, members in sorted(buckets.items(), reverse=True):
      shape = rows, _ = self._shape(length, few=few)
      for start in range(0, len(members), rows):
        calls.append((shape, members[start : start + rows]))
    out = np.zeros((len(tokens), self._dim), np.float32)

    def answer(call: tuple[tuple[int, int], list[int]]) -> None:
      shape, some = call
      ids, lengths = np.zeros(shape, np.int32), np.zeros(shape[0], np.int32)
      for row, i in enumerate(some):
        lengths[row] = len(tokens[i])
        ids[row, : lengths[row]] = tokens[i]
      batch = jax.device_put((ids, lengths), self._batch)
      found = self._program(shape)(self._params, *batch)
      out[some] = np.asarray(found)[: len(some)]

    if len(calls) > 1:
      with futures.ThreadPoolExecutor(min(_CALLS_AT_ONCE, _CORES)) as pool:
        list(pool.map(answer, calls))
    elif calls:
      answer(calls[0])
    if not np.isfinite(out).all():
      raise ValueError(
        "The model returned numbers that are not finite. Load it in float32, "
        "or copy its folder again."
      )
    return out
