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


@dataclasses.dataclass(frozen=True)
class Llama3Rope:
  """Llama-3.1's frequency scaling; `original_context` in tokens."""

  factor: float
  low_freq_factor: float
  high_freq_factor: float
  original_context: int


@dataclasses.dataclass(frozen=True)
class Architecture:
  """Sizes and switches of a decoder (legend of `types`).

  kv_heads divides heads. qkv_bias: Qwen2's biases on q, k and v. qk_norm:
  Qwen3's RMSNorm over each query and key head. tied: the head is the
  embedding. max_context: tokens, for who serves the exported folder (servers
  refuse longer requests); the decoder itself has no limit.
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
  qk_norm: bool = False
  tied: bool = False
  max_context: int = 32768


def from_hf(hf: Mapping[str, Any]) -> Architecture:
  """Reads a Hugging Face `config.json`, either dialect of RoPE settings.

  Raises:
    ValueError: an architecture or option that the decoder does not have.
  """
  names = hf.get("architectures") or ["(none)"]
  family = _FAMILIES.get(names[0])
  if family is None:
    raise ValueError(
      f"config.json: architecture {names[0]!r} is not supported; expected one "
      f"of {', '.join(_FAMILIES)}."
    )
  if hf.get("hidden_act", "silu") != "silu":
    raise ValueError(
      f"config.json: hidden_act {hf['hidden_act']!r}, expected 'silu'."
    )
  if hf.get("use_sliding_window"):
    raise ValueError("config.json: sliding-window attention is not supported.")
  bias = bool(hf.get("attention_bias", False))
  if family != "qwen2" and bias:
    raise ValueError(
      f"config.json: attention_bias is not supported for {family}."
    )
  if hf.get("mlp_bias"):
    raise ValueError("config.json: mlp_bias is not supported.")
  theta, scaling = _rope(hf)
  return Architecture(
    family=family,
    vocab_size=hf["vocab_size"],
    d_model=hf["hidden_size"],
    layers=hf["num_hidden_layers"],
    heads=hf["num_attention_heads"],
    kv_heads=hf.get("num_key_value_heads") or hf["num_attention_heads"],
    head_dim=hf.get("head_dim")
    or hf["hidden_size"] // hf["num_attention_heads"],
    mlp_dim=hf["intermediate_size"],
    norm_eps=hf.get("rms_norm_eps", 1e-6),
    rope_theta=theta,
    rope_scaling=scaling,
    qkv_bias=family == "qwen2",
    qk_norm=family == "qwen3",
    tied=bool(hf.get("tie_word_embeddings", False)),
    max_context=hf.get("max_position_embeddings", 32768),
  )


def _rope(hf: Mapping[str, Any]) -> tuple[float, Llama3Rope | None]:
  """theta and scaling, from `rope_parameters` or the older pair of keys."""
  rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
  theta = rope.get("rope_theta") or hf.get("rope_theta") or 10_000.0
  kind = rope.get("rope_type") or rope.get("type") or "default"
  if kind == "default":
    return float(theta), None
  if kind != "llama3":
    raise ValueError(
      f"config.json: RoPE type {kind!r} is not supported; expected 'default' "
      "or 'llama3'."
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
    "attention_bias": False,
    **extra,
  }
