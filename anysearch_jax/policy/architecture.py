"""The sizes and switches of a decoder, read from a `config.json`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from anysearch_jax.policy import families, hf_config

_FULL, _SLIDING = "full_attention", "sliding_attention"
# The defaults of transformers for keys that a config.json lacks.
_DEFAULTS = {
  "rms_norm_eps": 1e-6,
  "tie_word_embeddings": False,
  "max_position_embeddings": 32768,
  "attention_bias": False,
  "mlp_bias": False,
  "use_sliding_window": False,
  "sliding_window": 4096,
  "max_window_layers": 28,
}
_KINDS = {
  "vocab_size": hf_config.SIZE,
  "hidden_size": hf_config.SIZE,
  "num_hidden_layers": hf_config.SIZE,
  "num_attention_heads": hf_config.SIZE,
  "intermediate_size": hf_config.SIZE,
  "max_position_embeddings": hf_config.SIZE,
  "rms_norm_eps": hf_config.NUMBER,
  "tie_word_embeddings": hf_config.SWITCH,
  "attention_bias": hf_config.SWITCH,
  "mlp_bias": hf_config.SWITCH,
  "use_sliding_window": hf_config.SWITCH,
  "max_window_layers": hf_config.INTEGER,
}
_EXPERTS = {
  "num_experts": hf_config.SIZE,
  "num_experts_per_tok": hf_config.SIZE,
  "moe_intermediate_size": hf_config.SIZE,
  "norm_topk_prob": hf_config.SWITCH,
}
# These keys may also be null or missing.
_NULLABLE = {
  "architectures": hf_config.NAMES,
  "num_key_value_heads": hf_config.SIZE,
  "head_dim": hf_config.SIZE,
  "layer_types": hf_config.NAMES,
  "sliding_window": hf_config.SIZE,
  "rope_scaling": hf_config.OBJECT,
  "rope_parameters": hf_config.OBJECT,
  "quantization_config": hf_config.OBJECT,
  "no_rope_layers": hf_config.SWITCHES,
}
_LLAMA3_ROPE = {
  "factor": hf_config.NUMBER,
  "low_freq_factor": hf_config.NUMBER,
  "high_freq_factor": hf_config.NUMBER,
  "original_max_position_embeddings": hf_config.SIZE,
}
_YARN_ROPE = {
  "factor": hf_config.NUMBER,
  "original_max_position_embeddings": hf_config.SIZE,
  "beta_fast": hf_config.NUMBER,
  "beta_slow": hf_config.NUMBER,
  "truncate": hf_config.SWITCH,
}
# These may also be null or missing.
_YARN_ATTENTION = dict.fromkeys(
  ("attention_factor", "mscale", "mscale_all_dim"), hf_config.NUMBER
)
# Options for which the decoder supports only these values.
_ONLY: Mapping[str, tuple] = {
  "hidden_act": ("silu", "swish"),
  # transformers treats null as false (`masking_utils.create_causal_mask`).
  "is_causal": (True,),
  "partial_rotary_factor": (1.0, 1, None),
  # Of earlier modelling code; the effect of other values is unknown.
  "rope_interleaved": (False, None),
  "use_mrope": (False, None),
  # Layers without experts among those with them.
  "decoder_sparse_step": (1,),
  "mlp_only_layers": ([], None),
}
_UNDERSTOOD = (
  *(*_KINDS, *_NULLABLE, *_EXPERTS),
  *("model_type", "no_rope_layer_interval", "num_local_experts"),
  *("original_max_position_embeddings", "rope_theta", "rope_local_base_freq"),
  "sliding_window_pattern",
)
# Harmless keys in published files of these families, beyond those of
# `hf_config`.
_HARMLESS = (
  *("attention_dropout", "is_decoder", "is_llama_config"),
  *("max_sequence_length", "pretraining_tp"),
  *("output_router_logits", "router_aux_loss_coef"),
  *("_sliding_window_pattern", "initial_context_length", "experts_per_token"),
)


@dataclasses.dataclass(frozen=True)
class LinearRope:
  """RoPE whose frequencies are divided by `factor`."""

  kind = "linear"
  factor: float


@dataclasses.dataclass(frozen=True)
class Llama3Rope:
  """Llama-3.1's RoPE frequency scaling; the original length is in tokens."""

  kind = "llama3"
  factor: float
  low_freq_factor: float
  high_freq_factor: float
  original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True)
