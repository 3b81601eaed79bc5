"""The Prometheus metrics of the service."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import prometheus_client

from anysearch_jax import types
from anysearch_jax.agent import events

_SECONDS = tuple(m * 10.0**e for e in (-2, -1, 0, 1) for m in (1, 2, 5)) + (
  100,
)
_COUNTS = (0, 1, 2, 3, 4, 5, 8, 12, 16, 32)


class Metrics:
  """Counts and times, in their own registry.

  Args:
    slots: questions that are worked on at the same time.
    pages: returns the used and all pages of the KV cache; None without one.
  """

  def __init__(
    self, slots: int, pages: Callable[[], tuple[int, int]] | None = None
  ):
    self.registry = prometheus_client.CollectorRegistry()
    mine: Any = {"namespace": "anysearch", "registry": self.registry}
    counter: Any = functools.partial(prometheus_client.Counter, **mine)
    gauge: Any = functools.partial(prometheus_client.Gauge, **mine)
    histogram: Any = functools.partial(prometheus_client.Histogram, **mine)
    self._requests = counter(
      "requests",
      "Requests that were answered; 499: the client left.",
      ("route", "status"),
    )
    self._seconds = histogram(
      "request_seconds",
      "From the headers of a request to the end of its answer.",
      ("route",),
      buckets=_SECONDS,
    )
    self.first_event = histogram(
      "first_event_seconds",
      "From a question to the first piece of reasoning, search or answer.",
      buckets=_SECONDS,
    )
    self._outcomes = counter(
      "episodes", "Episodes that ended, by their outcome.", ("outcome",)
    )
    self.searches = counter(
      "searches", "Searches that were charged, also of clients that left."
    )
    self._searches = histogram(
      "episode_searches", "Searches of an ended episode.", buckets=_COUNTS
    )
    self._tokens = counter("tokens", "Tokens that the policy wrote.")
    self._turns = counter("turns", "Turns of the policy.")
    self.running = gauge(
      "running_questions",
      "Questions under way, those that wait for a place included.",
    )
    gauge("slots", "Questions that are worked on at the same time.").set(slots)
    if pages is not None:
      sentence = "Pages of the KV cache."
      gauge("kv_pages_used", sentence).set_function(lambda: pages()[0])
      gauge("kv_pages_all", sentence).set_function(lambda: pages()[1])

  def responded(self, route: str, status: int, seconds: float) -> None:
    """Counts a response."""
    self._requests.labels(route, str(status)).inc()
    self._seconds.labels(route).observe(seconds)

  def ended(self, reply: events.Reply) -> None:
    """Counts an episode."""
    self._outcomes.labels(str(reply.outcome)).inc()
    self._searches.observe(reply.searches)
    self._tokens.inc(reply.tokens)
    spans = reply.trajectory.spans
    self._turns.inc(sum(span.author is types.Author.MODEL for span in spans))
