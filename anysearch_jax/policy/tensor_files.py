"""Reads and writes folders of safetensors by a parameter table.

Loading goes directly to the devices: each one gets only its shard. The host
holds at most a tensor and the next one at a time.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import itertools
import json
import math
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from safetensors import numpy as safetensors_numpy

from anysearch_jax.config import settings
from anysearch_jax.host import disk, json_files, processes
from anysearch_jax.policy import parameters as weights

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
SHARD_BYTES = 5 * 10**9

# Types that can be written.
SAVED = ("float32", "float16", "bfloat16")
_DTYPES = ("F64", "F32", "F16", "BF16")
_MXFP4, _BLOCK = "MXFP4", 32  # Blocks of e2m1 numbers with an exponent.
_HASHED_AT_ONCE = 4


class Tensor(NamedTuple):
  """The description of a tensor in headers; MXFP4 is `packed` in two."""

  name: str
  path: pathlib.Path
  shape: tuple[int, ...]
  dtype: str
  packed: tuple[Tensor, ...] = ()


def load(
  folder: str | pathlib.Path,
  rows: Sequence[weights.Weight],
  *,
  shardings: Mapping | None = None,
  dtype: Any = jnp.float32,
  ignored: str = "",
  copies: Mapping[str, str] | None = None,
) -> dict:
  """Reads a folder's safetensors into a nested dict of JAX arrays.

  All headers are checked before anything is allocated.

  Args:
    folder: has `model.safetensors`, or shards with their index.
    rows: the table; every tensor of the files must be in it.
    shardings: nested dict laid out by the table; None means the first device.
    dtype: of the arrays, whatever the type in the files.
    ignored: a regular expression for names of tensors to skip.
    copies: maps names that the files may have to the tensors they copy.

  Raises:
    ValueError: a tensor is missing, unknown, misshaped or not a plain float, a
      file is damaged, or a copy differs; the message names it.
  """
  found = headers(folder)
  copies = {k: v for k, v in (copies or {}).items() if k in found}
  _check(folder, found, rows, ignored, copies)
  for name, original in copies.items():
    _check_copy(found[name], found[original])
  device = jax.sharding.SingleDeviceSharding(jax.devices()[0])

  def of(row: weights.Weight) -> jax.sharding.Sharding:
    return device if shardings is None else weights.get(shardings, row.path)

  def parts(row: weights.Weight) -> Iterator[list[Tensor]]:
    """Yields the tensors of each layer, or of the whole."""
    names = row.tensor_names()
    size = math.prod(row.stack[1:])
    for start in range(0, len(names), size):
      yield [found[name] for name in names[start : start + size]]

  placed = _ahead(
    functools.partial(_place, row, tensors, of(row))
    for row in rows
    for tensors in parts(row)
  )

  def assembled(row: weights.Weight) -> jax.Array:
    """Returns a row's array, made of the next tensors of `placed`."""
    jit = functools.partial(jax.jit, donate_argnums=0, out_shardings=of(row))
    if not row.stacked:
      return jit(lambda x: x.astype(dtype))(next(placed))
    put, stack = jit(_put), jnp.zeros(row.shape, dtype, device=of(row))
    for i in range(row.shape[0]):
      # Without this wait the host would read far ahead of the devices.
      stack = put(stack, next(placed), i).block_until_ready()
    return stack

  return weights.tree(rows, assembled)


