"""Makes the contents of a checkpoint, and restores a run from one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from anysearch_jax.config import settings as config_settings
from anysearch_jax.host import processes
from anysearch_jax.training import checkpoint, collection, train_step
from anysearch_jax.training import learner as learner_lib
from anysearch_jax.training import sampler as sampler_lib


class Resumed(NamedTuple):
  """The point at which a run starts or resumes.

  rollout: the first one to train on.
  sampler_state: the state of sampling before it.
  ready: rollouts from that one on that are already sampled.
  steps: metrics of its optimizer steps that were already taken.
  changes: settings that differ from the checkpoint's.
  """

  rollout: int
  sampler_state: sampler_lib.SamplerState
  ready: list[sampler_lib.ScoredRollout]
  steps: list[dict[str, float]]
  changes: list[config_settings.Change]


def snapshot(
  rollout: int,
  state: train_step.TrainState,
  sampler_state: sampler_lib.SamplerState,
  *,
  seed: int,
  stream: collection.QuestionStream,
  played: Sequence[collection.RolloutBatch] = (),
  steps: Sequence[dict[str, float]] = (),
) -> checkpoint.Saved:
  """Returns the contents of a checkpoint.

  Args:
    rollout: the next one to train on, or the one in training.
    state: of the learner.
    sampler_state: the state of sampling before the rollout.
    seed: of the run.
    stream: the training questions.
    played: rollouts from `rollout` on that are played and not trained on.
    steps: metrics of the optimizer steps already taken in `rollout`.
  """
  progress = {
    "rollout": rollout,
    "seed": seed,
    "questions": stream.position(rollout),
    "counters": {group: dict(c) for group, c in sampler_state.counters.items()},
  }
  return checkpoint.Saved(
    rollout,
    state,
    # The curriculum is replicated; in host memory, Orbax writes it once.
    jax.device_get(sampler_state.curriculum),
    progress | ({"steps": list(steps)} if steps else {}),
    collection.pack(played) if played else None,
  )


def resume(
  checkpoints: checkpoint.Checkpoints,
  *,
  changes_since: Callable[[Mapping[str, Any]], list[config_settings.Change]],
  stream: collection.QuestionStream,
  learner: learner_lib.Learner,
  sampler: sampler_lib.Sampler,
  allow_changes: bool = False,
) -> Resumed:
  """Restores the newest checkpoint into the learner and the sampler.

  Without a checkpoint both stay as they are, and the run begins at rollout 0.

  Args:
    checkpoints: of the run.
    changes_since: returns the settings of this run that differ from those of a
      checkpoint.
    stream: the training questions.
    learner: gets the checkpoint's training state.
    sampler: gets the checkpoint's state of sampling.
    allow_changes: whether settings of learning may differ from those that the
      checkpoint was saved with. If they do, its stored rollouts are sampled
      again, so that the new settings hold from the checkpoint on.

  Raises:
    checkpoint.MismatchError: the checkpoint belongs to another run, or settings
      differ that may not.
  """
  folder = checkpoints.folder
  found = processes.on_main(lambda: checkpoint.rollouts(folder))
  if not found:
    return Resumed(0, sampler.state, [], [], [])
  newest = found[-1]
  changes = changes_since(checkpoint.read_json(folder, newest, "config"))
  if refusal := config_settings.refusal(changes, allow=allow_changes):
    raise checkpoint.MismatchError(f"{folder / str(newest)}: {refusal}")
  saved = _restored(checkpoints, newest, learner, sampler.state, stream)
  learner.state = saved.state
  counters: dict[str, Counter[str]] = {
    group: Counter(saved.progress["counters"].get(group))
    for group in sampler.state.counters
  }
  sampler.state = sampler_lib.SamplerState(saved.curriculum, counters)
  return Resumed(
    saved.rollout,
    sampler.state,
    _stored_rollouts(saved, sampler, changes),
    # Steps that were taken remain counted, even if their rollout is sampled
    # again: it then gives only the remaining steps, so that each question is
    # trained on once.
    saved.progress.get("steps", []),
    changes,
  )


def _restored(
  checkpoints: checkpoint.Checkpoints,
  rollout: int,
  learner: learner_lib.Learner,
  sampler_state: sampler_lib.SamplerState,
  stream: collection.QuestionStream,
) -> checkpoint.Saved:
  """Reads a checkpoint in place of the learner's state.

  Raises:
    checkpoint.MismatchError: it is of another policy or of other questions.
  """
  like = checkpoint.Saved(
    0, learner.release(), jax.device_get(sampler_state.curriculum), {}
  )
  saved = checkpoints.restore(rollout, like)
  expected = stream.position(rollout)
  if saved.progress["questions"] != expected:
    raise checkpoint.MismatchError(
      f"The checkpoint of rollout {rollout} is at position "
      f"{saved.progress['questions']} in its questions, expected {expected}. "
      "Resume with the questions that the run began with, or name another "
      "folder."
    )
  return saved


def _stored_rollouts(
  saved: checkpoint.Saved,
  sampler: sampler_lib.Sampler,
  changes: Sequence[config_settings.Change],
) -> list[sampler_lib.ScoredRollout]:
  """Returns the rollouts of a checkpoint that may be trained on."""
  if saved.pending is None:
    return []
  learning = config_settings.named(changes, config_settings.Kind.LEARNING)
  if learning:
    sampler.discard_stored(
      f"Found {learning}.",
      stale_rollouts=len(saved.pending.values["rollouts"]),
    )
    return []
  return sampler.score_stored(saved.rollout, saved.pending)
