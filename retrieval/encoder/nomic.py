"""Nomic's BERT encoders (https://arxiv.org/abs/2402.01613).

Layers are post-norm with rotary positions and a gated feed-forward. A folder's
config.json has the keys of Nomic's own code, those of transformers, or both.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from anysearch_jax.policy import hf_config
from anysearch_jax.policy import parameters as weights
from retrieval.encoder import families, layers

_IGNORED = r"pooler\.dense\.(weight|bias)"
_SIZES = {
  "vocab_size": "vocab_size",
  "hidden_size": "d_model",
  "num_hidden_layers": "layers",
  "num_attention_heads": "heads",
  "intermediate_size": "mlp_dim",
  "max_position_embeddings": "positions",
  "type_vocab_size": "token_types",
}
# Keys of Nomic's code, and those of transformers for the same values. Texts of
# more tokens than the model was trained with need another theta.
_NAMES = {
  "n_embd": "hidden_size",
  "n_layer": "num_hidden_layers",
  "n_head": "num_attention_heads",
  "n_inner": "intermediate_size",
  "max_trained_positions": "max_position_embeddings",
  "layer_norm_epsilon": "layer_norm_eps",
  "rotary_emb_base": "rope_theta",
}
# The defaults of both for values that a config.json omits.
_DEFAULTS: Mapping[str, Any] = {
  "max_position_embeddings": 2048,
  "type_vocab_size": 2,
  "rope_theta": 1000.0,
}
# Options of which the encoder supports only these values. Nomic's code has
# other defaults for the first five.
_SAID: Mapping[str, tuple] = {
  "activation_function": ("swiglu",),
  "mlp_fc1_bias": (False,),
  "mlp_fc2_bias": (False,),
  "qkv_proj_bias": (False,),
  "rotary_emb_fraction": (1.0, 1),
}
_ONLY: Mapping[str, tuple] = {
  **_SAID,
  "causal": (False,),
  "hidden_act": ("silu",),
  "is_causal": (False,),
  "is_decoder": (False, None),
  "parallel_block": (False,),
  "prenorm": (False,),
  "rope_scaling": (None,),
  "rotary_emb_interleaved": (False,),
  "rotary_emb_scale_base": (None,),
  "scale_attn_by_inverse_layer_idx": (False,),
  "scale_attn_weights": (True,),
  "use_rms_norm": (False, None),
}
# Options without effect here: dropout, how torch computes, GPT-2's heads, and
# what is for texts of more tokens than the model was trained with.
_HARMLESS = (
  "attention_probs_dropout_prob",
  "attn_pdrop",
  "dense_seq_output",
  "embd_pdrop",
  "fused_bias_fc",
  "fused_dropout_add_ln",
  "hidden_dropout_prob",
  "n_positions",
  "pad_vocab_size_multiple",
  "parallel_block_tied_norm",
  "reorder_and_upcast_attn",
  "resid_pdrop",
  "rotary_scaling_factor",
  "summary_activation",
  "summary_first_dropout",
  "summary_proj_to_labels",
  "summary_type",
  "summary_use_proj",
  "tie_word_embeddings",
  "use_flash_attn",
  "use_xentropy",
)
# Nomic's own code, whose options are the keys above.
_CODE = re.compile(
  r"(nomic-ai/nomic-bert-2048--)?"
  r"(configuration|modeling)_hf_nomic_bert\.NomicBert\w+"
)


@dataclasses.dataclass(frozen=True)
class Architecture:
  """Sizes of a Nomic encoder."""

  vocab_size: int
  d_model: int
  layers: int
  heads: int
  mlp_dim: int
  positions: int
  token_types: int
  theta: float
  norm_eps: float

  @property
  def max_tokens(self) -> int:
    """The most tokens of a text: as many as the model was trained with."""
    return self.positions

  def identity(self) -> dict[str, Any]:
    """Returns the fields as JSON values."""
    return dataclasses.asdict(self)


def from_hf(hf: Mapping[str, Any]) -> Architecture:
  """Reads a Hugging Face `config.json`.

  Raises:
    ValueError: an option is not supported, or a setting is missing or invalid;
      the message names it.
  """
  hf = dict(hf)
  code = families.mapping(hf, "auto_map")
  if all(_CODE.fullmatch(str(name)) for name in code.values()):
    hf.pop("auto_map", None)
  hf_config.check(
    hf,
    understood=(
      "architectures",
      "model_type",
      "head_dim",
      "rope_parameters",
      *_SIZES,
      *_NAMES,
      "layer_norm_eps",
    ),
    harmless=_HARMLESS,
    only=_ONLY,
  )
  missing = [key for key in _SAID if "n_embd" in hf and key not in hf]
  if missing:
    raise ValueError(
      f"config.json: {missing[0]} is missing, expected "
      f"{_SAID[missing[0]][0]!r}."
    )
  rope = families.mapping(hf, "rope_parameters")
  if "rope_theta" in rope:
    hf["rope_theta"] = rope["rope_theta"]
  for theirs, ours in _NAMES.items():
    if theirs in hf and hf.get(ours, hf[theirs]) != hf[theirs]:
      raise ValueError(
        f"config.json: {theirs} is {hf[theirs]!r}, but {ours} is {hf[ours]!r}; "
        "expected the same value."
      )
    if theirs in hf:
      hf[ours] = hf[theirs]
  hf = {**_DEFAULTS, **hf}
  sizes = families.sizes(hf, _SIZES)
  families.check_heads(sizes["d_model"], sizes["heads"], even=True)
  width = sizes["d_model"] // sizes["heads"]
  if hf.get("head_dim", width) != width:
    raise ValueError(
      f"config.json: head_dim is {hf['head_dim']!r}, expected {width}, "
      "hidden_size / num_attention_heads."
    )
  return Architecture(
    **sizes,
    theta=families.theta(rope | {"rope_theta": hf["rope_theta"]}),
    norm_eps=families.number(hf, "layer_norm_eps"),
  )


def rows(a: Architecture) -> list[weights.Weight]:
  """Returns every weight of `a`."""
  d, m = a.d_model, a.mlp_dim
  table = [
    families.weight((key,), f"embeddings.{module}_embeddings.weight", (size, d))
    for key, module, size in (
      ("words", "word", a.vocab_size),
      ("token_types", "token_type", a.token_types),
    )
  ]
  table += families.pair(("norm",), "emb_ln", (d,), bias=True)
  for key, module, shape in (
    ("qkv", "attn.Wqkv", (3 * d, d)),
    ("o", "attn.out_proj", (d, d)),
    ("attention_norm", "norm1", (d,)),
    ("up", "mlp.fc11", (m, d)),
    ("gate", "mlp.fc12", (m, d)),
    ("down", "mlp.fc2", (d, m)),
    ("mlp_norm", "norm2", (d,)),
  ):
    table += families.pair(
      (families.LAYERS, key),
      f"encoder.layers.{{layer}}.{module}",
      shape,
      bias=len(shape) == 1,
      layers=a.layers,
    )
  return table


def load(
  folder: str | pathlib.Path,
  a: Architecture,
  *,
  sharding: jax.sharding.Sharding,
  dtype: Any,
) -> families.Params:
  """Reads a folder's safetensors; see `families.load`."""
  return families.load(
    folder, rows(a), sharding=sharding, dtype=dtype, ignored=_IGNORED
  )


