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
_SHORT_TOKENS = 32
# Tokens of a call for each CPU core.
_CORE_TOKENS = 256
# Tokens of a call for each accelerator.
_DEVICE_TOKENS = 1 << 16
# Up to this many tokens, as passages have, texts are padded in equal steps.
# Longer ones are padded to a multiple of an eighth of the next power of two, so
# that they need few programs.
_FINE_TOKENS = 256
# Queries of more tokens are padded to powers of two.
_QUERY_TOKENS = 64
# Queries are compiled ahead up to this many tokens, which is the most that an
# episode may generate.
_LONGEST_QUERY = 4096
# Attention scores of a call and a head; they limit the rows of long texts.
_ATTENTION_SCORES = 1 << 27


class Shapes(NamedTuple):
  """Shapes of calls; a call is shared by all devices.

  Attributes:
    step: row lengths are multiples of `step` (of half of it for short texts),
      up to `max_tokens`.
    query_rows: rows of a call for queries; few, because queries seldom come in
      hundreds.
    passage_tokens: tokens of a call for passages, including padding.
    max_tokens: the most tokens of a text.
  """

  step: int
  query_rows: int
  passage_tokens: int
  max_tokens: int

  def length(self, tokens: int, *, for_queries: bool) -> int:
    """Returns the padded row length for a query, or for a passage."""
    if for_queries and tokens > _QUERY_TOKENS:
      return min(1 << (tokens - 1).bit_length(), self.max_tokens)
    step = self.step // (2 if tokens <= _SHORT_TOKENS else 1)
    if tokens > _FINE_TOKENS:
      step = max(step, 1 << (tokens - 1).bit_length() >> 3)
    return min(-(-tokens // step) * step, self.max_tokens)

  def rows(self, length: int, *, for_queries: bool) -> int:
    """Returns the number of rows of a call whose rows have `length` tokens."""
    most_rows = max(1, _ATTENTION_SCORES // length**2)
    passage_rows = max(1, self.passage_tokens // length)
    return min(self.query_rows if for_queries else passage_rows, most_rows)


def shapes(devices: Sequence[jax.Device], max_tokens: int) -> Shapes:
  """Returns the shapes that suit devices, which share the rows of a call."""
  if devices[0].platform == "cpu":
    step = 8  # On CPUs arithmetic is expensive and compiling is cheap.
    query_rows = max(2, _CORES)
    device_tokens = _CORE_TOKENS * query_rows
  else:
    step = 32
    query_rows = 32
    device_tokens = _DEVICE_TOKENS
  return Shapes(
    step=step,
    query_rows=query_rows,
    passage_tokens=device_tokens * len(devices),
    max_tokens=max_tokens,
  )


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
    self._params = params
    self._dim = dim
    self._shapes = shapes
    self._devices = mesh.size
    self._batch = jax.sharding.NamedSharding(mesh, jax.P("data"))
    self._compute = jax.jit(compute, out_shardings=self._batch)
    self._programs: dict[tuple[int, int], Any] = {}
    self._compiling = threading.Lock()

  def compile_queries(self) -> None:
    """Compiles queries of up to 4096 tokens before the first one's deadline."""
    longest = min(self._shapes.max_tokens, _LONGEST_QUERY)
    tokens = range(1, longest + 1)
    for length in {self._shapes.length(n, for_queries=True) for n in tokens}:
      self._program(self._shape(length, for_queries=True))

  def _shape(self, length: int, *, for_queries: bool) -> tuple[int, int]:
    rows = self._shapes.rows(length, for_queries=for_queries)
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
    self, tokens: Sequence[np.ndarray], *, for_queries: bool = False
  ) -> np.ndarray:
    """Returns the results of n texts, float32 `[n, dim]`, in their order.

    Args:
      tokens: int32 ids of each of n texts, at most `shapes.max_tokens`.
      for_queries: whether the texts are queries, whose calls have few rows.

    Raises:
      ValueError: a result is not finite.
    """
    buckets = collections.defaultdict(list)
    for i, ids in enumerate(tokens):
      buckets[self._shapes.length(len(ids), for_queries=for_queries)].append(i)
    calls = []
    for length, members in sorted(buckets.items(), reverse=True):
      shape = self._shape(length, for_queries=for_queries)
      for start in range(0, len(members), shape[0]):
        calls.append((shape, members[start : start + shape[0]]))
    results = np.zeros((len(tokens), self._dim), np.float32)

    def answer(call: tuple[tuple[int, int], list[int]]) -> None:
      shape, members = call
      ids = np.zeros(shape, np.int32)
      lengths = np.zeros(shape[0], np.int32)
      for row, i in enumerate(members):
        lengths[row] = len(tokens[i])
        ids[row, : lengths[row]] = tokens[i]
      batch = jax.device_put((ids, lengths), self._batch)
      rows = self._program(shape)(self._params, *batch)
      results[members] = np.asarray(rows)[: len(members)]

    if len(calls) > 1:
      with futures.ThreadPoolExecutor(min(_CALLS_AT_ONCE, _CORES)) as pool:
        list(pool.map(answer, calls))
    elif calls:
      answer(calls[0])
    if not np.isfinite(results).all():
      raise ValueError(
        "The model returned numbers that are not finite. Load it in float32, "
        "or copy its folder again."
      )
    return results
