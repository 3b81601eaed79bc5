"""The Prometheus metrics of a search service."""

from __future__ import annotations

from collections.abc import Callable

import prometheus_client

_SECONDS = tuple(m * 10.0**e for e in (-3, -2, -1, 0, 1) for m in (1, 2, 5))
_QUERIES = tuple(2**e for e in range(11))


class Metrics:
  """Counts and times, in their own registry.

  Args:
    waiting: returns the number of queries that wait now.
  """

  def __init__(self, waiting: Callable[[], int]):
    self.registry = prometheus_client.CollectorRegistry()
    self._requests = prometheus_client.Counter(
      "retrieval_requests",
      "Requests that were answered; 499: the client left.",
      ("route", "status"),
      registry=self.registry,
    )
    self._seconds = prometheus_client.Histogram(
      "retrieval_request_seconds",
      "From the headers of a request to its answer.",
      ("route",),
      buckets=_SECONDS,
      registry=self.registry,
    )
    self.queries = prometheus_client.Counter(
      "retrieval_queries",
      "Queries of requests that were read.",
      registry=self.registry,
    )
    self.blank_queries = prometheus_client.Counter(
      "retrieval_blank_queries",
      "Queries without a letter, which got no passages.",
      registry=self.registry,
    )
    self.cut_queries = prometheus_client.Counter(
      "retrieval_cut_queries",
      "Queries that were too long and of which the beginning was searched.",
      registry=self.registry,
    )
    self._closed = prometheus_client.Counter(
      "retrieval_closed_connections",
      "Connections that were closed because their headers or their request "
      "took too long, another one took their place, or none was left.",
      ("reason",),
      registry=self.registry,
    )
    self._batches = prometheus_client.Histogram(
      "retrieval_search_queries",
      "Different queries in a search.",
      buckets=_QUERIES,
      registry=self.registry,
    )
    self._searches = prometheus_client.Histogram(
      "retrieval_search_seconds",
      "Of a search that did not fail.",
      buckets=_SECONDS,
      registry=self.registry,
    )
    prometheus_client.Gauge(
      "retrieval_waiting_queries",
      "Queries that wait for a search.",
      registry=self.registry,
    ).set_function(waiting)

  def responded(self, route: str, status: int, seconds: float) -> None:
    self._requests.labels(route, str(status)).inc()
    self._seconds.labels(route).observe(seconds)

  def closed(self, reason: str) -> None:
    self._closed.labels(reason).inc()

  def searched(self, queries: int, seconds: float) -> None:
    self._batches.observe(queries)
    self._searches.observe(seconds)