class YarnRope:
  """YaRN's RoPE scaling, https://arxiv.org/abs/2309.00071.

  Frequencies of more than `beta_fast` turns in the original length (in tokens)
  are kept, and those below `beta_slow` turns are divided by `factor`, at least
  1. attention_factor: multiplies cos and sin. truncate: whether interpolation
  begins and ends at a whole dimension.
  """

  kind = "yarn"
  factor: float
  original_max_position_embeddings: int
  attention_factor: float
  beta_fast: float
  beta_slow: float
  truncate: bool


@dataclasses.dataclass(frozen=True)
class Lora:
  """Low-rank adapters: W + alpha / rank * A B, with W frozen.

  rank: r >= 1. targets: which of `q k v o gate up down` have an adapter.
  See Hu et al. 2021, https://arxiv.org/abs/2106.09685.
  """

  rank: int
  alpha: float
  targets: tuple[str, ...]

  @property
  def scale(self) -> float:
    """The factor of A B."""
    return self.alpha / self.rank


@dataclasses.dataclass(frozen=True)
class Architecture:
  """Sizes and switches of a decoder (legend of `types`).

  vocab_size: rows of the embedding, including padding beyond the tokenizer's
  size. kv_heads divides heads. qkv_bias, o_bias, mlp_bias: whether these
  projections have biases. qk_norm: Qwen3's RMSNorm over each query and key
  head; query_scale: what it also multiplies queries by. unrotated: indices of
  the layers without rotary positions. experts: of width `mlp_dim` in each
  layer, of which a token uses `active`, weighted by a softmax that is
  `renormalized` over them or not; 0 is one feed-forward layer. joint_norm:
  whether `qk_norm` is over all heads together, as in Olmo 3. norms: whether
  they stand `before` attention and feed-forward, `after` them, or `around`
  them. norm_offset: what is added to their stored scales. gelu: whether the
  feed-forward layer has GELU by tanh in place of SiLU. scaled: whether
  embeddings are multiplied by the root of D. windowed: indices of the layers in
  which a token sees the last `window` tokens only, itself included; their
  rotary positions have `windowed_theta` and no scaling, unless it is 0. sinks:
  whether each head's softmax has one more, learned score. clamped: whether
  experts have gpt-oss's bounded SwiGLU, and they and routers biases. tied:
  whether the head is the embedding. max_context: in tokens, written to exported
  folders for servers, which refuse longer requests; the decoder itself has no
  limit. lora: the adapters, if any.
  """

  family: str
  vocab_size: int
  d_model: int
  layers: int
  heads: int
  kv_heads: int
  head_dim: int
  mlp_dim: int
  norm_eps: float = 1e-6
  rope_theta: float = 10_000.0
  rope_scaling: LinearRope | Llama3Rope | YarnRope | None = None
  qkv_bias: bool = False
  o_bias: bool = False
  mlp_bias: bool = False
  qk_norm: bool = False
  query_scale: float = 1.0
  joint_norm: bool = False
  norms: str = "before"
  norm_offset: float = 0.0
  gelu: bool = False
  scaled: bool = False
  unrotated: tuple[int, ...] = ()
  window: int = 0
  windowed: tuple[int, ...] = ()
  windowed_theta: float = 0.0
  experts: int = 0
  active: int = 0
  renormalized: bool = False
  sinks: bool = False
  clamped: bool = False
  tied: bool = False
  max_context: int = 32768
  lora: Lora | None = None

  @property
  def only_xla(self) -> str:
    """What attention has that XLA alone computes, "" if nothing."""
    found = {"attention sinks": self.sinks, "sliding windows": self.windowed}
    return next((name for name, has in found.items() if has), "")

  def without_lora(self) -> Architecture:
    """Returns the architecture of the base weights alone."""
    return dataclasses.replace(self, lora=None)

  def seen(self, context: float) -> float:
    """Returns the tokens that a layer sees of a context, the layers' mean."""
    unseen = max(0, context - self.window) if self.windowed else 0
    return context - unseen * len(self.windowed) / self.layers


