"""Tests what a policy learns of the expert: its gates, its fit and resuming."""

from __future__ import annotations

import itertools
import pathlib

import jax
import numpy as np
import pytest

from anysearch_jax import config as config_lib
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import decoder, hf, tokenizer
from anysearch_jax.world import (
  demonstrations,
  expert,
  warm_start,
  world_tokenizer,
)
from anysearch_jax.world import world as world_lib
from retrieval import lexical

ROOT = pathlib.Path(__file__).resolve().parents[2]
WORLD = world_lib.World()
SETTING = demonstrations.Setting(
  WORLD,
  lexical.LexicalRetriever(WORLD.corpus).lookup,
  tokenizer.Tokenizer(world_tokenizer.build_tokenizer(WORLD)),
  config_lib.EpisodeConfig(prompts="world"),
)


def situation(decision, relations, remaining):
  return expert.Situation(
    decision, decision == "known", relations, remaining, ()
  )


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
  here = situation(decision, relations, remaining)
  assert expert.PLAIN.strategy(WORLD)(here) == pytest.approx(plain)
  assert expert.SCAFFOLDED.strategy(WORLD)(here) == pytest.approx(scaffolded)


@pytest.fixture(scope="module")
def probes():
  """Probes of the expert's plain episodes."""
  return demonstrations.probe_sets(SETTING, "dev", count=80, seed=0)


def test_gates_name_what_a_policy_lacks(probes):
  kinds = demonstrations.PROBE_KINDS
  p = np.ones(len(probes.labels))
  p[probes.kinds == kinds.index("recall_unknown")] = 0
  assert warm_start.gate(p, probes) == []
  p[probes.kinds == kinds.index("copy")] = 0.9899
  p[probes.kinds == kinds.index("recall_known")] = 0.1
  assert warm_start.gate(p, probes) == [
    "copy: found 0.9899, expected at least 0.99",
    "recall_known - recall_unknown: found 0.1000, expected at least 0.2",
  ]


def test_the_shipped_policy_passes_the_gates_of_its_expert(probes):
  policy = hf.load(ROOT / "configs" / "graded_world_policy")
  assert policy.tokenizer.encode("mayor ?") == SETTING.codec.encode("mayor ?")
  p = warm_start.probe(policy.params, policy.architecture, probes)
  assert warm_start.gate(p, probes) == []


A = architecture_lib.Architecture(
  family="qwen3",
  vocab_size=23,
  d_model=8,
  layers=1,
  heads=2,
  kv_heads=1,
  head_dim=4,
  mlp_dim=16,
  qk_norm=True,
  tied=True,
)
STEPS = 6


def pool(seed=0):
  rng = np.random.default_rng(seed)
  return [
    demonstrations.Demonstration(
      rng.integers(0, 23, n).astype(np.int32), np.ones(n, np.float32)
    )
    for n in (7, 12, 9, 15, 11)
  ]


def fit(saved=None, **kwargs):
  return warm_start.fit(
    decoder.initialize(A, 3),
    A,
    pool(),
    seed=5,
    config=config_lib.WarmStartConfig(steps=STEPS, batch_tokens=24),
    optimizer=config_lib.OptimizerConfig(),
    batch=config_lib.BatchConfig(
      row_lengths=(32,), micro_batch_tokens=32, max_micro_batches=4
    ),
    saved=saved,
    **kwargs,
  )


def assert_same_bits(found, expected):
  jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.fixture(scope="module")
def whole():
  """The parameters of a fit that was not interrupted."""
  return fit()


class KilledError(BaseException):
  """Stands for a kill: nothing after it runs."""


def test_a_killed_fit_repeats_the_steps_since_its_last_save(tmp_path, whole):
  path, reached = tmp_path / "state", itertools.count(1)

  def kill():  # Before the sixth step; the fourth was saved.
    if next(reached) == STEPS:
      raise KilledError
    return False

  with pytest.raises(KilledError):
    fit(path, save_every=2, stop=kill)
  again = itertools.count(1)
  found = fit(path, save_every=2, stop=lambda: next(again) < 0)
  assert next(again) - 1 == 2  # The fifth and the sixth.
  assert_same_bits(found, whole)


def test_a_stopped_fit_saves_where_it_is(tmp_path, whole):
  path, asked = tmp_path / "state", itertools.count()
  assert fit(path, stop=lambda: next(asked) == 3) is None
  again = itertools.count(1)
  found = fit(path, stop=lambda: next(again) < 0)
  assert next(again) - 1 == STEPS - 3
  assert_same_bits(found, whole)
  # A finished fit takes no step.
  assert_same_bits(fit(path, stop=pytest.fail), found)


def test_a_position_that_cannot_be_used_is_refused(tmp_path):
  path = tmp_path / "state"
  fit(path, stop=lambda: True)
  with pytest.raises(ValueError, match="arrays of another policy"):
    warm_start._load(path, {"x": np.zeros(3)})
  path.write_bytes(path.read_bytes()[:-7])
  with pytest.raises(ValueError, match=r"state: not a whole .* begin anew"):
    fit(path)
