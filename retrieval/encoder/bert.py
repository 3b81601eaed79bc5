"""BERT encoders: reading config.json and weights, and the forward pass.

The model is post-norm with absolute positions (https://arxiv.org/abs/1810.04805),
written in Flax over a plain nested dict. RoBERTa and XLM-RoBERTa are the same
model whose first token has the position after the padding token's id.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from anysearch_jax.policy import hf_config, tensor_files
from anysearch_jax.policy import parameters as weights
from retrieval.encoder import families, layers

Params = families.Params

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
  sizes = families.sizes(hf, _SIZES)
  padding = hf.get("pad_token_id", 1)
  if kind in _ROBERTA and (type(padding) is not int or padding < 0):
    raise ValueError(
      f"config.json: pad_token_id is {padding!r}, expected a token's id, after "
      "which positions are counted."
    )
  a = Architecture(
    **sizes,
    norm_eps=families.number(hf, "layer_norm_eps"),
    first_position=padding + 1 if kind in _ROBERTA else 0,
  )
  families.check_heads(a.d_model, a.heads)
  return a


def rows(a: Architecture, prefix: str = "") -> list[weights.Weight]:
  """Returns every weight of `a`; their names in files begin with `prefix`."""
  d, m = a.d_model, a.mlp_dim
  table = [
    families.weight(
      (key,), f"{prefix}embeddings.{module}_embeddings.weight", (size, d)
    )
    for key, module, size in (
      ("words", "word", a.vocab_size),
      ("positions", "position", a.positions),
      ("token_types", "token_type", a.token_types),
    )
  ]
  name = f"{prefix}embeddings.LayerNorm"
  table += families.pair(("norm",), name, (d,), bias=True)
  for key, module, shape in (
    ("q", "attention.self.query", (d, d)),
    ("k", "attention.self.key", (d, d)),
    ("v", "attention.self.value", (d, d)),
    ("o", "attention.output.dense", (d, d)),
    ("up", "intermediate.dense", (m, d)),
    ("down", "output.dense", (d, m)),
    ("attention_norm", "attention.output.LayerNorm", (d,)),
    ("mlp_norm", "output.LayerNorm", (d,)),
  ):
    table += families.pair(
      (families.LAYERS, key),
      f"{prefix}encoder.layer.{{layer}}.{module}",
      shape,
      bias=True,
      layers=a.layers,
    )
  return table


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
  return families.load(
    folder,
    rows(a, prefix) + list(head),
    sharding=sharding,
    dtype=dtype,
    ignored=_IGNORED,
  )


class _Block(nn.Module):
  """One layer: attention, then the feed-forward, each normed with its input."""

  a: Architecture

  @nn.compact
  def __call__(self, x: jax.Array, visible: jax.Array) -> jax.Array:
    """Applies the layer to tokens `[D, B * T]`; `visible` is bool `[B, T]`."""
    a = self.a
    w = families.declare(self, (row for row in rows(a) if row.stacked))

    def project(key: str, x: jax.Array) -> jax.Array:
      return layers.project(w, key, x)

    def norm(key: str, x: jax.Array) -> jax.Array:
      return layers.layer_norm(w, key, x, a.norm_eps)

    b, t = visible.shape
    # [B, N, H, T].
    q, k, v = (
      project(key, x).reshape(a.heads, -1, b, t).transpose(2, 0, 1, 3)
      for key in ("q", "k", "v")
    )
    mask = visible[:, None, :, None]
    out = layers.attend(q * a.head_dim**-0.5, k, v, mask)
    out = out.transpose(1, 2, 0, 3).reshape(x.shape)
    x = norm("attention_norm", project("o", out) + x)
    y = project("down", layers.gelu(project("up", x)))
    return norm("mlp_norm", y + x)


class Bert(nn.Module):
  """Maps token ids to final hidden states; `rows` names the parameters."""

  a: Architecture

  @nn.compact
  def __call__(
    self, ids: jax.Array, lengths: jax.Array, first: jax.Array | None = None
  ) -> jax.Array:
    a, (b, t) = self.a, ids.shape
    w = families.declare(self, (row for row in rows(a) if not row.stacked))
    types = w["token_types"][0]
    if first is not None and a.token_types > 1:
      types = w["token_types"][(jnp.arange(t) >= first[:, None]).astype(int)]
    at = a.first_position
    x = w["words"][ids] + types + w["positions"][at : at + t]
    x = layers.layer_norm(w, "norm", x.reshape(b * t, -1).T, a.norm_eps)
    visible = jnp.arange(t) < lengths[:, None]
    for i in range(a.layers):
      x = _Block(a, name=families.layer(i))(x, visible)
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
