"""The supported model families: how the decoder computes each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Family(NamedTuple):
  """What distinguishes a family beyond the sizes in its `config.json`.

  Attributes:
    class_name: the model class of transformers, in `architectures`.
    qkv_bias: whether q, k and v always have biases; the file need not say so.
    experts: whether every layer has experts.
    windows: whether layers may have sliding-window attention.
    layer_ropes: whether windowed layers have a RoPE of their own.
    allowed_values: for some keys of the file, the only values that the decoder
      computes correctly; others are refused.
    architecture_fields: fields of `Architecture` that the whole family shares.
  """

  class_name: str
  qkv_bias: bool = False
  experts: bool = False
  windows: bool = False
  layer_ropes: bool = False
  allowed_values: Mapping[str, tuple] = {}
  architecture_fields: Mapping[str, Any] = {}


# By `model_type`. A family is a row here.
FAMILIES = {
  "qwen2": Family(class_name="Qwen2ForCausalLM", qkv_bias=True),
  "qwen3": Family(
    class_name="Qwen3ForCausalLM", architecture_fields={"qk_norm": True}
  ),
  "qwen3_moe": Family(
    class_name="Qwen3MoeForCausalLM",
    experts=True,
    allowed_values={
      # Dense layers between those with experts are not supported.
      "decoder_sparse_step": (1,),
      "mlp_only_layers": ([], None),
      # Keys of Qwen3-Coder, which transformers ignores.
      "qkv_bias": (False,),
      "use_qk_norm": (True,),
      "shared_expert_intermediate_size": (0,),
    },
    architecture_fields={"qk_norm": True},
  ),
  "llama": Family(class_name="LlamaForCausalLM"),
  "smollm3": Family(class_name="SmolLM3ForCausalLM"),
  "olmo3": Family(
    class_name="Olmo3ForCausalLM",
    windows=True,
    layer_ropes=True,
    architecture_fields={
      "qk_norm": True,
      "joint_norm": True,
      "norms": "after",
    },
  ),
  "gemma3_text": Family(
    class_name="Gemma3ForCausalLM",
    windows=True,
    layer_ropes=True,
    allowed_values={
      "hidden_activation": ("gelu_pytorch_tanh",),
      "use_bidirectional_attention": (False, None),
      "attn_logit_softcapping": (None,),
      "final_logit_softcapping": (None,),
    },
    architecture_fields={
      "qk_norm": True,
      "norms": "around",
      "norm_offset": 1.0,
      "gelu": True,
      "scaled": True,
    },
  ),
  "gpt_oss": Family(
    class_name="GptOssForCausalLM",
    experts=True,
    windows=True,
    allowed_values={"swiglu_alpha": (1.702,), "swiglu_limit": (7.0, 7)},
    architecture_fields={"sinks": True, "clamped": True},
  ),
}
