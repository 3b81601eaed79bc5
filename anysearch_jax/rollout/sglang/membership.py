"""The members of a fleet: what each server does, and which one gets a question.

A question goes to the server with the fewest questions for its speed and stays
there while that is up, because it has the prefix in its cache. Servers are
named one by one, or a gateway lists them (`smg --enable-rl`), from which they
come and go. The gateway is only asked for addresses.
"""

from __future__ import annotations

import asyncio
import collections
import enum
from collections.abc import Sequence
from typing import Any

from anysearch_jax import types
from anysearch_jax.host import redaction
from anysearch_jax.rollout.sglang import server as sglang_server

# A turn of so many tokens that are all one token has no content.
_DEGENERATE = 16
# Of the last turns of a server, those by which it is compared with the others.
_RECENT, _FEWEST = 32, 8
_BAD, _GOOD = 0.5, 0.1  # Shares of degenerate turns.
_SMOOTHING = 0.1  # Weight of the last turn in a server's speed.

Place = tuple[int, int]  # Rollout and question.


class State(enum.Enum):
  """The state of a server; see `health`."""

  UP = "up"
  SUSPECT = "suspect"
  DOWN = "down"


class Member:
  """A server and its state.

  reason: why the server is not up.
  turns: the deadlines of its running turns.
  loading: lock for loading weights, and for lending memory.
  doubted: event that starts a check immediately.
  places: questions that are sampled here, with their episodes that play.
  speed: sampled tokens a second of a turn, smoothed; 0 is unknown.
  recent: whether each of its last turns was degenerate.
  aside: whether it is left out until it is restarted.
  missed: in how many lists in a row the gateway did not name it.
  """

  def __init__(self, server: sglang_server.Server):
    self.server = server
    self.name = server.url.partition("://")[2]
    self.state = State.DOWN
    self.reason = "it has not answered yet"
    self.turns: set[asyncio.Timeout] = set()
    self.loading = asyncio.Lock()
    self.doubted = asyncio.Event()
    self.places: dict[Place, set[types.Address]] = {}
    self.speed = 0.0
    self.recent: collections.deque[bool] = collections.deque(maxlen=_RECENT)
    self.aside = False
    self.missed = 0

  def __str__(self) -> str:
    return f"{self.server.url} is {self.state.value}: {self.reason}"

  @property
  def samples(self) -> bool:
    """Whether new turns may go to it."""
    return self.state is State.UP and not self.missed

  def sampled(self, turn: types.Generation, seconds: float) -> dict[str, int]:
    """Notes a turn; returns its counts."""
    tokens = len(turn.token_ids)
    speed = tokens / max(seconds, 1e-3)
    old = self.speed or speed
    self.speed = old + _SMOOTHING * (speed - old)
    same = tokens >= _DEGENERATE and len(set(turn.token_ids)) == 1
    self.recent.append(same)
    return {
      "turns": 1,
      "tokens": tokens,
      "ms": round(1000 * seconds),
      "degenerate": int(same),
    }

  def degenerates(self, others: Sequence[Member]) -> str:
    """Says how many more of its turns have no content than the others'."""

    def share(members: Sequence[Member]) -> float | None:
      turns = [bad for m in members for bad in m.recent]
      return sum(turns) / len(turns) if len(turns) >= _FEWEST else None

    own, theirs = share([self]), share(others)
    if own is None or theirs is None or own < _BAD or theirs > _GOOD:
      return ""
    return (
      f"{own:.0%} of its last {len(self.recent)} turns repeat one token, "
      f"{theirs:.0%} of the other servers'"
    )


def home(
  address: types.Address, up: Sequence[Member], members: Sequence[Member]
) -> Member:
  """Returns the member, one of `up`, for the next turn of an episode."""
  place = address.rollout, address.question
  found = next((m for m in up if place in m.places), None)
  if found is None:
    episodes = [m.places.pop(place, set()) for m in members]
    found = choose(up)
    found.places[place] = set().union(*episodes)
  found.places[place].add(address)
  return found


def leave(address: types.Address, members: Sequence[Member]) -> None:
  """Notes that an episode has ended."""
  place = address.rollout, address.question
  for member in members:
    if (episodes := member.places.get(place)) is not None:
      episodes.discard(address)
      if not episodes:
        del member.places[place]


def choose(members: Sequence[Member]) -> Member:
  """Returns the member that gets the next question; there is at least one.

  Those of unknown speed count as of average speed.
  """
  known = [m.speed for m in members if m.speed]
  usual = sum(known) / len(known) if known else 1.0
  return min(members, key=lambda m: (len(m.places) + 1) / (m.speed or usual))


async def served(member: Member) -> str:
  """Returns a part of a sentence that says what a server serves."""
  server = member.server
  try:
    return f"{server.url} serves {await server.version()!r}"
  except types.EngineError as error:
    return f"{server.url} does not say what it serves ({error})"


async def workers(gateway: sglang_server.Server) -> list[str]:
  """Returns the addresses of the SGLang servers that a gateway knows.

  Raises:
    types.EngineError: it did not answer, or not with a list of workers.
  """
  reply = await gateway.get("/v1/rl/workers")
  found = reply.get("workers")
  if not isinstance(found, list):
    raise gateway.error(
      f"found {found!r} for its workers, expected a list; it must be an smg "
      "gateway that was started with --enable-rl."
    )
  urls = [_address(each) for each in found]
  return list(dict.fromkeys(url for url in urls if url))


def _address(worker: Any) -> str | None:
  """Returns a worker's address, None if it is of another engine."""
  found = worker if isinstance(worker, dict) else {}
  url = found.get("base_url") or found.get("url")
  other = found.get("engine") not in ("sglang", None)
  if other or not isinstance(url, str) or not redaction.is_address(url):
    return None
  return url.rstrip("/")
