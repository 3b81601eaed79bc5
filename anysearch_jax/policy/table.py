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

# The modules of norms, by `Architecture.norms`: the norm of a sublayer's input
# (`attention_norm`, `mlp_norm`) and of its output (`attention_end_norm`, ...).
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
  """A matrix of a layer.

  Attributes:
    key: its name in our parameters, such as `q`.
    module: its module in the file, below the layer's, such as
      `self_attn.q_proj`.
    in_axes: the axes of its input that it contracts.
    out_axes: the axes of its output.
    bias: whether it has a bias.
    std: standard deviation of its initial values.
  """

  key: str
  module: str
  in_axes: Sequence[Axis]
  out_axes: Sequence[Axis]
  bias: bool
  std: float

  @property
  def out_axes_first(self) -> bool:
    """Whether it is stored as `[*out_axes, *in_axes]`: the model axis is first.

    fsdp shards the model axis. If that axis is not the first one, GPUs copy the
    matrix to another layout before each all-gather.
    """
    return self.out_axes[0][1] == "model"


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
  model = ((a.d_model, None),)
  tokens = ((a.vocab_size, "vocab"), (a.d_model, "model"))
  layer = "model.layers.{layer}."

  def norm(key: str, module: str, axes: Sequence[Axis]) -> weights.Weight:
    name = f"{layer}{module}.weight"
    size = math.prod(n for n, _ in axes)
    return _plain(a, key, name, axes, (size,), init=None)

  table = [_plain(a, "embed", "model.embed_tokens.weight", tokens, init=0.02)]
  norms = [norm(key, name, model) for key, name in _NORMS[a.norms].items()]
  table.append(norms[0])
  if a.experts:
    experts = ((a.experts, None),)
    name = f"{layer}mlp.{'router' if a.clamped else 'gate'}"
    router = _matrix(a, "router", f"{name}.weight", model, experts, init=0.02)
    table.append(router)
    if a.clamped:
      table.append(_plain(a, "router_bias", f"{name}.bias", experts, init=0.0))
      table += _gpt_oss_experts(a)
  if a.sinks:
    heads = ((a.heads, "heads"),)
    name = f"{layer}self_attn.sinks"
    table.append(_plain(a, "sinks", name, heads, init=0.02))
  for p in projections(a).values():
    if a.clamped and p.key in ("gate", "up", "down"):
      continue  # Rows of `_gpt_oss_experts`.
    name = layer + p.module
    table.append(
      _matrix(
        a,
        p.key,
        f"{name}.weight",
        p.in_axes,
        p.out_axes,
        init=p.std,
        out_axes_first=p.out_axes_first,
      )
    )
    if p.bias:
      size = math.prod(size for size, _ in p.out_axes)
      key = p.key + "_bias"
      bias = _plain(a, key, f"{name}.bias", p.out_axes, (size,), init=0.0)
      table.append(bias)
  if a.qk_norm:
    head = (a.head_dim, None)
    heads_of_norms: dict[str, Axis] = {
      "q_norm": (a.heads, "heads"),
      "k_norm": (a.kv_heads, "kv_heads"),
    }
    for key, heads_axis in heads_of_norms.items():
      axes = (heads_axis, head) if a.joint_norm else (head,)
      table.append(norm(key, f"self_attn.{key}", axes))
  table += norms[1:]
  table.append(_plain(a, "norm", "model.norm.weight", model, init=None))
  if not a.tied:
    table.append(_plain(a, "head", "lm_head.weight", tokens, init=0.02))
  return table


