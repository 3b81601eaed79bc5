"""Checkpoints at rollout boundaries, which say when they are damaged.

A checkpoint is a folder named by the rollout to run next. Orbax writes it
beside and renames it; before that it gets a manifest of its files, because
Orbax restores flipped bits without a word and takes a truncated checkpoint
for the latest. Its items:

    params       the policy's trained arrays, alone so that they can be exported
    critic       the critic's, if there is one
    optimizer    optimizer state and steps taken
    curriculum   windows, counts, step, key
    progress     JSON: rollout, seed, cursor of the questions, counters
    pending      JSON: rollouts that were played and not trained on, if any
    tokens       their tokens
    config       JSON: the whole configuration
    metrics      JSON: the quality that `keep_best` compares

A run owns its checkpoints through `Checkpoints`. Whoever else reads them asks
`sound` for one and takes items out of it by `read` and `read_json`; that
changes nothing in the folder.

Several processes of one run share the folder and make the same calls: each
writes and reads what its devices hold, the first one does all else.
"""

from __future__ import annotations

import copy
import math
import operator
import pathlib
import shutil
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from absl import logging

from anysearch_jax import config as config_lib
from anysearch_jax.algorithms import curriculum as curriculum_lib
from anysearch_jax.config import values as config_values
from anysearch_jax.host import disk, processes
from anysearch_jax.policy import tensor_files
from anysearch_jax.training import damaged, manifest, saving, train_step
from anysearch_jax.training import pending as pending_lib

_TEMPORARY = ocp.path.atomicity_types.TMP_DIR_SUFFIX
# Orbax writes these at the rename, after the manifest; they enter it later. A
# killed run leaves them out: they hold times, and nothing restores from them.
_LATE = ("_CHECKPOINT_METADATA", "commit_success.txt")


class DamagedError(RuntimeError):
  """No checkpoint that may be used is as it was written."""


class MismatchError(ValueError):
  """A checkpoint is of another run or policy than the one that reads it."""


class Saved(NamedTuple):
  """What a run goes on from; `rollout` is the next one to train on.

  progress: plain values (JSON), the run's own.
  pending: rollouts from that one on which are played already.
  """

  rollout: int
  state: train_step.TrainState
  curriculum: curriculum_lib.CurriculumState
  progress: dict[str, Any]
  pending: pending_lib.Pending | None = None


def validate(config: config_lib.CheckpointConfig) -> None:
  """Refuses weights that cannot be exported.

  Raises:
    ValueError: what was found, what was expected.
  """
  if config.export_dtype not in tensor_files.SAVED:
    raise ValueError(
      f"checkpoint.export_dtype: found {config.export_dtype!r}, expected one "
      f"of {', '.join(tensor_files.SAVED)}."
    )


def quality(
  metrics: Mapping[str, float], *, config: config_lib.CheckpointConfig
) -> float:
  """Returns what `keep_best` compares, or 0 if it keeps nothing.

  A value that is missing or not finite is the worst: a rollout whose episodes
  all failed has no reward of its searches.

  Args:
    metrics: of one rollout.
    config: `best_metric` names one of them.
  """
  if not config.keep_best:
    return 0.0
  value = float(metrics.get(config.best_metric, math.nan))
  return value if math.isfinite(value) else -math.inf


