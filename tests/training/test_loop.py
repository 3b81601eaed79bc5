"""Tests small runs of the training loop: metrics, resume, refusals, guards."""

from __future__ import annotations

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import scripted_runs as runs
import small_run

from anysearch_jax import config as config_lib
from anysearch_jax.policy import hf
from anysearch_jax.policy import parameters as weights
from anysearch_jax.training import checkpoint, health


def test_every_optimizer_step_has_its_record(trained):
  steps = small_run.records(trained, "steps.jsonl")
  assert [s["step"] for s in steps] == list(range(1, 9))
  assert [s["rollout"] for s in steps] == [0, 0, 1, 1, 2, 2, 3, 3]
  for record in small_run.records(trained):
    of_rollout = [s for s in steps if s["rollout"] == record["rollout"]]
    for name, reduced in (("grad_norm", np.mean), ("loss/ratio_max", np.max)):
      values = [s[name] for s in of_rollout]
      np.testing.assert_allclose(record[name], reduced(values), rtol=1e-6)


def test_a_run_writes_all_its_files(trained):
  records = small_run.records(trained)
  assert [r["rollout"] for r in records] == [0, 1, 2, 3]
  assert [r["step"] for r in records] == [2, 4, 6, 8]
  assert [r["phase"] for r in records] == [1, 1, 2, 2]
  assert [r["scaffold"] for r in records] == [1, 1, 0, 0]
  # Phase I: all four groups at budget 2, then at budget 1.
  assert [r["curriculum/count2"] for r in records[:2]] == [4, 0]
  assert [r["curriculum/count1"] for r in records[:2]] == [0, 4]
  for r in records:
    assert r["finite"] == 1
    # Sampling and scoring use the same forward pass.
    assert r["policy/engine_gap_max"] < 1e-5
  assert (trained / "policy" / "model.safetensors").is_file()
  prompts = json.loads((trained / "prompts.json").read_text())
  assert prompts["plain"].startswith("<|user|> budget 2 question ")
  assert prompts["scaffold"].startswith("<|user|> guide budget 2 question ")
  assert list((trained / "tensorboard").iterdir())
  lines = (trained / "trajectories" / "rollout-00001.jsonl").read_text()
  assert len(lines.splitlines()) == 4


@pytest.mark.parametrize("run", ["trained", "adapted"])
def test_it_compiles_once(run, request):
  folder = request.getfixturevalue(run)
  last = (folder / "metrics.jsonl").read_text().splitlines()[-1]
  assert json.loads(last)["compile/train_step"] == 1


def test_training_moves_the_policy(trained, parts):
  moved = jax.tree.map(
    lambda a, b: float(np.abs(a - b).max()),
    hf.load(trained / "policy").params,
    parts["policy"].params,
  )
  assert min(jax.tree.leaves(moved)) > 0


def test_a_killed_run_resumes_to_the_same_bits(trained, parts, tmp_path):
  small_run.train(tmp_path, parts, rollouts=3)  # The checkpoint: rollout 2.
  assert len(small_run.records(tmp_path)) == 3
  small_run.train(tmp_path, parts)
  small_run.assert_same_bits(tmp_path, trained)


def test_counters_are_of_the_whole_run(trained):
  records = small_run.records(trained)
  counters = checkpoint.read_json(trained / "checkpoints", 4, "progress")
  # Four rollouts of two steps, of four questions sampled twice each.
  assert counters["counters"]["run"] == {
    "optimizer_steps": 8,
    "trajectories": 32,
    "failed": 0,
    "dropped_groups": 0,
    "resampled_groups": 0,
    "stragglers": 0,
    "stale_rollouts": 0,
    "failed_rollouts": 0,
  }
  assert counters["questions"] == {"epoch": 0, "position": 16, "of": 32}
  generated = sum(8 * r["rollout/generated_tokens"] for r in records)
  assert counters["counters"]["engine"]["sampled_tokens"] == generated
  assert records[-1]["engine/sampled_tokens"] == generated
  assert [r["run/trajectories"] for r in records] == [8, 16, 24, 32]