def headers(folder: str | pathlib.Path) -> dict[str, Tensor]:
  """Reads the headers of a folder's safetensors, by tensor name.

  Matrices of experts in MXFP4, `NAME_blocks` and `NAME_scales`, are one.

  Raises:
    ValueError: a file is missing or damaged, or two files have the same tensor.
  """
  folder = pathlib.Path(folder)
  found: dict[str, Tensor] = {}
  for path in _files(folder):
    try:
      with safetensors.safe_open(path, framework="numpy") as handle:
        for name in handle.keys():
          if name in found:
            raise ValueError(
              f"{folder}: tensor {name!r} stands in {found[name].path.name} "
              f"and in {path.name}; expected it once."
            )
          part = handle.get_slice(name)
          found[name] = Tensor(
            name, path, tuple(part.get_shape()), part.get_dtype()
          )
    except safetensors.SafetensorError as error:
      raise ValueError(
        f"{path}: not a whole safetensors file ({error}); copy it again."
      ) from error
  for blocks in [x for name, x in found.items() if name.endswith("_blocks")]:
    name = blocks.name.removesuffix("_blocks")
    scales = found.get(name + "_scales", blocks)
    bytes_ = {blocks.dtype, scales.dtype} == {"U8"} and len(blocks.shape) == 4
    if bytes_ and blocks.shape == (*scales.shape, _BLOCK // 2):
      experts, gives, count = scales.shape
      shape = experts, count * _BLOCK, gives
      found[name] = Tensor(name, blocks.path, shape, _MXFP4, (blocks, scales))
      del found[blocks.name], found[scales.name]
  return found


def digest(folder: str | pathlib.Path) -> str:
  """Returns a SHA-256 of a folder's safetensors; file names do not matter.

  Raises:
    ValueError: there are no such files.
  """
  with futures.ThreadPoolExecutor(_HASHED_AT_ONCE) as pool:
    found = pool.map(disk.fingerprint, _files(pathlib.Path(folder)))
    text = "".join(each["sha256"] for each in found)
  return hashlib.sha256(text.encode()).hexdigest()


def save(
  folder: str | pathlib.Path,
  params: Mapping,
  rows: Sequence[weights.Weight],
  *,
  dtype: Any = np.float32,
  shard_bytes: int = SHARD_BYTES,
  name: str = SINGLE_NAME,
  part_of: Callable[[weights.Weight, Sequence[int]], Any] | None = None,
) -> None:
  """Writes a folder's safetensors with the names of the table.

  Writes one file if everything fits into `shard_bytes`, otherwise shards with
  an index. The first process holds a shard and writes it. In a run of several
  processes all must call this function, because all take part in gathering an
  array; an error of the first is raised in all.

  Args:
    folder: must exist.
    params: arrays of NumPy or JAX, on any mesh.
    rows: the table.
    dtype: of the files, one of `SAVED`; values are rounded to nearest even.
    shard_bytes: maximum bytes per shard, unless one tensor is larger.
    name: of the single file; shards are numbered after it.
    part_of: returns a layer of a row in our layout; default: from `params`.

  Raises:
    ValueError: the dtype is not in `SAVED`.
  """
  folder, dtype = pathlib.Path(folder), jnp.dtype(dtype)
  settings.require("dtype", dtype.name, SAVED)
  part_of = part_of or functools.partial(weights.layer_slice, params)
  shards: list[list[tuple[str, weights.Weight, tuple[int, ...]]]] = [[]]
  total = size = 0
  for entry in weights.tensors(rows):
    length = _bytes(entry[1], dtype)
    if size and size + length > shard_bytes:
      shards.append([])
      size = 0
    shards[-1].append(entry)
    size += length
    total += length
  stem = name.removesuffix(".safetensors")
  count = len(shards)
  index: dict[str, str] = {}
  for i, shard in enumerate(shards, start=1):
    file = f"{stem}-{i:05d}-of-{count:05d}.safetensors" if count > 1 else name
    tensors = _tensors(shard, part_of, dtype)
    processes.on_main(functools.partial(_write, folder / file, tensors))
    index |= {key: file for key, _, _ in shard}
  if count > 1 and processes.is_main():
    text = json.dumps(
      {"metadata": {"total_size": total}, "weight_map": index}, indent=2
    )
    (folder / f"{name}.index.json").write_text(text + "\n")


def _tensors(
  entries: Sequence[tuple[str, weights.Weight, tuple[int, ...]]],
  part_of: Callable[[weights.Weight, Sequence[int]], Any],
  dtype: np.dtype,
) -> dict[str, np.ndarray]:
  """Returns the tensors of a file by name; empty where none is written."""
  tensors = {}
  layer_key: tuple[weights.Weight, Sequence[int]] | None = None
  for name, row, position in entries:
    if layer_key != (row, position[:1]):
      # Rounding on the device halves the bytes that cross to the host.
      rounded = part_of(row, position[:1]).astype(dtype)
      if isinstance(rounded, jax.Array):
        rounded = processes.to_replicated(rounded)
      layer_key = (row, position[:1])
      layer = np.asarray(rounded)
    if processes.is_main():
      tensor = row.to_file(layer[tuple(position[1:])])
      tensors[name] = np.ascontiguousarray(tensor)
  return tensors


def _write(path: pathlib.Path, tensors: Mapping[str, np.ndarray]) -> None:
  """Writes a file; an error names it."""
  try:
    safetensors_numpy.save_file(dict(tensors), path, metadata={"format": "pt"})
  except OSError as error:  # The library's names no file.
    code = error.errno or errno.EIO
    raise OSError(code, os.strerror(code), str(path)) from error


def _bytes(row: weights.Weight, dtype: np.dtype) -> int:
  return math.prod(row.file_shape) * dtype.itemsize


def _ahead(calls: Iterable[Callable[[], Any]]) -> Iterator[Any]:
  """Yields the calls' results in order; the next call runs ahead."""
  with futures.ThreadPoolExecutor(1) as pool:
    started = (pool.submit(call) for call in calls)
    end: Iterable[futures.Future] = [futures.Future()]
    for running, _ in itertools.pairwise(itertools.chain(started, end)):
      yield running.result()


def _put(stack: jax.Array, layer: jax.Array, i: jax.Array) -> jax.Array:
  # Written as integers: on CPUs, XLA converts a whole bfloat16 stack to float32
  # to update one layer.
  bits = jnp.dtype(f"uint{8 * stack.dtype.itemsize}")
  view = functools.partial(jax.lax.bitcast_convert_type, new_dtype=bits)
  written = jax.lax.dynamic_update_index_in_dim(
    view(stack), view(layer.astype(stack.dtype)), i, 0
  )
  return jax.lax.bitcast_convert_type(written, stack.dtype)


def _place(
  row: weights.Weight,
  tensors: Sequence[Tensor],
  sharding: jax.sharding.Sharding,
) -> jax.Array:
  """Reads a layer into our layout, sharded, in the file's type.

  Of experts, each of which is a tensor, a device reads those that it gets.
  """
  shape = row.layer_shape
  if row.stacked and isinstance(sharding, jax.sharding.NamedSharding):
    sharding = jax.sharding.NamedSharding(
      sharding.mesh, jax.P(*sharding.spec[1:])
    )
  stacks = len(shape) - len(row.tensor_shape)
  read: dict[tuple, np.ndarray] = {}
  arrays = []
  for device, index in sharding.addressable_devices_indices_map(shape).items():
    assert index is not None  # The device is addressable.
    ends = tuple(
      cut.indices(size)[:2] for cut, size in zip(index, shape, strict=True)
    )
    if ends not in read:
      block = tuple(slice(*end) for end in ends)
      mine = tensors[block[0]] if stacks else tensors
      each = [
        row.read_block(block[stacks:], functools.partial(_read, tensor))
        for tensor in mine
      ]
      read[ends] = np.stack(each) if stacks else each[0]
    arrays.append(jax.device_put(read[ends], device))
  return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _read(tensor: Tensor, block: weights.Block) -> np.ndarray:
  if tensor.packed:
    return _unpacked(tensor, block)
  # Opened again for each block: closing the file unmaps its pages.
  with safetensors.safe_open(tensor.path, framework="numpy") as handle:
    whole = tuple(slice(0, size) for size in tensor.shape)
    if block == whole:
      return handle.get_tensor(tensor.name)
    return handle.get_slice(tensor.name)[block]


def _unpacked(tensor: Tensor, block: weights.Block) -> np.ndarray:
  """Reads a block of an MXFP4 tensor `[E, D, F]`; the file has `[E, F, D]`."""
  experts, takes, gives = block
  first, end = takes.start // _BLOCK, -(-takes.stop // _BLOCK)
  part, size = (experts, gives, slice(first, end)), _BLOCK // 2
  codes = _read(tensor.packed[0], (*part, slice(0, size)))
  scales = _read(tensor.packed[1], part).astype(np.uint16)[..., None] << 8
  # Expert by expert: NumPy converts indices to 8 bytes each.
  each = [_pairs()[x | y] for x, y in zip(scales, codes, strict=True)]
  found = np.stack(each).view(jnp.bfloat16).reshape(*codes.shape[:2], -1)
  cut = slice(takes.start - first * _BLOCK, takes.stop - first * _BLOCK)
  return found[..., cut].swapaxes(1, 2)


@functools.cache
def _pairs() -> np.ndarray:
  """Returns two bfloat16 numbers, as uint32 `[65536]`, by scale and byte."""
  half = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
  byte = np.arange(256)[:, None] >> np.array([0, 4]) & 15
  exponents = np.arange(-127, 129)[:, None, None]
  with np.errstate(over="ignore"):
    found = np.ldexp(np.concatenate([half, -half])[byte], exponents)
    return found.astype(jnp.bfloat16).view(np.uint32).reshape(-1)


def _check(
  folder: str | pathlib.Path,
  found: Mapping[str, Tensor],
  rows: Sequence[weights.Weight],
  ignored: str,
  copies: Mapping[str, str],
) -> None:
  """Raises ValueError for a missing, unknown, misshaped or mistyped tensor."""
  wanted = {name: row for row in rows for name in row.tensor_names()}
  missing = sorted(set(wanted) - set(found))
  unknown = sorted(
    name
    for name in set(found) - set(wanted) - set(copies)
    if not re.fullmatch(ignored, name)
  )
  if missing or unknown:
    kind, names = ("lacks", missing) if missing else ("has unknown", unknown)
    raise ValueError(
      f"{folder}: {kind} tensor {names[0]!r} ({len(names)} in all); the "
      "config.json beside it does not describe these weights."
    )
  for name, row in wanted.items():
    tensor = found[name]
    if tensor.shape != row.file_shape:
      raise ValueError(
        f"{folder}: tensor {name!r} has shape {tensor.shape}, expected "
        f"{row.file_shape}."
      )
    if tensor.dtype not in (*_DTYPES, _MXFP4):
      raise ValueError(
        f"{folder}: tensor {name!r} is of type {tensor.dtype}, expected one "
        f"of {', '.join(_DTYPES)}; quantised weights are not supported."
      )


def _check_copy(copy: Tensor, first: Tensor) -> None:
  def whole(tensor: Tensor) -> np.ndarray:
    return _read(tensor, tuple(slice(0, size) for size in tensor.shape))

  same = copy.shape == first.shape and np.array_equal(whole(copy), whole(first))
  if not same:
    raise ValueError(
      f"{copy.path.parent}: tensor {copy.name!r} differs from {first.name!r}, "
      "which config.json says is the same (tie_word_embeddings); correct that "
      "value or remove the tensor that does not count."
    )


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
  """Returns the paths of the folder's safetensors files, which all exist."""
  single, index = folder / SINGLE_NAME, folder / INDEX_NAME
  files = [single]
  if index.is_file() and not single.is_file():
    try:
      names = sorted(set(json_files.read(index)["weight_map"].values()))
      files = [folder / name for name in names]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
      raise ValueError(
        f"{index}: no JSON object with a weight_map of file names; copy it "
        "again."
      ) from error
    if outside := [n for n in names if pathlib.PurePath(n).name != n]:
      raise ValueError(
        f"{index}: found the file {outside[0]!r}, expected names of files "
        "beside it; nothing is read from elsewhere."
      )
  for path in files:
    if path.is_file():
      continue
    raise ValueError(
      f"{path}: no such file; expected {SINGLE_NAME} or shards with "
      f"{INDEX_NAME}. Load files of another kind (*.bin) with transformers and "
      "write them again with save_pretrained."
    )
  return files
