"""What differs between the supported families, as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

_FAMILIES = {
  "Qwen2ForCausalLM": "qwen2",
  "Qwen3ForCausalLM": "qwen3",
  "LlamaForCausalLM": "llama",
}
# What transformers takes where a config.json is silent.
_DEFAULTS = {
  "rms_norm_eps": 1e-6,
  "tie_word_embeddings": False,
  "max_position_embeddings": 32768,
}
_FAMILY_DEFAULTS = {
  "qwen2": {"num_key_value_heads": 32},
  "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
  "llama": {"max_position_embeddings": 2048},
}
_SIZES = (
  "vocab_size",
  "hidden_size",
  "num_hidden_layers",
  "num_attention_heads",
  "intermediate_size",
)
# Options that the decoder has in one setting only.
_ONLY = {
  "hidden_act": "silu",
  "partial_rotary_factor": 1.0,
  "quantization_config": None,
}
_LLAMA3_ROPE = (
  "factor",
  "low_freq_factor",
  "high_freq_factor",
  "original_max_position_embeddings",
)


@dataclasses.dataclass(frozen=True)
class Llama3Rope:
  """Llama-3.1's frequency scaling; `original_context` in tokens."""

  factor: float
  low_freq_factor: float
  high_freq_factor: float
  original_context: int


@dataclasses.dataclass(frozen=True)
class Lora:
  """Low-rank adapters (Hu et al. 2021): W + alpha / rank * A B, W frozen.

  rank: r >= 1. targets: which of `q k v o gate up down` have one.
  """

  rank: int
  alpha: float
  targets: tuple[str, ...]

  @property
  def scale(self) -> float:
    return self.alpha / self.rank


@dataclasses.dataclass(frozen=True)
class Architecture:
  """Sizes and switches of a decoder (legend of `types`).

  vocab_size: rows of the embedding, padding beyond the tokenizer's included.
  kv_heads divides heads. qkv_bias, o_bias, mlp_bias: biases of these
  projections. qk_norm: Qwen3's RMSNorm over each query and key head. tied: the
  head is the embedding. max_context: tokens, for who serves the exported folder
  (servers refuse longer requests); the decoder itself has no limit. lora: the
  adapters beside the weights, if any.
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
  rope_scaling: Llama3Rope | None = None
  qkv_bias: bool = False
  o_bias: bool = False
  mlp_bias: bool = False
  qk_norm: bool = False
  tied: bool = False
  max_context: int = 32768
  lora: Lora | None = None

  def without_lora(self) -> Architecture:
    return dataclasses.replace(self, lora=None)


def from_hf(hf: Mapping[str, Any]) -> Architecture:
  """Reads a Hugging Face `config.json`, either dialect of its settings.

  Raises:
    ValueError: an architecture or option that the decoder does not have, or a
      size that is missing, by name.
  """
  names = hf.get("architectures") or ["(none)"]
  family = _FAMILIES.get(names[0])
  if family is None:
    raise ValueError(
      f"config.json: architecture {names[0]!r} is not supported; expected one "
      f"of {', '.join(_FAMILIES)}."
    )
  hf = _DEFAULTS | _FAMILY_DEFAULTS[family] | hf
  missing = [key for key in _SIZES if not isinstance(hf.get(key), int)]
  if missing:
    raise ValueError(
      f"config.json: {missing[0]} is {hf.get(missing[0])!r}, expected a number."
    )
  # transformers reads the older key first.
  rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
  for key, expected in _ONLY.items():
    for value in (hf.get(key), rope.get(key)):
      if value not in (None, expected):
        raise ValueError(
          f"config.json: {key} {value!r} is not supported; expected "
          f"{expected!r}."
        )
  if _slides(hf):
    raise ValueError("config.json: sliding-window attention is not supported.")
  heads = hf["num_attention_heads"]
  kv_heads = hf.get("num_key_value_heads") or heads
  if heads % kv_heads:
    raise ValueError(
      f"config.json: {heads} attention heads do not divide over {kv_heads} "
      "key-value heads."
    )
  theta, scaling = _rope(rope, hf.get("rope_theta"))
  # Qwen2 has no key for its biases.
  bias = bool(hf.get("attention_bias")) and family != "qwen2"
  return Architecture(
    family=family,
    vocab_size=hf["vocab_size"],
    d_model=hf["hidden_size"],
    layers=hf["num_hidden_layers"],
    heads=heads,
    kv_heads=kv_heads,
    head_dim=hf.get("head_dim") or hf["hidden_size"] // heads,
    mlp_dim=hf["intermediate_size"],
    norm_eps=hf["rms_norm_eps"],
    rope_theta=theta,
    rope_scaling=scaling,
    qkv_bias=family == "qwen2" or bias,
    o_bias=bias,
    mlp_bias=bool(hf.get("mlp_bias")) and family == "llama",
    qk_norm=family == "qwen3",
    tied=bool(hf["tie_word_embeddings"]),
    max_context=hf["max_position_embeddings"],
  )


def _slides(hf: Mapping[str, Any]) -> bool:
  """Whether any layer's attention has a window (having its size is not it)."""
  if hf.get("layer_types"):
    return set(hf["layer_types"]) != {"full_attention"}
  return bool(
    hf.get("use_sliding_window")
    and hf.get("sliding_window", 4096)
    and hf.get("max_window_layers", 28) < hf["num_hidden_layers"]
  )


