"""ModernBERT encoders (https://arxiv.org/abs/2412.13663).

Layers are pre-norm with rotary positions and a gated feed-forward. Some attend
to the whole text, the others to a window around each token, with another theta.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from anysearch_jax.policy import hf_config, tensor_files
from anysearch_jax.policy import parameters as weights
from retrieval.encoder import families, layers

# Models with heads store the encoder under this prefix.
_PREFIX = "model."
# The head for masked tokens.
_IGNORED = r"(head\.(dense|norm)|decoder)\.(weight|bias)"
_SIZES = {
  "vocab_size": "vocab_size",
  "hidden_size": "d_model",
  "num_hidden_layers": "layers",
  "num_attention_heads": "heads",
  "intermediate_size": "mlp_dim",
  "max_position_embeddings": "positions",
  "local_attention": "window",
}
_FLAGS = ("norm_bias", "attention_bias", "mlp_bias")
# The defaults of transformers for values that a config.json omits.
_DEFAULTS: Mapping[str, Any] = {
  "max_position_embeddings": 8192,
  "local_attention": 128,
  "global_attn_every_n_layers": 3,
  "global_rope_theta": 160_000.0,
  "local_rope_theta": 10_000.0,
  "norm_eps": 1e-5,
  **dict.fromkeys(_FLAGS, False),
}
_WHOLE, _WINDOW = "full_attention", "sliding_attention"
# Options of which the encoder supports only these values.
_ONLY = {
  "hidden_activation": ("gelu",),
  "is_causal": (False,),
  "is_decoder": (False, None),
  "rope_scaling": (None,),
}
# Options without effect here: dropout, the heads, how torch computes, and two
# keys of published files that transformers does not read.
_HARMLESS = (
  "attention_dropout",
  "classifier_activation",
  "classifier_bias",
  "classifier_pooling",
  "cls_token_id",
  "decoder_bias",
  "deterministic_flash_attn",
  "embedding_dropout",
  "initializer_cutoff_factor",
  "layer_norm_eps",
  "mlp_dropout",
  "position_embedding_type",
  "reference_compile",
  "repad_logits_with_grad",
  "sparse_pred_ignore_index",
  "sparse_prediction",
  "tie_word_embeddings",
)


@dataclasses.dataclass(frozen=True)
class Architecture:
  """Sizes of a ModernBERT encoder.

  `windowed` says for each layer whether a token attends only to the `window`
  // 2 tokens on each side.
  """

  vocab_size: int
  d_model: int
  layers: int
  heads: int
  mlp_dim: int
  positions: int
  window: int
  windowed: tuple[bool, ...]
  global_theta: float
  local_theta: float
  norm_eps: float
  norm_bias: bool
  attention_bias: bool
  mlp_bias: bool

  @property
  def max_tokens(self) -> int:
    """The most tokens of a text."""
    return self.positions

  def identity(self) -> dict[str, Any]:
    """Returns the fields as JSON values."""
    return dataclasses.asdict(self) | {"windowed": list(self.windowed)}


def from_hf(hf: Mapping[str, Any]) -> Architecture:
  """Reads a Hugging Face `config.json`.

  Raises:
    ValueError: an option is not supported, or a setting is missing or invalid;
      the message names it.
  """
  hf_config.check(
    hf,
    understood=(
      "architectures",
      "model_type",
      "layer_types",
      "rope_parameters",
      *_SIZES,
      *_DEFAULTS,
    ),
    harmless=_HARMLESS,
    only=_ONLY,
  )
  hf = {**_DEFAULTS, **hf}
  for key in _FLAGS:
    if type(hf[key]) is not bool:
      raise ValueError(
        f"config.json: {key} is {hf[key]!r}, expected true or false."
      )
  sizes: dict[str, Any] = families.sizes(hf, _SIZES)
  families.check_heads(sizes["d_model"], sizes["heads"], even=True)
  rope = families.mapping(hf, "rope_parameters")
  hf_config.check(rope, understood=(_WHOLE, _WINDOW), only={})
  return Architecture(
    **sizes,
    windowed=_windowed(hf, sizes["layers"]),
    global_theta=_theta(hf, rope, _WHOLE, "global_rope_theta"),
    local_theta=_theta(hf, rope, _WINDOW, "local_rope_theta"),
    norm_eps=families.number(hf, "norm_eps"),
    **{key: hf[key] for key in _FLAGS},
  )


def _windowed(hf: Mapping[str, Any], count: int) -> tuple[bool, ...]:
  """Returns which layers have a window; older files say how many do not."""
  types = hf.get("layer_types")
  if types is None:
    key = "global_attn_every_n_layers"
    every = families.sizes(hf, {key: key})[key]
    return tuple(i % every > 0 for i in range(count))
  if (
    not isinstance(types, list)
    or len(types) != count
    or any(kind not in (_WHOLE, _WINDOW) for kind in types)
  ):
    raise ValueError(
      f"config.json: layer_types is {types!r}, expected {_WHOLE!r} or "
      f"{_WINDOW!r} for each of {count} layers."
    )
  return tuple(kind == _WINDOW for kind in types)


def _theta(
  hf: Mapping[str, Any], rope: Mapping[str, Any], kind: str, older: str
) -> float:
  """Returns the theta of a kind of layers; older files have the key `older`."""
  said = families.mapping(rope, kind)
  if "rope_theta" not in said:
    said = said | {"rope_theta": families.number(hf, older)}
  return families.theta(said)


def rows(a: Architecture, prefix: str = "") -> list[weights.Weight]:
  """Returns every weight of `a`; their names in files begin with `prefix`."""
  d, m = a.d_model, a.mlp_dim
  name = f"{prefix}embeddings.tok_embeddings.weight"
  table = [families.weight(("words",), name, (a.vocab_size, d))]
  for path, module in (
    (("norm",), "embeddings.norm"),
    (("final_norm",), "final_norm"),
    # The first layer has none.
    *(
      ((families.layer(i), "attention_norm"), f"layers.{i}.attn_norm")
      for i in range(1, a.layers)
    ),
  ):
    table += families.pair(path, prefix + module, (d,), bias=a.norm_bias)
  for key, module, shape, bias in (
    ("qkv", "attn.Wqkv", (3 * d, d), a.attention_bias),
    ("o", "attn.Wo", (d, d), a.attention_bias),
    ("mlp_norm", "mlp_norm", (d,), a.norm_bias),
    ("up", "mlp.Wi", (2 * m, d), a.mlp_bias),
    ("down", "mlp.Wo", (d, m), a.mlp_bias),
  ):
    table += families.pair(
      (families.LAYERS, key),
      f"{prefix}layers.{{layer}}.{module}",
      shape,
      bias=bias,
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
  names = tensor_files.headers(folder)
  prefix = _PREFIX if any(name.startswith(_PREFIX) for name in names) else ""
  return families.load(
    folder, rows(a, prefix), sharding=sharding, dtype=dtype, ignored=_IGNORED
  )


class _Block(nn.Module):
  """One layer: attention, then the gated feed-forward, each added."""

  a: Architecture

  @nn.compact
  def __call__(
    self, x: jax.Array, turns: jax.Array, mask: jax.Array
  ) -> jax.Array:
    """Applies the layer to tokens `[D, B * T]`; see `layers.rotary_attend`."""
    a = self.a
    own = (families.LAYERS, self.name)
    w = families.declare(self, (row for row in rows(a) if row.path[0] in own))

    def norm(key: str, x: jax.Array) -> jax.Array:
      return layers.layer_norm(w, key, x, a.norm_eps)

    y = norm("attention_norm", x) if "attention_norm" in w else x
    y = layers.rotary_attend(layers.project(w, "qkv", y), a.heads, turns, mask)
    x += layers.project(w, "o", y)
    y = layers.project(w, "up", norm("mlp_norm", x))
    y, gate = jnp.split(y, 2)
    return x + layers.project(w, "down", layers.gelu(y) * gate)


class ModernBert(nn.Module):
  """Maps token ids to final hidden states; `rows` names the parameters."""

  a: Architecture

  @nn.compact
  def __call__(self, ids: jax.Array, lengths: jax.Array) -> jax.Array:
    a, (b, t) = self.a, ids.shape
    w = families.declare(self, (row for row in rows(a) if len(row.path) == 1))

    def norm(key: str, x: jax.Array) -> jax.Array:
      return layers.layer_norm(w, key, x, a.norm_eps)

    x = norm("norm", w["words"][ids].reshape(b * t, -1).T)
    at = jnp.arange(t)
    visible = (at < lengths[:, None])[:, None, :, None]
    near = jnp.abs(at[:, None] - at) <= a.window // 2
    width = a.d_model // a.heads
    whole = layers.rotary(width, a.global_theta, t), visible
    window = layers.rotary(width, a.local_theta, t), visible & near
    for i, windowed in enumerate(a.windowed):
      block = _Block(a, name=families.layer(i))
      x = block(x, *(window if windowed else whole))
    return norm("final_norm", x).reshape(-1, b, t).transpose(1, 2, 0)


def forward(
  params: families.Params, a: Architecture, ids: jax.Array, lengths: jax.Array
) -> jax.Array:
  """Returns the final hidden states of texts; see `bert.forward`."""
  hidden = ModernBert(a).apply({"params": params}, ids, lengths)
  return hidden
