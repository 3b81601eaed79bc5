"""The parameter table of a decoder: the only file that names its weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import parameters as weights

LAYERS = "layers"
# Prefix of the tensor names in PEFT's adapter files.
ADAPTER_PREFIX = "base_model.model."
_EXPERTS = "model.layers.{layer}.mlp.experts."

# The modules of norms, by where they stand.
_NORMS = {
  "before": {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
  },
  "after": {
    "attention_end_norm": "post_attention_layernorm",
    "mlp_end_norm": "post_feedforward_layernorm",
  },
}
_NORMS["around"] = {
  "attention_norm": "input_layernorm",
  "mlp_norm": "pre_feedforward_layernorm",
  **_NORMS["after"],
}

# (size, logical axis).
Axis = tuple[int, str | None]


class Projection(NamedTuple):
  """A matrix of a layer that maps the axes `takes` to the axes `gives`."""

  key: str
  module: str
  takes: Sequence[Axis]
  gives: Sequence[Axis]
  bias: bool
  std: float

  @property
  def gives_first(self) -> bool:
    """Whether the matrix is stored as `[*gives, *takes]`, model axis first.

    fsdp shards the model axis. If that axis is not the first one, GPUs copy the
    matrix to another layout before each all-gather.
    """
    return self.gives[0][1] == "model"


def rows(a: architecture_lib.Architecture) -> list[weights.Weight]:
  """Returns the rows of all parameters of `a`, adapters included."""
  return base_rows(a) + adapter_rows(a)


def trainable_rows(a: architecture_lib.Architecture) -> list[weights.Weight]:
  """Returns the rows that are trained: the adapters if any, otherwise all."""
  return adapter_rows(a) or base_rows(a)


def headless(a: architecture_lib.Architecture) -> architecture_lib.Architecture:
  """Returns `a` without a separate LM head."""
  return dataclasses.replace(a, tied=True)


def critic_rows(a: architecture_lib.Architecture) -> list[weights.Weight]:
  """Returns the trained rows of a critic of `a`: the body's and a value head.

  The file names are those of a Hugging Face token classifier with one label.
  The head is initialised with zeros, so all values start at zero.
  """
  axes = ((a.d_model, None),)
  value = _plain(a, "value", "score.weight", axes, (1, a.d_model), init=0.0)
  return [*trainable_rows(headless(a)), value]


def base_rows(a: architecture_lib.Architecture) -> list[weights.Weight]:
  """Returns the rows of a Hugging Face checkpoint of `a`."""
  model, head = ((a.d_model, None),), ((a.head_dim, None),)
  tokens = ((a.vocab_size, "vocab"), (a.d_model, "model"))
  layer = "model.layers.{layer}."

  def norm(key: str, module: str, axes: Sequence[Axis]) -> weights.Weight:
    name, size = f"{layer}{module}.weight", math.prod(n for n, _ in axes)
    return _plain(a, key, name, axes, (size,), init=None)

  table = [_plain(a, "embed", "model.embed_tokens.weight", tokens, init=0.02)]
  norms = [norm(key, name, model) for key, name in _NORMS[a.norms].items()]
  table.append(norms[0])
  if a.experts:
    gives = ((a.experts, None),)
    name = f"{layer}mlp.{'router' if a.clamped else 'gate'}"
    router = _matrix(a, "router", f"{name}.weight", model, gives, init=0.02)
    table.append(router)
    if a.clamped:
      table.append(_plain(a, "router_bias", f"{name}.bias", gives, init=0.0))
      table += _clamped(a)
  if a.sinks:
    sinks = "sinks", f"{layer}self_attn.sinks", ((a.heads, "heads"),)
    table.append(_plain(a, *sinks, init=0.02))
  for p in projections(a).values():
    if a.clamped and p.key in ("gate", "up", "down"):
      continue
    name = layer + p.module
    matrix = a, p.key, f"{name}.weight", p.takes, p.gives
    table.append(_matrix(*matrix, init=p.std, gives_first=p.gives_first))
    if p.bias:
      size = math.prod(size for size, _ in p.gives)
      key = p.key + "_bias"
      table.append(_plain(a, key, f"{name}.bias", p.gives, (size,), init=0.0))
  if a.qk_norm:
    for key, of in (("q_norm", a.heads), ("k_norm", a.kv_heads)):
      over = ((of, "heads" if key == "q_norm" else "kv_heads"), *head)
      axes = over if a.joint_norm else head
      table.append(norm(key, f"self_attn.{key}", axes))
  table += norms[1:]
  table.append(_plain(a, "norm", "model.norm.weight", model, init=None))
  if not a.tied:
    table.append(_plain(a, "head", "lm_head.weight", tokens, init=0.02))
  return table


def _clamped(a: architecture_lib.Architecture) -> list[weights.Weight]:
  """Returns the rows of gpt-oss's experts, all of which share a tensor.

  Gate and up alternate in the file's columns; ours are two matrices.
  """
  both, e, f = (2, None), (a.experts, "experts"), (a.mlp_dim, "mlp")
  d, table = (a.d_model, "expert_model"), []
  axes: dict[str, Sequence[Axis]] = {
    "gate_up_proj": (e, both, d, f),
    "gate_up_proj_bias": (e, both, f),
    "down_proj": (e, f, d),
    "down_proj_bias": ((a.experts, None), (a.d_model, "model")),
  }
  for name, over in axes.items():
    key = name.replace("_up", "").replace("_proj", "")
    std = projections(a)[key].std if key in ("gate", "down") else 0.0
    row = _plain(a, key, f"{_EXPERTS}{name}", over, init=std)
    if key.startswith("gate"):
      experts, _, *sizes, width = row.split
      file, n = (experts, *sizes, width, 2), len(sizes) + 2
      row = dataclasses.replace(row, split=file, perm=(0, n, *range(1, n)))
      row = dataclasses.replace(row, file_shape=(experts, *sizes, 2 * width))
    table.append(row)
  return table


def adapter_rows(a: architecture_lib.Architecture) -> list[weights.Weight]:
  """Returns the rows of the low-rank factors A (`_lora_a`) and B (`_lora_b`).

  B is initialised with zeros, so a new adapter does not change the output.
  """
  if a.lora is None:
    return []
  rank: Sequence[Axis] = ((a.lora.rank, None),)
  table = []
  for p in projections(a).values():
    if p.key not in a.lora.targets:
      continue
    name = f"{ADAPTER_PREFIX}model.layers.{{layer}}.{p.module}.lora_"
    # The standard deviation of PEFT's uniform initial values.
    std = (3 * math.prod(size for size, _ in p.takes)) ** -0.5
    table += [
      _matrix(a, p.key + "_lora_a", f"{name}A.weight", p.takes, rank, init=std),
      _matrix(a, p.key + "_lora_b", f"{name}B.weight", rank, p.gives, init=0.0),
    ]
  return table


def projections(a: architecture_lib.Architecture) -> dict[str, Projection]:
  """Returns the seven matrices of a layer, or of its experts, by their keys."""
  model, mlp = (a.d_model, "model"), (a.mlp_dim, "mlp")
  inner = (a.d_model, "expert_model") if a.experts else model
  part = "mlp.experts.{expert}" if a.experts else "mlp"
  heads = ((a.heads, "heads"), (a.head_dim, "head_dim"))
  kv = ((a.kv_heads, "kv_heads"), (a.head_dim, "head_dim"))
  std = 0.02
  end = std / (2 * a.layers) ** 0.5  # Of what is added to the residual.
  found = (
    ("q", "self_attn", (model,), heads, a.qkv_bias, std),
    ("k", "self_attn", (model,), kv, a.qkv_bias, std),
    ("v", "self_attn", (model,), kv, a.qkv_bias, std),
    ("o", "self_attn", heads, (model,), a.o_bias, end),
    ("gate", part, (inner,), (mlp,), a.mlp_bias, std),
    ("up", part, (inner,), (mlp,), a.mlp_bias, std),
    ("down", part, (mlp,), (inner,), a.mlp_bias, end),
  )
  return {
    key: Projection(key, f"{part}.{key}_proj", takes, gives, bias, deviation)
    for key, part, takes, gives, bias, deviation in found
  }


def _matrix(
  a: architecture_lib.Architecture,
  key: str,
  name: str,
  takes: Sequence[Axis],
  gives: Sequence[Axis],
  *,
  init: float,
  gives_first: bool = False,
) -> weights.Weight:
  """Returns the row of a matrix, stored as `[L, *takes, *gives]`.

  With `gives_first` it is stored as `[L, *gives, *takes]`, as in the file.
  Experts follow the layers, if a tensor is one of theirs.
  """
  file = (*gives, *takes)
  ours = file if gives_first else (*takes, *gives)
  stack = [(a.layers, LAYERS)]
  if "{expert}" in name:
    stack.append((a.experts, "experts"))
  given = 0 if gives_first else len(gives)
  sizes = [math.prod(size for size, _ in side) for side in (gives, takes)]
  return weights.Weight(
    path=(LAYERS, key),
    shape=tuple(size for size, _ in (*stack, *ours)),
    axes=tuple(axis for _, axis in (*stack, *ours)),
    name=name,
    split=tuple(size for size, _ in file),
    perm=(*range(given, len(file)), *range(given)),
    file_shape=tuple(sizes),
    init=init,
  )


def _plain(
  a: architecture_lib.Architecture,
  key: str,
  name: str,
  axes: Sequence[Axis],
  file_shape: tuple[int, ...] | None = None,
  *,
  init: float | None,
) -> weights.Weight:
  """Returns the row of an array whose axes are in the file's order."""
  shape = tuple(size for size, _ in axes)
  over = [(a.layers, LAYERS)] if "{layer}" in name else []
  return weights.Weight(
    path=(LAYERS, key) if over else (key,),
    shape=tuple(size for size, _ in (*over, *axes)),
    axes=tuple(axis for _, axis in (*over, *axes)),
    name=name,
    split=shape,
    perm=tuple(range(len(shape))),
    file_shape=file_shape or shape,
    init=init,
    scale=1 - a.norm_offset,
  )
