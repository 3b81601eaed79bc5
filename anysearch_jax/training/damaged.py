"""Keeps damaged checkpoints for inspection, and removes the older ones."""

from __future__ import annotations

import pathlib
import shutil

from absl import logging

_NAME = "damaged"


def set_aside(folder: pathlib.Path, rollout: int, damage: str) -> None:
  """Moves a checkpoint to the subfolder `damaged/`.

  Args:
    folder: of the checkpoints.
    rollout: number of the checkpoint.
    damage: describes the damage, for the log.
  """
  aside = _free(folder / _NAME / str(rollout))
  aside.parent.mkdir(exist_ok=True)
  (folder / str(rollout)).rename(aside)
  logging.warning(
    "Moved a damaged checkpoint to %s; it is not used: %s", aside, damage
  )


def prune(folder: pathlib.Path, *, keep: int) -> None:
  """Removes all but the newest damaged checkpoints of a folder.

  Args:
    folder: of the checkpoints.
    keep: number of damaged checkpoints to keep.
  """
  found = [path for path in (folder / _NAME).glob("*") if path.is_dir()]
  # The move to this folder sets ctime; mtime is from before the move.
  newest = sorted(found, key=lambda path: path.stat().st_ctime_ns, reverse=True)
  for path in newest[keep:]:
    shutil.rmtree(path)
  if removed := len(newest[keep:]):
    logging.warning(
      "Removed %d damaged checkpoints of %s, kept %d.",
      removed,
      folder / _NAME,
      min(keep, len(found)),
    )


def make_room(folder: pathlib.Path, size: int) -> None:
  """Removes all damaged checkpoints if a save needs their disk space.

  Args:
    folder: of the checkpoints.
    size: bytes of the save.
  """
  if shutil.disk_usage(folder).free < size:
    prune(folder, keep=0)


def _free(path: pathlib.Path) -> pathlib.Path:
  """Returns the first of `path`, `path.1`, `path.2`, ... that is missing."""
  number, free = 0, path
  while free.exists():
    number += 1
    free = path.with_name(f"{path.name}.{number}")
  return free
