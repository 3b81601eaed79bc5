"""The supported model families: what their `config.json` means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Windows(NamedTuple):
  """By default the last of each `every` layers has no window.

  theta, windowed_theta: the defaults of RoPE without and with a window; 0 where
  all layers have the same.
  """

  every: int
  theta: float = 0.0
  windowed_theta: float = 0.0


class Family(NamedTuple):
  """How a family's `config.json` is read.

  class_name: of transformers. defaults: those that differ from the ones of
  `architecture`. unread: keys that transformers does not read for this family.
  qkv_bias: whether it always has these biases. head_dim: whether null is
  invalid. caches_windows: whether a window without a switch applies, in the
  cache of `generate` alone. unrotated: whether layers may lack rotary
  positions. experts: whether every layer has experts. windows: how windowed
  layers are found. only: values that keys must have. fields: of `Architecture`,
  which all of the family have.
  """

  class_name: str
  defaults: Mapping[str, Any]
  unread: tuple[str, ...]
  qkv_bias: bool = False
  head_dim: bool = False
  caches_windows: bool = False
  unrotated: bool = False
  experts: bool = False
  windows: Windows | None = None
  only: Mapping[str, tuple] = {}
  fields: Mapping[str, Any] = {}


# By `model_type`. A family is a row here.
FAMILIES = {
  "qwen2": Family(
    "Qwen2ForCausalLM",
    {"num_key_value_heads": 32},
    unread=("attention_bias", "mlp_bias"),
    qkv_bias=True,
  ),
  "qwen3": Family(
    "Qwen3ForCausalLM",
    {"num_key_value_heads": 32, "head_dim": 128},
    unread=("mlp_bias",),
    head_dim=True,
    fields={"qk_norm": True},
  ),
  "qwen3_moe": Family(
    "Qwen3MoeForCausalLM",
    {
      **{"num_key_value_heads": 4, "max_window_layers": 0},
      **{"num_experts": 128, "num_experts_per_tok": 8},
      **{"moe_intermediate_size": 768, "norm_topk_prob": False},
    },
    unread=("mlp_bias", "max_window_layers"),
    head_dim=True,
    experts=True,
    only={  # Of Qwen3-Coder; transformers reads none of them.
      **{"qkv_bias": (False,), "use_qk_norm": (True,)},
      "shared_expert_intermediate_size": (0,),
    },
    fields={"qk_norm": True},
  ),
  "llama": Family(
    "LlamaForCausalLM",
    {"max_position_embeddings": 2048, "sliding_window": None},
    unread=("use_sliding_window", "max_window_layers"),
    caches_windows=True,
  ),
  "smollm3": Family(
    "SmolLM3ForCausalLM",
    {
      **{"num_key_value_heads": 4, "rope_theta": 2e6, "sliding_window": None},
      **{"max_window_layers": 0, "no_rope_layer_interval": 4},
      "tie_word_embeddings": True,
    },
    unread=("max_window_layers",),
    head_dim=True,
    unrotated=True,
  ),
  "olmo3": Family(
    "Olmo3ForCausalLM",
    {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
    unread=(
      *("mlp_bias", "use_sliding_window", "max_window_layers"),
      *("original_max_position_embeddings", "rope_local_base_freq"),
      "sliding_window_pattern",
    ),
    head_dim=True,
    windows=Windows(4, 500_000.0, 500_000.0),
    fields={"qk_norm": True, "joint_norm": True, "norms": "after"},
  ),
  "gemma3_text": Family(
    "Gemma3ForCausalLM",
    {
      **{"max_position_embeddings": 131_072, "query_pre_attn_scalar": 256},
      **{"num_key_value_heads": 4, "head_dim": 256},
      **{"tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh"},
    },
    unread=(
      *("mlp_bias", "use_sliding_window", "max_window_layers", "hidden_act"),
      "original_max_position_embeddings",
    ),
    head_dim=True,
    windows=Windows(6, 1e6, 10_000.0),
    only={
      "hidden_activation": ("gelu_pytorch_tanh",),
      "use_bidirectional_attention": (False, None),
    },
    fields={
      **{"qk_norm": True, "norms": "around", "norm_offset": 1.0},
      **{"gelu": True, "scaled": True},
    },
  ),
  "gpt_oss": Family(
    "GptOssForCausalLM",
    {
      **{"max_position_embeddings": 131_072, "rms_norm_eps": 1e-5},
      **{"num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128},
      **{"num_experts": 128, "num_experts_per_tok": 4, "attention_bias": True},
      "rope_theta": 150_000.0,
      "rope_parameters": {
        **{"rope_type": "yarn", "factor": 32.0, "truncate": False},
        "original_max_position_embeddings": 4096,
      },
    },
    unread=(
      *("mlp_bias", "use_sliding_window", "max_window_layers"),
      *("rope_local_base_freq", "sliding_window_pattern"),
      *("moe_intermediate_size", "norm_topk_prob"),
    ),
    head_dim=True,
    experts=True,
    windows=Windows(2),
    only={"swiglu_alpha": (1.702,), "swiglu_limit": (7.0, 7)},
    fields={"sinks": True, "clamped": True},
  ),
}
