"""Makes the contents of a checkpoint, and restores a run from one."""

from __future__ import annotations

import pathlib
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import jax

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.config import changes as config_changes
from anysearch_jax.data import dataset_iterator
from anysearch_jax.host import processes
from anysearch_jax.training import (
  checkpoint,
  collection,
  pending,
  train_step,
)
from anysearch_jax.training import learner as learner_lib
from anysearch_jax.training import sampler as sampler_lib


class Resumed(NamedTuple):
  """The point at which a run starts or resumes.

  rollout: the first one to train on.
  seen: the state of sampling before it.
  ready: rollouts from that one on that are already sampled.
  steps: metrics of its optimizer steps that were already taken.
  changes: settings that differ from the checkpoint's.
  """

  rollout: int
  seen: sampler_lib.Seen
  ready: list[sampler_lib.Sampled]
  steps: list[dict[str, float]]
  changes: list[config_changes.Change]


def position(
  rollout: int,
  *,
  config: config_lib.ExperimentConfig,
  questions: Sequence[types.Question],
) -> dict[str, int]:
  """Returns the position in the questions before `rollout`, as plain values."""
  return dataset_iterator.progress(
    questions, rollout * collection.questions(config)
  )


def snapshot(
  rollout: int,
  state: train_step.TrainState,
  seen: sampler_lib.Seen,
  *,
  config: config_lib.ExperimentConfig,
  questions: Sequence[types.Question],
  played: Sequence[collection.Collected] = (),
  steps: Sequence[dict[str, float]] = (),
) -> checkpoint.Saved:
  """Returns the contents of a checkpoint.

  Args:
    rollout: the next one to train on, or the one in training.
    state: of the learner.
    seen: the state of sampling before the rollout.
    config: of the run.
    questions: the training stream.
    played: rollouts from `rollout` on that are played and not trained on.
    steps: metrics of the optimizer steps already taken in `rollout`.
  """
  progress = {
    "rollout": rollout,
    "seed": config.seed,
    "questions": position(rollout, config=config, questions=questions),
    "counters": {group: dict(c) for group, c in seen.counters.items()},
  }
  return checkpoint.Saved(
    rollout,
    state,
    # The curriculum is replicated; in host memory, Orbax writes it once.
    jax.device_get(seen.curriculum),
    progress | ({"steps": list(steps)} if steps else {}),
    pending.pack(played) if played else None,
  )


def resume(
  checkpoints: checkpoint.Checkpoints,
  folder: pathlib.Path,
  *,
  config: config_lib.ExperimentConfig,
  questions: Sequence[types.Question],
  learner: learner_lib.Learner,
  sampler: sampler_lib.Sampler,
  allow_changes: bool = False,
) -> Resumed:
  """Restores the newest checkpoint into the learner and the sampler.

  Without a checkpoint both stay as they are, and the run begins at rollout 0.

  Args:
    checkpoints: of the run.
    folder: of the checkpoints.
    config: of the run.
    questions: the training stream.
    learner: gets the checkpoint's training state.
    sampler: gets the checkpoint's state of sampling.
    allow_changes: whether settings of learning may differ from those that the
      checkpoint was saved with. If they do, its stored rollouts are sampled
      again, so that the new settings hold from the checkpoint on.

  Raises:
    checkpoint.MismatchError: the checkpoint belongs to another run, or settings
      differ that may not.
  """
  found = processes.on_main(lambda: checkpoint.rollouts(folder))
  if not found:
    return Resumed(0, sampler.seen, [], [], [])
  newest = found[-1]
  changes = config_changes.changes(
    checkpoint.read_json(folder, newest, "config"), config
  )
  if refusal := config_changes.refusal(changes, allow=allow_changes):
    raise checkpoint.MismatchError(f"{folder / str(newest)}: {refusal}")
  like = checkpoint.Saved(
    0,
    learner.release(),
    jax.device_get(sampler.seen.curriculum),
    {},
  )
  saved = checkpoints.restore(newest, like)
  expected = position(saved.rollout, config=config, questions=questions)
  if saved.progress["questions"] != expected:
    raise checkpoint.MismatchError(
      f"The checkpoint of rollout {saved.rollout} has questions "
      f"{saved.progress['questions']}, this run has {expected}; resume with "
      "what the run began with, or name another folder."
    )
  learner.state = saved.state
  counters: dict[str, Counter[str]] = {
    group: Counter(saved.progress["counters"].get(group))
    for group in sampler.seen.counters
  }
  seen = sampler.seen = sampler.seen._replace(
    curriculum=saved.curriculum, counters=counters
  )
  learning = config_changes.named(changes, config_changes.Kind.LEARNING)
  if learning and saved.pending:
    sampler.sample_anew(
      f"Found {learning}.",
      stale_rollouts=len(saved.pending.values["rollouts"]),
    )
    ready: list[sampler_lib.Sampled] = []
  else:
    ready = sampler.take_up_all(saved.rollout, saved.pending)
  # Steps that were taken remain counted, even if their rollout is sampled
  # again: it then gives only the remaining steps, so that each question is
  # trained on once.
  steps = saved.progress.get("steps", [])
  return Resumed(saved.rollout, seen, ready, steps, changes)
