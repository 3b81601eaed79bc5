"""The parameter table: one row describes everything about a weight.

A row has the parameter's path in our nested dict, its shape and logical axes,
its name in a checkpoint file, and how the file's layout is rearranged:
`ours = file.reshape(split).transpose(perm)`. A row whose name contains
`{layer}` is stacked over layers on its first axis, and one with `{expert}` over
experts on its second. Initial values, shardings, loading and export all follow
from the rows.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

# One slice per axis, with start and stop.
Block = tuple[slice, ...]
# The mesh axes that an axis is sharded over.
Over = str | tuple[str, ...] | None
# Maps logical axes to mesh axes.
Rules = Mapping[str, Over]


@dataclasses.dataclass(frozen=True)
class Weight:
  """One row of the table.

  Attributes:
    path: keys in the nested parameter dict.
    shape: our shape, including the axes of stacked rows.
    axes: one logical axis name (or None) for each axis of `shape`.
    name: the tensor's name in the file; contains `{layer}` if stacked, and
      `{expert}` if an expert is a tensor.
    split: shape to which one tensor of the file is reshaped.
    perm: the transpose after `split`.
    file_shape: shape of one tensor in the file.
    init: standard deviation of the normal initial value, 0 means zeros; None
      means a norm's scale.
    scale: the initial value of a norm's scale.
  """

  path: tuple[str, ...]
  shape: tuple[int, ...]
  axes: tuple[str | None, ...]
  name: str
  split: tuple[int, ...]
  perm: tuple[int, ...]
  file_shape: tuple[int, ...]
  init: float | None
  scale: float = 1.0

  @property
  def stacked(self) -> bool:
    """Whether the layers are stacked on the first axis of `shape`."""
    return "{layer}" in self.name

  @property
  def stack(self) -> tuple[int, ...]:
    """The sizes of the axes over layers and experts, which files lack."""
    axes = [key for key in ("{layer}", "{expert}") if key in self.name]
    return self.shape[: len(axes)]

  @property
  def layer_shape(self) -> tuple[int, ...]:
    """Our shape of one layer, or of the whole array if it is not stacked."""
    return self.shape[1:] if self.stacked else self.shape

  @property
  def tensor_shape(self) -> tuple[int, ...]:
    """Our shape of one tensor of the file."""
    return self.shape[len(self.stack) :]

  def tensor_names(self) -> list[str]:
    """Returns the names of this row's tensors in the file, layer by layer."""
    return [self.tensor_name(i) for i in np.ndindex(*self.stack)]

  def tensor_name(self, i: Sequence[int]) -> str:
    """Returns the name of the tensor at an index of `stack`."""
    return self.name.format(**dict(zip(("layer", "expert"), i, strict=False)))

  def from_file(self, tensor: np.ndarray) -> np.ndarray:
    """Rearranges one tensor of the file to our layout."""
    return tensor.reshape(self.split).transpose(self.perm)

  def to_file(self, array):
    """Rearranges one layer (NumPy or JAX) to the file's layout."""
    inverse = tuple(int(i) for i in np.argsort(self.perm))
    return array.transpose(inverse).reshape(self.file_shape)

  def read_block(
    self, block: Block, read: Callable[[Block], np.ndarray]
  ) -> np.ndarray:
    """Reads a block of one layer, in our layout, from the file's tensor.

    One axis of the file may consist of several of ours, such as heads and
    head_dim. A block of the outermost of them is contiguous in the file; for
    any other, the whole file axis is read and then sliced.

    Args:
      block: a block of `tensor_shape`.
      read: returns a block of the file's tensor.

    Returns:
      A view of the array that `read` returned.
    """
    # The block by the axes of `split`, which are in the file's order.
    slices = [block[self.perm.index(j)] for j in range(len(self.perm))]
    shape = list(self.split)
    file_slices = []
    axis = 0
    for size in self.file_shape:
      # The axes of `split` from `first` to `axis` make up this file axis.
      first = axis
      product = 1
      while product < size:
        product *= self.split[axis]
        axis += 1
      outer = next((j for j in range(first, axis) if self.split[j] > 1), None)
      if outer is None:
        file_slices.append(slice(0, size))
        continue
      width = size // self.split[outer]
      cut = slices[outer]
      file_slices.append(slice(cut.start * width, cut.stop * width))
      shape[outer] = cut.stop - cut.start
      slices[outer] = slice(None)
    array = read(tuple(file_slices)).reshape(shape)
    return array[tuple(slices)].transpose(self.perm)


