"""Damaged checkpoints: kept for a look, and removed before they pile up."""

from __future__ import annotations

import pathlib
import shutil

from absl import logging

_NAME = "damaged"


def set_aside(folder: pathlib.Path, rollout: int, damage: str) -> None:
  """Moves a checkpoint of a folder to its `damaged/`.

  Args:
    folder: of the checkpoints.
    rollout: names the checkpoint.
    damage: what is wrong with it, for the log.
  """
  aside = _free(folder / _NAME / str(rollout))
  aside.parent.mkdir(exist_ok=True)
  (folder / str(rollout)).rename(aside)
  logging.warning(
    "A damaged checkpoint is moved to %s and not used: %s", aside, damage
  )


def prune(folder: pathlib.Path, *, keep: int) -> None:
  """Removes all but the newest damaged checkpoints of a folder.

  Args:
    folder: of the checkpoints.
    keep: how many stay.
  """
  found = [path for path in (folder / _NAME).glob("*") if path.is_dir()]
  # The status changes when a folder is moved here; its content keeps its times.
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
  """Removes all damaged checkpoints where a save needs their room.

  Args:
    folder: of the checkpoints.
    size: bytes of the save.
  """
  if shutil.disk_usage(folder).free < size:
    prune(folder, keep=0)


def _free(path: pathlib.Path) -> pathlib.Path:
  """`path`, or the first of `path.1`, `path.2`, ... that is not there."""
  number, free = 0, path
  while free.exists():
    number += 1
    free = path.with_name(f"{path.name}.{number}")
  return free
