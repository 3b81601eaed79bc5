"""Asks a model that gave no answer once more, by a prompt of its own.

Models that were not trained here, small ones above all, may use up their budget
and their tries without an answer in the form that was asked for. They then get
the question and the passages that they found in one short prompt, as in plain
retrieval, and what they reply is the answer (`short_prompts`). Text without
tags is an answer too where no search is left.
"""

from __future__ import annotations

import dataclasses

from anysearch_jax import types
from anysearch_jax.environment import spec
from anysearch_jax.rollout import (
  episode,
  episode_state,
  short_prompts,
  written_calls,
)


def add(environment: spec.Environment) -> spec.Environment:
  """Returns an environment whose episodes ask for a last answer."""
  return dataclasses.replace(environment, step=step)


def step(
  waiting: episode_state.Episode, event: episode_state.Event | None
) -> episode_state.Episode:
  """Advances an episode as `episode.step` does, and asks for a last answer.

  Args:
    waiting: the episode.
    event: the answer to its request; None if its time is over.

  Returns:
    The next episode, at another address when it asks for the last answer.
  """
  if waiting.memory == short_prompts.ANSWER:
    return short_prompts.answered(waiting, event)
  if isinstance(event, types.Generation) and _is_plain_answer(waiting, event):
    return short_prompts.answered(waiting, event)
  advanced = episode.step(waiting, event)
  request = advanced.request
  if event is None or not isinstance(request, episode_state.Done):
    return advanced
  if request.trajectory.outcome not in (
    types.Outcome.INVALID,
    types.Outcome.TRUNCATED,
  ):
    return advanced
  asking_episode = short_prompts.ask(
    advanced, advanced.environment.last, memory=short_prompts.ANSWER
  )
  return asking_episode or advanced


def _is_plain_answer(
  waiting: episode_state.Episode, turn: types.Generation
) -> bool:
  """Returns whether a turn is an answer without tags, after the last search."""
  request = waiting.request
  assert isinstance(request, types.GenerateRequest)
  if request.may_search or turn.finish is types.Finish.LENGTH:
    return False
  if waiting.environment.action(turn.text) is not None:
    return False
  text = short_prompts.without_reasoning(turn.text)
  return bool(text) and not written_calls.is_call(text)
