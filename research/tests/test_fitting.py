"""Tests what a policy learns of the expert: its gates, its fit and resuming."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from exact_agents import SETTING, WORLD

import anysearch_jax as aj
from anysearch_jax.configs import quickstart
from research import demonstrations, fitting, warm_start_settings
from research import expert as expert_lib


@pytest.mark.parametrize(
  ("decision", "relations", "remaining", "plain", "scaffolded"),
  [
    # change .5, .2 and 0; slack 0, -1/3, 1 and beyond.
    ("known", ("mayor",), 1, 0.6 + 0.6 * 0.3, 0.5 + 1.2 * 0.3),
    ("known", ("river", "mouth"), 1, 0.6 - 0.05, 0.5 - 0.4 / 3),
    ("known", ("country",), 4, 0.6 - 0.12 + 0.15, 0.5 - 0.24 + 0.4),
    ("known", ("mayor",), 9, 0.6 + 0.18 + 0.15, 0.97),
    ("known", ("country",) * 6, 1, 0.6 - 0.12 - 0.15, 0.03),
    ("unknown", ("mayor",), 1, 0.75, 0.95),
    ("miss", ("mayor",), 1, 0.7, 0.85),
    ("conflict", ("mayor",), 1, 0.5, 0.7),
  ],
)
def test_the_expert_weighs_reliability_and_slack(
  decision, relations, remaining, plain, scaffolded
):
  here = expert_lib.Situation(decision, relations, remaining)
  assert expert_lib.PLAIN.strategy(WORLD)(here) == pytest.approx(plain)
  assert expert_lib.SCAFFOLDED.strategy(WORLD)(here) == pytest.approx(
    scaffolded
  )


@pytest.fixture(scope="module")
def probes():
  """Probes of the expert's plain episodes."""
  return demonstrations.probe_sets(SETTING, "dev", count=80, seed=0)


def test_gates_name_what_a_policy_lacks(probes):
  kinds = demonstrations.PROBE_KINDS
  p = np.ones(len(probes.labels))
  p[probes.kinds == kinds.index("recall_unknown")] = 0
  assert fitting.gate(p, probes) == []
  p[probes.kinds == kinds.index("copy")] = 0.9899
  p[probes.kinds == kinds.index("recall_known")] = 0.1
  assert fitting.gate(p, probes) == [
    "copy: found 0.9899, expected at least 0.99",
    "recall_known - recall_unknown: found 0.1000, expected at least 0.2",
  ]


STEPS = 6
SIZE = warm_start_settings.WarmStart(
  steps=STEPS, batch=2, layers=1, hidden=16, heads=2, kv_heads=1, mlp=16
)
CONFIG = aj.config.changed(
  quickstart.get_config(),
  save_every=2,
  batch={
    "row_lengths": (32,),
    "micro_batch_tokens": 32,
    "max_micro_batches": 4,
  },
)


def pool():
  rng = np.random.default_rng(0)
  return [
    aj.imitation.Demonstration(
      rng.integers(0, 23, n).astype(np.int32), np.ones(n, np.float32)
    )
    for n in (7, 12, 9, 15, 11)
  ]


def fit(folder, learning_rate=4e-3):
  """Fits with a save every two steps."""
  folder.mkdir(exist_ok=True)
  return fitting.fit(
    fitting.fresh(WORLD, SIZE, seed=3),
    pool(),
    config=CONFIG,
    warm_start=dataclasses.replace(SIZE, learning_rate=learning_rate),
    held_out=aj.imitation.HeldOut(
      WORLD.evaluation_questions(1, "dev"), aj.LexicalRetriever(WORLD.corpus)
    ),
    folder=folder,
  )


class KilledError(BaseException):
  """Stands for a kill: nothing after it runs."""


def test_a_killed_fit_repeats_the_steps_since_its_last_save(
  tmp_path, monkeypatch
):
  whole = fit(tmp_path / "whole")
  killed, step, taken = tmp_path / "killed", aj.imitation.Trainer._step, []

  def dying(self, number):
    if len(taken) == 5:  # One step after the second save.
      raise KilledError
    taken.append(number)
    return step(self, number)

  def counting(self, number):
    taken.append(number)
    return step(self, number)

  monkeypatch.setattr(aj.imitation.Trainer, "_step", dying)
  with pytest.raises(KilledError):
    fit(killed)
  monkeypatch.setattr(aj.imitation.Trainer, "_step", counting)
  resumed = fit(killed)
  # Orbax writes in the background: a kill may find the second save unwritten.
  again = taken[5:]
  assert again in ([4, 5], [2, 3, 4, 5])
  jax.tree.map(np.testing.assert_array_equal, resumed.params, whole.params)
  # A finished fit takes no step.
  finished = fit(killed)
  assert taken[5:] == again
  jax.tree.map(np.testing.assert_array_equal, finished.params, whole.params)
  with pytest.raises(ValueError, match="learning_rate"):
    fit(killed, learning_rate=1e-3)


def test_decisions_weigh_more_in_the_loss():
  ids = np.arange(4, dtype=np.int32)
  heavy = aj.imitation.Demonstration(ids, np.array([0, 0, 1, 3], np.float32))
  light = aj.imitation.Demonstration(ids, np.array([0, 1, 1, 0], np.float32))
  first, second = aj.imitation.examples([heavy, light])
  np.testing.assert_allclose(first.weights, [0, 0, 1 / 6, 3 / 6])
  np.testing.assert_allclose(second.weights, [0, 1 / 6, 1 / 6, 0])
