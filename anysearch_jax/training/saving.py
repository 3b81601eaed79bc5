"""Decides when a run saves by the clock, and how long a stop may take."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from anysearch_jax.host import disk, json_files

# Size and duration of the newest save, in the folder of the checkpoints.
_FILE = "last_save.json"
# Bytes a second to assume before the first save: those of a slow network disk.
_SPEED = 100e6
# Least seconds granted until a save begins; a first compilation takes that.
_LEAST = 120.0


class Save(NamedTuple):
  """Size and duration of a completed save."""

  bytes: int
  seconds: float


def write(folder: pathlib.Path, save: Save) -> None:
  """Records the newest save in the folder of the checkpoints.

  Raises:
    disk.DiskError: the disk is full.
  """
  disk.write_whole(folder / _FILE, json.dumps(save._asdict()) + "\n")


def read(folder: pathlib.Path) -> Save | None:
  """Reads the newest save of a folder of checkpoints; None before the first."""
  try:
    values = json_files.read(folder / _FILE)
    return Save(int(values["bytes"]), float(values["seconds"]))
  except (OSError, ValueError, LookupError, TypeError):
    return None


def size(state: Any) -> int:
  """Returns the bytes of a state's arrays, as if they were not sharded."""
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))


def stop_seconds(
  size: int, *, last: Save | None, longest_rollout: float
) -> float:
  """Returns the seconds to allow from a stop until its checkpoint is written.

  A stop waits for the optimizer step in progress, and for rollouts that use
  older weights; both take less than one rollout. Times vary, so the result is
  twice the expected duration.

  Args:
    size: bytes of the state.
    last: the newest save, which gives the disk's speed; None before the first.
    longest_rollout: seconds from one rollout's end to the next.
  """
  speed = last.bytes / max(last.seconds, 1e-3) if last else _SPEED
  return max(_LEAST, 2 * longest_rollout) + 2 * size / max(speed, 1.0)


class Pace:
  """Measures rollouts and decides when a save by the clock is due.

  longest: seconds of the longest rollout so far.

  Args:
    minutes: between saves; 0 disables saves by the clock.
    clock: returns the time in seconds.
  """

  def __init__(self, minutes: float, clock: Callable[[], float]):
    self._every, self._clock = 60 * minutes, clock
    self._began = self._saved = clock()
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