def from_hf(hf: Mapping[str, Any]) -> Architecture:
  """Reads a Hugging Face `config.json`, with old or new names of its keys.

  Raises:
    ValueError: the decoder does not support the architecture or an option, or a
      key is missing or has the wrong type; the message names it.
  """
  hf_config.typed(
    hf, {k: v for k, v in _NULLABLE.items() if hf.get(k) is not None}
  )
  name = _family(hf)
  family = families.FAMILIES[name]
  only = {**_ONLY, **family.only}
  kind = (hf.get("quantization_config") or {}).get("quant_method")
  if family.fields.get("clamped") and kind == "mxfp4":
    hf = {**hf, "quantization_config": None}  # The tensors' types say it.
  understood = (*_UNDERSTOOD, *family.defaults)
  hf_config.check(hf, understood=understood, harmless=_HARMLESS, only=only)
  hf = {k: v for k, v in hf.items() if k not in family.unread}
  # transformers knows the same number by two names.
  if family.experts and "num_local_experts" in hf:
    hf = {"num_experts": hf["num_local_experts"], **hf}
    if hf["num_experts"] != hf["num_local_experts"]:
      raise ValueError(
        f"config.json: num_experts {hf['num_experts']!r} contradicts "
        f"num_local_experts {hf['num_local_experts']!r}; expected one number."
      )
  hf = {**_DEFAULTS, **family.defaults, **hf}
  hf_config.typed(hf, _KINDS)
  if family.experts:
    read = {k: v for k, v in _EXPERTS.items() if k not in family.unread}
    hf_config.typed(hf, read)
    if hf["num_experts_per_tok"] > hf["num_experts"]:
      raise ValueError(
        f"config.json: num_experts_per_tok is {hf['num_experts_per_tok']}, "
        f"expected at most num_experts, {hf['num_experts']}."
      )
  if family.head_dim and "head_dim" in hf:
    hf_config.typed(hf, {"head_dim": hf_config.SIZE})
  windowed = _windowed(hf, family.windows) if family.windows else {}
  if family.windows and family.windows.theta:
    rope: Any = {"rope_theta": hf.get("rope_theta", family.windows.theta)}
    rope |= {**_rope_of(hf, _FULL), **(hf.get("rope_scaling") or {})}
  else:
    # transformers prefers the older key, `rope_scaling`.
    rope = hf.get("rope_scaling") or hf.get("rope_parameters")
    rope = family.defaults.get("rope_parameters", {}) if rope is None else rope
  if not family.windows:
    _check_windows(hf, cached=family.caches_windows)
  heads = hf["num_attention_heads"]
  kv_heads = hf.get("num_key_value_heads") or heads
  if heads % kv_heads:
    raise ValueError(
      f"config.json: {heads} attention heads do not divide over {kv_heads} "
      "key-value heads."
    )
  head_dim = hf.get("head_dim") or hf["hidden_size"] // heads
  if head_dim < 2 or head_dim % 2:
    raise ValueError(
      f"config.json: heads of {head_dim} (head_dim, or hidden_size over "
      "num_attention_heads); expected an even size for the rotary positions."
    )
  scaled = {"query_pre_attn_scalar": head_dim, **hf}
  hf_config.typed(scaled, {"query_pre_attn_scalar": hf_config.SIZE})
  theta, scaling = _rope(rope, hf)
  return Architecture(
    family=name,
    vocab_size=hf["vocab_size"],
    d_model=hf["hidden_size"],
    layers=hf["num_hidden_layers"],
    heads=heads,
    kv_heads=kv_heads,
    head_dim=head_dim,
    mlp_dim=(family.experts and hf.get("moe_intermediate_size"))
    or hf["intermediate_size"],
    norm_eps=hf["rms_norm_eps"],
    rope_theta=theta,
    rope_scaling=scaling,
    qkv_bias=family.qkv_bias or hf["attention_bias"],
    o_bias=hf["attention_bias"],
    mlp_bias=hf["mlp_bias"],
    query_scale=(head_dim / scaled["query_pre_attn_scalar"]) ** 0.5,
    unrotated=_unrotated(hf) if family.unrotated else (),
    experts=hf["num_experts"] if family.experts else 0,
    active=hf["num_experts_per_tok"] if family.experts else 0,
    renormalized=family.experts and hf.get("norm_topk_prob", True),
    tied=hf["tie_word_embeddings"],
    max_context=hf["max_position_embeddings"],
    **{**family.fields, **windowed},
  )