def _rope(
  rope: Mapping[str, Any], older_theta: float | None
) -> tuple[float, Llama3Rope | None]:
  """theta and scaling, from `rope_parameters` or the older pair of keys."""
  theta = rope.get("rope_theta") or older_theta or 10_000.0
  kind = rope.get("rope_type") or rope.get("type") or "default"
  if any(isinstance(value, Mapping) for value in rope.values()):
    kind = "one for each layer type"
  if kind == "default":
    return float(theta), None
  if kind != "llama3":
    raise ValueError(
      f"config.json: RoPE type {kind!r} is not supported; expected 'default' "
      "or 'llama3'."
    )
  missing = [key for key in _LLAMA3_ROPE if key not in rope]
  if missing:
    raise ValueError(
      f"config.json: the llama3 RoPE settings lack {', '.join(missing)}."
    )
  return float(theta), Llama3Rope(
    factor=float(rope["factor"]),
    low_freq_factor=float(rope["low_freq_factor"]),
    high_freq_factor=float(rope["high_freq_factor"]),
    original_context=int(rope["original_max_position_embeddings"]),
  )


def to_hf(architecture: Architecture, **extra: Any) -> dict[str, Any]:
  """A `config.json` for weights that were born here (no source folder)."""
  a = architecture
  class_name = {v: k for k, v in _FAMILIES.items()}[a.family]
  rope: dict[str, Any] = {"rope_type": "default", "rope_theta": a.rope_theta}
  if a.rope_scaling is not None:
    s = a.rope_scaling
    rope |= {
      "rope_type": "llama3",
      "factor": s.factor,
      "low_freq_factor": s.low_freq_factor,
      "high_freq_factor": s.high_freq_factor,
      "original_max_position_embeddings": s.original_context,
    }
  return {
    "architectures": [class_name],
    "model_type": a.family,
    "vocab_size": a.vocab_size,
    "hidden_size": a.d_model,
    "num_hidden_layers": a.layers,
    "num_attention_heads": a.heads,
    "num_key_value_heads": a.kv_heads,
    "head_dim": a.head_dim,
    "intermediate_size": a.mlp_dim,
    "hidden_act": "silu",
    "rms_norm_eps": a.norm_eps,
    "rope_parameters": rope,
    "rope_theta": a.rope_theta,
    "max_position_embeddings": a.max_context,
    "tie_word_embeddings": a.tied,
    "attention_bias": a.o_bias,
    "mlp_bias": a.mlp_bias,
    **extra,
  }
