"""An episode as it stands, and the requests and events that move it.

An episode is a row of chunks. A chunk is what one author wrote at one time:
the sampled ids of a turn as they came (they are never encoded again), or the
ids of a text of the environment. Tokens, authors and spans all derive from it.
"""

from __future__ import annotations

import dataclasses

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.environment import environment as environment_lib
from anysearch_jax.methods import systems


@dataclasses.dataclass(frozen=True)
class Chunk:
  """Tokens that one author wrote at one time, and their text."""

  author: types.Author
  token_ids: tuple[int, ...]
  logps: tuple[float, ...]
  versions: tuple[int, ...]
  text: str


@dataclasses.dataclass(frozen=True)
class Done:
  """The episode is over: nothing more is asked."""

  trajectory: types.Trajectory


@dataclasses.dataclass(frozen=True)
class Retrieved:
  """The event that answers a `SearchRequest`; no hit is legal."""

  passages: tuple[types.Passage, ...]


@dataclasses.dataclass(frozen=True)
class Failure:
  """The event of a request that nobody could answer; `reason` says why."""

  reason: str


Request = types.GenerateRequest | types.SearchRequest | Done
Event = types.Generation | Retrieved | Failure


@dataclasses.dataclass(frozen=True)
class Episode:
  """What has happened so far, and the request that the episode waits on.

  Attributes:
    chunks: prompt, turns and environment texts in order.
    queries: the charged queries; their number is the budget used.
    documents: what each of them found.
    search_ends: where the turns ended that searched, as in a `Trajectory`.
    bad_turns: turns answered with an error line.
    violation: a search beyond the budget was tried.
    verifying: the policy was asked what it thinks of its answer.
    request: what is awaited; None only inside `start`.
  """

  address: types.Address
  question: types.Question
  budget: int
  scaffold: bool
  config: config_lib.EpisodeConfig
  codec: types.TextCodec
  chunks: tuple[Chunk, ...] = ()
  queries: tuple[str, ...] = ()
  documents: tuple[tuple[types.Document, ...], ...] = ()
  search_ends: tuple[int, ...] = ()
  bad_turns: int = 0
  violation: bool = False
  verifying: bool = False
  request: Request | None = None

  @property
  def environment(self) -> environment_lib.Environment:
    """The texts around the episode, and how its own are read."""
    return systems.environment(self.config.prompts)

  @property
  def used(self) -> int:
    """Searches charged."""
    return len(self.queries)

  @property
  def left(self) -> int:
    """Searches that may still be made."""
    lost = self.bad_turns if self.environment.turns_are_budget else 0
    return self.budget - self.used - lost

  @property
  def turns(self) -> int:
    """Turns that the model has taken."""
    return sum(chunk.author is types.Author.MODEL for chunk in self.chunks)

  @property
  def tokens(self) -> int:
    """Tokens of the context."""
    return sum(len(chunk.token_ids) for chunk in self.chunks)

  @property
  def generated(self) -> int:
    """Tokens that the model wrote."""
    return sum(
      len(chunk.token_ids)
      for chunk in self.chunks
      if chunk.author is types.Author.MODEL
    )

  @property
  def room(self) -> int:
    """Tokens that the next turn may sample; none are left below 1."""
    return min(
      self.config.max_generated - self.generated,
      self.config.max_context - self.tokens,
    )
