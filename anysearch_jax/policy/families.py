"""The supported model families: how the decoder computes each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Family(NamedTuple):
  """What a family's `config.json` does not say, or may say and we do not do.

  class_name: of transformers. qkv_bias: whether it always has these biases.
  experts: whether every layer has experts. windows: whether layers may have
  windows. layer_ropes: whether those have rotary positions of their own. only:
  values that keys must have. fields: of `Architecture`, which all of the family
  have.
  """

  class_name: str
  qkv_bias: bool = False
  experts: bool = False
  windows: bool = False
  layer_ropes: bool = False
  only: Mapping[str, tuple] = {}
  fields: Mapping[str, Any] = {}


# By `model_type`. A family is a row here.
FAMILIES = {
  "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True),
  "qwen3": Family("Qwen3ForCausalLM", fields={"qk_norm": True}),
  "qwen3_moe": Family(
    "Qwen3MoeForCausalLM",
    experts=True,
    only={
      # Layers without experts among those with them.
      "decoder_sparse_step": (1,),
      "mlp_only_layers": ([], None),
      # Of Qwen3-Coder; transformers reads none of them.
      "qkv_bias": (False,),
      "use_qk_norm": (True,),
      "shared_expert_intermediate_size": (0,),
    },
    fields={"qk_norm": True},
  ),
  "llama": Family("LlamaForCausalLM"),
  "smollm3": Family("SmolLM3ForCausalLM"),
  "olmo3": Family(
    "Olmo3ForCausalLM",
    windows=True,
    layer_ropes=True,
    fields={"qk_norm": True, "joint_norm": True, "norms": "after"},
  ),
  "gemma3_text": Family(
    "Gemma3ForCausalLM",
    windows=True,
    layer_ropes=True,
    only={
      "hidden_activation": ("gelu_pytorch_tanh",),
      "use_bidirectional_attention": (False, None),
      "attn_logit_softcapping": (None,),
      "final_logit_softcapping": (None,),
    },
    fields={
      "qk_norm": True,
      "norms": "around",
      "norm_offset": 1.0,
      "gelu": True,
      "scaled": True,
    },
  ),
  "gpt_oss": Family(
    "GptOssForCausalLM",
    experts=True,
    windows=True,
    only={"swiglu_alpha": (1.702,), "swiglu_limit": (7.0, 7)},
    fields={"sinks": True, "clamped": True},
  ),
}
