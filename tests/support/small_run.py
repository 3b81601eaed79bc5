"""A training run that takes seconds, and its parts."""

from __future__ import annotations

import functools
import json
import pathlib
from typing import Any

import jax
import numpy as np
import small_policy

from anysearch_jax import config as config_lib
from anysearch_jax.methods import systems
from anysearch_jax.policy import decoder, hf
from anysearch_jax.policy import tokenizer as tokenizer_lib
from anysearch_jax.retrieval import lexical
from anysearch_jax.training import learner, loop
from anysearch_jax.world import world as world_lib
from anysearch_jax.world import world_tokenizer

CONFIG = config_lib.ExperimentConfig(
  compute_dtype="float32",
  questions=4,
  group=2,
  save_every=2,
  curriculum=config_lib.CurriculumConfig(
    max_budget=2, phase1_steps=4, total_steps=8, steps_per_rollout=2, window=4
  ),
  # Random policies never answer; only their lengths differ.
  reward=config_lib.RewardConfig(length_limit=2, length_tolerance=40),
  optimizer=config_lib.OptimizerConfig(learning_rate=1e-3),
  episode=config_lib.EpisodeConfig(
    prompts="world", max_generated=24, max_context=110
  ),
  engine=config_lib.EngineConfig(
    slots=8,
    max_context=112,
    page=8,
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


def parts() -> dict[str, Any]:
  """Returns a random policy, 32 questions and their retriever."""
  return dict(_parts())


@functools.cache
def _parts() -> dict[str, Any]:
  world = world_lib.World()
  inner = world_tokenizer.build_tokenizer(world)
  # Many words end a turn, so that the episodes of a random policy differ.
  codec = tokenizer_lib.Tokenizer(
    inner, end_of_turn_ids=range(0, len(inner), 8)
  )
  a = small_policy.qwen3(codec.vocab_size, mlp_dim=16)
  return {
    "policy": hf.Policy(decoder.initialize(a, 0), a, codec),
    "questions": world.questions("train", 32, 0),
    "retriever": lexical.LexicalRetriever(world.corpus, reads=world.searched),
  }


# Metrics that differ between equal runs: times, compilations, throughput.
PASSING = ("time/", "compile/", "train/tokens_per_second")


def records(folder: pathlib.Path, name: str = "metrics.jsonl"):
  """Returns the records of a run, without what differs between equal runs."""
  return [
    {n: x for n, x in json.loads(line).items() if not n.startswith(PASSING)}
    for line in (folder / name).read_text().splitlines()
  ]


def assert_same_bits(
  folder: pathlib.Path,
  expected: pathlib.Path,
  names=("metrics.jsonl", "steps.jsonl"),
) -> None:
  """Asserts that two runs have the same metrics and the same policy."""
  for name in names:
    assert records(folder, name) == records(expected, name)
  ours, theirs = (hf.load(f / "policy").params for f in (folder, expected))
  jax.tree.map(np.testing.assert_array_equal, ours, theirs)


_STEPS: dict[str, Any] = {}


def share_programs(trainer: loop.Trainer, config) -> None:
  """Gives a trainer the train step of an earlier run with the same settings.

  Tracing a step again takes longer than a small run.
  """
  made = trainer._learner
  if isinstance(made, learner.Learner):
    key = repr((made.architecture, config))
    made._step = _STEPS.setdefault(key, made._step)


def train(folder: pathlib.Path, parts, config=CONFIG, *, rollouts=None):
  """Trains; stops after `rollouts` rollouts as if killed."""

  class KilledError(Exception):
    pass

  def on_event(event):
    if rollouts is not None and event.rollout + 1 == rollouts:
      raise KilledError

  folder.mkdir(exist_ok=True)
  systems.validate(config)
  trainer = loop.Trainer(
    config, method=systems.trained(config), folder=folder, **parts
  )
  share_programs(trainer, config)
  try:
    trainer.run(on_event)
  except KilledError:
    pass
