"""A circuit breaker: a service that does not answer is left alone for a while.

What it says then costs its callers no waiting, and it nothing at all.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from anysearch_jax.host.http import errors


class Breaker:
  """Lets calls through, or refuses them at once; for one thread.

  After `failures` failed calls in a row none is let through for `cooldown`
  seconds. Then one is: when it succeeds all are again, when it fails another
  `cooldown` begins.

  Args:
    failures: 1 or more.
    cooldown: seconds.
    unless: an error that tells of a service that is well.
    clock: seconds that only grow.
  """

  def __init__(
    self,
    failures: int,
    cooldown: float,
    *,
    unless: type[errors.RetrievalError],
    clock: Callable[[], float] = time.monotonic,
  ):
    self._limit, self._cooldown = failures, cooldown
    self._unless, self._clock = unless, clock
    self._failed = 0
    self._closed_until = 0.0
    self._last = ""
    self._probing = False

  @contextlib.contextmanager
  def call(
    self, unsure: tuple[type[errors.RetrievalError], ...] = ()
  ) -> Iterator[None]:
    """One call; a `RetrievalError` in it is a failure.

    Any other exception, as when nobody waits for the call any more, tells
    nothing about the service.

    Args:
      unsure: errors that tell nothing either; whoever finds out that they are
        the service's fault says so by `fail`.

    Raises:
      RetrievalError: the call may not be made now.
    """
    is_probe = self._failed >= self._limit
    if is_probe:
      self._refuse_early()
      self._probing = True
    try:
      yield
    except self._unless:
      self._failed = 0
      raise
    except unsure:
      raise
    except errors.RetrievalError as error:
      self.fail(error)
      raise
    else:
      self._failed = 0
    finally:
      if is_probe:
        self._probing = False

  def fail(self, error: errors.RetrievalError) -> None:
    """Counts a failed call."""
    self._failed += 1
    self._closed_until = self._clock() + self._cooldown
    self._last = str(error)

  def _refuse_early(self) -> None:
    left = self._closed_until - self._clock()
    if left > 0 or self._probing:
      when = f"in {left:.3g} seconds" if left > 0 else "by the call under way"
      raise errors.RetrievalError(
        f"{self._failed} calls in a row failed, so nothing is asked; it is "
        f"tried again {when}. The last met: {self._last}"
      )