def _family(hf: Mapping[str, Any]) -> str:
  """Returns the family by class name or, if that is missing, `model_type`."""
  kind = hf.get("model_type")
  classes = {x.class_name: name for name, x in families.FAMILIES.items()}
  names = hf.get("architectures") or [
    name for name, family in classes.items() if family == kind
  ]
  if len(names) != 1 or names[0] not in classes:
    found = ", ".join(map(repr, names)) or f"'(none)' of model_type {kind!r}"
    raise ValueError(
      f"config.json: architecture {found} is not supported; expected one of "
      f"{', '.join(classes)}."
    )
  family = classes[names[0]]
  # transformers chooses the model by `model_type` alone, so both must agree.
  if kind not in (None, family):
    raise ValueError(
      f"config.json: model_type {kind!r} contradicts architecture "
      f"{names[0]!r}; expected {family!r}."
    )
  return family


def _check_windows(hf: Mapping[str, Any], *, cached: bool) -> None:
  """Refuses layers with sliding-window attention.

  Published Qwen files have a window size but do not use it
  (`use_sliding_window`), so the size alone is accepted.
  """
  types, layers = _layer_types(hf), hf["num_hidden_layers"]
  if types is not None:
    slides = set(types) != {_FULL}
  else:
    slides = (
      hf["use_sliding_window"]
      and hf["sliding_window"] is not None
      and hf["max_window_layers"] < layers
    )
  if slides or (cached and hf["sliding_window"] is not None):
    raise ValueError("config.json: sliding-window attention is not supported.")


def _layer_types(hf: Mapping[str, Any]) -> list[str] | None:
  types, layers = hf.get("layer_types"), hf["num_hidden_layers"]
  if types is not None and len(types) != layers:
    raise ValueError(
      f"config.json: layer_types names {len(types)} layers, expected "
      f"{layers} (num_hidden_layers)."
    )
  return types