class _Block(nn.Module):
  """One layer: attention, then the feed-forward, each normed with its input."""

  a: Architecture

  @nn.compact
  def __call__(
    self, x: jax.Array, turns: jax.Array, mask: jax.Array
  ) -> jax.Array:
    """Applies the layer to tokens `[D, B * T]`; see `layers.rotary_attend`."""
    a = self.a
    w = families.declare(self, (row for row in rows(a) if row.stacked))
    y = layers.project(w, "qkv", x)
    y = layers.rotary_attend(y, a.heads, turns, mask)
    y = layers.project(w, "o", y)
    x = layers.layer_norm(w, "attention_norm", x + y, a.norm_eps)
    y = layers.project(w, "up", x) * nn.silu(layers.project(w, "gate", x))
    y = layers.project(w, "down", y)
    return layers.layer_norm(w, "mlp_norm", x + y, a.norm_eps)


class Nomic(nn.Module):
  """Maps token ids to final hidden states; `rows` names the parameters."""

  a: Architecture

  @nn.compact
  def __call__(self, ids: jax.Array, lengths: jax.Array) -> jax.Array:
    a, (b, t) = self.a, ids.shape
    w = families.declare(self, (row for row in rows(a) if not row.stacked))
    x = (w["words"][ids] + w["token_types"][0]).reshape(b * t, -1).T
    x = layers.layer_norm(w, "norm", x, a.norm_eps)
    mask = (jnp.arange(t) < lengths[:, None])[:, None, :, None]
    turns = layers.rotary(a.d_model // a.heads, a.theta, t)
    for i in range(a.layers):
      x = _Block(a, name=families.layer(i))(x, turns, mask)
    return x.reshape(-1, b, t).transpose(1, 2, 0)


def forward(
  params: families.Params, a: Architecture, ids: jax.Array, lengths: jax.Array
) -> jax.Array:
  """Returns the final hidden states of texts; see `bert.forward`."""
  hidden = Nomic(a).apply({"params": params}, ids, lengths)
  return hidden
