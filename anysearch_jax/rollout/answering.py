"""Answers what an episode waits for, each request with a deadline."""

from __future__ import annotations

import asyncio
import math

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.rollout import episode_state

# The share of its seconds after which an episode is asked for its answer.
LANDING = 0.75


def time_limit(
  started: float, seconds: float | None, *, landed: bool
) -> float | None:
  """Returns the time at which an episode lands, or ends if it has landed.

  Args:
    started: time of the event loop at which the episode began.
    seconds: how long it may take; None or infinity: as long as it needs.
    landed: whether its answer has been asked for.
  """
  if seconds is None or seconds == math.inf:
    return None
  return started + seconds * (1.0 if landed else LANDING)


async def in_time(
  request: types.GenerateRequest | types.SearchRequest,
  *,
  engine: types.Engine,
  retriever: types.Retriever,
  config: config_lib.EpisodeConfig,
  until: float | None,
) -> episode_state.Event | None:
  """Returns the event of `answer`; None once it is `until`, a loop's time."""
  try:
    async with asyncio.timeout_at(until):
      return await answer(
        request, engine=engine, retriever=retriever, config=config
      )
  except TimeoutError:
    return None


async def answer(
  request: types.GenerateRequest | types.SearchRequest,
  *,
  engine: types.Engine,
  retriever: types.Retriever,
  config: config_lib.EpisodeConfig,
) -> episode_state.Event:
  """Returns the event that answers a request; an outage is a `Failure`."""
  try:
    if isinstance(request, types.GenerateRequest):
      what, seconds = f"Turn {request.turn}", config.turn_deadline
      async with asyncio.timeout(seconds):
        return await engine.generate(request)
    what = f"The search for {request.query!r}"
    seconds = config.search_deadline
    async with asyncio.timeout(seconds):
      return episode_state.Retrieved(tuple(await retriever.search(request)))
  # A generative retriever asks an engine, so a search can raise both errors.
  except (types.EngineError, types.RetrievalError, TimeoutError) as error:
    why = str(error) or f"no answer within {seconds:g} seconds."
    return episode_state.Failure(f"{what} failed: {why}")
