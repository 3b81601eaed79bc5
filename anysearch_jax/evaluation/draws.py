"""Random signs of questions, shared by all tests of a report.

Every test starts from the same seed, so those over equally many questions use
the same signs. They are kept and used again: drawing takes several times as
long as summing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np

_CHUNK = 4_000_000  # Numbers held at once: bounds memory, not the result.
# Draws with more numbers than this are not kept. A kept number takes one byte.
_KEPT = 16_000_000
_KEPT_DRAWS = 12  # A study has a few numbers of questions, one per dataset.


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
