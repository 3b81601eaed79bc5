"""Rules that steer when a policy searches and when it answers.

A policy proposes an action by its turn: it asks for a search, or it answers. A
rule accepts the action or replaces it by the other one: a search is refused as
if the budget were used up, and an answer is discarded and sampled again until
it searches. If it never does, the answer is kept after all. `steered` returns
an environment with a rule of one's own.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import anysearch_jax as aj

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


def seen(after: aj.episode_state.Episode) -> Seen:
  """Returns what is seen of an episode after its last turn was stepped."""
  last = after.chunks[-1]
  match after.request:
    case aj.SearchRequest(query=query):
      repeated = query in after.queries
    case _:
      repeated = False
  return Seen(
    after.searches_used,
    min(after.searches_left, MOST_SEARCHES),
    after.written_tokens,
    sum(after.turn_lengths) / after.turns,
    int(repeated),
    round(sum(last.logps) / len(last.logps), 5),
  )


def steered(environment: aj.Environment, rule: Rule) -> aj.Environment:
  """Returns an environment whose episodes a rule steers.

  Args:
    environment: is played but for the searches and answers that the rule
      replaces.
    rule: decides; an error of its function becomes a sentence.

  Raises:
    ValueError: the environment has a `step` already.
  """
  if environment.step is not None:
    raise ValueError(
      "control.steered: found an environment with a step of its own, which is "
      "steered already; expected one without (bats, not bats_verify)."
    )
  code = getattr(rule.searches, "__code__", None)
  path = "" if code is None else code.co_filename

  def searches(proposal: str, seen: Seen, cap: int) -> bool:
    with aj.plugins.as_sentence(f"A rule of {path or 'control.steered'}", path):
      return bool(rule.searches(proposal, seen, cap))

  checked = dataclasses.replace(rule, searches=searches)
  return dataclasses.replace(
    environment,
    step=functools.partial(step, rule=checked),
    keeps_room=False,
  )


def step(
  waiting: aj.episode_state.Episode,
  event: aj.episode_state.Event | None,
  *,
  rule: Rule,
) -> aj.episode_state.Episode:
  """Advances an episode as `episode.step` does, and lets a rule decide.

  Args:
    waiting: as returned by `episode.start` or by the last `step`; its `memory`
      is the finished episode whose answer is being sampled again.
    event: the answer to its request; None if its time is over.
    rule: decides.

  Returns:
    The next episode. Its address differs from that of `waiting` while an answer
    is sampled again; the caller releases the old one.
  """
  if waiting.memory is not None:
    return _sampled_again(waiting, event, waiting.memory, rule.tries)
  after = aj.episode.step(waiting, event)
  if waiting.landing or waiting.stopped:
    return after
  if not isinstance(event, aj.Generation):
    return after
  limit = after.token_cap
  match after.request:
    case aj.SearchRequest():
      if not rule.searches(ASK, seen(after), limit):
        return refuse(waiting, event)
    case aj.episode_state.Done(aj.Trajectory(outcome=aj.Outcome.ANSWERED)):
      if (
        after.searches_left > 0
        and rule.searches(ANSWER, seen(after), limit)
        and rule.tries
        and (redo := again(waiting, event))
      ):
        return dataclasses.replace(redo, memory=after)
  return after


def _sampled_again(
  waiting: aj.episode_state.Episode,
  event: aj.episode_state.Event | None,
  answered: aj.episode_state.Episode,
  tries: int,
) -> aj.episode_state.Episode:
  """Takes a turn that searches; tries again, or keeps the answer otherwise."""
  spent = waiting
  if isinstance(event, aj.Generation):
    after = aj.episode.step(waiting, event)
    if isinstance(after.request, aj.SearchRequest):
      return dataclasses.replace(after, memory=None)
    redo = again(waiting, event)
    made = waiting.address.attempt - answered.address.attempt
    if redo is not None and made < 2 * tries:
      return redo
    spent = aj.episode.charge_discarded_turn(waiting, event)
  # The answer counts as written now, not as discarded.
  first, ended = answered.chunks[-1], answered.request
  assert isinstance(ended, aj.episode_state.Done)
  trajectory = ended.trajectory
  is_timed = answered.caps.seconds < math.inf
  done = aj.episode_state.Done(
    dataclasses.replace(
      trajectory,
      discarded_tokens=spent.discarded.written_tokens - len(first.token_ids),
      discarded_input=spent.discarded.read_tokens
      - (answered.tokens - len(first.token_ids)),
      seconds=spent.elapsed if is_timed else trajectory.seconds,
    )
  )
  return dataclasses.replace(answered, request=done)


def refuse(
  asking: aj.episode_state.Episode, turn: aj.Generation
) -> aj.episode_state.Episode:
  """Answers a turn that searches as if its budget were used up.

  Where turns are the budget, the next turn must answer.
  """
  if asking.environment.turns_are_budget:
    stepped = dataclasses.replace(aj.episode.step(asking, turn), stopped=True)
    return aj.episode.land(stepped)
  return aj.episode.step(dataclasses.replace(asking, stopped=True), turn)


def again(
  waiting: aj.episode_state.Episode, turn: aj.Generation
) -> aj.episode_state.Episode | None:
  """Asks for a turn once more; `turn` is discarded and remains charged.

  The episode gets an address of its own, because its random numbers differ.
  None if no token is left for the turn.
  """
  asked = waiting.request
  assert isinstance(asked, aj.GenerateRequest)
  redo = aj.episode.charge_discarded_turn(waiting, turn)
  if redo.scaffold:  # What is left is stated anew.
    line = aj.episode.environment_chunk(redo, redo.budget_line)
    redo = dataclasses.replace(redo, chunks=(*redo.chunks[:-1], line))
  most = min(asked.max_tokens, redo.turn_limit)
  if most <= 0:
    return None
  # Groups are sampled as attempts 0 and 1.
  address = waiting.address._replace(attempt=waiting.address.attempt + 2)
  request = dataclasses.replace(
    asked, address=address, max_tokens=most, token_ids=redo.context
  )
  return dataclasses.replace(redo, address=address, request=request)
