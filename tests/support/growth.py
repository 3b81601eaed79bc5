"""Asserts how work grows with its input, by ratios within one run.

A bound in seconds fails on a busy machine and passes on a fast one whatever the
algorithm does. CPU time of the thread at two sizes, measured side by side, does
neither.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

# Four times the input: 4 for linear work, 16 for quadratic work.
_BOUND = 10.0
# CPU seconds. Quadratic work on a megabyte takes minutes; below this the clock
# and the caches decide the ratio.
_FLOOR = 0.02


def assert_linear(work: Callable[[Sequence], object], whole: Sequence) -> None:
  """Fails where `work(whole)` costs over 10 times `work` on a quarter of it.

  Args:
    work: takes a prefix of `whole`; runs up to three times on each size.
    whole: a text or a list, large enough that quadratic work would be seen.
  """
  quarter = whole[: len(whole) // 4]
  for _ in range(3):  # Something else may disturb a measurement, not three.
    large, small = _seconds(work, whole), _seconds(work, quarter)
    if large <= max(_BOUND * small, _FLOOR):
      return
  raise AssertionError(
    f"{len(whole)} items took {large:.3g} CPU seconds, {len(quarter)} items "
    f"took {small:.3g}: more than {_BOUND:g} times for four times the input"
  )


def _seconds(work: Callable[[Sequence], object], items: Sequence) -> float:
  start = time.thread_time()
  work(items)
  return time.thread_time() - start
