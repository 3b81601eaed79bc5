"""Published configurations of the supported families, as their files are."""

from __future__ import annotations

QWEN2_7B = {
  "architectures": ["Qwen2ForCausalLM"],
  "hidden_act": "silu",
  "hidden_size": 3584,
  "intermediate_size": 18944,
  "max_position_embeddings": 32768,
  "num_attention_heads": 28,
  "num_hidden_layers": 28,
  "num_key_value_heads": 4,
  "rms_norm_eps": 1e-06,
  "rope_theta": 1000000.0,
  "sliding_window": 131072,
  "tie_word_embeddings": False,
  "use_sliding_window": False,
  "vocab_size": 152064,
}
QWEN3_4B = {
  "architectures": ["Qwen3ForCausalLM"],
  "attention_bias": False,
  "head_dim": 128,
  "hidden_act": "silu",
  "hidden_size": 2560,
  "intermediate_size": 9728,
  "max_position_embeddings": 40960,
  "num_attention_heads": 32,
  "num_hidden_layers": 36,
  "num_key_value_heads": 8,
  "rms_norm_eps": 1e-06,
  "rope_scaling": None,
  "rope_theta": 1000000,
  "tie_word_embeddings": True,
  "vocab_size": 151936,
}
LLAMA3_8B = {
  "architectures": ["LlamaForCausalLM"],
  "attention_bias": False,
  "hidden_act": "silu",
  "hidden_size": 4096,
  "intermediate_size": 14336,
  "max_position_embeddings": 131072,
  "mlp_bias": False,
  "num_attention_heads": 32,
  "num_hidden_layers": 32,
  "num_key_value_heads": 8,
  "rms_norm_eps": 1e-05,
  "rope_scaling": {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
  },
  "rope_theta": 500000.0,
  "tie_word_embeddings": False,
  "vocab_size": 128256,
}
PUBLISHED = [QWEN2_7B, QWEN3_4B, LLAMA3_8B]
# Further keys in published files of these families.
PUBLISHED_EXTRAS = [
  # Qwen/Qwen2.5-*, base, instruct, math and distilled.
  {
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "initializer_range": 0.02,
    "max_window_layers": 21,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
  },
  # meta-llama/Llama-3.*, and Llama 2's.
  {
    "_name_or_path": "meta-llama/Llama-3.2-1B",
    "eos_token_id": [128001, 128008, 128009],
    "max_sequence_length": 2048,
    "pad_token_id": 0,
    "pretraining_tp": 1,
  },
  # HuggingFaceTB/SmolLM2-*.
  {
    "is_llama_config": True,
    "rope_interleaved": False,
    "transformers.js_config": {"dtype": "q4"},
  },
  # Saved by trainers.
  {
    "_attn_implementation_autoset": True,
    "gradient_checkpointing": False,
    "unsloth_version": "2025.3.19",
    "temperature": 0.7,
    "max_length": 20,
    "auto_map": {},
    "quantization_config": None,
  },
]
LLAMA3_ROPE = LLAMA3_8B["rope_scaling"]
CONTEXT = "original_max_position_embeddings"


def without(key, values):
  return {k: v for k, v in values.items() if k != key}
