"""Plays an episode with scripted turns and records its transcript."""

from __future__ import annotations

import scripted

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.rollout import episode, episode_state

ADDRESS = types.Address(rollout=3, question=1, sample=2)
QUESTION = types.Question("q1", "Who wrote Emma?", ("Jane Austen",), "wiki")
CONFIG = config_lib.EpisodeConfig(max_generated=500, max_context=5000)
EMMA = types.Passage("7", '"Emma"', "A novel by Jane Austen.")
NOTHING = "\n\n<information>No results found.</information>\n\n"
FOUND = (
  '\n\n<information>Doc 1(Title: "Emma") A novel by Jane Austen.'
  "</information>\n\n"
)


def begin(*, budget=2, scaffold=False, config=CONFIG, question=QUESTION):
  return episode.start(
    question,
    budget=budget,
    scaffold=scaffold,
    address=ADDRESS,
    config=config,
    codec=scripted.CODEC,
  )


def play(*turns, hits=(), **kwargs):
  """Plays scripted turns; an event instead of a turn is passed on unchanged.

  Returns the trajectory and every request that was answered.
  """
  state = begin(**kwargs)
  script, asked = iter(turns), []
  while not isinstance(request := state.request, episode_state.Done):
    asked.append(request)
    if isinstance(request, types.SearchRequest):
      event = (
        hits
        if isinstance(hits, episode_state.Failure)
        else episode_state.Retrieved(hits)
      )
    else:
      event = next(script)
      if isinstance(event, str):
        event = scripted.turn(request, event)
    state = episode.step(state, event)
  assert next(script, None) is None, "The episode ended before its script."
  return request.trajectory, asked


def transcript(trajectory):
  """Returns the spans as `M text` and `E text`."""
  return [f"{span.author.name[0]} {span.text}" for span in trajectory.spans]


def searches(asked):
  return [each for each in asked if isinstance(each, types.SearchRequest)]


def length_of_prompt(budget=2, scaffold=False):
  _, ids = episode.prompt(
    QUESTION,
    budget=budget,
    scaffold=scaffold,
    config=CONFIG,
    codec=scripted.CODEC,
  )
  return len(ids)
