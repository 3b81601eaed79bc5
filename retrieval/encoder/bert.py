"""BERT encoders: reading config.json and weights, and the forward pass.

The model is post-norm with absolute positions (https://arxiv.org/abs/1810.04805),
written in Flax over a plain nested dict. RoBERTa and XLM-RoBERTa are the same
model whose first token has the position after the padding token's id.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from anysearch_jax.policy import hf_config, tensor_files
from anysearch_jax.policy import parameters as weights

Params = dict[str, Any]

_LAYERS = "layers"
# Models with heads store the encoder under one of these prefixes.
_PREFIXES = ("bert.", "roberta.")
# Not needed for retrieval: buffers that follow from the config, and the pooler.
_IGNORED = (
  r"(bert\.|roberta\.)?"
  r"(embeddings\.(position|token_type)_ids|pooler\.dense\..*)"
)
_SIZES = {
  "vocab_size": "vocab_size",
  "hidden_size": "d_model",
  "num_hidden_layers": "layers",
  "num_attention_heads": "heads",
  "intermediate_size": "mlp_dim",
  "max_position_embeddings": "positions",
  "type_vocab_size": "token_types",
}
_ROBERTA = ("roberta", "xlm-roberta")
# The defaults of transformers for values that a config.json omits.
_DEFAULTS = {
  "max_position_embeddings": 512,
  "type_vocab_size": 2,
  "layer_norm_eps": 1e-12,
}
# Options of which the encoder supports only these values.
_ONLY = {
  "hidden_act": ("gelu",),
  "is_causal": (False,),
  "is_decoder": (False, None),
  "pooling": ("average", None),
  "position_embedding_type": ("absolute", None),
}
# Options without effect here: dropout, and BERT's pooler.
_HARMLESS = (
  "attention_probs_dropout_prob",
  "directionality",
  "sbert_ce_default_activation_function",
  "sentence_transformers",
  "hidden_dropout_prob",
  "pooler_fc_size",
  "pooler_num_attention_heads",
  "pooler_num_fc_layers",
  "pooler_size_per_head",
  "pooler_type",
  "tie_word_embeddings",
)


@dataclasses.dataclass(frozen=True)
class Architecture:
  """Sizes of a BERT encoder.

  A text has at most `positions` - `first_position` tokens; `first_position` is
  the row of the first token's position, 0 except in RoBERTa.
  """

  vocab_size: int
  d_model: int
  layers: int
  heads: int
  mlp_dim: int
  positions: int
  token_types: int
  norm_eps: float
  first_position: int = 0

  @property
  def head_dim(self) -> int:
    return self.d_model // self.heads

  @property
  def max_tokens(self) -> int:
    """The most tokens of a text."""
    return self.positions - self.first_position

  def identity(self) -> dict[str, Any]:
    """Returns the fields; identities from before RoBERTa had no offset."""
    fields = dataclasses.asdict(self)
    if not self.first_position:
      del fields["first_position"]
    return fields


def from_hf(hf: Mapping[str, Any]) -> Architecture:
  """Reads a Hugging Face `config.json`.

  Raises:
    ValueError: the model or an option is not supported, or a setting is missing
      or invalid; the message names it.
  """
  kind = hf.get("model_type")
  if kind != "bert" and kind not in _ROBERTA:
    raise ValueError(
      f"config.json: model_type {kind!r} is not supported; expected 'bert', "
      f"{' or '.join(map(repr, _ROBERTA))}."
    )
  hf_config.check(
    hf,
    understood=("architectures", "model_type", "layer_norm_eps", *_SIZES),
    harmless=_HARMLESS,
    only=_ONLY,
  )
  hf = {**_DEFAULTS, **hf}
  for key in _SIZES:
    if type(hf.get(key)) is not int or hf[key] < 1:
      raise ValueError(
        f"config.json: {key} is {hf.get(key, 'missing')!r}, expected a "
        "positive integer."
      )
  eps = hf["layer_norm_eps"]
  if type(eps) not in (int, float) or not 0 < eps < math.inf:
    raise ValueError(
      f"config.json: layer_norm_eps is {eps!r}, expected a positive number."
    )
  padding = hf.get("pad_token_id", 1)
  if kind in _ROBERTA and (type(padding) is not int or padding < 0):
    raise ValueError(
      f"config.json: pad_token_id is {padding!r}, expected a token's id, after "
      "which positions are counted."
    )
  a = Architecture(
    **{ours: hf[key] for key, ours in _SIZES.items()},
    norm_eps=eps,
    first_position=padding + 1 if kind in _ROBERTA else 0,
  )
  if a.d_model % a.heads:
    raise ValueError(
      f"config.json: hidden_size {a.d_model} is not divisible by "
      f"{a.heads} attention heads."
    )
  return a


def rows(a: Architecture, prefix: str = "") -> list[weights.Weight]:
  """Returns every weight of `a`; their names in files begin with `prefix`."""
  table = [
    _weight(a, (key,), f"{prefix}embeddings.{module}_embeddings.weight", shape)
    for key, module, shape in (
      ("words", "word", (a.vocab_size, a.d_model)),
      ("positions", "position", (a.positions, a.d_model)),
      ("token_types", "token_type", (a.token_types, a.d_model)),
    )
  ]
  table += _norm(a, (), "norm", f"{prefix}embeddings.LayerNorm")
  layer = f"{prefix}encoder.layer.{{layer}}."
  d, m = a.d_model, a.mlp_dim
  for key, module, takes, gives in (
    ("q", "attention.self.query", d, d),
    ("k", "attention.self.key", d, d),
    ("v", "attention.self.value", d, d),
    ("o", "attention.output.dense", d, d),
    ("up", "intermediate.dense", d, m),
    ("down", "output.dense", m, d),
  ):
    name, path = layer + module, (_LAYERS, key)
    table += [
      _weight(a, path, name + ".weight", (gives, takes)),
      _weight(a, (_LAYERS, key + "_bias"), name + ".bias", (gives,), init=0.0),
    ]
  for key, module in (
    ("attention_norm", "attention.output.LayerNorm"),
    ("mlp_norm", "output.LayerNorm"),
  ):
    table += _norm(a, (_LAYERS,), key, layer + module)
  return table


def _norm(
  a: Architecture, path: tuple[str, ...], key: str, name: str
) -> list[weights.Weight]:
  size = (a.d_model,)
  return [
    _weight(a, (*path, key), name + ".weight", size, init=None),
    _weight(a, (*path, key + "_bias"), name + ".bias", size, init=0.0),
  ]


def _weight(
  a: Architecture,
  path: tuple[str, ...],
  name: str,
  shape: tuple[int, ...],
  *,
  init: float | None = 0.02,
) -> weights.Weight:
  """Returns the row of a weight that is stored in the file's own layout."""
  stack = (a.layers,) if path[0] == _LAYERS else ()
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


