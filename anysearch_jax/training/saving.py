"""When a run saves by the clock, and how long it takes to stop with a save."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from anysearch_jax.host import disk, json_files

# Of the newest save, in the folder of the checkpoints.
_FILE = "last_save.json"
# Bytes a second that a disk takes where none was measured: a slow network's.
_SPEED = 100e6
# The least that a run may take until its save begins: a first compilation.
_LEAST = 120.0


class Save(NamedTuple):
  """A save that was written: how large it was, and how long that took."""

  bytes: int
  seconds: float


def write(folder: pathlib.Path, save: Save) -> None:
  """Notes the newest save of a folder of checkpoints.

  Raises:
    disk.DiskError: the disk takes no more.
  """
  disk.write_whole(folder / _FILE, json.dumps(save._asdict()) + "\n")


def read(folder: pathlib.Path) -> Save | None:
  """The newest save of a folder of checkpoints; None before the first."""
  try:
    values = json_files.read(folder / _FILE)
    return Save(int(values["bytes"]), float(values["seconds"]))
  except (OSError, ValueError, LookupError, TypeError):
    return None


def size(state: Any) -> int:
  """The bytes of a state's arrays, over all devices and processes."""
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))


def stop_seconds(
  size: int, *, last: Save | None, longest_rollout: float
) -> float:
  """The seconds that a stop may take until its checkpoint is written.

  A stop waits for the optimizer step under way, and for rollouts that only the
  weights of the moment can sample; both take less than a rollout. Times vary,
  so twice the expected ones are granted.

  Args:
    size: bytes of the state.
    last: the newest save; its speed is measured.
    longest_rollout: seconds from one rollout's end to the next.
  """
  speed = last.bytes / max(last.seconds, 1e-3) if last else _SPEED
  return max(_LEAST, 2 * longest_rollout) + 2 * size / max(speed, 1.0)


class Pace:
  """How the rollouts of a run and its saves follow one another in time.

  Args:
    minutes: between saves; 0 asks for none.
    clock: seconds.
  """

  def __init__(self, minutes: float, clock: Callable[[], float]):
    self._every, self._clock = 60 * minutes, clock
    self._began = self._saved = clock()
    self.longest = 0.0

  def rollout(self) -> bool:
    """Notes the end of a rollout; whether it is time for a save."""
    now = self._clock()
    self.longest = max(self.longest, now - self._began)
    self._began = now
    return 0 < self._every <= now - self._saved

  def saved(self) -> None:
    """Notes that a save began."""
    self._saved = self._clock()
