"""The file that holds where a fit is, from which it resumes after a kill."""

from __future__ import annotations

import pathlib
from typing import NamedTuple

import jax
import numpy as np
import safetensors
from safetensors import numpy as safetensors_numpy

from anysearch_jax.host import disk
from anysearch_jax.training import train_step


class Position(NamedTuple):
  """Where a fit is.

  Attributes:
    state: parameters, optimizer state and steps applied.
    steps: number of steps taken.
    consumed: number of demonstrations that these steps used.
  """

  state: train_step.TrainState
  steps: int
  consumed: int


def save(path: pathlib.Path, position: Position) -> None:
  """Replaces the file at once: a kill leaves the old one or the new one.

  Raises:
    disk.DiskError: the disk is full or broken.
  """
  arrays = {
    name: np.asarray(leaf) for name, leaf in _leaves(position.state).items()
  }
  with disk.replacing(path) as beside:
    safetensors_numpy.save_file(
      arrays,
      beside,
      metadata={
        "steps": str(position.steps),
        "consumed": str(position.consumed),
      },
    )


def load(path: pathlib.Path, like: train_step.TrainState) -> Position | None:
  """Returns the saved position, bit for bit; None if nothing was saved.

  Args:
    path: of the file.
    like: a state with the same arrays, such as the one before the first step.

  Raises:
    ValueError: the file is damaged, or its arrays are those of another policy.
  """
  if not path.is_file():
    return None
  try:
    with safetensors.safe_open(path, framework="numpy") as file:
      said = file.metadata()
      found = {name: file.get_tensor(name) for name in file.keys()}
  except safetensors.SafetensorError as error:
    raise ValueError(
      f"{path}: not a whole safetensors file ({error}); remove it to begin "
      "anew."
    ) from error
  expected = _leaves(like)
  if _shapes(found) != _shapes(expected):
    raise ValueError(
      f"{path}: found the arrays of another policy or optimizer, expected "
      f"{len(expected)} arrays of this one; remove it to begin anew."
    )
  leaves = [jax.device_put(found[name]) for name in expected]
  state = jax.tree.unflatten(jax.tree.structure(like), leaves)
  return Position(state, int(said["steps"]), int(said["consumed"]))


def _leaves(state: train_step.TrainState) -> dict[str, jax.Array]:
  """Returns the arrays of a state by their paths, in the order of its tree."""
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(state)
  }


def _shapes(arrays: dict) -> dict[str, tuple]:
  return {name: (a.shape, np.dtype(a.dtype)) for name, a in arrays.items()}
