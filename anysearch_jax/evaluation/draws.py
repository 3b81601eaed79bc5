"""Random draws of questions, shared by all intervals and tests of a report.

Every bootstrap and every permutation test starts from the same seed, so those
over equally many questions use the same draws. The draws are kept and used
again: drawing takes several times as long as summing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np

_CHUNK = 4_000_000  # Numbers held at once: bounds memory, not the result.
# Draws with more numbers than this are not kept. A kept number takes one byte.
_KEPT = 16_000_000
_KEPT_DRAWS = 12  # A study has a few numbers of questions, one per dataset.

# A sum of integers below this bound is exact in float32, in any order.
_EXACT = 2**24
# Rows multiplied at once, which stay in the cache. OpenBLAS spreads products
# of more multiplications than this over all cores, where waiting for each other
# costs more than it saves; those are multiplied whole.
_ROWS = 64
_ALONE = 2**20

# What the next draw of a PCG64 generator depends on: state, increment, and the
# half of a 64-bit number that 32-bit draws have not used yet.
_State = tuple[int, int, int, int]


def resampled_totals(
  rng: np.random.Generator, sums: np.ndarray, resamples: int
) -> np.ndarray:
  """Returns the totals of resamples of N questions, drawn with replacement.

  Args:
    rng: its draws decide the resamples; it is advanced.
    sums: float `[N, K]`, K sums for each of N >= 1 questions.
    resamples: R, the number of resamples.

  Returns:
    `[R, K]`.
  """
  questions = len(sums)
  if resamples * questions > _KEPT:
    blocks = _count_blocks(rng, resamples, questions)
    return np.concatenate([product(block, sums) for block in blocks])
  kept, after = _kept_counts(_state_of(rng), resamples, questions)
  _set_state(rng, after)
  return np.concatenate([product(block, sums) for block in kept])


def product(drawn: np.ndarray, sums: np.ndarray) -> np.ndarray:
  """Returns drawn @ sums in float64.

  Sums that are small integers, such as counts of right answers, are multiplied
  in float32. The result is the same, because every partial sum is exact.

  Args:
    drawn: small integers `[R, N]`; the absolute values of a row sum to at most
      N.
    sums: float64 `[N, K]`.
  """
  bound = len(sums) * np.abs(sums).max(initial=0.0)
  # A bound that is nan is not below _EXACT.
  if not (bound < _EXACT and np.array_equal(sums, np.rint(sums))):
    return drawn.astype(np.float64) @ sums
  small = sums.astype(np.float32)
  out = np.empty((len(drawn), sums.shape[1]))
  step = _ROWS if _ROWS * sums.size <= _ALONE else max(1, len(drawn))
  for start in range(0, len(drawn), step):
    rows = slice(start, start + step)
    out[rows] = drawn[rows].astype(np.float32) @ small
  return out


@functools.lru_cache(maxsize=_KEPT_DRAWS)
def _kept_counts(
  state: _State, resamples: int, questions: int
) -> tuple[tuple[np.ndarray, ...], _State]:
  """Returns the blocks that follow `state`, and the state after them."""
  rng = np.random.default_rng()
  _set_state(rng, state)
  return tuple(_count_blocks(rng, resamples, questions)), _state_of(rng)


def _count_blocks(
  rng: np.random.Generator, resamples: int, questions: int
) -> Iterator[np.ndarray]:
  """Yields how often each resample draws each question, in blocks `[r, N]`."""
  step = max(1, _CHUNK // questions)
  for start in range(0, resamples, step):
    rows = min(step, resamples - start)
    drawn = rng.integers(questions, size=(rows, questions))
    drawn += np.arange(rows)[:, None] * questions
    counts = np.bincount(drawn.ravel(), minlength=rows * questions)
    smallest = np.min_scalar_type(counts.max())
    yield counts.astype(smallest).reshape(rows, questions)


def _state_of(rng: np.random.Generator) -> _State:
  found = rng.bit_generator.state
  inner = found["state"]
  return inner["state"], inner["inc"], found["has_uint32"], found["uinteger"]


def _set_state(rng: np.random.Generator, state: _State) -> None:
  inner, increment, has_half, half = state
  rng.bit_generator.state = {
    "bit_generator": "PCG64",
    "state": {"state": inner, "inc": increment},
    "has_uint32": has_half,
    "uinteger": half,
  }


def signs(questions: int, draws: int, seed: int) -> Iterator[np.ndarray]:
  """Yields random signs, 1 or -1, int8 `[r, N]` for `draws` rows in blocks."""
  few = questions * draws <= _KEPT
  yield from (_kept_signs if few else _sign_blocks)(questions, draws, seed)


@functools.lru_cache(maxsize=_KEPT_DRAWS)
def _kept_signs(
  questions: int, draws: int, seed: int
) -> tuple[np.ndarray, ...]:
  return tuple(_sign_blocks(questions, draws, seed))


def _sign_blocks(questions: int, draws: int, seed: int) -> Iterator[np.ndarray]:
  rng = np.random.default_rng(seed)
  step = max(1, _CHUNK // questions)
  for start in range(0, draws, step):
    shape = min(step, draws - start), questions
    yield 1 - 2 * rng.integers(2, size=shape, dtype=np.int8)
