"""Refused Hugging Face configs, and accepted options without an effect."""

from __future__ import annotations

import math

import pytest
from published_configs import (
  CONTEXT,
  LLAMA3_8B,
  LLAMA3_ROPE,
  PUBLISHED,
  PUBLISHED_EXTRAS,
  QWEN2_7B,
  QWEN3_4B,
  without,
)

from anysearch_jax.policy import architecture as architecture_lib

SLIDING = {"use_sliding_window": True, "sliding_window": 4096}
ROPE_REFUSAL = "RoPE type {!r} is not supported; expected 'default' or 'llama3'"


@pytest.mark.parametrize(
  ("base", "change", "sentence"),
  [
    (
      QWEN2_7B,
      {"architectures": ["GPT2LMHeadModel"]},
      "'GPT2LMHeadModel' is not supported; expected one of Qwen2ForCausalLM",
    ),
    (
      QWEN2_7B,
      {"architectures": None},
      r"architecture '\(none\)' of model_type None is not supported",
    ),
    *(
      (QWEN3_4B, {"architectures": [name]}, f"{name!r} is not supported")
      for name in (
        "Qwen3MoeForCausalLM",
        "Qwen2ForSequenceClassification",
      )
    ),
    (QWEN2_7B, {"hidden_act": "gelu"}, "hidden_act 'gelu' .*expected 'silu'"),
    (QWEN2_7B, SLIDING | {"max_window_layers": 27}, "sliding-window attention"),
    (
      # The window size is missing: transformers defaults to 4096.
      without("sliding_window", QWEN2_7B),
      {"use_sliding_window": True, "max_window_layers": 0},
      "sliding-window attention",
    ),
    (
      QWEN3_4B,
      {"layer_types": ["full_attention"] * 35 + ["sliding_attention"]},
      "sliding-window attention",
    ),
    *(
      (QWEN2_7B, {key: {name: kind, "factor": 4.0}}, ROPE_REFUSAL.format(kind))
      for key in ("rope_scaling", "rope_parameters")
      for name, kind in [("type", "yarn"), ("rope_type", "linear")]
    ),
    (
      QWEN3_4B,
      {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
      "RoPE type 'one for each layer type' is not supported",
    ),
    (QWEN3_4B, {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is"),
    (
      QWEN3_4B,
      {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.25}},
      "partial_rotary_factor 0.25 is not supported; expected 1.0",
    ),
    (
      LLAMA3_8B,
      {"quantization_config": {"quant_method": "fp8"}},
      "quantization_config .*'fp8'.* is not supported",
    ),
    (
      QWEN2_7B,
      {"num_key_value_heads": 5},
      "28 attention heads do not divide over 5 key-value heads",
    ),
    (QWEN3_4B, {"head_dim": 7}, "heads of 7 .* expected an even size"),
    (QWEN3_4B, {"head_dim": None}, "head_dim is None, expected a positive"),
    # transformers chooses by model_type and ignores the architecture.
    (QWEN2_7B, {"model_type": "qwen3"}, "model_type 'qwen3' contradicts arch"),
    (QWEN2_7B, {"model_type": "mistral"}, "'mistral' contradicts architecture"),
    (
      QWEN2_7B,
      {"architectures": ["Qwen2ForCausalLM", "LlamaForCausalLM"]},
      "architecture 'Qwen2ForCausalLM', 'LlamaForCausalLM' is not supported",
    ),
    (QWEN2_7B, {"is_causal": False}, "is_causal False is not .* expected True"),
    (QWEN2_7B, {"is_causal": None}, "is_causal None is not .* expected True"),
    (QWEN2_7B, {"use_mrope": True}, "use_mrope True is not .* expected False"),
    (
      LLAMA3_8B,
      {"rope_interleaved": True},
      "rope_interleaved True is not supported; expected False",
    ),
    (LLAMA3_8B, {"sliding_window": 4096}, "sliding-window attention"),
    (
      QWEN2_7B,
      {"use_sliding_window": True, "sliding_window": 0},
      "is 0, expec",
    ),
    (
      QWEN3_4B,
      {"layer_types": ["full_attention"]},
      "names 1 layers, expected 36",
    ),
    (QWEN3_4B, {"layer_types": []}, "names 0 layers, expected 36"),
    *(
      (base, {key: value}, f"unknown key '{key}' .* may change what the model")
      for base, key, value in [
        (QWEN2_7B, "attention_chunk_size", 8),
        (QWEN3_4B, "num_experts", 8),
        (LLAMA3_8B, "per_layer_config", {"0": {"rms_norm_eps": 0.5}}),
        (LLAMA3_8B, "transformers_weights", "other.safetensors"),
      ]
    ),
    (
      QWEN2_7B,
      {"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}},
      "auto_map .* is not supported; expected no such key or {}",
    ),
    (
      QWEN2_7B,
      {"rope_scaling": {"type": "default", "mrope_section": [16, 24, 24]}},
      "unknown key 'mrope_section'",
    ),
    (QWEN2_7B, {"hidden_size": 84}, "heads of 3 .* expected an even size"),
    (QWEN2_7B, {"hidden_size": 8}, "heads of 0 .* expected an even size"),
  ],
)
def test_unsupported_option_is_refused(base, change, sentence):
  with pytest.raises(ValueError, match=sentence):
    architecture_lib.from_hf(base | change)


SIZE = "expected a positive integer"
NUMBER = "expected a positive number"
SWITCH = "expected true or false"
NO_NUMBERS = [None, "1e-6", True, 0.0, math.nan, math.inf]


@pytest.mark.parametrize(
  ("key", "value", "expected"),
  [
    *(
      (key, value, SIZE)
      for key in ("num_hidden_layers", "vocab_size")
      for value in (None, "28", 0, True, 28.0)
    ),
    ("num_key_value_heads", "1", SIZE),
    ("head_dim", -2, SIZE),
    ("hidden_size", 0, SIZE),
    ("intermediate_size", False, SIZE),
    ("max_position_embeddings", None, SIZE),
    *(("rms_norm_eps", value, NUMBER) for value in NO_NUMBERS),
    *(("rope_theta", value, NUMBER) for value in NO_NUMBERS),
    ("tie_word_embeddings", "false", SWITCH),
    ("attention_bias", 0, SWITCH),
    ("mlp_bias", "no", SWITCH),
    ("use_sliding_window", 1, SWITCH),
    ("max_window_layers", "28", "expected an integer"),
    ("rope_parameters", [], "expected an object"),
    ("rope_scaling", "llama3", "expected an object"),
    ("layer_types", "full_attention", "expected a list of names"),
    ("layer_types", [["full_attention"]], "expected a list of names"),
    ("architectures", "LlamaForCausalLM", "expected a list of names"),
    ("architectures", {"a": 1}, "expected a list of names"),
  ],
)
def test_a_setting_of_the_wrong_kind_is_refused(key, value, expected):
  # Llama has no key for windows; transformers ignores it.
  base = QWEN2_7B if "window" in key else LLAMA3_8B
  with pytest.raises(ValueError) as refusal:
    architecture_lib.from_hf(base | {key: value})
  assert str(refusal.value) == f"config.json: {key} is {value!r}, {expected}."


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
  ("change", "sentence"),
  [
    ({"rope_theta": "500000"}, f"rope_theta is '500000', {NUMBER}"),
    ({"low_freq_factor": None}, f"low_freq_factor is None, {NUMBER}"),
    ({CONTEXT: "8192"}, f"{CONTEXT} is '8192', {SIZE}"),
    ({"low_freq_factor": 4}, "is 4, expected below high_freq_factor, 4.0"),
  ],
)
def test_a_rope_setting_of_the_wrong_kind_is_refused(key, change, sentence):
  config = without("rope_scaling", LLAMA3_8B)
  with pytest.raises(ValueError, match=sentence):
    architecture_lib.from_hf(config | {key: LLAMA3_ROPE | change})


def test_missing_key_is_refused():
  for key in ("vocab_size", "num_hidden_layers", "intermediate_size"):
    with pytest.raises(ValueError, match=f"{key} is missing, {SIZE}"):
      architecture_lib.from_hf(without(key, LLAMA3_8B))
  for key in ("factor", "low_freq_factor", "high_freq_factor"):
    rope = {"rope_scaling": without(key, LLAMA3_ROPE)}
    with pytest.raises(ValueError, match=f"{key} is missing, {NUMBER}"):
      architecture_lib.from_hf(LLAMA3_8B | rope)


@pytest.mark.parametrize(
  ("base", "change"),
  [
    (QWEN2_7B, {"use_sliding_window": False, "sliding_window": 4096}),
    (QWEN2_7B, {"use_sliding_window": True, "sliding_window": None}),
    (QWEN2_7B, SLIDING | {"max_window_layers": 28}),
    (QWEN2_7B, SLIDING | {"layer_types": ["full_attention"] * 28}),
    (QWEN2_7B, {"architectures": None, "model_type": "qwen2"}),
    (LLAMA3_8B, {"architectures": [], "model_type": "llama"}),
    (QWEN2_7B, {"hidden_act": "swish", "is_causal": True}),
    (QWEN2_7B, {"attention_bias": None, "mlp_bias": None, "head_dim": None}),
    (QWEN3_4B, {"mlp_bias": None, "vision_config": None, "use_mrope": None}),
    (QWEN3_4B, dict.fromkeys(("is_encoder_decoder", "add_cross_attention"))),
    (LLAMA3_8B, dict.fromkeys(("use_sliding_window", "sliding_window"))),
    *((base, extra) for base in PUBLISHED for extra in PUBLISHED_EXTRAS),
    (QWEN3_4B, {"partial_rotary_factor": 1.0, "quantization_config": None}),
    (QWEN3_4B, {"rope_scaling": {"rope_type": "default"}}),
    (LLAMA3_8B, {"head_dim": 128, "pretraining_tp": 1}),
    (LLAMA3_8B, {"head_dim": None}),
    # theta in the RoPE settings takes precedence over the top-level key.
    (QWEN3_4B, {"rope_parameters": {"rope_theta": 1e6}, "rope_theta": 5e6}),
  ],
)
def test_an_option_that_changes_nothing_is_accepted(base, change):
  changed = architecture_lib.from_hf(base | change)
  assert changed == architecture_lib.from_hf(base)
