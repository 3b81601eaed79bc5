"""What the families of encoders share: values of config.json, and weights."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax

from anysearch_jax.policy import hf_config, tensor_files
from anysearch_jax.policy import parameters as weights

Params = dict[str, Any]

LAYERS = "layers"


def sizes(hf: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, int]:
  """Returns positive integers of a config.json under our names.

  Args:
    hf: the config.json.
    keys: maps its keys to our names.

  Raises:
    ValueError: a value is missing or not a positive integer.
  """
  for key in keys:
    if type(hf.get(key)) is not int or hf[key] < 1:
      raise ValueError(
        f"config.json: {key} is {hf.get(key, 'missing')!r}, expected a "
        "positive integer."
      )
  return {ours: hf[key] for key, ours in keys.items()}


def number(hf: Mapping[str, Any], key: str) -> float:
  """Returns a positive number of a config.json, or raises ValueError."""
  value: Any = hf.get(key)
  if type(value) not in (int, float) or not 0 < value < math.inf:
    raise ValueError(
      f"config.json: {key} is {value!r}, expected a positive number."
    )
  return value


def mapping(hf: Mapping[str, Any], key: str) -> dict[str, Any]:
  """Returns an object of a config.json, {} if it is missing or null.

  Raises:
    ValueError: the value is something else.
  """
  value = hf.get(key)
  if not isinstance(value, dict | None):
    raise ValueError(f"config.json: {key} is {value!r}, expected an object.")
  return value or {}


def theta(rope: Mapping[str, Any]) -> float:
  """Returns the `rope_theta` of plain rotary positions.

  Raises:
    ValueError: the positions are scaled, or theta is not a positive number.
  """
  plain = ("default", None)
  hf_config.check(
    rope, understood=("rope_theta",), only={"rope_type": plain, "type": plain}
  )
  return float(number(rope, "rope_theta"))


def check_heads(d_model: int, heads: int, *, even: bool = False) -> None:
  """Refuses a width that the heads cannot share, with a ValueError.

  Args:
    d_model: width of a hidden state.
    heads: number of heads.
    even: whether a head's width must be even, as rotary positions need it.
  """
  if d_model % (2 * heads if even else heads):
    width = " of an even width" if even else ""
    raise ValueError(
      f"config.json: hidden_size {d_model} is not divisible by {heads} "
      f"attention heads{width}."
    )


def weight(
  path: tuple[str, ...],
  name: str,
  shape: tuple[int, ...],
  *,
  layers: int = 0,
  init: float | None = 0.02,
) -> weights.Weight:
  """Returns the row of a weight that is stored in the file's own layout.

  Args:
    path: keys in the nested parameter dict.
    name: the tensor's name in the file, with `{layer}` if it is stacked.
    shape: of the tensor in the file.
    layers: number of layers that are stacked; 0: it is not stacked.
    init: see `weights.Weight`.
  """
  stack = (layers,) if layers else ()
  return weights.Weight(
    path=path,
    shape=(*stack, *shape),
    axes=(None,) * (len(stack) + len(shape)),
    name=name,
    split=shape,
    perm=tuple(range(len(shape))),
    file_shape=shape,
    init=init,
  )


def pair(
  path: tuple[str, ...],
  name: str,
  shape: tuple[int, ...],
  *,
  bias: bool,
  layers: int = 0,
) -> list[weights.Weight]:
  """Returns rows of a norm or a projection, and of its bias if it has one.

  Args:
    path: of the weight; that of the bias ends in `_bias`.
    name: the module's name in the file.
    shape: of the weight; a norm's has one axis.
    bias: whether there is a bias.
    layers: see `weight`.
  """
  init = None if len(shape) == 1 else 0.02
  rows = [weight(path, f"{name}.weight", shape, layers=layers, init=init)]
  if bias:
    path = (*path[:-1], f"{path[-1]}_bias")
    rows.append(
      weight(path, f"{name}.bias", shape[:1], layers=layers, init=0.0)
    )
  return rows


def load(
  folder: str | pathlib.Path,
  rows: Sequence[weights.Weight],
  *,
  sharding: jax.sharding.Sharding,
  dtype: Any,
  ignored: str,
) -> Params:
  """Reads a folder's safetensors; `sharding` should replicate them.

  Raises:
    ValueError: a tensor is missing, unknown or misshaped; the message names it.
  """
  params = tensor_files.load(
    folder,
    rows,
    shardings=weights.tree(rows, lambda row: sharding),
    dtype=dtype,
    ignored=ignored,
  )
  # Unstack the layers once, because slicing inside the jitted call would copy
  # every weight in every call.
  stacks = params.pop(LAYERS)
  while stacks:
    key, stack = stacks.popitem()
    for i in range(stack.shape[0]):
      params.setdefault(layer(i), {})[key] = weights.index(stack, i)
  return params


def layer(i: int) -> str:
  """Returns the key of a layer in the parameters that `load` returns."""
  return f"{LAYERS}_{i}"


def declare(
  module: nn.Module, rows: Iterable[weights.Weight]
) -> dict[str, jax.Array]:
  """Returns the parameters of a module by the last key of their paths."""
  zeros = nn.initializers.zeros_init()
  return {
    row.path[-1]: module.param(row.path[-1], zeros, row.layer_shape)
    for row in rows
  }
