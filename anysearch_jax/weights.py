"""Parameter trees and safetensors files, by one two-way table.

A row says where a parameter stands in our nested dict, its shape and logical
axes, what the file calls it, and how the file's layout is rearranged:
`ours = file.reshape(split).transpose(perm)`. A row whose name contains
`{layer}` is stacked over layers on its first axis.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import ml_dtypes  # noqa: F401  (gives NumPy the bfloat16 of most files)
import numpy as np
import safetensors
import safetensors.numpy

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


@dataclasses.dataclass(frozen=True)
class Weight:
  """One row of the table.

  Attributes:
    path: keys in the nested parameter dict.
    shape: our shape, the layer axis included where stacked.
    axes: one logical axis name (or None) for each axis of `shape`.
    name: the tensor's name in the file, with `{layer}` where stacked.
    split: what the file's tensor is reshaped to, one layer.
    perm: the transpose after it, one layer.
    file_shape: the tensor's shape in the file, one layer.
    init: standard deviation of a fresh normal value; None means ones,
      0 means zeros.
  """

  path: tuple[str, ...]
  shape: tuple[int, ...]
  axes: tuple[str | None, ...]
  name: str
  split: tuple[int, ...]
  perm: tuple[int, ...]
  file_shape: tuple[int, ...]
  init: float | None

  @property
  def stacked(self) -> bool:
    return "{layer}" in self.name

  def names(self) -> list[str]:
    """The tensors of the file that this row holds, in layer order."""
    if not self.stacked:
      return [self.name]
    return [self.name.format(layer=i) for i in range(self.shape[0])]

  def from_file(self, tensor: np.ndarray) -> np.ndarray:
    return tensor.reshape(self.split).transpose(self.perm)

  def to_file(self, ours: np.ndarray) -> np.ndarray:
    inverse = np.argsort(self.perm)
    return np.ascontiguousarray(
      ours.transpose(inverse).reshape(self.file_shape)
    )


def tree(rows: Sequence[Weight], leaf: Callable[[Weight], object]) -> dict:
  """The nested dict with `leaf(row)` at each row's path."""
  out: dict = {}
  for row in rows:
    node = out
    for key in row.path[:-1]:
      node = node.setdefault(key, {})
    node[row.path[-1]] = leaf(row)
  return out


def get(params: Mapping, path: Sequence[str]):
  """The leaf at `path`."""
  for key in path:
    params = params[key]
  return params


def initialize(rows: Sequence[Weight], seed: int) -> dict:
  """Fresh float32 parameters, deterministic by seed."""
  rng = np.random.Generator(np.random.PCG64(seed))

  def leaf(row: Weight) -> np.ndarray:
    if row.init is None:
      return np.ones(row.shape, np.float32)
    return (rng.standard_normal(row.shape) * row.init).astype(np.float32)

  return tree(rows, leaf)


def load(
  folder: str | pathlib.Path,
  rows: Sequence[Weight],
  *,
  ignored: Sequence[str] = (),
) -> dict:
  """Reads a folder's safetensors into a nested dict of float32 arrays.

  Args:
    folder: holds `model.safetensors`, or shards with their index.
    rows: the table; every tensor of the files must be in it.
    ignored: names that may be there and are not read.

  Raises:
    ValueError: a missing, unknown or misshaped tensor, by name.
  """
  folder = pathlib.Path(folder)
  files = _files(folder)
  found: dict[str, pathlib.Path] = {}
  for path in files:
    with safetensors.safe_open(path, framework="numpy") as handle:
      for name in handle.keys():
        if name in found:
          raise ValueError(
            f"{folder}: tensor {name!r} stands in {found[name].name} and in "
            f"{path.name}; expected it once."
          )
        found[name] = path
  wanted = {name for row in rows for name in row.names()}
  missing = sorted(wanted - set(found))
  unknown = sorted(set(found) - wanted - set(ignored))
  if missing or unknown:
    kind, names = ("lacks", missing) if missing else ("has unknown", unknown)
    raise ValueError(
      f"{folder}: {kind} tensor {names[0]!r} ({len(names)} in all); the "
      "config.json beside it does not describe these weights."
    )
  handles = {
    path: safetensors.safe_open(path, framework="numpy") for path in files
  }

  def read(row: Weight, name: str) -> np.ndarray:
    tensor = handles[found[name]].get_tensor(name)
    if tensor.shape != row.file_shape:
      raise ValueError(
        f"{folder}: tensor {name!r} has shape {tensor.shape}, expected "
        f"{row.file_shape}."
      )
    return row.from_file(tensor.astype(np.float32))

  def leaf(row: Weight) -> np.ndarray:
    parts = [read(row, name) for name in row.names()]
    return np.stack(parts) if row.stacked else parts[0]

  return tree(rows, leaf)


def save(
  path: str | pathlib.Path,
  params: Mapping,
  rows: Sequence[Weight],
  *,
  dtype: np.dtype | type = np.float32,
) -> None:
  """Writes one safetensors file in the table's names, beside and renamed."""
  path = pathlib.Path(path)
  beside = path.with_name(path.name + ".writing")
  safetensors.numpy.save_file(
    dict(_tensors(params, rows, dtype)), beside, metadata={"format": "pt"}
  )
  beside.rename(path)


def _tensors(
  params: Mapping, rows: Sequence[Weight], dtype: np.dtype | type
) -> Iterator[tuple[str, np.ndarray]]:
  for row in rows:
    ours = np.asarray(get(params, row.path))
    for i, name in enumerate(row.names()):
      yield name, row.to_file(ours[i] if row.stacked else ours).astype(dtype)


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
  """The folder's safetensors files, each of which exists."""
  if (folder / INDEX_NAME).is_file():
    index = json.loads((folder / INDEX_NAME).read_text())
    files = [
      folder / name for name in sorted(set(index["weight_map"].values()))
    ]
  else:
    files = [folder / SINGLE_NAME]
  for path in files:
    if not path.is_file():
      raise ValueError(
        f"{path}: no such file; expected {SINGLE_NAME} or shards with "
        f"{INDEX_NAME}."
      )
  return files
