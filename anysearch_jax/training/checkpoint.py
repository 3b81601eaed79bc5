"""Checkpoints of a run, with a manifest that detects damage.

A checkpoint is a folder named by the rollout to train on next. Before Orbax
renames it into place it gets a manifest of its files, because Orbax restores
flipped bits without an error and accepts a truncated checkpoint as the latest.
Its items:

    params       the policy's trained arrays, apart for exports
    critic       the critic's, if there is one
    optimizer    optimizer state and number of steps taken
    curriculum   windows, counts, step, key
    progress     JSON: rollout, seed, position in the questions, counters
    pending      JSON: rollouts that were played and not trained on, if any
    tokens       their tokens
    config       JSON: the whole configuration
    metrics      JSON: the quality that `keep_best` compares

A run owns its checkpoints through `Checkpoints`. Other readers find one with
`sound` and load items with `read` and `read_json`, which never modify it. The
processes of one run share the folder and make the same calls: each writes and
reads the shards of its devices, and the first does everything else.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import json
import math
import operator
import pathlib
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from absl import logging

from anysearch_jax import config as config_lib
from anysearch_jax.algorithms import curriculum as curriculum_lib
from anysearch_jax.host import disk, json_files, processes
from anysearch_jax.training import collection, train_step

MANIFEST = "manifest.json"
# Orbax writes these at the rename, after the manifest, so they are not in it.
# They hold times, and no restore reads them.
LATE = ("_CHECKPOINT_METADATA", "commit_success.txt")
# Size and duration of the newest save, in the folder of the checkpoints.
_LAST_SAVE = "last_save.json"
# Bytes a second to assume before the first save: those of a slow network disk.
_SPEED = 100e6
# Least seconds granted until a save begins.
_LEAST_WAIT = 120.0
# The same before the first step, which may be compiling for minutes; a run that
# is killed then loses little.
_LEAST_WAIT_AT_FIRST = 20.0
_DAMAGED = "damaged"
_TEMPORARY = ocp.path.atomicity_types.TMP_DIR_SUFFIX


class DamagedError(RuntimeError):
  """All usable checkpoints differ from what was written."""


class MismatchError(ValueError):
  """A checkpoint belongs to another run or policy than its reader."""


class Saved(NamedTuple):
  """The state from which a run resumes.

  Attributes:
    rollout: the next one to train on, or the one in training.
    state: the training state.
    curriculum: the state of the curriculum before that rollout.
    progress: plain values (JSON) of the run.
    pending: rollouts from `rollout` on that are already played.
  """

  rollout: int
  state: train_step.TrainState
  curriculum: curriculum_lib.CurriculumState
  progress: dict[str, Any]
  pending: collection.StoredRollouts | None = None

  @property
  def trees(self) -> dict[str, Any]:
    """The items that are trees of arrays."""
    params, opt_state, step, critic = self.state
    trees = {
      "params": params,
      "optimizer": {"opt_state": opt_state, "step": step},
      "curriculum": self.curriculum,
    }
    if critic is not None:
      trees["critic"] = critic
    return trees


def quality(
  metrics: Mapping[str, float], *, config: config_lib.CheckpointConfig
) -> float:
  """Returns the value that `keep_best` compares, or 0 if `keep_best` is 0.

  A missing or non-finite metric is the worst value: a rollout whose episodes
  all failed has no reward of its searches.
  """
  if not config.keep_best:
    return 0.0
  value = float(metrics.get(config.best_metric, math.nan))
  return value if math.isfinite(value) else -math.inf


class Checkpoints(contextlib.AbstractContextManager["Checkpoints"]):
  """The checkpoints of one run in `folder`; use as a context manager.

  Opening creates the folder, removes leftovers of a killed save and verifies
  every checkpoint. Damaged ones are reported and moved to `damaged/`, which
  keeps one of them, so that the run can save them again.

  Args:
    folder: of the checkpoints.
    config: the run's configuration as plain values, which every checkpoint
      stores.
    keep: says which checkpoints are kept.
    clock: returns the time in seconds.

  Raises:
    DamagedError: there are checkpoints, and all are damaged.
  """

  def __init__(
    self,
    folder: str | pathlib.Path,
    *,
    config: Mapping[str, Any],
    keep: config_lib.CheckpointConfig,
    clock: Callable[[], float] = time.monotonic,
  ):
    self._clock = clock
    self._began = 0.0
    self.folder = pathlib.Path(folder).absolute()
    self._config = config
    self._rollout = 0
    processes.on_main(lambda: _tidy(self.folder))
    quality_of = operator.itemgetter("quality")
    policies = ocp.checkpoint_managers
    preservation = policies.AnyPreservationPolicy(
      [
        policies.LatestN(keep.keep_last),
        policies.BestN(get_metric_fn=quality_of, n=keep.keep_best),
      ]
    )
    options = ocp.CheckpointManagerOptions(
      best_fn=quality_of,
      preservation_policy=preservation,
      async_options=ocp.AsyncOptions(post_finalization_callback=self._seal),
    )
    self._manager = ocp.CheckpointManager(self.folder, options=options)

  def has(self, rollout: int) -> bool:
    """Returns whether a rollout has a checkpoint, complete or in progress."""
    return rollout in self._manager.all_steps()

  def save(self, saved: Saved, quality: float) -> None:
    """Saves in the background; the arrays are copied before this returns.

    With several processes, the arrays are on a mesh of all their devices.

    Args:
      saved: the state.
      quality: the value that `keep_best` compares; larger is better.
    """
    self._finish()
    self._rollout = saved.rollout
    self._began = self._clock()
    trees = dict(saved.trees)
    # A copy, because Orbax serializes it later, in the background.
    values = {"progress": copy.deepcopy(saved.progress), "config": self._config}
    if saved.pending is not None:
      values["pending"] = saved.pending.values
      # Orbax cannot save an array without elements.
      if all(x.size for x in saved.pending.tokens.values()):
        trees["tokens"] = saved.pending.tokens
    with disk.translate_errors(self.folder / str(saved.rollout)):
      self._manager.save(
        saved.rollout,
        metrics={"quality": quality},
        args=ocp.args.Composite(
          **{name: ocp.args.StandardSave(tree) for name, tree in trees.items()},
          **{name: ocp.args.JsonSave(value) for name, value in values.items()},
        ),
        # Otherwise Orbax skips a save that is not newer than the last one; with
        # `force` it raises for a checkpoint that exists.
        force=True,
      )

  def restore(self, rollout: int, like: Saved) -> Saved:
    """Restores a checkpoint.

    Args:
      rollout: number of the checkpoint.
      like: its state and curriculum (arrays or `jax.ShapeDtypeStruct`) have the
        shapes, dtypes and shardings to restore to; the rest is ignored.

    Raises:
      MismatchError: as `read`.
    """
    folder = self.folder / str(rollout)
    trees = {
      item: read(self.folder, rollout, item, tree)
      for item, tree in like.trees.items()
    }
    pending = None
    if (folder / "pending").is_dir():
      tokens = collection.serialize(()).tokens
      if (folder / "tokens").is_dir():
        with ocp.StandardCheckpointer() as reader:
          tokens = reader.restore(folder / "tokens")
      values = read_json(self.folder, rollout, "pending")
      pending = collection.StoredRollouts(values, tokens)
    state = train_step.TrainState(
      trees["params"], **trees["optimizer"], critic=trees.get("critic")
    )
    return Saved(
      rollout=rollout,
      state=state,
      curriculum=trees["curriculum"],
      progress=read_json(self.folder, rollout, "progress"),
      pending=pending,
    )

  def __exit__(self, failure: type | None = None, *unused) -> None:
    if failure is not None and jax.process_count() > 1:
      return  # Other processes may never get here; Orbax would wait for them.
    try:
      self._finish()
    finally:
      self._manager.close()

  def _seal(self) -> None:
    """Writes the manifest; Orbax calls this on process 0 before the rename."""
    listed = write_manifest(self.folder / f"{self._rollout}{_TEMPORARY}")
    save = {
      "bytes": sum(entry["bytes"] for entry in listed.values()),
      "seconds": self._clock() - self._began,
    }
    disk.write_whole(self.folder / _LAST_SAVE, json.dumps(save) + "\n")

  def _finish(self) -> None:
    """Waits for the save in progress."""
    with disk.translate_errors(self.folder / str(self._rollout)):
      self._manager.wait_until_finished()


def rollouts(folder: str | pathlib.Path) -> list[int]:
  """Returns the checkpoints of a folder, damaged or not, the newest last."""
  return sorted(
    int(path.name)
    for path in pathlib.Path(folder).glob("[0-9]*")
    if path.name.isdigit()
  )


def sound(folder: str | pathlib.Path, rollout: int | None = None) -> int:
  """Returns the newest undamaged checkpoint, and logs the damaged ones before.

  Args:
    folder: of the checkpoints.
    rollout: the only acceptable one; None accepts any.

  Raises:
    FileNotFoundError: there is no acceptable checkpoint.
    DamagedError: all of them are damaged.
  """
  saved = rollouts(folder)
  candidates = [r for r in saved if rollout in (None, r)]
  if not candidates:
    raise FileNotFoundError(
      f"{folder}: found checkpoints {saved}, expected "
      f"{'one' if rollout is None else rollout}."
    )
  damages = []
  for candidate in reversed(candidates):
    damage = find_damage(pathlib.Path(folder) / str(candidate))
    if not damage:
      return candidate
    damages.append(damage)
    logging.warning("Skipping a damaged checkpoint: %s", damage)
  raise DamagedError(
    f"{folder}: every usable checkpoint is damaged: {' '.join(damages)} "
    "Restore one from a backup."
  )


def read(folder: str | pathlib.Path, rollout: int, item: str, like: Any) -> Any:
  """Reads the arrays of one item of a sound checkpoint.

  Args:
    folder: of the checkpoints.
    rollout: number of the checkpoint.
    item: `params`, `optimizer`, `curriculum` or `critic`.
    like: its tree; the leaves (arrays or `jax.ShapeDtypeStruct`) give shape,
      dtype and sharding, which may differ from that at saving.

  Raises:
    MismatchError: an array differs in name, shape or dtype; names the first.
  """
  path = pathlib.Path(folder).absolute() / str(rollout) / item
  metadata = ocp.StandardCheckpointHandler().metadata(path)
  stored = _leaves(metadata.tree)
  expected = _leaves(like)
  for name in [*expected, *stored]:
    if stored.get(name) != expected.get(name):
      raise MismatchError(
        f"{path}: {name}: found {stored.get(name, 'no array')}, expected "
        f"{expected.get(name, 'no array')}; the checkpoint belongs to another "
        "policy or optimizer."
      )
  with ocp.StandardCheckpointer() as reader:
    return reader.restore(path, like)


def read_json(
  folder: str | pathlib.Path, rollout: int, item: str
) -> dict[str, Any]:
  """Reads the values of one JSON item of a checkpoint.

  Args:
    folder: of the checkpoints.
    rollout: number of the checkpoint.
    item: `progress`, `config` or `pending`.
  """
  path = pathlib.Path(folder).absolute() / str(rollout) / item
  with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as reader:
    return reader.restore(path)


def _leaves(tree: Any) -> dict[str, str]:
  """Returns dtype and shape of each array in words, by its path."""
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): (
      f"{jnp.dtype(leaf.dtype).name}{list(leaf.shape)}"
    )
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }


# Path in the folder -> {"bytes": size, "sha256": hexadecimal digest}.
Entries = dict[str, dict[str, Any]]


def write_manifest(folder: pathlib.Path) -> Entries:
  """Lists the files of a folder in its `manifest.json`; returns the list."""
  entries = _entries(folder, _names(folder))
  text = json.dumps(entries, indent=1, sort_keys=True) + "\n"
  disk.write_whole(folder / MANIFEST, text)
  return entries


def find_damage(folder: pathlib.Path) -> str:
  """Returns a sentence on the first difference of a folder from its manifest.

  It is "" if every file is as listed.
  """
  try:
    listed = dict(json.loads((folder / MANIFEST).read_bytes()))
  except FileNotFoundError:
    return f"{folder} has no {MANIFEST}."
  except (OSError, ValueError, TypeError) as error:
    return f"{folder / MANIFEST} cannot be read: {error}."
  names = _names(folder)
  if lacking := sorted(listed.keys() - names):
    return f"{folder} lacks {lacking[0]} ({len(lacking)} files in all)."
  if unlisted := sorted(names - listed.keys()):
    return f"{folder} has {unlisted[0]}, which its manifest does not list."
  try:
    entries = _entries(folder, listed)
  except OSError as error:
    return f"{folder} cannot be read: {error}."
  for name, entry in entries.items():
    if entry != listed[name]:
      return f"{folder / name} is {entry}; its manifest says {listed[name]}."
  return ""


def _names(folder: pathlib.Path) -> set[str]:
  """Returns the paths of the files that a manifest lists."""
  return {
    path.relative_to(folder).as_posix()
    for path in folder.rglob("*")
    if path.is_file()
  } - {MANIFEST, MANIFEST + disk.SUFFIX, *LATE}


def _entries(folder: pathlib.Path, names: Collection[str]) -> Entries:
  """Returns size and digest of each file."""
  paths = (folder / name for name in names)
  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    return dict(zip(names, pool.map(disk.fingerprint, paths)))


def _tidy(folder: pathlib.Path) -> None:
  """Removes leftovers of killed saves, and sets damaged checkpoints aside."""
  for left_over in folder.glob(f"*{_TEMPORARY}*"):
    if left_over.is_dir():
      shutil.rmtree(left_over)
  damages = {r: find_damage(folder / str(r)) for r in rollouts(folder)}
  # If all are damaged, move none: the next start would find an empty folder and
  # train from the beginning.
  if damages and all(damages.values()):
    raise DamagedError(
      f"{folder}: every checkpoint is damaged: {' '.join(damages.values())} "
      "Restore one from a backup, or remove the folder to start over."
    )
  for rollout, damage in damages.items():
    if damage:
      # Keep only one, because a checkpoint may fill a disk.
      aside = folder / _DAMAGED
      shutil.rmtree(aside, ignore_errors=True)
      aside.mkdir()
      (folder / str(rollout)).rename(aside / str(rollout))
      logging.warning(
        "Moved a damaged checkpoint to %s; it is not used: %s",
        aside / str(rollout),
        damage,
      )


def stop_seconds(
  folder: pathlib.Path, size: int, *, longest_rollout: float, stepped: bool
) -> float:
  """Returns the seconds to allow from a stop until its checkpoint is written.

  A stop waits for the optimizer step in progress, and for rollouts that use
  older weights, less than one rollout. The result is twice the expected
  duration.

  Args:
    folder: of the checkpoints; its newest save gives the disk's speed.
    size: bytes of the state.
    longest_rollout: seconds of the longest rollout so far.
    stepped: whether an optimizer step was taken.
  """
  try:
    last = json_files.read(folder / _LAST_SAVE)
    speed = float(last["bytes"]) / max(float(last["seconds"]), 1e-3)
  except (OSError, ValueError, LookupError, TypeError):
    speed = _SPEED
  least = _LEAST_WAIT if stepped else _LEAST_WAIT_AT_FIRST
  return max(least, 2 * longest_rollout) + 2 * size / max(speed, 1.0)


class Pace:
  """Measures rollouts and decides when a save by the clock is due.

  Attributes:
    longest: seconds of the longest rollout so far.

  Args:
    minutes: time between saves; 0 disables them.
    clock: returns the time in seconds.
  """

  def __init__(self, minutes: float, clock: Callable[[], float]):
    self._every = 60 * minutes
    self._clock = clock
    self._began = clock()
    self._saved = self._began
    self.longest = 0.0

  def rollout(self) -> bool:
    """Records the end of a rollout; returns whether a save is due."""
    now = self._clock()
    self.longest = max(self.longest, now - self._began)
    self._began = now
    return 0 < self._every <= now - self._saved

  def saved(self) -> None:
    """Records that a save began."""
    self._saved = self._clock()