def _windowed(hf: Mapping[str, Any], of: families.Windows) -> dict[str, Any]:
  """Returns the fields of `Architecture` about windows."""
  layers = range(hf["num_hidden_layers"])
  hf = {
    "sliding_window_pattern": of.every,
    "rope_local_base_freq": of.windowed_theta,
    **hf,
  }
  hf_config.typed(hf, {"sliding_window_pattern": hf_config.SIZE})
  every = hf["sliding_window_pattern"]
  types = _layer_types(hf) or [
    _SLIDING if (i + 1) % every else _FULL for i in layers
  ]
  if other := set(types) - {_FULL, _SLIDING}:
    raise ValueError(
      f"config.json: layer_types names {', '.join(map(repr, sorted(other)))}, "
      f"expected {_FULL!r} or {_SLIDING!r}."
    )
  windowed = tuple(i for i in layers if types[i] == _SLIDING)
  if not windowed:
    return {}
  hf_config.typed(hf, {"sliding_window": hf_config.SIZE})
  found = {"window": hf["sliding_window"], "windowed": windowed}
  if not of.windowed_theta:
    return found
  # transformers gives the top-level `rope_theta` to the other layers alone.
  theta = hf["rope_local_base_freq"]
  rope = {"rope_theta": theta, **_rope_of(hf, _SLIDING)}
  theta, scaling = _rope(rope, hf)
  if scaling is not None:
    raise ValueError(
      f"config.json: RoPE type {rope['rope_type']!r} of {_SLIDING} is not "
      "supported; expected 'default'."
    )
  return found | {"windowed_theta": theta}


def _rope_of(hf: Mapping[str, Any], kind: str) -> dict[str, Any]:
  """Returns what `rope_parameters` has for a type of layer."""
  rope = hf.get("rope_parameters") or {}
  hf_config.check(rope, understood=(_FULL, _SLIDING), only={})
  found = {kind: rope.get(kind) or {"rope_type": "default"}}
  hf_config.typed(found, {kind: hf_config.OBJECT})
  return dict(found[kind])


def _unrotated(hf: Mapping[str, Any]) -> tuple[int, ...]:
  """Returns the layers without rotary positions: listed, or one in so many."""
  hf_config.typed(hf, {"no_rope_layer_interval": hf_config.SIZE})
  layers, interval = hf["num_hidden_layers"], hf["no_rope_layer_interval"]
  rotated = hf.get("no_rope_layers")
  if rotated is None:
    rotated = [(i + 1) % interval for i in range(layers)]
  if len(rotated) < layers:
    raise ValueError(
      f"config.json: no_rope_layers names {len(rotated)} layers, expected "
      f"{layers} (num_hidden_layers)."
    )
  return tuple(i for i in range(layers) if not rotated[i])


def _rope(
  rope: Mapping[str, Any], hf: Mapping[str, Any]
) -> tuple[float, LinearRope | Llama3Rope | YarnRope | None]:
  """Returns theta and scaling, from `rope` or from top-level keys of `hf`."""
  rope = {"rope_theta": hf.get("rope_theta", 10_000.0), **rope}
  kind = rope.get("rope_type") or rope.get("type") or "default"
  if any(
    isinstance(value, Mapping) or key.endswith("_attention")
    for key, value in rope.items()
  ):
    kind = "one for each layer type"
  if kind not in ("default", "linear", "llama3", "yarn"):
    raise ValueError(
      f"config.json: RoPE type {kind!r} is not supported; expected 'default', "
      "'linear', 'llama3' or 'yarn'."
    )
  keys = (*_LLAMA3_ROPE, *_YARN_ROPE, *_YARN_ATTENTION)
  hf_config.check(
    rope,
    understood=("rope_type", "type", "rope_theta", *keys),
    only={"partial_rotary_factor": _ONLY["partial_rotary_factor"]},
  )
  hf_config.typed(rope, {"rope_theta": hf_config.NUMBER})
  theta = float(rope["rope_theta"])
  if kind == "default":
    return theta, None
  if kind == "linear":
    hf_config.typed(rope, {"factor": hf_config.NUMBER})
    return theta, LinearRope(float(rope["factor"]))
  # transformers prefers the top-level key here, unlike for theta, and uses the
  # whole context if both keys are missing.
  key = "original_max_position_embeddings"
  rope = {key: hf["max_position_embeddings"], **rope}
  rope = {**rope, key: hf.get(key, rope[key])}
  if kind == "yarn":
    return theta, _yarn(rope, theta)
  hf_config.typed(rope, _LLAMA3_ROPE)
  low, high = rope["low_freq_factor"], rope["high_freq_factor"]
  if low >= high:
    raise ValueError(
      f"config.json: low_freq_factor is {low}, expected below "
      f"high_freq_factor, {high}: between the two, frequencies are blended."
    )
  return theta, Llama3Rope(
    float(rope["factor"]), float(low), float(high), rope[key]
  )


