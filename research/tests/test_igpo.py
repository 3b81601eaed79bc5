"""IGPO: what a search adds to the probability of the answer, and advantages."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections import Counter

import numpy as np
import pytest
import scripted
from scripted import CODEC, answer, search
from spoken import of_authors

import anysearch_jax as aj
from research.methods import igpo

CONFIG = aj.config.EpisodeConfig(prompts="search_r1_world", max_generated=900)
HITS = {"q1": [aj.Passage("1", "T1", "text")]}
PROMPT, MODEL, _ = aj.Author
TURNS = search("q1"), "hm", search("q2"), answer("tol a")
QUESTION = aj.Question("id3", "Question 3?", ("tol a", "other"))


class Engine(scripted.Engine):
  """Scores texts by a table: the tokens of the answer are ` tol a`."""

  def __init__(self, answer_logps, *, error=None):
    super().__init__(TURNS)
    self.counters = Counter()
    self.answer_logps = answer_logps
    self.error = error
    self.scored = []

  def set_params(self, params, version):
    pass

  def close(self):
    pass

  def scores(self, token_ids):
    if self.error:
      raise self.error
    given = self.answer_logps[len(self.scored)]
    self.scored.append(CODEC.decode(token_ids))
    return {"one": [-99.0] * (len(token_ids) - 1 - len(given)) + given}


def played(engine, **changes):
  """Plays one episode of `TURNS` with three searches."""
  config = dataclasses.replace(CONFIG, **changes)
  environment = dataclasses.replace(aj.environment_of(config), step=igpo.step)
  parts = aj.EpisodeParts(
    engine, scripted.Retriever(HITS), config, CODEC, environment
  )
  return asyncio.run(
    aj.run_episode(
      QUESTION,
      parts,
      budget=aj.Budget(3),
      scaffold=False,
      address=aj.Address(0, 0, 0),
    )
  )


def test_a_search_is_worth_the_rise_of_the_answers_probability():
  # Six characters: means of -4, -1 and -2.
  logps = [[-4.0] * 6, [0.0, -2.0] * 3, [-2.0] * 6]
  engine = Engine(logps)
  trajectory = played(engine)
  before, first, second = math.exp(-4), math.exp(-1), math.exp(-2)
  assert [o.value for o in trajectory.observations] == pytest.approx(
    [first - before, second - first]
  )
  said = CODEC.decode(trajectory.token_ids)
  tail = "<think></think><answer> tol a"
  assert all(text.endswith(tail) for text in engine.scored)
  contexts = [text.removesuffix(tail) for text in engine.scored]
  assert all(said.startswith(context) for context in contexts)
  # Before the first turn, and after what each search found.
  assert [said[len(context) :][:20] for context in contexts] == [
    TURNS[0][:20],
    "hm" + said[len(contexts[1]) + 2 :][:18],
    TURNS[3][:20],
  ]
  assert trajectory.outcome is aj.Outcome.ANSWERED


def test_contexts_without_room_for_the_answer_gain_nothing():
  roomy = Engine([[-1.0] * 6] * 3)
  played(roomy)
  room = len(CODEC.encode(roomy.scored[-1])) - 1
  trajectory = played(Engine([[-4.0] * 6, [-1.0] * 6]), max_context=room)
  gain = math.exp(-1) - math.exp(-4)
  assert [o.value for o in trajectory.observations] == pytest.approx([gain, 0])


def test_an_episode_that_cannot_be_scored_is_failed():
  engine = Engine([], error=aj.EngineError("it is down"))
  trajectory = played(engine)
  assert trajectory.failed and "it is down" in trajectory.reason
  trajectory = played(scripted.Engine(TURNS))
  assert trajectory.failed and "which scores no text" in trajectory.reason


def trajectory_of(sample, gains, said):
  return of_authors(
    0,
    sample,
    [PROMPT, MODEL],
    searches=len(gains),
    spans=(aj.Span(MODEL, said),),
    observations=tuple(
      aj.Observation("search", "x", 0, value=gain) for gain in gains
    ),
  )


def test_advantages_are_sums_of_rewards_normalised_over_the_groups_turns():
  given = {
    (0, 0): trajectory_of(0, [0.25, 0.5], "<answer>tol</answer>"),
    (0, 1): trajectory_of(1, [None], "<answer>no</answer>"),
    (0, 2): trajectory_of(2, [], "<think><answer>tol</answer>"),
    # Another question has a mean and a deviation of its own.
    (1, 0): trajectory_of(0, [], "<answer>tol</answer>"),
  }
  # Of .25, .5, 1, 0, 0 and -1, the mean is 1/8.
  rewards = [[0.25, 0.5, 1.0], [0.0, 0.0], [-1.0]]
  deviation = np.std([0.25, 0.5, 1.0, 0.0, 0.0, -1.0])
  options = igpo.Options(gamma=0.5, malformed=1.0)
  found = igpo.turns(given, options)
  for sample, earned in enumerate(rewards):
    scaled = [(x - 0.125) / deviation for x in earned]
    expected = [
      sum(0.5**k * x for k, x in enumerate(scaled[t:]))
      for t in range(len(scaled))
    ]
    np.testing.assert_allclose(found[0, sample], expected, rtol=1e-5)
  np.testing.assert_allclose(found[1, 0], [0])


def test_a_group_of_right_answers_pays_for_each_search_that_gains_nothing():
  """Of 1, and of 0 and 1, the mean is 2/3: a search costs sqrt(2)."""
  right = "<answer>tol</answer>"
  given = {
    (0, 0): trajectory_of(0, [], right),
    (0, 1): trajectory_of(1, [0.0], right),
  }
  found = igpo.turns(given, igpo.Options())
  half = math.sqrt(0.5)
  np.testing.assert_allclose(found[0, 0], [half], rtol=1e-5)
  np.testing.assert_allclose(found[0, 1], [half - 2 * half, half], rtol=1e-5)
