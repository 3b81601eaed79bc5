"""beta-GRPO's reward by hand, and the probabilities of the tokens of a call."""

from __future__ import annotations

import asyncio
import dataclasses
import math

import chex
import numpy as np
import pytest
import scripted
import spoken

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.config import methods as config_methods
from anysearch_jax.methods import beta_grpo
from anysearch_jax.rollout import driver, episode_state

CONFIG = config_methods.BetaGrpoConfig()
UNJITTED = beta_grpo.reward.__wrapped__
# Right, confidence -> reward.
TABLE = [(1, 1.0, 1), (1, 0.4, 1), (1, 0.39, 0), (0, 1.0, 0), (0, 0.1, 0)]


class RewardTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  def test_rewards_equal_the_table(self):
    reward = self.variant(UNJITTED, static_argnames="config")
    em, confidence, total = np.array(TABLE, np.float32).T
    told = spoken.outcomes(em, measures={"confidence": confidence})
    out = reward(told, config=CONFIG)
    np.testing.assert_array_equal(out["total"], total)
    chex.assert_type(list(out.values()), np.float32)


def played(*turns):
  hits = {"a": (types.Passage("1", "A", "x"),)}
  return asyncio.run(
    driver.run_episode(
      types.Question("q", "where?", ("x",)),
      driver.EpisodeParts(
        engine=scripted.Engine(turns),
        retriever=scripted.Retriever(hits),
        config=config_lib.EpisodeConfig(prompts="search_r1"),
        codec=scripted.CODEC,
      ),
      budget=2,
      scaffold=False,
      address=types.Address(0, 0, 0),
    )
  )


def test_tokens_of_each_call_are_counted_from_its_opening_mark():
  first = "<think><search> is a tag</think> <search>a</search>"
  trajectory = played(first, "<search>b c</search>", scripted.answer("x"))
  assert [shown.tokens for shown in trajectory.observations] == [
    len("<search>a</search>"),
    len("<search>b c</search>"),
  ]
  for shown, end in zip(trajectory.observations, trajectory.search_ends):
    ids = trajectory.token_ids[end + 1 - shown.tokens : end + 1].tolist()
    said = scripted.CODEC.decode(ids)
    assert said == f"<search>{shown.argument}</search>"


def test_the_confidence_is_the_least_probability_in_a_call():
  trajectory = played(
    "<think>so</think><search>a</search>",
    "<think>so</think><search>b c</search>",
    scripted.answer("x"),
  )
  logps = np.where(trajectory.authors == types.Author.MODEL, -0.01, 0.0)
  first, second = trajectory.search_ends
  changed = {first - 3: -0.5, second - 19: -0.7, second - 20: -9.0, -1: -9.0}
  for place, logp in changed.items():
    logps[place] = logp
  trajectory = dataclasses.replace(trajectory, logps=logps.astype(np.float32))
  # The second call has 20 tokens: the one before it is a thought's.
  found = beta_grpo.measure(trajectory)["confidence"]
  assert found == pytest.approx(math.exp(-0.7))


def test_without_a_search_nothing_is_uncertain():
  assert beta_grpo.measure(played(scripted.answer("x"))) == {"confidence": 1.0}


@pytest.mark.parametrize(
  ("text", "expected"),
  [
    ("<search>a</search>", 18),
    ("so <search>a</search>", 18),
    ("no call", 7),
    ("a", 1),
  ],
)
def test_a_turn_without_the_mark_counts_whole(text, expected):
  ids = tuple(scripted.CODEC.encode(text))
  none = (0.0,) * len(ids)
  turn = episode_state.Chunk(
    types.Author.MODEL, ids, none, (0,) * len(ids), text
  )
  assert episode_state.call_tokens(turn, "<search>", scripted.CODEC) == expected
