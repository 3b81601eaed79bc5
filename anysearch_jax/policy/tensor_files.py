"""Reads and writes folders of safetensors by a parameter table.

Loading goes directly to the devices: each one gets only its shard. The host
holds at most two tensors at a time, the next one being read ahead.
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
from anysearch_jax.host import disk, git_lfs, json_files, processes
from anysearch_jax.policy import hf_config
from anysearch_jax.policy import parameters as weights

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
SHARD_BYTES = 5 * 10**9

# Types that can be written.
SAVED = ("float32", "float16", "bfloat16")
# Types that can be read, beside MXFP4.
_DTYPES = ("F64", "F32", "F16", "BF16")
# Our name for blocks of 4-bit numbers (e2m1) that share an exponent
# (https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf).
_MXFP4 = "MXFP4"
# Parts of names by `torch.compile`, FSDP, activation checkpointing, and models
# that also read pictures.
_WRAPPERS = re.compile(
  r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
  r"|(?<=\bmodel\.)language_model\."
)
# Of data parallelism and PEFT. They are removed if all names begin so.
_PREFIXES = ("module.", "base_model.model.")
_BLOCK = 32  # Numbers of an MXFP4 block.
_HASHED_AT_ONCE = 4  # Files: more threads wait for the same disk.


class Tensor(NamedTuple):
  """The description of a tensor in headers.

  Attributes:
    name: its name in the file; of MXFP4 the common part of two names.
    path: its file.
    shape: its shape; of MXFP4 that of the unpacked numbers.
    dtype: its type, by the format's name, or `MXFP4`.
    packed: of MXFP4 the tensors of blocks and of scales, otherwise ().
  """

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
    dtype: type of the arrays, whatever the type in the files.
    ignored: a regular expression for names of tensors to skip.
    copies: maps names that the files may have to the tensors they copy.

  Raises:
    ValueError: a tensor is missing, unknown, misshaped or not a plain float, a
      file is damaged, or a copy differs; the message names it.
  """
  file_tensors = headers(folder)
  copies = {k: v for k, v in (copies or {}).items() if k in file_tensors}
  _check(folder, file_tensors, rows, ignored, copies)
  for name, original in copies.items():
    _check_copy(file_tensors[name], file_tensors[original])
  device = jax.sharding.SingleDeviceSharding(jax.devices()[0])

  def sharding_of(row: weights.Weight) -> jax.sharding.Sharding:
    return device if shardings is None else weights.get(shardings, row.path)

  def layers(row: weights.Weight) -> Iterator[list[Tensor]]:
    """Yields the tensors of each layer; of an unstacked row, its tensor."""
    names = row.tensor_names()
    size = math.prod(row.stack[1:])
    for start in range(0, len(names), size):
      yield [file_tensors[name] for name in names[start : start + size]]

  placed_layers = _run_ahead(
    functools.partial(_place, row, tensors, sharding_of(row))
    for row in rows
    for tensors in layers(row)
  )

  def assemble(row: weights.Weight) -> jax.Array:
    """Returns a row's array, made of the next layers of `placed_layers`."""
    sharding = sharding_of(row)
    jit = functools.partial(jax.jit, donate_argnums=0, out_shardings=sharding)
    if not row.stacked:
      return jit(lambda x: x.astype(dtype))(next(placed_layers))
    put = jit(_put)
    stack = jnp.zeros(row.shape, dtype, device=sharding)
    for i in range(row.shape[0]):
      # Without this wait the host would read far ahead of the devices.
      stack = put(stack, next(placed_layers), i).block_until_ready()
    return stack

  return weights.tree(rows, assemble)