def test_a_finished_run_exports_again_in_another_dtype(
  trained, parts, tmp_path
):
  folder = tmp_path / "run"
  shutil.copytree(trained, folder)
  keep = config_lib.CheckpointConfig(export_dtype="bfloat16")
  small_run.train(
    folder, parts, dataclasses.replace(small_run.CONFIG, checkpoint=keep)
  )
  ours, theirs = (
    safetensors.numpy.load_file(f / "policy" / "model.safetensors")
    for f in (folder, trained)
  )
  assert ours.keys() == theirs.keys()
  for name, tensor in theirs.items():
    np.testing.assert_array_equal(
      ours[name], tensor.astype(ml_dtypes.bfloat16), strict=True
    )


def test_a_run_does_not_resume_with_other_questions(trained, parts, tmp_path):
  folder = tmp_path / "run"
  shutil.copytree(trained, folder)
  parts = parts | {"questions": parts["questions"][:31]}
  with pytest.raises(ValueError, match="'of': 32}.* expected .*'of': 31}"):
    small_run.train(folder, parts, small_run.CONFIG)


@pytest.fixture
def broken(parts):
  """Parts whose policy outputs NaN."""
  policy = parts["policy"]
  params = jax.tree.map(np.copy, policy.params)
  params["norm"][0] = np.nan
  return parts | {"policy": policy._replace(params=params)}


def test_steps_that_are_not_finite_stop_the_run(broken, tmp_path):
  with pytest.raises(health.NotFiniteError, match="not-finite-1.*3 in a row"):
    small_run.train(tmp_path, broken)
  # Two steps a rollout; the trajectories of both rollouts are recorded.
  for rollout in range(2):
    dumped = tmp_path / "trajectories" / f"not-finite-{rollout}.jsonl"
    assert len(dumped.read_text().splitlines()) == 4


def test_a_run_continues_after_fewer_bad_steps_and_warns(
  broken, tmp_path, caplog
):
  config = dataclasses.replace(
    small_run.CONFIG, watch=config_lib.WatchConfig(bad_steps=100)
  )
  small_run.train(tmp_path, broken, config, rollouts=2)
  said = [r.message for r in caplog.records if "was not applied" in r.message]
  assert len(said) == 4
  assert [r["finite"] for r in small_run.records(tmp_path)] == [0, 0]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory, parts):
  """A run that trains adapters on three of the projections."""
  folder = tmp_path_factory.mktemp("adapted")
  hf.save(folder / "base", parts["policy"])
  parts = parts | {"policy": hf.load(folder / "base")}
  small_run.train(folder, parts, ADAPTED)
  return folder


ADAPTED = dataclasses.replace(
  small_run.CONFIG,
  lora=config_lib.LoraConfig(rank=2, alpha=6.0, targets=("q", "o", "down")),
)


def _adapters(folder):
  flat = safetensors.numpy.load_file(folder / "adapter_model.safetensors")
  prefix = "base_model.model.model.layers.0."
  return {name.removeprefix(prefix): x for name, x in flat.items()}


