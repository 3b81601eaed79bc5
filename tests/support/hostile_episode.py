"""Plays episodes whose questions, documents and model are all hostile."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import hostile
import scripted

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.rollout import episode, episode_state

LARGE = config_lib.EpisodeConfig(max_generated=10**7, max_context=10**8)
# A short prompt, because encoding it takes most of the time.
SHORT = dataclasses.replace(LARGE, prompts="world")
ADDRESS = types.Address(rollout=0, question=0, sample=0)


def episode_of(tape):
  """Draws a question, turns, and search results."""

  def passage():
    return types.Passage(tape.text(1), tape.text(3), tape.text())

  return (
    tape.text(),
    tape.some(tape.turn, 5, least=1),
    tape.some(lambda: tape.some(passage, 2), 3, least=1),
  )


class Played(NamedTuple):
  """An episode, and the answers to its requests."""

  trajectory: types.Trajectory
  sampled: list[types.Generation]
  queries: list[str]


def play(
  text,
  said,
  found,
  *,
  budget,
  scaffold,
  config=SHORT,
  codec=scripted.CODEC,
  sample=scripted.turn,
):
  """Plays an episode with turns and search results, both repeated endlessly."""
  state = episode.start(
    types.Question("q", text, (hostile.GOLD,)),
    budget=budget,
    scaffold=scaffold,
    address=ADDRESS,
    config=config,
    codec=codec,
  )
  sampled, queries = [], []
  while not isinstance(request := state.request, episode_state.Done):
    if isinstance(request, types.SearchRequest):
      event = episode_state.Retrieved(tuple(found[len(queries) % len(found)]))
      queries.append(request.query)
    else:
      event = sample(request, said[request.turn % len(said)])
      sampled.append(event)
    state = episode.step(state, event)
  return Played(request.trajectory, sampled, queries)
