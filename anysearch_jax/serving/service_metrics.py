"""The Prometheus metrics of the service."""

from __future__ import annotations

import functools
from collections.abc import Callable

import prometheus_client

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
    self._requests = prometheus_client.Counter(
      "anysearch_requests",
      "Requests that were answered; 499: the client left.",
      ("route", "status"),
      registry=self.registry,
    )
    self._seconds = prometheus_client.Histogram(
      "anysearch_request_seconds",
      "From the headers of a request to the end of its answer.",
      ("route",),
      buckets=_SECONDS,
      registry=self.registry,
    )
    self.first_event = prometheus_client.Histogram(
      "anysearch_first_event_seconds",
      "From a question to the first piece of reasoning, search or answer.",
      buckets=_SECONDS,
      registry=self.registry,
    )
    self._outcomes = prometheus_client.Counter(
      "anysearch_episodes",
      "Episodes that ended, by their outcome.",
      ("outcome",),
      registry=self.registry,
    )
    self._searches = prometheus_client.Histogram(
      "anysearch_episode_searches",
      "Searches of an episode.",
      buckets=_COUNTS,
      registry=self.registry,
    )
    self._tokens = prometheus_client.Counter(
      "anysearch_tokens",
      "Tokens that the policy wrote.",
      registry=self.registry,
    )
    self._turns = prometheus_client.Counter(
      "anysearch_turns", "Turns of the policy.", registry=self.registry
    )
    self.running = prometheus_client.Gauge(
      "anysearch_running_questions",
      "Questions under way, those that wait for a place included.",
      registry=self.registry,
    )
    prometheus_client.Gauge(
      "anysearch_slots",
      "Questions that are worked on at the same time.",
      registry=self.registry,
    ).set(slots)
    if pages is not None:
      for index, name in enumerate(("used", "all")):
        prometheus_client.Gauge(
          f"anysearch_kv_pages_{name}",
          "Pages of the KV cache.",
          registry=self.registry,
        ).set_function(functools.partial(_part, pages, index))

  def responded(self, route: str, status: int, seconds: float) -> None:
    """Counts a response."""
    self._requests.labels(route, str(status)).inc()
    self._seconds.labels(route).observe(seconds)

  def ended(
    self, outcome: str, *, searches: int, tokens: int, turns: int
  ) -> None:
    """Counts an episode."""
    self._outcomes.labels(outcome).inc()
    self._searches.observe(searches)
    self._tokens.inc(tokens)
    self._turns.inc(turns)


def _part(pages: Callable[[], tuple[int, int]], index: int) -> int:
  return pages()[index]