def headers(folder: str | pathlib.Path) -> dict[str, Tensor]:
  """Reads the headers of a folder's safetensors, by tensor name.

  Names lose what wrappers of PyTorch and PEFT added. Matrices of experts in
  MXFP4, `NAME_blocks` and `NAME_scales`, are one tensor.

  Raises:
    ValueError: a file is missing or damaged, or two files have the same tensor.
  """
  folder = pathlib.Path(folder)
  tensors: dict[str, Tensor] = {}
  for path in _files(folder):
    try:
      with safetensors.safe_open(path, framework="numpy") as handle:
        for name_in_file in handle.keys():
          name = _WRAPPERS.sub("", name_in_file)
          if name in tensors:
            raise ValueError(
              f"{folder}: tensor {name!r} stands in {tensors[name].path.name} "
              f"and in {path.name}; expected it once."
            )
          header = handle.get_slice(name_in_file)
          shape = tuple(header.get_shape())
          tensors[name] = Tensor(name_in_file, path, shape, header.get_dtype())
    except safetensors.SafetensorError as error:
      git_lfs.refuse_pointer(path)
      raise ValueError(
        f"{path}: not a whole safetensors file ({error}); copy it again."
      ) from error
  for prefix in _PREFIXES:
    if all(name.startswith(prefix) for name in tensors):
      tensors = {k.removeprefix(prefix): v for k, v in tensors.items()}
  for name in [x.removesuffix("_blocks") for x in tensors if "_blocks" in x]:
    blocks = tensors[name + "_blocks"]
    scales = tensors.get(name + "_scales", blocks)
    bytes_ = {blocks.dtype, scales.dtype} == {"U8"} and len(blocks.shape) == 4
    if bytes_ and blocks.shape == (*scales.shape, _BLOCK // 2):
      experts, outputs, count = scales.shape
      shape = (experts, count * _BLOCK, outputs)
      tensors[name] = Tensor(
        name, blocks.path, shape, _MXFP4, packed=(blocks, scales)
      )
      del tensors[name + "_blocks"], tensors[name + "_scales"]
  return tensors


def digest(folder: str | pathlib.Path) -> str:
  """Returns a SHA-256 of a folder's safetensors; file names do not matter.

  Raises:
    ValueError: there are no such files.
  """
  with futures.ThreadPoolExecutor(_HASHED_AT_ONCE) as pool:
    prints = pool.map(disk.fingerprint, _files(pathlib.Path(folder)))
    text = "".join(fingerprint["sha256"] for fingerprint in prints)
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
    dtype: type in the files, one of `SAVED`; values are rounded to even.
    shard_bytes: maximum bytes per shard, unless one tensor is larger.
    name: name of the single file; shards are numbered after it.
    part_of: returns a layer of a row in our layout; default: from `params`.

  Raises:
    ValueError: the dtype is not in `SAVED`.
  """
  folder = pathlib.Path(folder)
  dtype = jnp.dtype(dtype)
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
  """Returns the tensors of a file by name, {} in processes that do not write.

  Args:
    entries: name, row and index of each tensor.
    part_of: as in `save`.
    dtype: type in the file.
  """
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


def _run_ahead(calls: Iterable[Callable[[], Any]]) -> Iterator[Any]:
  """Yields the calls' results in order, while a thread runs the next call."""
  with futures.ThreadPoolExecutor(1) as pool:
    submitted = (pool.submit(call) for call in calls)
    # `pairwise` submits a call before the result of the one before is awaited.
    end: Iterable[futures.Future] = [futures.Future()]
    for running, _ in itertools.pairwise(itertools.chain(submitted, end)):
      yield running.result()


def _put(stack: jax.Array, layer: jax.Array, i: jax.Array) -> jax.Array:
  """Writes layer `i` of a stack."""
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

  If each expert is a tensor, a device reads only the experts that it gets.

  Args:
    row: the row.
    tensors: the layer's tensors: one, or one for each expert.
    sharding: the sharding of the row's array.
  """
  shape = row.layer_shape
  if row.stacked and isinstance(sharding, jax.sharding.NamedSharding):
    sharding = jax.sharding.NamedSharding(
      sharding.mesh, jax.P(*sharding.spec[1:])
    )
  # 1 if each expert is a tensor, otherwise 0.
  expert_axes = len(shape) - len(row.tensor_shape)
  blocks: dict[
    tuple, np.ndarray
  ] = {}  # Several devices may get the same block.
  arrays = []
  for device, index in sharding.addressable_devices_indices_map(shape).items():
    assert index is not None  # The device is addressable.
    ends = tuple(
      cut.indices(size)[:2] for cut, size in zip(index, shape, strict=True)
    )
    if ends not in blocks:
      block = tuple(slice(*end) for end in ends)
      device_tensors = tensors[block[0]] if expert_axes else tensors
      read_blocks = [
        row.read_block(block[expert_axes:], functools.partial(_read, tensor))
        for tensor in device_tensors
      ]
      blocks[ends] = np.stack(read_blocks) if expert_axes else read_blocks[0]
    arrays.append(jax.device_put(blocks[ends], device))
  return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _read(tensor: Tensor, block: weights.Block) -> np.ndarray:
  """Reads a block of a tensor, in the file's type and layout."""
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
  experts, inputs, outputs = block
  # Whole MXFP4 blocks are along the inputs.
  first = inputs.start // _BLOCK
  end = -(-inputs.stop // _BLOCK)
  index = (experts, outputs, slice(first, end))
  all_bytes = slice(0, _BLOCK // 2)
  packed_blocks, packed_scales = tensor.packed
  codes = _read(packed_blocks, (*index, all_bytes))
  scales = _read(packed_scales, index).astype(np.uint16)[..., None] << 8
  # Expert by expert, because NumPy converts indices to 8 bytes each.
  pairs = [
    _pairs()[scale | code] for scale, code in zip(scales, codes, strict=True)
  ]
  numbers = np.stack(pairs).view(jnp.bfloat16).reshape(*codes.shape[:2], -1)
  cut = slice(inputs.start - first * _BLOCK, inputs.stop - first * _BLOCK)
  return numbers[..., cut].swapaxes(1, 2)


@functools.cache
def _pairs() -> np.ndarray:
  """Returns the numbers of each scale and byte, as uint32 `[65536]`.

  A byte has two e2m1 codes, so an entry is two bfloat16 numbers in 32 bits.
  """
  positive = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
  codes = np.arange(256)[:, None] >> np.array([0, 4]) & 15
  exponents = np.arange(-127, 129)[:, None, None]
  with np.errstate(over="ignore"):
    e2m1 = np.concatenate([positive, -positive])
    numbers = np.ldexp(e2m1[codes], exponents)
    return numbers.astype(jnp.bfloat16).view(np.uint32).reshape(-1)


def _check(
  folder: str | pathlib.Path,
  file_tensors: Mapping[str, Tensor],
  rows: Sequence[weights.Weight],
  ignored: str,
  copies: Mapping[str, str],
) -> None:
  """Raises ValueError for a missing, unknown, misshaped or mistyped tensor."""
  expected = {name: row for row in rows for name in row.tensor_names()}
  missing = sorted(set(expected) - set(file_tensors))
  unknown = sorted(
    name
    for name in set(file_tensors) - set(expected) - set(copies)
    if not re.fullmatch(ignored, name)
  )
  if missing or unknown:
    if adapted := [x for x in unknown if ".lora_" in x]:
      raise ValueError(
        f"{folder}: found the adapter tensor {adapted[0]!r}, expected merged "
        f"weights; {hf_config.MERGE}."
      )
    kind, names = ("lacks", missing) if missing else ("has unknown", unknown)
    raise ValueError(
      f"{folder}: {kind} tensor {names[0]!r} ({len(names)} in all); the "
      "config.json beside it does not describe these weights."
    )
  for name, row in expected.items():
    tensor = file_tensors[name]
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
  """Raises ValueError if a tensor differs from the one that it copies."""

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
  single = folder / SINGLE_NAME
  index = folder / INDEX_NAME
  files = [single]
  if index.is_file() and not single.is_file():
    try:
      names = sorted(set(json_files.read(index)["weight_map"].values()))
      files = [folder / name for name in names]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
      git_lfs.refuse_pointer(index)
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
    hf_config.refuse_gguf(folder)
    raise ValueError(
      f"{path}: no such file; expected {SINGLE_NAME} or shards with "
      f"{INDEX_NAME}. Load files of another kind (*.bin) with transformers and "
      "write them again with save_pretrained."
    )
  return files
