"""Tests what a policy learns of the expert: its gates, its fit and resuming."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import small_policy
from exact_agents import SETTING, WORLD

import anysearch_jax as aj
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


A = small_policy.qwen3(23)
STEPS = 6


def pool(seed=0):
  rng = np.random.default_rng(seed)
  return [
    demonstrations.Demonstration(
      rng.integers(0, 23, n).astype(np.int32), np.ones(n, np.float32)
    )
    for n in (7, 12, 9, 15, 11)
  ]


def fit(saved):
  """Fits with a save every two steps; returns the steps shown, too."""
  seen = []
  params = fitting.fit(
    aj.decoder.initialize(A, 3),
    A,
    pool(),
    seed=5,
    config=warm_start_settings.WarmStart(steps=STEPS, batch_tokens=24),
    optimizer=aj.config.OptimizerConfig(),
    batch=aj.config.BatchConfig(
      row_lengths=(32,), micro_batch_tokens=32, max_micro_batches=4
    ),
    saved=saved,
    save_every=2,
    on_step=lambda step, loss: seen.append(step),
  )
  return params, seen


class KilledError(BaseException):
  """Stands for a kill: nothing after it runs."""


def test_a_killed_fit_repeats_the_steps_since_its_last_save(
  tmp_path, monkeypatch
):
  whole, _ = fit(tmp_path / "whole")
  path, save, saves = tmp_path / "state", fitting._save, []

  def killed(*position):
    save(*position)
    saves.append(position)
    if len(saves) == 2:  # After the fourth step.
      raise KilledError

  monkeypatch.setattr(fitting, "_save", killed)
  with pytest.raises(KilledError):
    fit(path)
  found, seen = fit(path)
  assert seen == [STEPS] and len(saves) == 3
  jax.tree.map(np.testing.assert_array_equal, found, whole)
  # A finished fit takes no step.
  found, seen = fit(path)
  assert seen == []
  jax.tree.map(np.testing.assert_array_equal, found, whole)
  # A position that cannot be used is refused.
  with pytest.raises(ValueError, match="arrays of another policy"):
    fitting._load(path, {"x": np.zeros(3)})
  path.write_bytes(path.read_bytes()[:-7])
  with pytest.raises(ValueError, match=r"state: not a whole .* begin anew"):
    fit(path)