def test_only_adapters_are_trained(adapted, parts):
  adapters = _adapters(adapted / "adapter")
  assert sorted(adapters) == [
    f"{module}.lora_{factor}.weight"
    for module in ("mlp.down_proj", "self_attn.o_proj", "self_attn.q_proj")
    for factor in "AB"
  ]
  assert all(np.abs(x).min() > 0 for x in adapters.values())
  exported = safetensors.numpy.load_file(
    adapted / "policy" / "model.safetensors"
  )
  began = parts["policy"].params
  np.testing.assert_array_equal(
    exported["model.embed_tokens.weight"], began["embed"]
  )
  layer = {k: np.asarray(v[0], np.float64) for k, v in began["layers"].items()}
  files = {
    "self_attn.q_proj": layer["q"].reshape(16, 16).T,
    "self_attn.o_proj": layer["o"].reshape(16, 16),
    "mlp.down_proj": layer["down"],
    "self_attn.v_proj": layer["v"].reshape(16, 8).T,
    "mlp.gate_proj": layer["gate"].T,
  }
  for module, weight in files.items():
    if f"{module}.lora_A.weight" in adapters:
      a, b = (
        adapters[f"{module}.lora_{f}.weight"].astype(np.float64) for f in "AB"
      )
      weight = weight + 6.0 / 2 * b @ a
    np.testing.assert_allclose(
      exported[f"model.layers.0.{module}.weight"], weight, rtol=0, atol=1e-7
    )


def test_adapters_are_sampled_and_scored_by_one_forward(adapted):
  records = small_run.records(adapted)
  assert len(records) == 4
  assert all(r["policy/engine_gap_max"] < 1e-5 for r in records)
  # The reference is the base without adapters; training moves away from it.
  assert records[0]["loss/kl"] < records[-1]["loss/kl"]


@pytest.mark.slow
def test_a_run_may_compute_in_bfloat16(parts, tmp_path):
  config = config_lib.changed(
    ADAPTED, compute_dtype="bfloat16", lora={"base_dtype": "bfloat16"}
  )
  base = jax.tree.map(
    lambda p: jnp.asarray(p, jnp.bfloat16), parts["policy"].params
  )
  small_run.train(
    tmp_path, parts | {"policy": parts["policy"]._replace(params=base)}, config
  )
  records = small_run.records(tmp_path)
  assert len(records) == 4
  gaps = [r["policy/engine_gap_max"] for r in records]
  # More than the rounding of float32, and at most that of bfloat16.
  assert 1e-5 < max(gaps) < 0.1
  exported = hf.load(tmp_path / "policy").params
  for path in (("embed",), ("norm",), ("layers", "v"), ("layers", "gate")):
    np.testing.assert_array_equal(
      weights.get(exported, path), weights.get(base, path).astype(jnp.float32)
    )
  assert records[-1]["loss/kl"] > 0
  for adapter in _adapters(tmp_path / "adapter").values():
    assert adapter.dtype == np.float32
    assert np.abs(adapter).min() > 0


# Budgets that are pairs of searches and tokens.

BASE = config_lib.changed(
  small_run.CONFIG, save_every=1, curriculum={"total_steps": 6}
)
PAIRS = config_lib.changed(
  BASE,
  curriculum={"token_levels": (9, 16)},
  reward={"abs_tokens": 1.0, "rel_cost": "dollars"},
  evaluation={"search_price": 5.0, "output_price": 1.0},
)


def test_every_episode_is_within_caps_on_searches_and_tokens(parts, tmp_path):
  whole, killed = tmp_path / "whole", tmp_path / "killed"
  small_run.train(whole, parts, PAIRS)
  drawn = set()
  for groups in runs.played(whole):
    for group in groups:
      for trajectory in group["trajectories"]:
        cap = trajectory["caps"]["tokens"]
        drawn.add((group["budget"], cap))
        assert trajectory["generated_tokens"] <= cap
        assert trajectory["searches"] <= group["budget"]
  assert drawn >= {(2, 16), (1, 9)} and len(drawn) > 2
  # The levels of every group are counted.
  for record in small_run.records(whole):
    names = ("curriculum/tokens9", "curriculum/tokens16")
    assert sum(record[name] for name in names) == 4
    assert sum(record[f"curriculum/p{b}"] for b in (1, 2)) == pytest.approx(1)
  small_run.train(killed, parts, PAIRS, rollouts=2)
  small_run.train(killed, parts, PAIRS)
  small_run.assert_same_bits(killed, whole)
  assert list(runs.played(whole)) == list(runs.played(killed))
