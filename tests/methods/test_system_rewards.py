"""The rewards of the compared systems: tables by hand, OTC's in float64."""

from __future__ import annotations

import dataclasses
import math

import chex
import numpy as np
import pytest
import spoken

from anysearch_jax import config as config_lib
from anysearch_jax.methods import method as method_lib
from anysearch_jax.methods import systems

VARIANT = {"format_variant": True, "retrieval": 0.1}
PPO = {"form": "ppo", "c": 2.0, "alpha": 0.5}
HALF = math.sqrt(0.5)
# Of each system: constants, columns (outcomes or measures), rows whose last
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
  "search_r1": ({}, "em format", [(1, 1, 1), (1, 0, 1), (0, 1, 0), (0, 0, 0)]),
  "search_r1 variant": (
    VARIANT,
    "em format answered gold_found",
    [
      *((1, 1, 1, 0, 1.0), (1, 1, 1, 1, 1.0), (1, 0, 1, 1, 0.8)),
      *((0, 1, 1, 1, 0.3), (0, 1, 1, 0, 0.2), (0, 0, 1, 1, 0.1)),
      *((0, 0, 1, 0, 0.1), (0, 0, 0, 1, 0.0), (0, 0, 0, 0, 0.0)),
    ],
  ),
  "ssrl": (
    {},
    "em format",
    [(1, 1, 1.0), (1, 0, 0.9), (0, 1, 0.1), (0, 0, 0.0)],
  ),
  "stepsearch": (
    {},
    "f1 answered search_keys",
    [(1, 1, 0.5, 1.309), (0.5, 1, 1, 1.118), (0, 1, 0, 0), (0, 0, 1, -1)],
  ),
  "zerosearch": ({}, "f1", [(1, 1), (0.4, 0.4), (0, 0)]),
}


def constants(name, **changes):
  found = systems.get(name).constants(config_lib.ExperimentConfig())
  return dataclasses.replace(found, **changes)


def scored(name, told, **changes):
  return systems.get(name).reward(told, constants(name, **changes))


def test_every_trained_system_has_a_table():
  known = {key.split()[0] for key in TABLES} | {"anysearch"}
  assert known == {n for n, m in systems.METHODS.items() if m.reward}


@pytest.mark.parametrize("case", TABLES)
def test_rewards_equal_their_table(case):
  name = case.split()[0]
  changes, columns, rows = TABLES[case]
  *given, total = np.array(rows, float).T
  values = dict(zip(columns.split(), given, strict=True))
  em = values.pop("em", 0 * total)
  measures = {key: values.pop(key) for key in {*values} - {*FIELDS}}
  told = spoken.outcomes(em, **values, measures=measures)
  out = scored(name, told, **changes)
  np.testing.assert_allclose(out["total"], total, atol=1e-6)
  chex.assert_type(list(out.values()), np.float32)


FIELDS = method_lib.Outcomes._fields


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
  name = case.split()[0]
  changes, columns, _ = TABLES[case]
  measures = {*columns.split()} - {*FIELDS}
  for group in (1, 5) if name == "otc" else (5,):
    told = spoken.drawn(np.random.default_rng(group), 100, group, *measures)
    assert not told.valid.all()
    out = scored(name, told, **changes)
    if name == "otc":
      expected = otc(told, constants(name, **changes))
      np.testing.assert_allclose(
        out["total"], np.where(told.valid, expected, 0), atol=1e-6
      )
    chex.assert_trees_all_equal(
      out, scored(name, spoken.spoiled(told), **changes)
    )
    for value in out.values():
      assert not np.asarray(value)[~told.valid].any()


def test_stages_of_r1_searcher_follow_the_training():
  told = spoken.outcomes(
    [0, 0],
    measures=dict.fromkeys(systems.get("r1_searcher").measures, np.ones(2)),
  )
  for step, stage in ((0, 1), (15, 1), (16, 2), (95, 2)):
    at = method_lib.Progress(step // 5, step, 100)
    out = scored("r1_searcher", told._replace(progress=at))
    assert out["stage"].tolist() == [stage] * 2