class Checkpoints:
  """The checkpoints of one run; use as a context manager.

  Opening removes what a killed save left over and verifies every checkpoint.
  Damaged ones are reported and moved to `damaged/`, so that the run can save
  them again; the newest one stays there, until a save needs its room.

  Args:
    folder: of the checkpoints; made if it is not there.
    config: the run's; `config.checkpoint` says what is kept.
    clock: seconds.

  Raises:
    DamagedError: there are checkpoints and none is sound.
  """

  def __init__(
    self,
    folder: str | pathlib.Path,
    *,
    config: config_lib.ExperimentConfig,
    clock: Callable[[], float] = time.monotonic,
  ):
    self._clock, self._began = clock, 0.0
    self._folder = pathlib.Path(folder).absolute()
    self._config = config
    self._rollout = 0
    self._listed: manifest.Entries = {}
    processes.by_first(lambda: _tidy(self._folder))
    keep, quality_of = config.checkpoint, operator.itemgetter("quality")
    policies = ocp.checkpoint_managers
    self._manager = ocp.CheckpointManager(
      self._folder,
      options=ocp.CheckpointManagerOptions(
        best_fn=quality_of,
        preservation_policy=policies.AnyPreservationPolicy(
          [
            policies.LatestN(keep.keep_last),
            policies.BestN(get_metric_fn=quality_of, n=keep.keep_best),
          ]
        ),
        async_options=ocp.AsyncOptions(post_finalization_callback=self._seal),
      ),
    )

  def has(self, rollout: int) -> bool:
    """Whether there is one of this rollout, written or being written."""
    return rollout in self._manager.all_steps()

  def save(self, saved: Saved, quality: float) -> None:
    """Writes in the background; the arrays are copied before it returns.

    Args:
      saved: what to write; in several processes, JAX arrays are on a mesh of
        all their devices.
      quality: what `keep_best` compares; the larger, the better.
    """
    self._finish()
    self._rollout, self._began = saved.rollout, self._clock()
    if processes.first():
      damaged.make_room(self._folder, saving.size(saved.state))
    with disk.writing(self._folder / str(saved.rollout)):
      self._manager.save(
        saved.rollout,
        metrics={"quality": quality},
        args=ocp.args.Composite(
          **{
            item: ocp.args.StandardSave(tree)
            for item, tree in _trees(saved).items()
          },
          # Turned into text only in the background.
          progress=ocp.args.JsonSave(copy.deepcopy(saved.progress)),
          **_pending_items(saved.pending),
          config=ocp.args.JsonSave(config_values.to_dict(self._config)),
        ),
        # Without it a checkpoint that is already there would be skipped.
        force=True,
      )

  def restore(self, like: Saved) -> Saved | None:
    """The newest checkpoint; None without one.

    Args:
      like: state and curriculum of the shapes, types and shardings to restore
        to (arrays or `jax.ShapeDtypeStruct`); the rest is not looked at.

    Raises:
      MismatchError: the checkpoint holds arrays of other names or shapes.
    """
    found = processes.by_first(lambda: rollouts(self._folder))
    if not found:
      return None
    trees = {
      item: read(self._folder, found[-1], item, tree)
      for item, tree in _trees(like).items()
    }
    return Saved(
      found[-1],
      train_step.TrainState(
        trees["params"], **trees["optimizer"], critic=trees.get("critic")
      ),
      trees["curriculum"],
      read_json(self._folder, found[-1], "progress"),
      _read_pending(self._folder / str(found[-1])),
    )

  def __enter__(self) -> Checkpoints:
    return self

  def __exit__(self, failure: type | None = None, *unused) -> None:
    if failure is not None and jax.process_count() > 1:
      return  # The others may never come; Orbax would wait for them.
    try:
      self._finish()
    finally:
      self._manager.close()

  def _seal(self) -> None:
    """Writes the manifest; Orbax calls it on process 0 before the rename."""
    self._listed = manifest.write(
      self._folder / f"{self._rollout}{_TEMPORARY}", late=_LATE
    )
    size = sum(entry["bytes"] for entry in self._listed.values())
    took = self._clock() - self._began
    saving.write(self._folder, saving.Save(size, took))

  def _finish(self) -> None:
    """Waits for the save under way and lists what its rename added."""
    with disk.writing(folder := self._folder / str(self._rollout)):
      self._manager.wait_until_finished()
      if self._listed:
        manifest.write(folder, self._listed)
        self._listed = {}


def rollouts(folder: str | pathlib.Path) -> list[int]:
  """The checkpoints of a folder, sound or not, the newest last."""
  return sorted(
    int(path.name)
    for path in pathlib.Path(folder).glob("[0-9]*")
    if path.name.isdigit()
  )


