"""Checkpoints: train state and curriculum, at rollout boundaries.

Everything else that a resumed run needs is addressed by the rollout number
(questions, budgets, random draws), so these two are the whole state.
"""

from __future__ import annotations

import pathlib
from typing import NamedTuple

import orbax.checkpoint as ocp

from anysearch_jax import curriculum as curriculum_lib
from anysearch_jax.training import train_step


class Saved(NamedTuple):
  """What a checkpoint holds; `rollout` is the next one to run."""

  rollout: int
  state: train_step.TrainState
  curriculum: curriculum_lib.CurriculumState


class Checkpoints:
  """Orbax checkpoints of a run; use as a context manager."""

  def __init__(self, folder: str | pathlib.Path, *, keep: int = 2):
    self._manager = ocp.CheckpointManager(
      pathlib.Path(folder).absolute(),
      options=ocp.CheckpointManagerOptions(max_to_keep=keep, create=True),
    )

  def save(self, saved: Saved) -> None:
    """Writes in the background; the arrays are copied before it returns."""
    self._manager.save(
      saved.rollout,
      args=ocp.args.Composite(
        state=ocp.args.StandardSave(saved.state),
        curriculum=ocp.args.StandardSave(saved.curriculum),
      ),
    )

  def restore(self, like: Saved) -> Saved | None:
    """The latest checkpoint, shaped and sharded as `like`; None without one."""
    rollout = self._manager.latest_step()
    if rollout is None:
      return None
    restored = self._manager.restore(
      rollout,
      args=ocp.args.Composite(
        state=ocp.args.StandardRestore(like.state),
        curriculum=ocp.args.StandardRestore(like.curriculum),
      ),
    )
    return Saved(rollout, restored["state"], restored["curriculum"])

  def __enter__(self) -> Checkpoints:
    return self

  def __exit__(self, *unused) -> None:
    self._manager.wait_until_finished()
    self._manager.close()
