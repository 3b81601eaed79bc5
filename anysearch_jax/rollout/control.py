"""Rules that steer when a policy searches and when it answers.

A policy proposes an action by its turn: it asks for a search, or it answers. A
rule accepts the action or replaces it by the other one: a search is refused as
if the budget were used up, and an answer is discarded and sampled again until
it searches. If it never does, the answer is kept after all. `episode.control`
names a rule of one's own.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.host import plugins
from anysearch_jax.methods import systems
from anysearch_jax.rollout import episode, episode_state

ASK, ANSWER = "ask", "answer"
# Beyond these, more searches are as good as any number of them.
MOST_SEARCHES = 8


class Seen(NamedTuple):
  """What a host sees of an episode after a turn that asks or answers.

  made: searches charged before.
  left: searches that the budget still allows, at most `MOST_SEARCHES`.
  written: tokens that the policy wrote, this turn and discarded ones included.
  turn: mean length of its turns in tokens.
  repeated: 1 if the turn repeats a query, otherwise 0.
  logp: mean log-probability of the turn's tokens.
  """

  made: int
  left: int
  written: int
  turn: float
  repeated: int
  logp: float


@dataclasses.dataclass(frozen=True)
class Rule:
  """A rule.

  Attributes:
    searches: returns whether the episode searches, given what the turn does
      (`ASK` or `ANSWER`), what is seen of the episode, and its `token_cap`.
    tries: how often an answer is discarded until the policy asks, at most.
  """

  searches: Callable[[str, Seen, int], bool]
  tries: int = 0


def seen(after: episode_state.Episode) -> Seen:
  """Returns what is seen of an episode after its last turn was stepped."""
  last = after.chunks[-1]
  match after.request:
    case types.SearchRequest(query=query):
      repeated = query in after.queries
    case _:
      repeated = False
  return Seen(
    after.used,
    min(after.left, MOST_SEARCHES),
    after.written,
    sum(after.turn_lengths) / after.turns,
    int(repeated),
    round(sum(last.logps) / len(last.logps), 5),
  )


def of(config: config_lib.EpisodeConfig) -> Rule | None:
  """Returns the rule of a configuration; None if the policy decides alone.

  Raises:
    ValueError: the name is not that of a rule, or the environment verifies
      answers.
  """
  if not config.control:
    return None
  env = systems.of_episode(config)
  if env.verification or env.critic:
    raise ValueError(
      "config.episode.control: found an environment that verifies answers, "
      "which is steered already; expected one without (bats, not bats_verify)."
    )
  return _load(config.control)


@functools.cache
def _load(name: str) -> Rule:
  """Returns the rule of this name; its errors name its line."""
  setting = "config.episode.control"
  found = plugins.load(
    name,
    setting=setting,
    expected="a rule, anysearch_jax.control.Rule(...)",
    fits=lambda value: isinstance(value, Rule),
  )

  def searches(proposal: str, seen: Seen, cap: int) -> bool:
    with plugins.as_sentence(f"{setting} {name!r}", found.path):
      return bool(found.value.searches(proposal, seen, cap))

  return dataclasses.replace(found.value, searches=searches)


def step(
  waiting: episode_state.Episode, event: episode_state.Event | None
) -> episode_state.Episode:
  """Advances an episode as `episode.step` does, and lets its rule decide.

  Args:
    waiting: as returned by `episode.start` or by the last `step`.
    event: the answer to its request; None if its time is over.

  Returns:
    The next episode. Its address differs from that of `waiting` while an answer
    is sampled again; the caller releases the old one.
  """
  rule = of(waiting.config)
  if waiting.answered is not None and rule is not None:
    return _sampled_again(waiting, event, waiting.answered, rule.tries)
  if event is None:
    return episode.land(waiting)
  after = episode.step(waiting, event)
  if rule is None or waiting.landing or waiting.stopped:
    return after
  if not isinstance(event, types.Generation):
    return after
  limit = after.token_cap
  match after.request:
    case types.SearchRequest():
      if not rule.searches(ASK, seen(after), limit):
        return refuse(waiting, event)
    case episode_state.Done(types.Trajectory(outcome=types.Outcome.ANSWERED)):
      if (
        after.left > 0
        and rule.searches(ANSWER, seen(after), limit)
        and rule.tries
        and (redo := again(waiting, event))
      ):
        return dataclasses.replace(redo, answered=after)
  return after


def _sampled_again(
  waiting: episode_state.Episode,
  event: episode_state.Event | None,
  answered: episode_state.Episode,
  tries: int,
) -> episode_state.Episode:
  """Takes a turn that searches; tries again, or keeps the answer otherwise."""
  spent = waiting
  if isinstance(event, types.Generation):
    after = episode.step(waiting, event)
    if isinstance(after.request, types.SearchRequest):
      return dataclasses.replace(after, answered=None)
    redo = again(waiting, event)
    made = waiting.address.attempt - answered.address.attempt
    if redo is not None and made < 2 * tries:
      return redo
    spent = without(waiting, event)
  # The answer counts as written now, not as discarded.
  first, ended = answered.chunks[-1], answered.request
  assert isinstance(ended, episode_state.Done)
  trajectory = ended.trajectory
  is_timed = answered.caps.seconds < math.inf
  done = episode_state.Done(
    dataclasses.replace(
      trajectory,
      discarded_tokens=spent.discarded - len(first.token_ids),
      discarded_input=spent.reread - (answered.tokens - len(first.token_ids)),
      seconds=spent.elapsed if is_timed else trajectory.seconds,
    )
  )
  return dataclasses.replace(answered, request=done)


def refuse(
  asking: episode_state.Episode, turn: types.Generation
) -> episode_state.Episode:
  """Answers a turn that searches as if its budget were used up.

  Where turns are the budget, the next turn must answer.
  """
  if asking.environment.turns_are_budget:
    stepped = dataclasses.replace(episode.step(asking, turn), stopped=True)
    return episode.land(stepped)
  return episode.step(dataclasses.replace(asking, stopped=True), turn)


def again(
  waiting: episode_state.Episode, turn: types.Generation
) -> episode_state.Episode | None:
  """Asks for a turn once more; `turn` is discarded and remains charged.

  The episode gets an address of its own, because its random numbers differ.
  None if no token is left for the turn.
  """
  asked = waiting.request
  assert isinstance(asked, types.GenerateRequest)
  redo = episode.restated(without(waiting, turn))
  most = min(asked.max_tokens, redo.most_tokens)
  if most <= 0:
    return None
  # Groups are sampled as attempts 0 and 1.
  address = waiting.address._replace(attempt=waiting.address.attempt + 2)
  request = dataclasses.replace(
    asked, address=address, max_tokens=most, token_ids=redo.context
  )
  return dataclasses.replace(redo, address=address, request=request)


def without(
  waiting: episode_state.Episode, turn: types.Generation
) -> episode_state.Episode:
  """Returns the episode charged for a turn that is discarded."""
  asked = waiting.request
  assert isinstance(asked, types.GenerateRequest)
  return dataclasses.replace(
    waiting,
    discarded=waiting.discarded + len(turn.token_ids),
    reread=waiting.reread + len(asked.token_ids),
  )