def sound(folder: str | pathlib.Path, rollout: int | None = None) -> int:
  """Finds a checkpoint that is as it was written, and reports those passed.

  Args:
    folder: of the checkpoints.
    rollout: the only one that will do; None is the newest sound one.

  Raises:
    FileNotFoundError: there is no such checkpoint.
    DamagedError: it is damaged, or all are.
  """
  found = rollouts(folder)
  wanted = [r for r in found if rollout in (None, r)]
  if not wanted:
    raise FileNotFoundError(
      f"{folder}: found checkpoints {found}, expected "
      f"{'one' if rollout is None else rollout}."
    )
  damages = []
  for candidate in reversed(wanted):
    damage = _damage(folder, candidate)
    if not damage:
      return candidate
    damages.append(damage)
    logging.warning("A damaged checkpoint is passed over: %s", damage)
  raise DamagedError(f"No checkpoint to read is sound: {' '.join(damages)}")


def read(folder: str | pathlib.Path, rollout: int, item: str, like: Any) -> Any:
  """The arrays of one item.

  Args:
    folder: of the checkpoints.
    rollout: one that is `sound`.
    item: `params`, `optimizer`, `curriculum` or `critic`.
    like: its tree; the leaves (arrays or `jax.ShapeDtypeStruct`) give shape,
      type and sharding, which need not be the sharding it was saved with.

  Raises:
    MismatchError: the first array that differs in name, shape or type.
  """
  path = pathlib.Path(folder).absolute() / str(rollout) / item
  metadata = ocp.StandardCheckpointHandler().metadata(path)
  found, expected = _leaves(metadata.tree), _leaves(like)
  for name in [*expected, *found]:
    if found.get(name) != expected.get(name):
      raise MismatchError(
        f"{path}: {name} is {found.get(name, 'not there')}, expected "
        f"{expected.get(name, 'no such array')}; the checkpoint is of another "
        "policy or optimizer."
      )
  with ocp.StandardCheckpointer() as reader:
    return reader.restore(path, like)


def read_json(
  folder: str | pathlib.Path, rollout: int, item: str
) -> dict[str, Any]:
  """The values of one item, `progress` or `config`."""
  path = pathlib.Path(folder).absolute() / str(rollout) / item
  with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as reader:
    return reader.restore(path)


def _trees(saved: Saved) -> dict[str, Any]:
  """The items that are arrays."""
  state = saved.state
  critic = {} if state.critic is None else {"critic": state.critic}
  return {
    "params": state.params,
    "optimizer": {"opt_state": state.opt_state, "step": state.step},
    "curriculum": saved.curriculum,
    **critic,
  }


def _pending_items(
  pending: pending_lib.Pending | None,
) -> dict[str, ocp.args.CheckpointArgs]:
  if pending is None:
    return {}
  items = {"pending": ocp.args.JsonSave(pending.values)}
  # Orbax saves no array without elements.
  if all(x.size for x in pending.tokens.values()):
    items["tokens"] = ocp.args.StandardSave(pending.tokens)
  return items


def _read_pending(folder: pathlib.Path) -> pending_lib.Pending | None:
  if not (folder / "pending").is_dir():
    return None
  tokens = pending_lib.pack(()).tokens
  if (folder / "tokens").is_dir():
    with ocp.StandardCheckpointer() as reader:
      tokens = reader.restore(folder / "tokens")
  values = read_json(folder.parent, int(folder.name), "pending")
  return pending_lib.Pending(values, tokens)


def _leaves(tree: Any) -> dict[str, str]:
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): (
      f"{jnp.dtype(leaf.dtype).name}{list(leaf.shape)}"
    )
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }


def _damage(folder: str | pathlib.Path, rollout: int) -> str:
  return manifest.damage(pathlib.Path(folder) / str(rollout), late=_LATE)


def _tidy(folder: pathlib.Path) -> None:
  """Leaves sound checkpoints only; damaged ones are reported and set aside."""
  for left_over in folder.glob(f"*{_TEMPORARY}*"):
    if left_over.is_dir():
      shutil.rmtree(left_over)
  damages = {r: _damage(folder, r) for r in rollouts(folder)}
  # Nothing moves without a sound one: the next start would see an empty
  # folder and begin anew.
  if damages and all(damages.values()):
    raise DamagedError(
      f"No checkpoint in {folder} is sound: {' '.join(damages.values())} "
      "Bring one back from a copy, or remove the folder to start over."
    )
  for rollout, damage in damages.items():
    if damage:
      damaged.set_aside(folder, rollout, damage)
  damaged.prune(folder, keep=1)
