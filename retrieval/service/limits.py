"""Limits of a search service, per request and for all requests together."""

from __future__ import annotations

import dataclasses

from retrieval.service import dialects


@dataclasses.dataclass(frozen=True)
class Limits:
  """Limits of a service.

  Attributes:
    topk: passages for a query if the request does not say.
    max_topk: the most passages that a request may want for a query.
    queries: the most queries in a request.
    passages: the most passages that all queries of a request may want.
    characters: the most characters of a query; see `long`.
    body: the most bytes of a request.
    queue: the most queries of all requests that may wait; a request beyond that
      is refused.
    batch: the most queries in a search.
    deadline: seconds from a request to its answer.
    connections: the most connections at a time; fewer if the process may open
      fewer files.
    headers: seconds that a request's headers may take.
    blank: "empty" answers a blank query with an empty list, because clients
      like Search-R1's read "result" of every response; "reject" refuses the
      request, as the AnySearch authors' server does.
    long: "cut" searches the first `characters` of a longer query, as encoders
      do; "reject" refuses the request.
  """

  topk: int = 3
  max_topk: int = 100
  queries: int = 4096
  passages: int = 65536
  characters: int = 8192
  body: int = 16 << 20
  queue: int = 16384
  batch: int = 128
  deadline: float = 30.0
  connections: int = 4096
  headers: float = 10.0
  blank: str = "empty"
  long: str = "cut"

  def __post_init__(self):
    for name in (
      *("topk", "queries", "characters", "body", "batch", "deadline"),
      *("connections", "headers"),
    ):
      if not getattr(self, name) > 0:
        raise ValueError(
          f"{name}: found {getattr(self, name)}, expected more than 0."
        )
    if self.max_topk < self.topk:
      raise ValueError(
        f"max_topk: found {self.max_topk}, expected topk ({self.topk}) or more."
      )
    if self.passages < self.max_topk:
      raise ValueError(
        f"passages: found {self.passages}, expected max_topk ({self.max_topk}) "
        "or more."
      )
    if self.queue < self.queries:
      raise ValueError(
        f"queue: found {self.queue}, expected {self.queries} or more, so that "
        "the largest request fits into the queue."
      )
    for name, other in (("blank", "empty"), ("long", "cut")):
      if getattr(self, name) not in ("reject", other):
        raise ValueError(
          f"{name}: found {getattr(self, name)!r}, expected 'reject' or "
          f"{other!r}."
        )

  def check(self, asked: dialects.Asked) -> int:
    """Checks a request and returns the number of passages for each query.

    Raises:
      dialects.RequestError: the request exceeds a limit.
    """
    if len(asked.queries) > self.queries:
      raise dialects.RequestError(
        f"Found {len(asked.queries)} queries, expected at most {self.queries}; "
        "split the request."
      )
    for place, query in enumerate(asked.queries):
      if self.long == "reject" and len(query) > self.characters:
        raise dialects.RequestError(
          f"Query {place} has {len(query)} characters, expected at most "
          f"{self.characters}."
        )
      if self.blank == "reject" and not query.strip():
        raise dialects.RequestError(f"Query {place} is blank, expected text.")
    k = self.topk if asked.k is None else asked.k
    if not 1 <= k <= self.max_topk:
      raise dialects.RequestError(
        f"Expected 1 to {self.max_topk} passages for a query, or null for "
        f"{self.topk}; the request wants {'more' if k > 0 else 'fewer'}."
      )
    if len(asked.queries) * k > self.passages:
      raise dialects.RequestError(
        f"Found {len(asked.queries)} queries for {k} passages each, expected "
        f"at most {self.passages} passages in all; split the request."
      )
    return k
