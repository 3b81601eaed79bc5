"""The training loop end to end, small: metrics, resume, refusals, guards."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from anysearch_jax import config as config_lib
from anysearch_jax import tokenizer as tokenizer_lib
from anysearch_jax.data import world as world_lib
from anysearch_jax.data import world_tokenizer
from anysearch_jax.evaluation import harness
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import hf, transformer
from anysearch_jax.training import checkpoint, loop
from retrieval import lexical

_CONFIG = config_lib.ExperimentConfig(
  questions=4,
  group=2,
  save_every=2,
  curriculum=config_lib.CurriculumConfig(
    max_budget=2,
    phase1_steps=4,
    total_steps=8,
    steps_per_rollout=2,
    window=4,
  ),
  optimizer=config_lib.OptimizerConfig(learning_rate=1e-3),
  episode=config_lib.EpisodeConfig(
    prompts="world", max_generated=24, max_context=110
  ),
  engine=config_lib.EngineConfig(
    slots=8,
    kv_buckets=(128,),
    lanes=(8,),
    prefill_lanes=4,
    prefill_chunk=16,
    decode_steps=8,
  ),
  batch=config_lib.BatchConfig(
    row_lengths=(128,), micro_batch_tokens=256, max_micro_batches=8
  ),
  # The tests read exact weights from `policy/`.
  checkpoint=config_lib.CheckpointConfig(export_dtype="float32"),
)


@pytest.fixture(scope="module")
def parts():
  world = world_lib.World()
  codec = tokenizer_lib.Tokenizer(world_tokenizer.build_tokenizer(world))
  a = architecture_lib.Architecture(
    family="qwen3",
    vocab_size=codec.vocab_size,
    d_model=16,
    layers=1,
    heads=2,
    kv_heads=1,
    head_dim=8,
    mlp_dim=16,
    qk_norm=True,
    tied=True,
  )
  return {
    "policy": hf.Policy(transformer.initialize(a, 0), a, codec),
    "questions": world.questions("train", 32, 0),
    "retriever": lexical.LexicalRetriever(world.corpus),
  }


def _run(folder: pathlib.Path, parts, config=_CONFIG, *, rollouts=None):
  """Trains; stops as a kill would after `rollouts` of them."""

  class KilledError(Exception):
    pass

  def on_event(event):
    if rollouts is not None and event.rollout + 1 == rollouts:
      raise KilledError

  folder.mkdir(exist_ok=True)
  loop.validate(config)
  trainer = loop.Trainer(config, folder=folder, **parts)
  try:
    trainer.run(on_event)
  except KilledError:
    pass


def _metrics(folder):
  lines = (folder / "metrics.jsonl").read_text().splitlines()
  return [
    {
      name: value
      for name, value in json.loads(line).items()
      # Clocks never repeat; a resumed process compiles anew.
      if not name.startswith(("time/", "compile/"))
    }
    for line in lines
  ]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, parts):
  folder = tmp_path_factory.mktemp("run")
  _run(folder, parts)
  return folder


def test_a_run_leaves_what_it_promises(finished):
  records = _metrics(finished)
  assert [r["rollout"] for r in records] == [0, 1, 2, 3]
  assert [r["step"] for r in records] == [2, 4, 6, 8]
  assert [r["phase"] for r in records] == [1, 1, 2, 2]
  assert [r["scaffold"] for r in records] == [1, 1, 0, 0]
  # Phase I: all four groups at budget 2, then at budget 1.
  assert [r["curriculum/count2"] for r in records[:2]] == [4, 0]
  assert [r["curriculum/count1"] for r in records[:2]] == [0, 4]
  for r in records:
    assert r["finite"] == 1
    # One forward for sampling and scoring.
    assert r["policy/engine_gap_max"] < 1e-5
  assert (finished / "policy" / "model.safetensors").is_file()
  prompts = json.loads((finished / "prompts.json").read_text())
  assert prompts["plain"].startswith("<|user|> budget 2 question ")
  assert prompts["scaffold"].startswith("<|user|> guide budget 2 question ")
  assert list((finished / "tensorboard").iterdir())
  lines = (finished / "trajectories" / "rollout-00001.jsonl").read_text()
  assert len(lines.splitlines()) == 4


def test_it_compiles_once(finished):
  last = (finished / "metrics.jsonl").read_text().splitlines()[-1]
  assert json.loads(last)["compile/train_step"] == 1


def test_training_moves_the_policy(finished, parts):
  trained = hf.load(finished / "policy").params
  moved = jax.tree.map(
    lambda a, b: float(np.abs(a - b).max()), trained, parts["policy"].params
  )
  assert min(jax.tree.leaves(moved)) > 0


def test_a_killed_run_resumes_to_the_same_bits(finished, parts, tmp_path):
  folder = tmp_path / "run"
  _run(folder, parts, rollouts=3)  # The checkpoint is of rollout 2.
  assert len(_metrics(folder)) == 3
  _run(folder, parts)
  assert _metrics(folder) == _metrics(finished)
  ours, theirs = (hf.load(f / "policy").params for f in (folder, finished))
  jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_a_run_survives_a_flipped_bit_in_its_newest_checkpoint(
  finished, parts, tmp_path, caplog
):
  folder = tmp_path / "run"
  shutil.copytree(finished, folder)
  shutil.rmtree(folder / "policy")
  newest = folder / "checkpoints" / "4" / "params"
  file = max(newest.rglob("*"), key=lambda path: path.stat().st_size)
  content = bytearray(file.read_bytes())
  content[len(content) // 2] ^= 1
  file.write_bytes(content)
  _run(folder, parts)
  assert str(file) in caplog.text
  assert _metrics(folder) == _metrics(finished)
  ours, theirs = (hf.load(f / "policy").params for f in (folder, finished))
  jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_counters_are_of_the_whole_run(finished):
  records = _metrics(finished)
  counters = checkpoint.read_json(finished / "checkpoints", 4, "progress")
  # Four rollouts of two steps, of four questions sampled twice each.
  assert counters["counters"]["run"] == {
    "optimizer_steps": 8,
    "trajectories": 32,
    "failed": 0,
    "dropped_groups": 0,
    "resampled_groups": 0,
  }
  assert counters["questions"] == {"epoch": 0, "position": 16, "of": 32}
  generated = sum(8 * r["rollout/generated_tokens"] for r in records)
  assert counters["counters"]["engine"]["sampled_tokens"] == generated
  assert records[-1]["engine/sampled_tokens"] == generated
  assert [r["run/trajectories"] for r in records] == [8, 16, 24, 32]


def test_a_finished_run_exports_again_in_the_type_that_is_asked_for(
  finished, parts, tmp_path
):
  folder = tmp_path / "run"
  shutil.copytree(finished, folder)
  keep = config_lib.CheckpointConfig(export_dtype="bfloat16")
  _run(folder, parts, dataclasses.replace(_CONFIG, checkpoint=keep))
  ours, theirs = (
    safetensors.numpy.load_file(f / "policy" / "model.safetensors")
    for f in (folder, finished)
  )
  assert ours.keys() == theirs.keys()
  for name, tensor in theirs.items():
    np.testing.assert_array_equal(
      ours[name], tensor.astype(ml_dtypes.bfloat16), strict=True
    )


@pytest.mark.parametrize(
  ("questions", "seed", "message"),
  [
    (31, 42, "'of': 32}, this run has .*'of': 31}"),
    (32, 43, "has seed 42, this run has 43"),
  ],
)
def test_a_run_does_not_resume_on_other_terms(
  finished, parts, tmp_path, questions, seed, message
):
  folder = tmp_path / "run"
  shutil.copytree(finished, folder)
  parts = parts | {"questions": parts["questions"][:questions]}
  with pytest.raises(ValueError, match=message):
    _run(folder, parts, dataclasses.replace(_CONFIG, seed=seed))


def test_a_step_that_is_not_finite_stops_the_run(parts, tmp_path):
  policy = parts["policy"]
  broken = jax.tree.map(np.copy, policy.params)
  broken["norm"][0] = np.nan
  with pytest.raises(loop.NotFiniteError, match="not-finite-0"):
    _run(tmp_path, parts | {"policy": policy._replace(params=broken)})
  dumped = tmp_path / "trajectories" / "not-finite-0.jsonl"
  assert len(dumped.read_text().splitlines()) == 4


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"questions": 3, "group": 3}, "do not divide"),
    ({"sampling": config_lib.SamplingConfig(top_p=0.9)}, "top_p"),
    ({"batch": config_lib.BatchConfig(row_lengths=(64,))}, "row_lengths"),
    ({"batch": config_lib.BatchConfig(row_lengths=(256, 128))}, "ascending"),
    (
      {"engine": config_lib.EngineConfig(kv_buckets=(64,), lanes=(8,))},
      "kv_buckets",
    ),
    ({"curriculum": config_lib.CurriculumConfig(phase1_steps=7)}, "phase1"),
    ({"checkpoint": config_lib.CheckpointConfig(keep_last=0)}, "keep_last"),
    ({"checkpoint": config_lib.CheckpointConfig(keep_best=-1)}, "keep_best"),
    (
      {"checkpoint": config_lib.CheckpointConfig(export_dtype="int8")},
      "found 'int8', expected one of float32",
    ),
  ],
)
def test_what_cannot_run_is_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    loop.validate(dataclasses.replace(_CONFIG, **changes))


def test_the_harness_plays_every_cell_once(parts, tmp_path):
  config = dataclasses.replace(
    _CONFIG,
    evaluation=config_lib.EvaluationConfig(budgets=(0, 2), seeds=(1, 2)),
  )
  ticks = []
  path = tmp_path / "episodes.jsonl"
  harness.evaluate(
    config,
    policy=parts["policy"],
    questions=parts["questions"][:3],
    retriever=parts["retriever"],
    path=path,
    on_done=lambda done, total: ticks.append((done, total)),
  )
  rows = [json.loads(line) for line in path.read_text().splitlines()]
  cells = {(r["question_id"], r["budget"], r["seed"]) for r in rows}
  assert len(cells) == len(rows) == 12
  assert ticks == [(i, 12) for i in range(1, 13)]
  for row in rows:
    assert row["searches"] <= row["budget"]
    assert not row["scaffold"]
