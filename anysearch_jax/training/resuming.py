"""How a checkpoint restores a run, and where the run then is."""

from __future__ import annotations

import pathlib
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from anysearch_jax import config as config_lib
from anysearch_jax import processes, types
from anysearch_jax.data import cursor
from anysearch_jax.training import checkpoint, collection
from anysearch_jax.training import learner as learner_lib
from anysearch_jax.training import sampler as sampler_lib


class Resumed(NamedTuple):
  """Where a run begins.

  rollout: the first one to train on.
  seen: what sampling knew before it.
  ready: rollouts from that one on that are sampled already.
  steps: metrics of its optimizer steps that were taken already.
  """

  rollout: int
  seen: sampler_lib.Seen
  ready: list[sampler_lib.Sampled]
  steps: list[dict[str, float]]


def position(
  rollout: int,
  *,
  config: config_lib.ExperimentConfig,
  questions: Sequence[types.Question],
) -> dict[str, int]:
  """The cursor of the questions before `rollout`."""
  return cursor.progress(questions, rollout * collection.questions(config))


def progress(
  rollout: int,
  seen: sampler_lib.Seen,
  *,
  config: config_lib.ExperimentConfig,
  questions: Sequence[types.Question],
) -> dict[str, Any]:
  """Plain values of the run before `rollout`, for its checkpoint."""
  return {
    "rollout": rollout,
    "seed": config.seed,
    "questions": position(rollout, config=config, questions=questions),
    "counters": {group: dict(c) for group, c in seen.counters.items()},
  }


def resume(
  checkpoints: checkpoint.Checkpoints,
  folder: pathlib.Path,
  *,
  config: config_lib.ExperimentConfig,
  questions: Sequence[types.Question],
  learner: learner_lib.Learner,
  sampler: sampler_lib.Sampler,
) -> Resumed:
  """Restores the newest checkpoint into the learner and the sampler.

  Without a checkpoint both stay as they are, and the run begins at rollout 0.

  Args:
    checkpoints: of the run.
    folder: of the checkpoints.
    config: of the run.
    questions: the training stream.
    learner: gets the checkpoint's state.
    sampler: gets what sampling knew then.

  Raises:
    checkpoint.MismatchError: the checkpoint is of another run.
  """
  if not processes.by_first(lambda: checkpoint.rollouts(folder)):
    return Resumed(0, sampler.seen, [], [])
  like = checkpoint.Saved(
    0,
    learner.abstract_state(),
    jax.device_get(sampler.seen.curriculum),
    {},
  )
  # Two states are never held at once.
  learner.state = None
  saved = checkpoints.restore(like)
  expected = progress(
    saved.rollout, sampler.seen, config=config, questions=questions
  )
  for name in ("rollout", "seed", "questions"):
    if saved.progress[name] != expected[name]:
      raise checkpoint.MismatchError(
        f"The checkpoint of rollout {saved.rollout} has {name} "
        f"{saved.progress[name]}, this run has {expected[name]}; resume with "
        "what the run began with, or name another folder."
      )
  learner.state = saved.state
  counters = {
    group: Counter(saved.progress["counters"].get(group))
    for group in sampler.seen.counters
  }
  seen = sampler.seen = sampler.seen._replace(
    curriculum=saved.curriculum, counters=counters
  )
  ready = sampler.take_up_all(saved.rollout, saved.pending)
  # Steps that were taken stay taken, even if their rollout is sampled anew: it
  # then gives the remaining steps only, so that no question counts twice.
  return Resumed(saved.rollout, seen, ready, saved.progress.get("steps", []))
