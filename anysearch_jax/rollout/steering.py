"""Steers an episode by a rule: the turns that `control` replaces.

An answer that the rule replaces is discarded and sampled again until the policy
searches. If it never does, the answer is kept after all.
"""

from __future__ import annotations

import dataclasses
import math

from anysearch_jax import types
from anysearch_jax.rollout import control, episode, episode_state, room


def step(
  waiting: episode_state.Episode, event: episode_state.Event | None
) -> tuple[episode_state.Episode, episode_state.Request]:
  """Advances an episode as `episode.step` does, and lets its rule decide.

  Args:
    waiting: as returned by `episode.start` or by the last `step`.
    event: the answer to its request; None if its time is over.

  Returns:
    The next episode and its request. Its address differs from that of `waiting`
    while an answer is sampled again; the caller releases the old one.
  """
  rule = control.of(waiting.config)
  if waiting.answered is not None and rule is not None:
    return _sampled_again(waiting, event, waiting.answered, rule.tries)
  if event is None:
    return episode.land(waiting)
  after, request = episode.step(waiting, event)
  if rule is None or waiting.landing or waiting.stopped:
    return after, request
  if not isinstance(event, types.Generation):
    return after, request
  limit = control.cap(after.caps.tokens, after.config.max_generated)
  if isinstance(request, types.SearchRequest):
    if rule.searches(control.ASK, control.seen(after), limit):
      return after, request
    return refuse(waiting, event)
  if (
    isinstance(request, episode_state.Done)
    and request.trajectory.outcome is types.Outcome.ANSWERED
    and after.left > 0
    and rule.searches(control.ANSWER, control.seen(after), limit)
    and rule.tries
    and (redo := again(waiting, event))
  ):
    state, request = redo
    return dataclasses.replace(state, answered=after), request
  return after, request


def _sampled_again(
  waiting: episode_state.Episode,
  event: episode_state.Event | None,
  answered: episode_state.Episode,
  tries: int,
) -> tuple[episode_state.Episode, episode_state.Request]:
  """Takes a turn that searches; tries again, or keeps the answer otherwise."""
  spent = waiting
  if isinstance(event, types.Generation):
    after, request = episode.step(waiting, event)
    if isinstance(request, types.SearchRequest):
      return dataclasses.replace(after, answered=None), request
    redo = again(waiting, event)
    made = waiting.address.attempt - answered.address.attempt
    if redo is not None and made < 2 * tries:
      return redo
    spent = _without(waiting, event)
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
  return dataclasses.replace(answered, request=done), done


def refuse(
  asking: episode_state.Episode, turn: types.Generation
) -> tuple[episode_state.Episode, episode_state.Request]:
  """Answers a turn that searches as if its budget were used up.

  Args:
    asking: the episode that waits for the turn.
    turn: the turn, which searches.

  Returns:
    As `step`. Where turns are the budget, the next turn must answer.
  """
  if asking.environment.turns_are_budget:
    return episode.land(episode.step(asking, turn)[0])
  return episode.step(dataclasses.replace(asking, stopped=True), turn)


def again(
  waiting: episode_state.Episode, turn: types.Generation
) -> tuple[episode_state.Episode, types.GenerateRequest] | None:
  """Asks for a turn once more; `turn` is discarded and remains charged.

  Args:
    waiting: the episode that waits for the turn.
    turn: what was sampled.

  Returns:
    The episode with an address of its own, because its random numbers differ,
    and the request. None if no token is left for it.

  Raises:
    ValueError: the episode does not wait for a turn.
  """
  asked = waiting.request
  if not isinstance(asked, types.GenerateRequest):
    raise ValueError(
      f"Found the episode at {waiting.address} waiting on a "
      f"{type(asked).__name__}; expected one that waits for a turn."
    )
  redo = _without(waiting, turn)
  most = min(asked.max_tokens, room.turn(redo))
  if most <= 0:
    return None
  # Groups are sampled as attempts 0 and 1.
  address = waiting.address._replace(attempt=waiting.address.attempt + 2)
  request = dataclasses.replace(asked, address=address, max_tokens=most)
  return dataclasses.replace(redo, address=address, request=request), request


def _without(
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