def _yarn(rope: Mapping[str, Any], theta: float) -> YarnRope:
  """Reads YaRN's settings, with the defaults of transformers."""
  rope = {k: v for k, v in rope.items() if v is not None or k == "truncate"}
  rope = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True, **rope}
  given = {k: kind for k, kind in _YARN_ATTENTION.items() if k in rope}
  hf_config.typed(rope, _YARN_ROPE | given)
  factor, fast, slow = rope["factor"], rope["beta_fast"], rope["beta_slow"]
  if factor < 1 or fast < slow or theta <= 1:
    raise ValueError(
      f"config.json: YaRN of factor {factor}, beta_fast {fast}, beta_slow "
      f"{slow} and rope_theta {theta}; expected a factor of at least 1, a "
      "beta_fast of at least beta_slow and a rope_theta above 1."
    )

  def magnitude(scale: float = 1.0) -> float:
    return 0.1 * scale * math.log(factor) + 1

  attention = magnitude()
  if {"mscale", "mscale_all_dim"} <= rope.keys():
    attention = magnitude(rope["mscale"]) / magnitude(rope["mscale_all_dim"])
  return YarnRope(
    attention_factor=float(rope.get("attention_factor", attention)),
    **{key: rope[key] for key in _YARN_ROPE},
  )


def to_hf(architecture: Architecture, **extra: Any) -> dict[str, Any]:
  """Returns a `config.json` for a policy without a source folder."""
  a = architecture
  rope: dict[str, Any] = {"rope_type": "default", "rope_theta": a.rope_theta}
  if a.rope_scaling is not None:
    rope |= dataclasses.asdict(a.rope_scaling)
    rope["rope_type"] = a.rope_scaling.kind
  if a.gelu:
    extra |= {"hidden_activation": "gelu_pytorch_tanh"}
    extra |= {"query_pre_attn_scalar": round(a.head_dim / a.query_scale**2)}
  if windows := families.FAMILIES[a.family].windows:
    windowed = {"rope_type": "default", "rope_theta": a.windowed_theta}
    if windows.theta:
      rope = {_FULL: rope} | ({_SLIDING: windowed} if a.windowed else {})
    types = [_SLIDING if i in a.windowed else _FULL for i in range(a.layers)]
    # transformers needs a number, also where no layer has a window.
    extra |= {"layer_types": types, "sliding_window": a.window or a.max_context}
  if families.FAMILIES[a.family].unrotated:
    rotated = [int(i not in a.unrotated) for i in range(a.layers)]
    extra |= {"no_rope_layers": rotated}
  if a.experts:
    extra |= {
      **{"num_experts": a.experts, "num_local_experts": a.experts},
      "num_experts_per_tok": a.active,
      "moe_intermediate_size": a.mlp_dim,
      "norm_topk_prob": a.renormalized,
    }
  return {
    "architectures": [families.FAMILIES[a.family].class_name],
    "model_type": a.family,
    "vocab_size": a.vocab_size,
    "hidden_size": a.d_model,
    "num_hidden_layers": a.layers,
    "num_attention_heads": a.heads,
    "num_key_value_heads": a.kv_heads,
    "head_dim": a.head_dim,
    "intermediate_size": a.mlp_dim,
    **({} if a.gelu else {"hidden_act": "silu"}),
    "rms_norm_eps": a.norm_eps,
    "rope_parameters": rope,
    "rope_theta": a.rope_theta,
    "max_position_embeddings": a.max_context,
    "tie_word_embeddings": a.tied,
    "attention_bias": a.o_bias,
    "mlp_bias": a.mlp_bias,
    **extra,
  }
