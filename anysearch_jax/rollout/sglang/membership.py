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
  released: whether it had released its memory when it was last asked.
  loading: lock for loading weights.
  doubted: event that starts a check immediately.
  places: questions that are sampled here.
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
    self.released = False
    self.loading = asyncio.Lock()
    self.doubted = asyncio.Event()
    self.places: set[Place] = set()
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


class Homes:
  """Where each question is sampled, as long as an episode of it plays."""

  def __init__(self) -> None:
    self._of: dict[Place, tuple[Member, set[types.Address]]] = {}

  def of(self, address: types.Address, up: Sequence[Member]) -> Member:
    """Returns the member, one of `up`, for the next turn of an episode."""
    place = address.rollout, address.question
    home, episodes = self._of.get(place, (None, set()))
    if home is None or home not in up:
      if home:
        home.places.discard(place)
      home = choose(up)
      home.places.add(place)
    episodes.add(address)
    self._of[place] = home, episodes
    return home

  def leave(self, address: types.Address) -> None:
    """Notes that an episode has ended."""
    place = address.rollout, address.question
    if place in self._of:
      home, episodes = self._of[place]
      episodes.discard(address)
      if not episodes:
        home.places.discard(place)
        del self._of[place]


def choose(members: Sequence[Member]) -> Member:
  """Returns the member that gets the next question; there is at least one.

  Those of unknown speed count as of average speed.
  """
  known = [m.speed for m in members if m.speed]
  usual = sum(known) / len(known) if known else 1.0
  return min(members, key=lambda m: (len(m.places) + 1) / (m.speed or usual))


async def check_ready(server: sglang_server.Server, context: int) -> None:
  """Checks that a server that was down, or is new, has such contexts."""
  if (found := await server.ready()) < context:
    raise types.EngineError(
      f"{server.url}: came back with contexts of {found} tokens, expected "
      f"{context}; start it as it was."
    )


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