def tree(rows: Sequence[Weight], leaf: Callable[[Weight], Any]) -> dict:
  """Returns the nested dict with `leaf(row)` at each row's path."""
  out: dict = {}
  for row in rows:
    node = out
    for key in row.path[:-1]:
      node = node.setdefault(key, {})
    node[row.path[-1]] = leaf(row)
  return out


def get(params: Mapping, path: Sequence[str]):
  """Returns the leaf at `path`."""
  for key in path:
    params = params[key]
  return params


def layer_slice(params: Mapping, row: Weight, i: Sequence[int | jax.Array]):
  """Returns one layer of a row, in our layout (NumPy or JAX).

  Args:
    params: the nested dict of parameters.
    row: the row.
    i: an index of `row.stack`, or of a layer alone; () if it is not stacked.
  """
  return index(get(params, row.path), i)


def index(array, i: Sequence[int | jax.Array]):
  """Returns `array[i]`; for JAX arrays one compiled program serves all i."""
  if not isinstance(array, jax.Array):
    return array[tuple(i)]
  return _index(array, tuple(i)) if i else array


@jax.jit
def _index(array: jax.Array, i: tuple[jax.Array, ...]) -> jax.Array:
  """Indexes the first axes; `i` is traced, so that a program serves all."""
  for axis_index in i:
    array = jax.lax.dynamic_index_in_dim(array, axis_index, keepdims=False)
  return array


def tensors(
  rows: Sequence[Weight],
) -> Iterator[tuple[str, Weight, tuple[int, ...]]]:
  """Yields (name, row, index of the row's `stack`), layer after layer."""
  for stacked, neighbours in itertools.groupby(rows, lambda row: row.stacked):
    group = list(neighbours)
    for layer in range(group[0].shape[0] if stacked else 1):
      for row in group:
        for expert in np.ndindex(*row.stack[1:]):
          i = (layer, *expert) if stacked else ()
          yield row.tensor_name(i), row, i


def count(rows: Sequence[Weight]) -> int:
  """Returns the number of parameters (scalars) in the table."""
  return sum(math.prod(row.shape) for row in rows)


def initialize(rows: Sequence[Weight], seed: int) -> dict:
  """Returns initial float32 parameters, deterministic by seed."""
  rng = np.random.Generator(np.random.PCG64(seed))

  def leaf(row: Weight) -> np.ndarray:
    if row.init is None:
      return np.full(row.shape, row.scale, np.float32)
    return (rng.standard_normal(row.shape) * row.init).astype(np.float32)

  return tree(rows, leaf)


def shardings(
  rows: Sequence[Weight],
  mesh: jax.sharding.Mesh,
  rules: Rules,
) -> dict:
  """Returns the nested dict of each weight's `NamedSharding`.

  Args:
    rows: the table.
    mesh: the mesh of the weights.
    rules: as for `spec`.
  """
  return tree(
    rows,
    lambda row: jax.sharding.NamedSharding(
      mesh, spec(row.shape, row.axes, mesh, rules)
    ),
  )


def spec(
  shape: Sequence[int],
  axes: Sequence[str | None],
  mesh: jax.sharding.Mesh,
  rules: Rules,
) -> jax.P:
  """Returns the partition of an array with these logical axes.

  An axis whose size the mesh axes do not divide is replicated (fewer kv heads
  than tensor parallelism, an odd vocabulary).

  Args:
    shape: the array's.
    axes: the logical axis of each axis, or None.
    mesh: the mesh of the array.
    rules: maps logical axes to mesh axes.
  """
  partition = []
  for axis, size in zip(axes, shape, strict=True):
    over = rules[axis] if axis else None
    shards = math.prod(mesh.shape[name] for name in mesh_axes(over))
    partition.append(over if size % shards == 0 else None)
  return jax.P(*partition)


def mesh_axes(over: Over) -> tuple[str, ...]:
  """Returns the names of mesh axes as a tuple."""
  if over is None:
    return ()
  return (over,) if isinstance(over, str) else over


def abstract(
  rows: Sequence[Weight], shardings: Mapping | None, dtype: Any
) -> dict:
  """Returns the nested dict of `jax.ShapeDtypeStruct`; allocates nothing.

  Args:
    rows: the table.
    shardings: nested dict laid out by the table; None means no shardings.
    dtype: of all weights but the scales of norms, which are float32.
  """

  def leaf(row: Weight) -> jax.ShapeDtypeStruct:
    sharding = get(shardings, row.path) if shardings is not None else None
    row_dtype = np.float32 if row.init is None else dtype
    return jax.ShapeDtypeStruct(row.shape, row_dtype, sharding=sharding)

  return tree(rows, leaf)
