"""Plays the episode of one question and tells what happens in it."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable

from anysearch_jax import budgets, types
from anysearch_jax import config as config_lib
from anysearch_jax.agent import events, reasoning
from anysearch_jax.methods import systems
from anysearch_jax.rollout import answering, driver, episode, episode_state


async def ask(
  question: types.Question,
  parts: driver.EpisodeParts,
  *,
  budget: budgets.Assigned,
  scaffold: bool,
  address: types.Address,
  started: float,
  deadline: float | None,
  sampling: config_lib.SamplingConfig | None,
  tell: Callable[[events.Event], None],
  pieces: bool,
) -> events.Reply:
  """Plays one episode.

  Args:
    question: what is asked.
    parts: engine, retriever and limits.
    budget: what is allowed; a number is one of searches, >= 0. Its seconds
      count from `started` too.
    scaffold: whether the environment states the budget before every turn.
    address: seeds the episode's random numbers; no other episode that is being
      played may have it.
    started: time of the event loop at which the question arrived.
    deadline: seconds from `started` in which the reply is due. After the share
      `answering.LANDING` of them the policy is asked for its answer, and at the
      end the episode is truncated. None: no deadline.
    sampling: how tokens are drawn; None: as the engine does.
    tell: called with each event, the last of which is an `Answer`; an exception
      of it ends the episode and is raised.
    pieces: whether reasoning is told while it is sampled; otherwise it is told
      once a turn.

  Returns:
    The reply.
  """
  loop = asyncio.get_running_loop()
  searches = budgets.of(budget).searches
  seconds = min(deadline or math.inf, budgets.of(budget).seconds)
  documents: list[tuple[types.Passage, ...]] = []
  played = address
  try:
    state, request = await driver.start(
      question, parts, budget=budget, scaffold=scaffold, address=address
    )
    tell(events.Budget(0, searches))
    while not isinstance(request, episode_state.Done):
      until = answering.time_limit(started, seconds, landed=state.landing)
      if isinstance(request, types.GenerateRequest):
        request = _drawn(request, sampling)
        # A rule that replaces the turn asks for it in the same way.
        state = dataclasses.replace(state, request=request)
      event = await _answered(
        request, state, parts, until=until, tell=tell, pieces=pieces
      )
      if state.caps.seconds < math.inf:
        state = dataclasses.replace(state, elapsed=loop.time() - started)
      if event is None:
        state, request = episode.land(state)
        continue
      state, request = await driver.steered(
        state,
        event,
        engine=parts.engine,
        retriever=parts.retriever,
        until=until,
      )
      played = state.address
      if isinstance(event, episode_state.Retrieved):
        # Passages that had no room were not shown.
        documents.append(state.observations[-1].passages)
        tell(events.Found(len(documents), documents[-1]))
        tell(events.Budget(state.used, searches))
  finally:
    for each in {address, played}:
      parts.engine.release(each)
  trajectory = request.trajectory
  env = systems.of_episode(parts.config)
  answer = env.answer(trajectory.spans)
  reply = events.Reply(
    answer=answer,
    outcome=trajectory.outcome,
    reason="" if answer is not None else _reason(trajectory),
    searches=trajectory.searches,
    documents=tuple(documents),
    tokens=trajectory.written_tokens,
    seconds=loop.time() - started,
    trajectory=trajectory,
  )
  tell(events.Answer(reply))
  return reply


async def search(
  request: types.SearchRequest, parts: driver.EpisodeParts
) -> list[types.Passage]:
  """Answers one query, without an episode.

  Raises:
    types.RetrievalError: the retriever cannot answer in time.
  """
  seconds = parts.config.search_deadline
  try:
    async with asyncio.timeout(seconds):
      return list(await parts.retriever.search(request))
  except TimeoutError as error:
    raise types.RetrievalError(
      f"The retriever gave no answer within {seconds:g} s."
    ) from error


def _drawn(
  request: types.GenerateRequest, sampling: config_lib.SamplingConfig | None
) -> types.GenerateRequest:
  """Returns a request that names how its tokens are drawn."""
  if sampling is None:
    return request
  return dataclasses.replace(
    request,
    temperature=sampling.temperature,
    top_p=sampling.top_p,
    top_k=sampling.top_k,
  )


async def _answered(
  request: types.GenerateRequest | types.SearchRequest,
  state: episode_state.Episode,
  parts: driver.EpisodeParts,
  *,
  until: float | None,
  tell: Callable[[events.Event], None],
  pieces: bool,
) -> episode_state.Event | None:
  """Returns the event that answers a request; None once it is `until`."""
  told = reasoning.Reasoning(
    parts.codec.decode, lambda piece: tell(events.Thinking(piece))
  )
  if isinstance(request, types.SearchRequest):
    tell(events.Searching(state.used + 1, request.query))
  elif pieces:
    request = dataclasses.replace(request, on_tokens=told.add)
  event = await answering.in_time(
    request,
    engine=parts.engine,
    retriever=parts.retriever,
    config=parts.config,
    until=until,
  )
  if isinstance(event, types.Generation):
    told.end(event.text)
  return event


def _reason(trajectory: types.Trajectory) -> str:
  """Returns why an episode has no answer."""
  return trajectory.reason or (
    "The model's last turn had neither a search that its budget allows nor an "
    "answer."
  )
