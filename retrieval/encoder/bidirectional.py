"""BERT's family and ModernBERT, whose tokens see what follows them too.

A family is a row of `_FAMILIES` and a table of its layers' weights. BERT and
(XLM-)RoBERTa are post-norm with absolute positions; RoBERTa's first token has
the position after the padding token's id (https://arxiv.org/abs/1810.04805).
ModernBERT is pre-norm with rotary positions and a gated feed-forward; some of
its layers attend to a window around each token, with another theta
(https://arxiv.org/abs/2412.13663).

Tokens are the last axis of hidden states, `[D, B * T]`.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from anysearch_jax.policy import hf_config, tensor_files
from anysearch_jax.policy import parameters as weights

Params = dict[str, Any]

_LAYERS = "layers"
_WHOLE = "full_attention"
_WINDOW = "sliding_attention"
_FLAGS = ("norm_bias", "attention_bias", "mlp_bias")


@dataclasses.dataclass(frozen=True)
class Architecture:
  """Sizes of an encoder.

  Attributes:
    vocab_size: rows of the embedding of tokens.
    d_model: width of a hidden state.
    layers: number of layers.
    heads: number of attention heads.
    mlp_dim: width of the feed-forward layer.
    positions: number of positions that the model has.
    norm_eps: epsilon of the norms.
    token_types: rows of the embedding of segments; BERT's family only, as
      `first_position` is.
    first_position: the row of the first token's position, 0 except in RoBERTa.
    window: width of a window, in tokens; ModernBERT only, as are all fields
      below.
    windowed: for each layer, whether it attends only to the `window` // 2
      tokens on each side of a token; () means absolute positions.
    global_theta: base of the rotary frequencies in layers without a window.
    local_theta: base of the rotary frequencies in layers with a window.
    norm_bias, attention_bias, mlp_bias: whether these parts have biases.
  """

  vocab_size: int
  d_model: int
  layers: int
  heads: int
  mlp_dim: int
  positions: int
  norm_eps: float
  token_types: int = 0
  first_position: int = 0
  window: int = 0
  windowed: tuple[bool, ...] = ()
  global_theta: float = 0.0
  local_theta: float = 0.0
  norm_bias: bool = True
  attention_bias: bool = True
  mlp_bias: bool = True

  @property
  def max_tokens(self) -> int:
    """The most tokens of a text."""
    return self.positions - self.first_position

  def identity(self) -> dict[str, Any]:
    """Returns the fields that the family has, as JSON values."""
    fields = dataclasses.asdict(self) | {"windowed": list(self.windowed)}
    absent = [*_FLAGS, "window", "windowed", "global_theta", "local_theta"]
    if self.windowed:
      absent = ["token_types", "first_position"]
    elif not self.first_position:
      absent.append("first_position")
    return {name: x for name, x in fields.items() if name not in absent}


@dataclasses.dataclass(frozen=True)
class _Family:
  """How a family's folders are read.

  Attributes:
    sizes: maps keys of config.json to fields of `Architecture`.
    defaults: the defaults of transformers for keys that a config.json omits.
    only: the supported values of options.
    harmless: options without effect here, such as dropout and training heads.
    prefixes: prefixes under which models with heads store the encoder.
    ignored: pattern of tensors that are not needed: buffers, poolers, heads.
    layers: key, module, shape in letters (see `rows`) and bias flag of each
      weight of a layer.
  """

  sizes: Mapping[str, str]
  defaults: Mapping[str, Any]
  only: Mapping[str, tuple]
  harmless: Sequence[str]
  prefixes: tuple[str, ...]
  ignored: str
  layers: tuple[tuple[str, str, str, str], ...]


_SIZES = {
  "vocab_size": "vocab_size",
  "hidden_size": "d_model",
  "num_hidden_layers": "layers",
  "num_attention_heads": "heads",
  "intermediate_size": "mlp_dim",
  "max_position_embeddings": "positions",
}
_BERT = _Family(
  sizes=_SIZES | {"type_vocab_size": "token_types"},
  defaults={
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
  },
  only={
    "hidden_act": ("gelu",),
    "is_causal": (False,),
    "is_decoder": (False, None),
    "pooling": ("average", None),
    "position_embedding_type": ("absolute", None),
  },
  harmless=(
    "attention_probs_dropout_prob",
    "directionality",
    "hidden_dropout_prob",
    "pooler_fc_size",
    "pooler_num_attention_heads",
    "pooler_num_fc_layers",
    "pooler_size_per_head",
    "pooler_type",
    "sbert_ce_default_activation_function",
    "sentence_transformers",
    "tie_word_embeddings",
  ),
  prefixes=("bert.", "roberta."),
  ignored=(
    r"(bert\.|roberta\.)?"
    r"(embeddings\.(position|token_type)_ids|pooler\.dense\..*)"
  ),
  layers=(
    ("q", "attention.self.query", "D D", "attention_bias"),
    ("k", "attention.self.key", "D D", "attention_bias"),
    ("v", "attention.self.value", "D D", "attention_bias"),
    ("o", "attention.output.dense", "D D", "attention_bias"),
    ("up", "intermediate.dense", "M D", "mlp_bias"),
    ("down", "output.dense", "D M", "mlp_bias"),
    ("attention_norm", "attention.output.LayerNorm", "D", "norm_bias"),
    ("mlp_norm", "output.LayerNorm", "D", "norm_bias"),
  ),
)
_MODERNBERT = _Family(
  sizes=_SIZES | {"local_attention": "window"},
  defaults={
    "max_position_embeddings": 8192,
    "local_attention": 128,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160_000.0,
    "local_rope_theta": 10_000.0,
    "norm_eps": 1e-5,
    "layer_types": None,
    "rope_parameters": None,
    **dict.fromkeys(_FLAGS, False),
  },
  only={
    "hidden_activation": ("gelu",),
    "is_causal": (False,),
    "is_decoder": (False, None),
    "rope_scaling": (None,),
  },
  # Published files have the last two, which transformers does not read.
  harmless=(
    "attention_dropout",
    "classifier_activation",
    "classifier_bias",
    "classifier_pooling",
    "cls_token_id",
    "decoder_bias",
    "deterministic_flash_attn",
    "embedding_dropout",
    "initializer_cutoff_factor",
    "mlp_dropout",
    "reference_compile",
    "repad_logits_with_grad",
    "sparse_pred_ignore_index",
    "sparse_prediction",
    "tie_word_embeddings",
    "layer_norm_eps",
    "position_embedding_type",
  ),
  prefixes=("model.",),
  ignored=r"(head\.(dense|norm)|decoder)\.(weight|bias)",
  layers=(
    ("qkv", "attn.Wqkv", "3D D", "attention_bias"),
    ("o", "attn.Wo", "D D", "attention_bias"),
    ("mlp_norm", "mlp_norm", "D", "norm_bias"),
    ("up", "mlp.Wi", "2M D", "mlp_bias"),
    ("down", "mlp.Wo", "D M", "mlp_bias"),
  ),
)
_FAMILIES = {
  "bert": _BERT,
  "roberta": _BERT,
  "xlm-roberta": _BERT,
  "modernbert": _MODERNBERT,
}
KINDS = tuple(_FAMILIES)
_PADDING = hf_config.Kind(
  "a token's id, after which positions count",
  lambda x: type(x) is int and x >= 0,
)


# Configurations.


def from_hf(hf: Mapping[str, Any]) -> Architecture:
  """Reads a Hugging Face `config.json` of one of `KINDS`.

  Raises:
    ValueError: an option is not supported, or a setting is missing or invalid;
      the message names it.
  """
  family = _FAMILIES[hf["model_type"]]
  understood = ("architectures", "model_type", *family.sizes, *family.defaults)
  hf_config.check_keys(
    hf, understood=understood, harmless=family.harmless, only=family.only
  )
  hf = {**family.defaults, **hf}
  fields: dict[str, Any]
  hf_config.check_types(hf, dict.fromkeys(family.sizes, hf_config.SIZE))
  fields = {field: hf[key] for key, field in family.sizes.items()}
  divisor = fields["heads"]
  condition = ""
  if family is _BERT:
    hf_config.check_types(hf, {"layer_norm_eps": hf_config.NUMBER})
    fields["norm_eps"] = hf["layer_norm_eps"]
    if hf["model_type"] != "bert":
      hf = {"pad_token_id": 1, **hf}
      hf_config.check_types(hf, {"pad_token_id": _PADDING})
      fields["first_position"] = hf["pad_token_id"] + 1
  else:
    fields |= _modernbert(hf, fields["layers"])
    divisor *= 2  # Rotary positions turn pairs.
    condition = " of an even width"
  if fields["d_model"] % divisor:
    raise ValueError(
      f"config.json: hidden_size {fields['d_model']} is not divisible by "
      f"{fields['heads']} attention heads{condition}."
    )
  return Architecture(**fields)


def _modernbert(hf: Mapping[str, Any], layers: int) -> dict[str, Any]:
  """Returns the fields of ModernBERT that are not sizes.

  Older files use other keys for the layers without a window and the thetas.
  """
  hf_config.check_types(
    hf, dict.fromkeys(_FLAGS, hf_config.SWITCH) | {"norm_eps": hf_config.NUMBER}
  )
  rope = _object(hf, "rope_parameters")
  hf_config.check_keys(rope, understood=(_WHOLE, _WINDOW), only={})
  kinds = hf.get("layer_types")
  if kinds is None:
    period = "global_attn_every_n_layers"
    hf_config.check_types(hf, {period: hf_config.SIZE})
    kinds = [_WINDOW if i % hf[period] else _WHOLE for i in range(layers)]
  layer_types = hf_config.Kind(
    f"{_WHOLE!r} or {_WINDOW!r} for each of {layers} layers",
    lambda x: (
      isinstance(x, list)
      and len(x) == layers
      and {_WHOLE, _WINDOW}.issuperset(map(str, x))
    ),
  )
  hf_config.check_types({"layer_types": kinds}, {"layer_types": layer_types})
  fields: dict[str, Any] = {
    "norm_eps": hf["norm_eps"],
    "windowed": tuple(kind == _WINDOW for kind in kinds),
  }
  fields |= {key: hf[key] for key in _FLAGS}
  for kind, reach in ((_WHOLE, "global"), (_WINDOW, "local")):
    options = _object(rope, kind)
    plain = ("default", None)
    hf_config.check_keys(
      options,
      understood=("rope_theta",),
      only={"rope_type": plain, "type": plain},
    )
    theta = "rope_theta" if "rope_theta" in options else f"{reach}_rope_theta"
    options = {**hf, **options}
    hf_config.check_types(options, {theta: hf_config.NUMBER})
    fields[f"{reach}_theta"] = float(options[theta])
  return fields


def _object(hf: Mapping[str, Any], key: str) -> Mapping[str, Any]:
  """Returns an object of a config.json, {} if it is missing or null."""
  if hf.get(key) is not None:
    hf_config.check_types(hf, {key: hf_config.OBJECT})
  return hf.get(key) or {}


# Weights.


def rows(a: Architecture, prefix: str = "") -> list[weights.Weight]:
  """Returns every weight of `a`; their names in files begin with `prefix`.

  Weights keep the layout that they have in the file.
  """
  sizes = {
    "D": a.d_model,
    "3D": 3 * a.d_model,
    "M": a.mlp_dim,
    "2M": 2 * a.mlp_dim,
  }

  def row(path, name, shape, init, layers=0) -> weights.Weight:
    stack = (layers,) if layers else ()
    return weights.Weight(
      path=path,
      shape=(*stack, *shape),
      axes=(None,) * len((*stack, *shape)),
      name=prefix + name,
      split=shape,
      perm=tuple(range(len(shape))),
      file_shape=shape,
      init=init,
    )

  def pair(path, module, shape, flag, layers=0) -> list[weights.Weight]:
    """Returns a norm or a projection, and its bias unless the flag is off."""
    init = None if len(shape) == 1 else 0.02
    weight_and_bias = [row(path, f"{module}.weight", shape, init, layers)]
    if getattr(a, flag):
      path = (*path[:-1], f"{path[-1]}_bias")
      bias = row(path, f"{module}.bias", shape[:1], 0.0, layers)
      weight_and_bias.append(bias)
    return weight_and_bias

  width = (a.d_model,)
  if not a.windowed:
    family = _BERT
    layer = "encoder.layer.{layer}."
    norm = "LayerNorm"
    embedded = {
      "words": ("word_embeddings", a.vocab_size),
      "positions": ("position_embeddings", a.positions),
      "token_types": ("token_type_embeddings", a.token_types),
    }
    table = []
  else:
    family = _MODERNBERT
    layer = "layers.{layer}."
    norm = "norm"
    embedded = {"words": ("tok_embeddings", a.vocab_size)}
    table = pair(("final_norm",), "final_norm", width, "norm_bias")
    for i in range(1, a.layers):  # The first layer has none.
      path = (f"{_LAYERS}_{i}", "attention_norm")
      table += pair(path, f"layers.{i}.attn_norm", width, "norm_bias")
  table += pair(("norm",), f"embeddings.{norm}", width, "norm_bias")
  for key, (module, count) in embedded.items():
    name = f"embeddings.{module}.weight"
    table.append(row((key,), name, (count, a.d_model), 0.02))
  for key, module, letters, flag in family.layers:
    shape = tuple(sizes[letter] for letter in letters.split())
    table += pair((_LAYERS, key), layer + module, shape, flag, a.layers)
  return table


def load(
  folder: str | pathlib.Path,
  a: Architecture,
  *,
  sharding: jax.sharding.Sharding,
  dtype: Any,
) -> Params:
  """Reads the weights of a folder's safetensors files.

  Args:
    folder: a Hugging Face folder.
    a: the architecture.
    sharding: sharding of every weight; it should replicate them.
    dtype: dtype of the weights.

  Returns:
    The parameters of `forward`, with one entry for each layer.

  Raises:
    ValueError: a tensor is missing, unknown or misshaped; the message names it.
  """
  family = _MODERNBERT if a.windowed else _BERT
  tensors = tensor_files.headers(folder)
  prefix = next(
    (p for p in family.prefixes if any(n.startswith(p) for n in tensors)), ""
  )
  table = rows(a, prefix)
  shardings = weights.tree(table, lambda row: sharding)
  params = tensor_files.load(
    folder, table, shardings=shardings, dtype=dtype, ignored=family.ignored
  )
  # Unstack the layers once, because slicing inside the jitted call would copy
  # every weight in every call.
  stacks = params.pop(_LAYERS)
  while stacks:
    key, stack = stacks.popitem()
    for i in range(stack.shape[0]):
      params.setdefault(f"{_LAYERS}_{i}", {})[key] = weights.index(stack, (i,))
  return params


# The forward pass.


def forward(
  params: Params, a: Architecture, ids: jax.Array, lengths: jax.Array
) -> jax.Array:
  """Returns the final hidden states of texts.

  Args:
    params: the result of `load`; the computation is in their dtype.
    a: the architecture.
    ids: int `[B, T]`, T <= `a.max_tokens`.
    lengths: int `[B]`, number of tokens of each text; the rest is padding.

  Returns:
    `[B, T, D]`; values at padding are undefined.
  """
  b, t = ids.shape
  positions = jnp.arange(t)
  visible = (positions < lengths[:, None])[:, None, :, None]
  x = params["words"][ids]
  if not a.windowed:
    rows = slice(a.first_position, a.first_position + t)
    x = x + params["token_types"][0] + params["positions"][rows]
    kinds: list[Any] = [(visible, None)] * a.layers
  else:
    in_window = jnp.abs(positions[:, None] - positions) <= a.window // 2
    width = a.d_model // a.heads
    without_window = (visible, _rotary(width, a.global_theta, t))
    with_window = (visible & in_window, _rotary(width, a.local_theta, t))
    kinds = [
      with_window if windowed else without_window for windowed in a.windowed
    ]
  x = _norm(params, "norm", x.reshape(b * t, -1).T, a)
  for i, (mask, turns) in enumerate(kinds):
    x = _layer(params[f"{_LAYERS}_{i}"], a, x, mask, turns)
  if "final_norm" in params:
    x = _norm(params, "final_norm", x, a)
  return x.reshape(-1, b, t).transpose(1, 2, 0)


def _layer(
  w: Params, a: Architecture, x: jax.Array, mask: jax.Array, turns: Any
) -> jax.Array:
  """Applies a layer: attention, then the feed-forward, each added."""
  if turns is None:  # Post-norm.
    x = _norm(w, "attention_norm", _attention(w, a, x, mask, None) + x, a)
    y = _project(w, "down", _gelu(_project(w, "up", x)))
    return _norm(w, "mlp_norm", y + x, a)
  y = _norm(w, "attention_norm", x, a) if "attention_norm" in w else x
  x += _attention(w, a, y, mask, turns)
  y, gate = jnp.split(_project(w, "up", _norm(w, "mlp_norm", x, a)), 2)
  return x + _project(w, "down", _gelu(y) * gate)


def _attention(
  w: Params, a: Architecture, x: jax.Array, mask: jax.Array, turns: Any
) -> jax.Array:
  """Returns the output of attention.

  Scores are `[B, N, keys, queries]`, because XLA does not vectorise reductions
  over the last axis on CPUs. The division by the sum comes last, because it
  then costs H divisions for each query instead of T.

  Args:
    w: weights of the layer.
    a: the architecture.
    x: `[D, B * T]`.
    mask: which keys a query sees, bool `[B, 1, T, 1]` or `[B, 1, T, T]`.
    turns: the result of `_rotary`; None if `x` has absolute positions.
  """
  b, _, t, _ = mask.shape
  if "qkv" in w:
    projections = jnp.split(_project(w, "qkv", x), 3)
  else:
    projections = [_project(w, key, x) for key in "qkv"]
  # [B, N, H, T].
  q, k, v = (
    projection.reshape(a.heads, -1, b, t).transpose(2, 0, 1, 3)
    for projection in projections
  )
  if turns is not None:
    q = _rotate(q, turns)
    k = _rotate(k, turns)
  q = q * q.shape[-2] ** -0.5
  scores = _dot(k.swapaxes(-1, -2), q).astype(jnp.float32)
  scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
  shares = jnp.exp(scores - scores.max(-2, keepdims=True))
  total = shares.sum(-2, keepdims=True)
  mixed = (_dot(v, shares.astype(v.dtype)) / total).astype(v.dtype)
  return _project(w, "o", mixed.transpose(1, 2, 0, 3).reshape(x.shape))


def _dot(x: jax.Array, w: jax.Array) -> jax.Array:
  """Multiplies at full precision; TPUs would round float32 to bfloat16."""
  return jnp.matmul(x, w, precision=jax.lax.Precision.HIGHEST)


def _project(w: Params, key: str, x: jax.Array) -> jax.Array:
  """Multiplies by a weight and adds its bias, if it has one."""
  y = _dot(w[key], x)
  bias = w.get(f"{key}_bias")
  return y if bias is None else y + bias[:, None]


def _norm(w: Params, key: str, x: jax.Array, a: Architecture) -> jax.Array:
  """Normalises over the first axis, in float32, with a bias if there is one."""
  x32 = x.astype(jnp.float32)
  x32 -= x32.mean(0)
  x32 *= jax.lax.rsqrt(jnp.square(x32).mean(0) + a.norm_eps)
  x32 *= w[key][:, None]
  bias = w.get(f"{key}_bias")
  return (x32 if bias is None else x32 + bias[:, None]).astype(x.dtype)


def _rotary(head_dim: int, theta: float, tokens: int) -> jax.Array:
  """Returns cos and sin of the rotary angles, float32 `[2, H / 2, T]`."""
  exponent = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
  frequency = (theta**-exponent).astype(np.float32)
  angles = frequency[:, None] * jnp.arange(tokens, dtype=jnp.float32)
  return jnp.stack([jnp.cos(angles), jnp.sin(angles)])


def _rotate(x: jax.Array, turns: jax.Array) -> jax.Array:
  """Turns the pairs (i, i + H / 2) of x `[..., H, T]`, in float32."""
  cos, sin = turns
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-2)
  turned = [first * cos - second * sin, second * cos + first * sin]
  return jnp.concatenate(turned, axis=-2).astype(x.dtype)


def _gelu(x: jax.Array) -> jax.Array:
  """Exact GELU by erf; `jax.nn.gelu` uses erfc, three times slower on CPUs."""
  return 0.5 * x * (1 + jax.lax.erf(x * 0.5**0.5))