def _gpt_oss_experts(
  a: architecture_lib.Architecture,
) -> list[weights.Weight]:
  """Returns the rows of gpt-oss's experts, all of which share a tensor.

  Gate and up alternate in the file's columns; ours are two matrices.
  """
  experts = (a.experts, "experts")
  gate_and_up = (2, None)
  mlp = (a.mlp_dim, "mlp")
  model = (a.d_model, "expert_model")
  axes_by_name: dict[str, Sequence[Axis]] = {
    "gate_up_proj": (experts, gate_and_up, model, mlp),
    "gate_up_proj_bias": (experts, gate_and_up, mlp),
    "down_proj": (experts, mlp, model),
    "down_proj_bias": ((a.experts, None), (a.d_model, "model")),
  }
  table = []
  for name, axes in axes_by_name.items():
    key = name.replace("_up", "").replace("_proj", "")
    std = projections(a)[key].std if key in ("gate", "down") else 0.0
    row = _plain(a, key, f"{_EXPERTS}{name}", axes, init=std)
    if key.startswith("gate"):
      # The file's last axis has 2 F columns. Split into F x 2, the axis of gate
      # and up is the last one, which becomes the second.
      count, _, *sizes, width = row.split
      last = len(sizes) + 2
      row = dataclasses.replace(
        row,
        split=(count, *sizes, width, 2),
        perm=(0, last, *range(1, last)),
        file_shape=(count, *sizes, 2 * width),
      )
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
    std = (3 * math.prod(size for size, _ in p.in_axes)) ** -0.5
    factor_a = f"{p.key}_lora_a"
    factor_b = f"{p.key}_lora_b"
    table += [
      _matrix(a, factor_a, f"{name}A.weight", p.in_axes, rank, init=std),
      _matrix(a, factor_b, f"{name}B.weight", rank, p.out_axes, init=0.0),
    ]
  return table


def projections(a: architecture_lib.Architecture) -> dict[str, Projection]:
  """Returns the seven matrices of a layer, or of its experts, by their keys."""
  model = ((a.d_model, "model"),)
  mlp = ((a.mlp_dim, "mlp"),)
  heads = ((a.heads, "heads"), (a.head_dim, "head_dim"))
  kv_heads = ((a.kv_heads, "kv_heads"), (a.head_dim, "head_dim"))
  mlp_input: Sequence[Axis] = model
  mlp_module = "mlp"
  if a.experts:
    mlp_input = ((a.d_model, "expert_model"),)
    mlp_module = "mlp.experts.{expert}"
  std = 0.02
  # GPT-2's: L layers add 2 L terms to the residual stream.
  residual_std = std / (2 * a.layers) ** 0.5
  matrices = (
    ("q", "self_attn", model, heads, a.qkv_bias, std),
    ("k", "self_attn", model, kv_heads, a.qkv_bias, std),
    ("v", "self_attn", model, kv_heads, a.qkv_bias, std),
    ("o", "self_attn", heads, model, a.o_bias, residual_std),
    ("gate", mlp_module, mlp_input, mlp, a.mlp_bias, std),
    ("up", mlp_module, mlp_input, mlp, a.mlp_bias, std),
    ("down", mlp_module, mlp, mlp_input, a.mlp_bias, residual_std),
  )
  return {
    key: Projection(key, f"{module}.{key}_proj", in_axes, out_axes, bias, init)
    for key, module, in_axes, out_axes, bias, init in matrices
  }


def _matrix(
  a: architecture_lib.Architecture,
  key: str,
  name: str,
  in_axes: Sequence[Axis],
  out_axes: Sequence[Axis],
  *,
  init: float,
  out_axes_first: bool = False,
) -> weights.Weight:
  """Returns the row of a matrix.

  Args:
    a: the architecture.
    key: the matrix's name in our parameters.
    name: the tensor's name in the file.
    in_axes: the axes that it contracts.
    out_axes: the axes of its output.
    init: standard deviation of its initial values.
    out_axes_first: whether it is stored as `[L, *out_axes, *in_axes]`, as in
      the file, or as `[L, *in_axes, *out_axes]`. The axis of experts follows L
      if each expert has a tensor.
  """
  file_axes = (*out_axes, *in_axes)
  our_axes = file_axes if out_axes_first else (*in_axes, *out_axes)
  stack = [(a.layers, LAYERS)]
  if "{expert}" in name:
    stack.append((a.experts, "experts"))
  moved = 0 if out_axes_first else len(out_axes)
  sizes = [math.prod(size for size, _ in axes) for axes in (out_axes, in_axes)]
  return weights.Weight(
    path=(LAYERS, key),
    shape=tuple(size for size, _ in (*stack, *our_axes)),
    axes=tuple(axis for _, axis in (*stack, *our_axes)),
    name=name,
    split=tuple(size for size, _ in file_axes),
    perm=(*range(moved, len(file_axes)), *range(moved)),
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
  stack = [(a.layers, LAYERS)] if "{layer}" in name else []
  return weights.Weight(
    path=(LAYERS, key) if stack else (key,),
    shape=tuple(size for size, _ in (*stack, *axes)),
    axes=tuple(axis for _, axis in (*stack, *axes)),
    name=name,
    split=shape,
    perm=tuple(range(len(shape))),
    file_shape=file_shape or shape,
    init=init,
    scale=1 - a.norm_offset,
  )
