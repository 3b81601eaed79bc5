"""A circuit breaker: calls to a failing service are refused for a while.

The refusals cost callers no waiting and the service no load. The pattern is
described at https://martinfowler.com/bliki/CircuitBreaker.html.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from anysearch_jax import types


class Breaker:
  """Lets calls through, or refuses them at once. Not thread-safe.

  After `failures` consecutive failed calls, it refuses all calls for `cooldown`
  seconds and then lets one through. If that one succeeds, all calls are let
  through again; if it fails, another `cooldown` begins.

  Args:
    failures: 1 or more.
    cooldown: seconds.
    unless: class of errors that show that the service works; such an error
      counts as a success.
    clock: monotonic clock, in seconds.
  """

  def __init__(
    self,
    failures: int,
    cooldown: float,
    *,
    unless: type[types.RetrievalError],
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
    self, unsure: tuple[type[types.RetrievalError], ...] = ()
  ) -> Iterator[None]:
    """Wraps one call; a `RetrievalError` inside counts as a failure.

    Any other exception, for example a cancellation, says nothing about the
    service and changes nothing.

    Args:
      unsure: classes of errors that count neither as failures nor as successes.
        A caller that finds the service at fault reports it by `fail`.

    Raises:
      RetrievalError: calls are refused at present.
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
    except types.RetrievalError as error:
      self.fail(error)
      raise
    else:
      self._failed = 0
    finally:
      if is_probe:
        self._probing = False

  def fail(self, error: types.RetrievalError) -> None:
    """Counts a failed call."""
    self._failed += 1
    self._closed_until = self._clock() + self._cooldown
    self._last = str(error)

  def _refuse_early(self) -> None:
    left = self._closed_until - self._clock()
    if left > 0 or self._probing:
      when = f"in {left:.3g} seconds" if left > 0 else "by the call under way"
      raise types.RetrievalError(
        f"{self._failed} calls in a row failed, so nothing is asked; it is "
        f"tried again {when}. The last met: {self._last}"
      )
