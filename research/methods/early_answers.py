"""Asks a policy, after each search, what it would answer without another one.

That end is played beside the episode, at an address of its own, with a prompt
that states the searches made as the budget. It is recorded with the search
(`types.Observation.answer`) and not charged. An outage fails the episode.
"""

from __future__ import annotations

import dataclasses

import anysearch_jax as aj

# Attempts between those of an episode and those of its early answers. Groups
# are attempts 0 and 1, and rules sample turns again as later ones.
ATTEMPTS = 1 << 16


def step(
  waiting: aj.episode_state.Episode, event: aj.episode_state.Event | None
) -> aj.episode_state.Episode:
  """Advances an episode as `episode.step` does, or what it answers early.

  Args:
    waiting: while it answers early, its `memory` is the episode that goes on
      afterwards; None otherwise.
    event: the answer to its request; None if its time is over.

  Returns:
    The next episode, at another address when it begins or ends to answer early.
  """
  main = waiting.memory
  if main is None:
    advanced = aj.episode.step(waiting, event)
    is_over = isinstance(advanced.request, aj.episode_state.Done)
    if is_over or not isinstance(event, aj.episode_state.Retrieved):
      return advanced
    return _ending(advanced)
  if event is None:
    return aj.episode.land(dataclasses.replace(main, elapsed=waiting.elapsed))
  early = aj.episode.step(waiting, event)
  if not isinstance(early.request, aj.episode_state.Done):
    return early
  end = early.request.trajectory
  if end.failed:
    return aj.episode.step(main, aj.episode_state.Failure(end.reason))
  *earlier, last = main.observations
  answered = last._replace(answer=main.environment.answer(end.spans))
  return dataclasses.replace(main, observations=(*earlier, answered))


def _ending(main: aj.episode_state.Episode) -> aj.episode_state.Episode:
  """Returns an episode before a turn as if its budget ended here."""
  attempt = main.address.attempt + ATTEMPTS * main.searches_used
  address = main.address._replace(attempt=attempt)
  begun = aj.episode.start(
    main.question,
    budget=dataclasses.replace(main.caps, searches=main.searches_used),
    scaffold=main.scaffold,
    address=address,
    config=main.config,
    environment=main.environment,
    codec=main.codec,
  )
  ended = dataclasses.replace(
    main,
    address=address,
    budget=main.searches_used,
    chunks=(begun.chunks[0], *main.chunks[1:]),
    experts=None,
    memory=main,
  )
  asked = main.request
  assert isinstance(asked, aj.GenerateRequest)
  request = dataclasses.replace(
    asked, address=address, token_ids=ended.context, may_search=False
  )
  return dataclasses.replace(ended, request=request)


def curve(trajectory: aj.Trajectory) -> list[tuple[float, int]]:
  """Returns F1 and exact match of the answer after each search."""
  golds = trajectory.question.golden_answers
  return [
    (
      aj.scoring.f1(search.answer, golds),
      aj.scoring.exact_match(search.answer, golds),
    )
    for search in trajectory.observations
  ]