def load(
  folder: str | pathlib.Path,
  a: Architecture,
  *,
  sharding: jax.sharding.Sharding,
  dtype: Any,
  head: Sequence[weights.Weight] = (),
) -> Params:
  """Reads a folder's safetensors; `sharding` should replicate them.

  Args:
    folder: contains the safetensors.
    a: the architecture.
    sharding: of every weight.
    dtype: of every weight.
    head: rows of further weights, which are not stacked.

  Raises:
    ValueError: a tensor is missing, unknown or misshaped; the message names it.
  """
  found = tensor_files.headers(folder)
  prefix = next(
    (p for p in _PREFIXES if any(name.startswith(p) for name in found)), ""
  )
  table = rows(a, prefix) + list(head)
  params = tensor_files.load(
    folder,
    table,
    shardings=weights.tree(table, lambda row: sharding),
    dtype=dtype,
    ignored=_IGNORED,
  )
  # Unstack the layers once, because slicing inside the jitted call would copy
  # every weight in every call.
  stacks = params.pop(_LAYERS)
  layers: Params = {_layer(i): {} for i in range(a.layers)}
  while stacks:
    key, stack = stacks.popitem()
    for i in range(a.layers):
      layers[_layer(i)][key] = weights.index(stack, i)
  return params | layers


def _layer(i: int) -> str:
  return f"{_LAYERS}_{i}"


