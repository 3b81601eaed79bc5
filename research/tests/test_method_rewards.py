"""The rewards of the plug-ins: tables by hand, OTC's in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import reward_tables
import spoken

import anysearch_jax as aj
from research import methods

PPO = {"form": "ppo", "c": 2.0, "alpha": 0.5}
HALF = math.sqrt(0.5)
# 2 / (1 + exp(x)) of a cost that is x times as high as the cheapest one.
HALF_MORE = 2 / (1 + math.exp(0.5))
AS_MUCH_MORE = 2 / (1 + math.e)
# Of each system: options, columns (outcomes or measures), rows whose last
# number is the reward.
TABLES = {
  "autorefine": (
    {},
    "f1 answered refined",
    [
      *((1.0, 1, 0, 1.0), (1.0, 1, 1, 1.0), (0.05, 1, 1, 0.05)),
      *((0.0, 1, 1, 0.1), (0.0, 1, 0, 0.0), (0.0, 0, 1, 0.0)),
    ],
  ),
  # The last turn: 1, after searches also .2 / searches - .025; the form.
  "autosearch": (
    {},
    "em searches sound sufficient anytime",
    [
      *((1, 0, 1, 0, 1, 1.1), (1, 0, 0, 0, 1, 0.5), (1, 2, 1, 0, 1, 1.175)),
      *((1, 2, 0, 0, 1, 0.5), (0, 2, 1, 0, 0, 0.1125), (0, 0, 1, 0, 0, 0.1)),
      *((1, 3, 1, 1, 1, -0.05), (0, 3, 0, 1, 0, -0.05)),
    ],
  ),
  "beta_grpo": (
    {},
    "em confidence",
    [(1, 1.0, 1), (1, 0.4, 1), (1, 0.39, 0), (0, 1.0, 0), (0, 0.1, 0)],
  ),
  "hiprag": (
    {},
    "contained format optimal",
    [
      *((1, 1, 1.0, 1.4), (1, 1, 0.5, 1.2), (1, 1, 0.0, 1.0), (1, 0, 0.0, 0.8)),
      *((0, 1, 1.0, 0.2), (0, 0, 1.0, 0.0)),
    ],
  ),
  "ikea": (
    {},
    "well_formed em searches",
    [
      *((1, 1, 0, 1.6), (1, 1, 1, 1.4), (1, 1, 2, 1.2), (1, 1, 3, 1.0)),
      *((1, 1, 8, 1.0), (1, 0, 0, 0.0), (1, 0, 1, 0.05), (1, 0, 8, 0.05)),
      *((0, 1, 0, -1.0), (0, 0, 2, -1.0)),
    ],
  ),
  "igpo": (
    {},
    "f1 well_formed",
    [(1.0, 1, 1.0), (0.4, 1, 0.4), (0.0, 1, 0.0), (1.0, 0, -2.0), (0, 0, -2)],
  ),
  "mt_grpo": (
    {},
    "em contained format",
    [
      *((1, 1, 1, 1.7), (1, 1, 0, 1.5), (0, 1, 1, 0.7), (0, 0, 1, 0.2)),
      (0, 0, 0, 0.0),
    ],
  ),
  # The fewest searches are n = 1: sin(pi/2), sin(2 pi/3), sin(3 pi/4).
  "otc": (
    {},
    "em searches",
    [(1, 1, 1), (1, 2, math.sqrt(0.75)), (1, 3, HALF), (0, 0, 0)],
  ),
  # c = 2, alpha = 1/2: cos(0), cos(pi/4), cos(2 pi/6).
  "otc ppo": (
    PPO,
    "em searches",
    [(1, 0, 0.5), (1, 1, 0.5 * HALF), (1, 2, 0.25), (0, 0, 0)],
  ),
  "r1_searcher": (
    {"stage_one": 1.0},
    "contained structured searched well_formed answer_f1",
    [
      *((1, 1, 1, 1, 1.0, 2.0), (1, 1, 0, 1, 0.5, 1.5), (1, 0, 1, 0, 0.5, 1.5)),
      *((1, 0, 0, 0, 0.5, 1.0), (0, 1, 1, 1, 0.0, 0.0)),
      *((0, 1, 0, 0, 0.2, -0.5), (0, 0, 0, 0, 0.0, -1.0)),
    ],
  ),
  "r1_searcher two": (
    {"stage_one": 0.0},
    "contained structured searched well_formed answer_f1",
    [
      *((1, 1, 1, 1, 1.0, 1.0), (0, 1, 0, 1, 0.2, 0.2)),
      *((1, 1, 1, 0, 0.5, -1.5), (0, 0, 0, 0, 0.0, -2.0)),
    ],
  ),
  "research": (
    {},
    "well_formed answered f1",
    [
      *((1, 1, 1.0, 1.0), (1, 1, 0.05, 0.05), (1, 1, 0.0, 0.1)),
      *((1, 0, 0.0, 0.0), (0, 1, 1.0, 0.0), (0, 1, 0.0, 0.0)),
    ],
  ),
  # Two are right without searches: each search of a right answer costs .05. One
  # has an F1 of 1 in another order of words.
  "saas": (
    {"stage_one": 0.0},
    "em f1 searches closed",
    [
      *((1, 1, 0, 1, 1), (1, 1, 0, 1, 1), (0, 0.4, 0, 1, 0.4), (0, 0, 0, 1, 0)),
      *((1, 1, 1, 0, 0.95), (1, 1, 3, 0, 0.85), (0, 1, 2, 0, 0.9)),
      (0, 0.5, 4, 0, 0.5),
    ],
  ),
  # None is: those beyond 2, the fewest of a right answer, cost.
  "saas needed": (
    {"stage_one": 0.0},
    "em f1 searches closed",
    [
      *((0, 1, 0, 1, 1), (0, 0.5, 0, 1, 0.5), (1, 1, 2, 0, 1)),
      *((1, 1, 5, 0, 0.85), (0, 1, 3, 0, 0.95), (0, 0, 1, 0, 0)),
    ],
  ),
  "saas undecided": (
    {"stage_one": 0.0},
    "em f1 searches closed",
    [(1, 1, 0, 1, 1), (0, 0, 0, 1, 0), (1, 1, 1, 0, 1), (1, 1, 4, 0, 1)],
  ),
  "saas first stage": (
    {},
    "em f1 searches closed",
    [(1, 1, 0, 1, 1), (1, 1, 0, 1, 1), (1, 1, 4, 0, 1), (0, 0.3, 1, 0, 0.3)],
  ),
  "saas script": (
    {"formed": 0.1, "repeated": 0.1},
    "em f1 format repeated closed",
    [
      *((1, 1, 1, 0, 1, 1), (1, 1, 0, 1, 0, 0.9), (0, 0, 1, 0, 0, 0.1)),
      *((0, 0, 1, 1, 0, 0), (0, 0, 0, 0, 0, 0), (0, 0.05, 1, 0, 0, 0.05)),
    ],
  ),
  # The cheapest right answers took 1 search and 99 tokens: a search more is
  # (2 - 1) / (1 + 1) too many, 100 tokens more (199 - 99) / (99 + 1). Wrong
  # answers are cheaper and count for nothing.
  "slimsearcher": (
    {},
    "em searches generated_tokens",
    [
      *((1, 1, 99, 1), (1, 2, 99, HALF_MORE), (1, 3, 99, AS_MUCH_MORE)),
      *((1, 1, 199, AS_MUCH_MORE), (1, 2, 199, HALF_MORE * AS_MUCH_MORE)),
      *((0, 0, 9, 0), (0, 1, 99, 0)),
    ],
  ),
  # A right answer without a search: each search is one too many.
  "slimsearcher searches": (
    {"tokens": False},
    "em searches generated_tokens",
    [(1, 0, 300, 1), (1, 1, 9, AS_MUCH_MORE), (0, 0, 9, 0)],
  ),
  "ssrl": (
    {},
    "em format",
    [(1, 1, 1.0), (1, 0, 0.9), (0, 1, 0.1), (0, 0, 0.0)],
  ),
}


def system_of(case):
  return aj.get_method(methods.method_name(case.split()[0]))


def test_every_trained_system_has_a_table():
  known = {key.split()[0] for key in TABLES}
  assert known == {x for x in methods.COMPARED if system_of(x).reward}


@pytest.mark.parametrize("case", TABLES)
def test_rewards_equal_their_table(case):
  reward_tables.assert_equals(system_of(case), *TABLES[case])


def productivity(m, n, c):
  """Returns r_tool of one trajectory; n is None in the PPO form."""
  if n == 0 or n is None:
    return math.cos(m * math.pi / (2 * m + c))
  return math.sin(2 * n * m / (m + n) * math.pi / (2 * n))


def otc(told, c):
  out = np.zeros(told.em.shape)
  for row, (em, searches, valid) in enumerate(
    zip(told.em, told.searches, told.valid)
  ):
    right = np.flatnonzero(valid & (em != 0))
    n = min(searches[right], default=0) if c.form == "grpo" else None
    for i in right:
      out[row, i] = c.alpha * productivity(int(searches[i]), n, c.c)
  return out


@pytest.mark.parametrize("case", TABLES)
def test_drawn_groups_in_float64_and_nothing_for_failed_episodes(case):
  changes, columns, _ = TABLES[case]
  system = system_of(case)
  for group in (1, 5) if system.name == "otc" else (5,):
    told, out = reward_tables.drawn(system, changes, columns, group)
    if system.name == "otc":
      expected = otc(told, reward_tables.constants(system, **changes))
      np.testing.assert_allclose(
        out["total"], np.where(told.valid, expected, 0), atol=1e-6
      )


def test_stages_of_r1_searcher_follow_the_training():
  system = system_of("r1_searcher")
  told = spoken.outcomes(
    [0, 0], measures=dict.fromkeys(system.measures, np.ones(2))
  )
  for step, stage in ((0, 1), (15, 1), (16, 2), (95, 2)):
    at = aj.method.Progress(step // 5, step, 100)
    out = reward_tables.scored(system, told._replace(progress=at))
    assert out["stage"].tolist() == [stage] * 2


def test_options_are_read_checked_and_refused():
  otc_system = system_of("otc")

  def read(*options):
    config = aj.ExperimentConfig(
      method=aj.config.MethodConfig(methods.method_name("otc"), options=options)
    )
    return otc_system.constants_of(config)

  assert (read().c, read("c=2", "form=ppo").c) == (4.0, 2.0)
  for option, sentence in (
    ("form=dpo", "config.method.options.form: found 'dpo', expected one of"),
    ("d=1", "found 'd=1', expected NAME=VALUE of one of alpha, c, form"),
    ("c=x", "config.method.options c: found 'x'"),
    ("c=0", "config.method.options.c: found 0.0, expected above 0"),
  ):
    with pytest.raises(ValueError, match=sentence):
      read(option)
