"""Small random models of every supported kind, made with transformers.

Every value is random, including biases and norm scales, and large enough that a
wrong position, mask or layout changes the logits.
"""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import small_policy
import tokenizers
import transformers
from tokenizers import models, pre_tokenizers

from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import decoder, hf_architecture

TOKENS = 61  # Size of the tokenizer; a padded embedding has more rows.
ORIGINAL_CONTEXT = 32  # Of RoPE scaling; longer rows are scaled.

_SIZES = {
  "vocab_size": TOKENS,
  "hidden_size": 32,
  "intermediate_size": 48,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "max_position_embeddings": 512,
}
_QWEN2: dict[str, Any] = {"rope_theta": 1e6}
_QWEN3: dict[str, Any] = {"head_dim": 16, "rope_theta": 1e6}
_LLAMA: dict[str, Any] = {
  "rms_norm_eps": 1e-5,
  "rope_parameters": {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL_CONTEXT,
  },
}
_YARN = {
  "rope_parameters": {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 8.0,
    "original_max_position_embeddings": ORIGINAL_CONTEXT,
  }
}
_TIED = {"tie_word_embeddings": True}
_SMOLLM3: dict[str, Any] = {
  "rope_theta": 5e6,
  "no_rope_layers": [1, 0],
  "pad_token_id": None,
  "bos_token_id": None,
  "eos_token_id": None,
}
_QWEN3_MOE: dict[str, Any] = _QWEN3 | {
  "num_experts": 6,
  "num_experts_per_tok": 2,
  "moe_intermediate_size": 24,
}
# A window that ends inside pages of 4 and 8 tokens, and inside a chunk.
_OLMO3: dict[str, Any] = {
  "layer_types": ["sliding_attention", "full_attention"],
  "sliding_window": 10,
  "pad_token_id": None,
  "eos_token_id": None,
  "rope_parameters": {
    "full_attention": _YARN["rope_parameters"],
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
  },
}
_GEMMA3: dict[str, Any] = {
  "layer_types": ["sliding_attention", "full_attention"],
  "sliding_window": 10,
  "head_dim": 16,
  "query_pre_attn_scalar": 16,
  "pad_token_id": None,
  "bos_token_id": None,
  "eos_token_id": None,
}
_GPT_OSS: dict[str, Any] = {
  "layer_types": ["sliding_attention", "full_attention"],
  "sliding_window": 10,
  "head_dim": 16,
  "num_local_experts": 6,
  "num_experts_per_tok": 2,
  "pad_token_id": None,
  "rope_parameters": _YARN["rope_parameters"] | {"truncate": False},
}
# As in 4B and larger ones: a scale of its own, and RoPE in larger steps.
_GEMMA3_LARGE: dict[str, Any] = _GEMMA3 | {
  "query_pre_attn_scalar": 24,
  "rope_parameters": {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
  },
}
# By name: the prefix of transformers' classes, and the settings.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
  "qwen2": ("Qwen2", _QWEN2 | {"vocab_size": TOKENS + 11}),
  "qwen2-tied": ("Qwen2", _QWEN2 | _TIED),
  "qwen3": ("Qwen3", _QWEN3),
  "qwen3-tied": ("Qwen3", _QWEN3 | _TIED),
  "qwen3-biased": ("Qwen3", _QWEN3 | {"attention_bias": True}),
  "qwen3-yarn": ("Qwen3", _QWEN3 | _YARN),
  "qwen3-moe": ("Qwen3Moe", _QWEN3_MOE | {"norm_topk_prob": True}),
  "qwen3-moe-biased": ("Qwen3Moe", _QWEN3_MOE | {"attention_bias": True}),
  "llama": ("Llama", _LLAMA),
  "llama-tied": ("Llama", _LLAMA | _TIED),
  "llama-biased": (
    "Llama",
    _LLAMA | {"attention_bias": True, "mlp_bias": True, "head_dim": 16},
  ),
  "smollm3": ("SmolLM3", _SMOLLM3 | _TIED),
  "smollm3-biased": (
    "SmolLM3",
    _SMOLLM3 | {"attention_bias": True, "mlp_bias": True, "head_dim": 16},
  ),
  "gemma3-tied": ("Gemma3", _GEMMA3),
  "gemma3-biased": (
    "Gemma3",
    _GEMMA3_LARGE | {"attention_bias": True, "tie_word_embeddings": False},
  ),
  "olmo3": ("Olmo3", _OLMO3),
  "gpt-oss": ("GptOss", _GPT_OSS),
  "gpt-oss-unbiased": ("GptOss", _GPT_OSS | {"attention_bias": False}),
  "olmo3-biased": ("Olmo3", _OLMO3 | _TIED | {"attention_bias": True}),
}


def config(case: str, **sizes: Any) -> transformers.PreTrainedConfig:
  """Returns the configuration of a case; `sizes` override its settings."""
  prefix, settings = CASES[case]
  name = {"Gemma3": "Gemma3Text"}.get(prefix, prefix)
  return getattr(transformers, name + "Config")(
    architectures=[prefix + "ForCausalLM"], **_SIZES | settings | sizes
  )


def architecture(case: str, **sizes: Any) -> architecture_lib.Architecture:
  """Returns the architecture of a case; needs no torch."""
  return hf_architecture.from_hf(config(case, **sizes).to_dict())


def params(a: architecture_lib.Architecture) -> decoder.Params:
  """Returns float32 parameters of which none has its initial value."""
  return small_policy.noisy(decoder.initialize(a, 0), 0, scale=0.15)


def tokenizer() -> transformers.PreTrainedTokenizerFast:
  """Returns a tokenizer with the words `w0` to `w58`, `<eos>` and `<pad>`."""
  words = {f"w{i}": i for i in range(TOKENS - 2)}
  special = {"<eos>": TOKENS - 2, "<pad>": TOKENS - 1}
  inner = tokenizers.Tokenizer(models.WordLevel(words | special, "w0"))
  inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
  return transformers.PreTrainedTokenizerFast(
    tokenizer_object=inner, eos_token="<eos>", pad_token="<pad>"
  )


def make(
  case: str, folder: pathlib.Path, *, seed: int = 0, **sizes: Any
) -> transformers.PreTrainedModel:
  """Makes a float32 torch model of a case and saves it with a tokenizer."""
  import torch

  prefix, _ = CASES[case]
  model = getattr(transformers, prefix + "ForCausalLM")(config(case, **sizes))
  model = model.float().eval()
  generator = torch.Generator().manual_seed(seed)
  with torch.no_grad():
    for parameter in model.parameters():
      noise = torch.randn(parameter.shape, generator=generator)
      parameter.copy_(0.15 * noise + (parameter.dim() == 1))
  model.save_pretrained(folder)
  tokenizer().save_pretrained(folder)
  return model


def random_tokens(shape: tuple[int, int], below: int = TOKENS) -> np.ndarray:
  """Returns ids `[B, T]`, equal for equal arguments."""
  return np.random.default_rng(5).integers(0, below, shape)


def one_segment(
  tokens: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns tokens, positions and segment ids; each row is one segment."""
  positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
  return tokens, positions, np.ones_like(tokens)