class _Block(nn.Module):
  """One layer: attention, then the feed-forward, each normed with its input."""

  a: Architecture

  @nn.compact
  def __call__(self, x: jax.Array, visible: jax.Array) -> jax.Array:
    """Applies the layer to tokens `[D, B * T]`; `visible` is bool `[B, T]`."""
    a = self.a
    w = {
      row.path[-1]: self.param(
        row.path[-1], nn.initializers.zeros_init(), row.layer_shape
      )
      for row in rows(a)
      if row.stacked
    }

    def project(key: str, x: jax.Array) -> jax.Array:
      return _dot(w[key], x) + w[key + "_bias"][:, None]

    def norm(key: str, x: jax.Array) -> jax.Array:
      return _layer_norm(x, w[key], w[key + "_bias"], a)

    b, t = visible.shape
    # [B, N, H, T].
    q, k, v = (
      project(key, x).reshape(a.heads, -1, b, t).transpose(2, 0, 1, 3)
      for key in ("q", "k", "v")
    )
    out = _attend(q * a.head_dim**-0.5, k, v, visible)
    out = out.transpose(1, 2, 0, 3).reshape(x.shape)
    x = norm("attention_norm", project("o", out) + x)
    y = project("down", _gelu(project("up", x)))
    return norm("mlp_norm", y + x)


class Bert(nn.Module):
  """Maps token ids to final hidden states; `rows` names the parameters."""

  a: Architecture

  @nn.compact
  def __call__(
    self, ids: jax.Array, lengths: jax.Array, first: jax.Array | None = None
  ) -> jax.Array:
    a, (b, t) = self.a, ids.shape
    w = {
      row.path[0]: self.param(
        row.path[0], nn.initializers.zeros_init(), row.shape
      )
      for row in rows(a)
      if not row.stacked
    }
    types = w["token_types"][0]
    if first is not None and a.token_types > 1:
      types = w["token_types"][(jnp.arange(t) >= first[:, None]).astype(int)]
    at = a.first_position
    x = w["words"][ids] + types + w["positions"][at : at + t]
    x = _layer_norm(x.reshape(b * t, -1).T, w["norm"], w["norm_bias"], a)
    visible = jnp.arange(t) < lengths[:, None]
    for i in range(a.layers):
      x = _Block(a, name=_layer(i))(x, visible)
    return x.reshape(-1, b, t).transpose(1, 2, 0)


def forward(
  params: Params,
  a: Architecture,
  ids: jax.Array,
  lengths: jax.Array,
  first: jax.Array | None = None,
) -> jax.Array:
  """Returns the final hidden states of texts.

  Args:
    params: the result of `load`; the computation is in their dtype.
    a: the architecture.
    ids: int `[B, T]`, T <= `a.max_tokens`.
    lengths: int `[B]`, number of tokens of each text; the rest is padding.
    first: int `[B]`, number of tokens of token type 0; the others have type 1,
      if the model has one. None: all tokens have type 0.

  Returns:
    `[B, T, D]`; values at padding are undefined.
  """
  hidden = Bert(a).apply({"params": params}, ids, lengths, first)
  return hidden


def _dot(x: jax.Array, w: jax.Array) -> jax.Array:
  """Multiplies at full precision; TPUs would round float32 to bfloat16."""
  return jnp.matmul(x, w, precision=jax.lax.Precision.HIGHEST)


def _attend(
  q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array
) -> jax.Array:
  """Returns attention to the visible tokens; q, k, v, result `[B, N, H, T]`.

  Scores are `[B, N, keys, queries]`, because XLA does not vectorise reductions
  over the last axis on CPUs. The division by the sum comes last, because it
  then costs H divisions for each query instead of T.
  """
  scores = _dot(k.swapaxes(-1, -2), q).astype(jnp.float32)
  hidden = jnp.finfo(jnp.float32).min
  scores = jnp.where(visible[:, None, :, None], scores, hidden)
  shares = jnp.exp(scores - scores.max(-2, keepdims=True))
  total = shares.sum(-2, keepdims=True)
  return (_dot(v, shares.astype(v.dtype)) / total).astype(v.dtype)


def _gelu(x: jax.Array) -> jax.Array:
  """Exact GELU by erf; `jax.nn.gelu` uses erfc, three times slower on CPUs."""
  return 0.5 * x * (1 + jax.lax.erf(x * 0.5**0.5))


def _layer_norm(
  x: jax.Array, scale: jax.Array, bias: jax.Array, a: Architecture
) -> jax.Array:
  """Normalises over the first axis, in float32."""
  x32 = x.astype(jnp.float32)
  x32 -= x32.mean(0)
  x32 *= jax.lax.rsqrt(jnp.square(x32).mean(0) + a.norm_eps)
  return (x32 * scale[:, None] + bias[:, None]).astype(x.dtype)
