"""A server of a fleet: its state, its turns, and the questions that it has."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import enum
from collections.abc import AsyncIterator, Sequence

from anysearch_jax import types
from anysearch_jax.rollout.servers import server as server_lib

# A turn of so many tokens that are all one token has no content.
_DEGENERATE_TOKENS = 16
# Of the last turns of a server, those by which it is compared with the others.
_RECENT_TURNS = 32
_FEWEST_TURNS = 8
# Shares of degenerate turns: of a broken server, and of the others at most.
_BROKEN_SHARE = 0.5
_SOUND_SHARE = 0.1
_SMOOTHING = 0.1  # Weight of the last turn in a server's speed.

Place = tuple[int, int]  # Rollout and question.


class State(enum.Enum):
  """The state of a server; see docs/rollouts.md."""

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

  def __init__(self, server: server_lib.Server):
    self.server = server
    self.name = server.url.partition("://")[2]
    self.state = State.DOWN
    self.reason = "it has not answered yet"
    self.turns: set[asyncio.Timeout] = set()
    self.loading = asyncio.Lock()
    self.doubted = asyncio.Event()
    self.places: dict[Place, set[types.Address]] = {}
    self.speed = 0.0
    self.recent = collections.deque[bool](maxlen=_RECENT_TURNS)
    self.aside = False
    self.missed = 0

  def __str__(self) -> str:
    return f"{self.server.url} is {self.state.value}: {self.reason}"

  @property
  def samples(self) -> bool:
    """Whether new turns may go to it."""
    return self.state is State.UP and not self.missed

  @contextlib.asynccontextmanager
  async def turn(self, deadline: float) -> AsyncIterator[None]:
    """Limits a turn to some seconds, and until `cut`.

    Raises:
      server.UnansweredError: it was cut.
      types.EngineError: it took too long.
    """
    limit = asyncio.timeout(deadline)
    self.turns.add(limit)
    try:
      async with limit:
        yield
    except TimeoutError:
      is_late = limit in self.turns
      kind = types.EngineError if is_late else server_lib.UnansweredError
      raise kind(
        f"{self.server.url}: no turn within {deadline:g} seconds."
      ) from None
    finally:
      self.turns.discard(limit)

  def cut(self) -> None:
    """Ends the running turns; they may move to another server."""
    turns = self.turns
    self.turns = set()
    for limit in turns:
      if not limit.expired():
        limit.reschedule(asyncio.get_running_loop().time())

  def note_turn(self, turn: types.Generation, seconds: float) -> dict[str, int]:
    """Notes a turn that took some seconds; returns its counts."""
    tokens = len(turn.token_ids)
    speed = tokens / max(seconds, 1e-3)
    before = self.speed or speed
    self.speed = before + _SMOOTHING * (speed - before)
    is_degenerate = tokens >= _DEGENERATE_TOKENS
    is_degenerate = is_degenerate and len(set(turn.token_ids)) == 1
    self.recent.append(is_degenerate)
    return {
      "turns": 1,
      "tokens": tokens,
      "ms": round(1000 * seconds),
      "degenerate": int(is_degenerate),
    }

  def degeneration(self, others: Sequence[Member]) -> str:
    """Says how many more of its turns have no content than the others', or "".

    Args:
      others: the members with which it is compared.
    """

    def share(members: Sequence[Member]) -> float | None:
      turns = [bad for m in members for bad in m.recent]
      return sum(turns) / len(turns) if len(turns) >= _FEWEST_TURNS else None

    ours = share([self])
    theirs = share(others)
    if ours is None or theirs is None:
      return ""
    if ours < _BROKEN_SHARE or theirs > _SOUND_SHARE:
      return ""
    return (
      f"{ours:.0%} of its last {len(self.recent)} turns repeat one token, "
      f"{theirs:.0%} of the other servers'"
    )


def choose(members: Sequence[Member]) -> Member:
  """Returns the member that gets the next question; there is at least one.

  Those of unknown speed count as of average speed.
  """
  speeds = [m.speed for m in members if m.speed]
  usual = sum(speeds) / len(speeds) if speeds else 1.0
  return min(members, key=lambda m: (len(m.places) + 1) / (m.speed or usual))
