"""Steers an episode by a rule: the turns that `control` replaces."""

from __future__ import annotations

import asyncio
import dataclasses
import math

from anysearch_jax import types
from anysearch_jax.rollout import (
  answering,
  control,
  episode,
  episode_state,
  room,
)


async def steer(
  waiting: episode_state.Episode,
  turn: types.Generation,
  after: episode_state.Episode,
  *,
  engine: types.Engine,
  retriever: types.Retriever,
  until: float | None = None,
) -> tuple[episode_state.Episode, episode_state.Request]:
  """Accepts what a turn proposes, or replaces it.

  Args:
    waiting: the state before the turn.
    turn: the turn, as it was sampled.
    after: the state after it.
    engine, retriever: answer what is asked meanwhile.
    until: time of the event loop until which answers are sampled again; None
      for no limit.

  Returns:
    The next state and its request. Its address differs from that of `waiting`
    if an answer was replaced; the engine has then forgotten the old one.
  """
  rule = control.of(waiting.config)
  request = after.request
  if request is None:
    raise ValueError(f"Found the episode at {after.address} without a request.")
  if rule is None or waiting.landing or waiting.stopped:
    return after, request
  limit = control.cap(after.caps.tokens, after.config.max_generated)
  if isinstance(request, types.SearchRequest):
    if rule.searches(control.ASK, control.seen(after), limit):
      return after, request
    return refuse(waiting, turn)
  if not (
    isinstance(request, episode_state.Done)
    and request.trajectory.outcome is types.Outcome.ANSWERED
    and after.left > 0
    and rule.searches(control.ANSWER, control.seen(after), limit)
  ):
    return after, request
  return await _replaced(
    waiting,
    turn,
    after,
    request.trajectory,
    tries=rule.tries,
    engine=engine,
    retriever=retriever,
    until=until,
  )


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
  # Groups are sampled as attempts 0 and 1.
  address = waiting.address._replace(attempt=waiting.address.attempt + 2)
  redo = dataclasses.replace(
    waiting,
    address=address,
    discarded=waiting.discarded + len(turn.token_ids),
    reread=waiting.reread + len(asked.token_ids),
  )
  most = min(asked.max_tokens, room.turn(redo))
  if most <= 0:
    return None
  request = dataclasses.replace(asked, address=address, max_tokens=most)
  return dataclasses.replace(redo, request=request), request


async def _replaced(
  waiting: episode_state.Episode,
  turn: types.Generation,
  answered: episode_state.Episode,
  trajectory: types.Trajectory,
  *,
  tries: int,
  engine: types.Engine,
  retriever: types.Retriever,
  until: float | None,
) -> tuple[episode_state.Episode, episode_state.Request]:
  """Samples a turn again until it searches; otherwise keeps the answer."""
  first, clock = waiting.address, asyncio.get_running_loop().time
  started = clock()
  discarded = reread = 0
  for _ in range(tries):
    redo = again(waiting, turn)
    if redo is None:
      break
    waiting, request = redo
    try:
      event = await answering.in_time(
        request,
        engine=engine,
        retriever=retriever,
        config=waiting.config,
        until=until,
      )
    except BaseException:  # The caller knows the episode's address alone.
      engine.release(request.address)
      raise
    if not isinstance(event, types.Generation):
      engine.release(request.address)
      break
    turn = event
    after, asked = episode.step(waiting, turn)
    if isinstance(asked, types.SearchRequest):
      engine.release(first)
      return after, asked
    discarded += len(turn.token_ids)
    reread += len(request.token_ids)
    engine.release(request.address)
  return _charged(
    answered,
    trajectory,
    discarded=discarded,
    reread=reread,
    seconds=clock() - started,
  )


def _charged(
  answered: episode_state.Episode,
  trajectory: types.Trajectory,
  *,
  discarded: int,
  reread: int,
  seconds: float,
) -> tuple[episode_state.Episode, episode_state.Request]:
  """Returns a finished episode that is charged for discarded turns besides."""
  is_timed = trajectory.caps.seconds < math.inf
  done = episode_state.Done(
    dataclasses.replace(
      trajectory,
      discarded_tokens=trajectory.discarded_tokens + discarded,
      discarded_input=trajectory.discarded_input + reread,
      seconds=trajectory.seconds + seconds * is_timed,
    )
  )
  return dataclasses.replace(answered, request=done), done
