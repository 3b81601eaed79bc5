"""Hugging Face configs in and out, and the table's names and sizes."""

from __future__ import annotations

import copy
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers

from anysearch_jax import weights
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import attention, lora, table, transformer

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


@pytest.mark.parametrize(
  ("config", "count"),
  zip(PUBLISHED, [7_615_616_512, 4_022_468_096, 8_030_261_248]),
)
def test_published_models_have_their_published_parameter_counts(config, count):
  rows = table.rows(architecture_lib.from_hf(config))
  assert sum(math.prod(row.shape) for row in rows) == count
  of_files = [len(row.names()) * math.prod(row.file_shape) for row in rows]
  assert sum(of_files) == count


@pytest.mark.parametrize("config", PUBLISHED)
def test_a_config_comes_back_from_what_is_exported(config):
  a = architecture_lib.from_hf(config)
  exported = architecture_lib.to_hf(a, dtype="bfloat16")
  assert architecture_lib.from_hf(exported) == a
  assert exported["dtype"] == "bfloat16"
  for key in config.keys() & exported.keys():
    assert exported[key] == config[key], key


def test_families_differ_in_the_fields_that_name_the_difference():
  qwen2, qwen3, llama = map(architecture_lib.from_hf, PUBLISHED)
  assert (qwen2.qkv_bias, qwen2.qk_norm, qwen2.head_dim) == (True, False, 128)
  assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.tied) == (False, True, True)
  assert (llama.qkv_bias, llama.qk_norm, llama.norm_eps) == (
    False,
    False,
    1e-05,
  )
  assert llama.rope_scaling == architecture_lib.Llama3Rope(8.0, 1.0, 4.0, 8192)
  assert qwen2.rope_scaling is None and qwen3.rope_scaling is None


def without(key, values):
  return {k: v for k, v in values.items() if k != key}


def of_transformers(config):
  """The same settings, complete, in the dialect of transformers 5."""
  prefix = config["architectures"][0].removesuffix("ForCausalLM")
  config = copy.deepcopy(config)  # transformers completes it in place.
  return getattr(transformers, prefix + "Config")(**config).to_dict()


@pytest.mark.parametrize("config", PUBLISHED)
def test_both_dialects_read_alike(config):
  new = of_transformers(config)
  assert new.keys().isdisjoint({"rope_theta", "rope_scaling", "torch_dtype"})
  a = architecture_lib.from_hf(config)
  assert architecture_lib.from_hf(new) == a
  older = config.get("rope_scaling")
  if older:
    older = {k: v for k, v in older.items() if k != "rope_type"}
    older["type"] = "llama3"
    assert architecture_lib.from_hf(config | {"rope_scaling": older}) == a


@pytest.mark.parametrize("config", PUBLISHED)
def test_what_a_config_leaves_out_is_what_transformers_takes(config):
  sizes = ("vocab_size", "hidden_size", "intermediate_size")
  bare = {
    "architectures": config["architectures"],
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
  } | {key: config[key] // 32 * 32 for key in sizes}
  full = architecture_lib.from_hf(of_transformers(bare))
  assert architecture_lib.from_hf(bare) == full


def test_a_rope_key_added_to_the_newer_dialect_counts_as_in_transformers():
  """Model cards tell their readers to add `rope_scaling` for long context."""
  new = without("rope_theta", without("rope_scaling", QWEN3_4B))
  new["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
  assert architecture_lib.from_hf(new).rope_theta == 1e6
  yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}
  with pytest.raises(ValueError, match="RoPE type 'yarn' is not supported"):
    architecture_lib.from_hf(new | {"rope_scaling": yarn})


LLAMA3_ROPE = LLAMA3_8B["rope_scaling"]
CONTEXT = "original_max_position_embeddings"


@pytest.mark.parametrize("dialect", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
  ("nested", "beside", "counts"),
  [
    ({CONTEXT: 8192}, {}, 8192),
    ({}, {CONTEXT: 1024}, 1024),
    ({CONTEXT: 8192}, {CONTEXT: 1024}, 1024),
    ({}, {}, 131072),  # max_position_embeddings
  ],
)
def test_llama3_frequencies_are_those_of_transformers_wherever_the_context_is(
  torch, dialect, nested, beside, counts
):
  from transformers.models.llama import modeling_llama

  rope = without(CONTEXT, LLAMA3_ROPE) | nested
  config = without("rope_scaling", LLAMA3_8B) | {dialect: rope} | beside
  a = architecture_lib.from_hf(config)
  assert a.rope_scaling.original_context == counts
  theirs = modeling_llama.LlamaRotaryEmbedding(
    transformers.LlamaConfig.from_dict(config)
  )
  np.testing.assert_allclose(
    attention.inverse_frequencies(a), theirs.inv_freq.numpy(), rtol=1e-5
  )


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
    (QWEN2_7B, {"architectures": None}, r"architecture '\(none\)'"),
    *(
      (QWEN3_4B, {"architectures": [name]}, f"{name!r} is not supported")
      for name in (
        "Qwen3MoeForCausalLM",
        "Qwen2MoeForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForSequenceClassification",
        "Llama4ForConditionalGeneration",
      )
    ),
    (QWEN2_7B, {"hidden_act": "gelu"}, "hidden_act 'gelu' .*expected 'silu'"),
    (QWEN2_7B, SLIDING | {"max_window_layers": 27}, "sliding-window attention"),
    (
      # Its size is left out: transformers takes 4096.
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
      for name, kind in [
        ("type", "yarn"),
        ("rope_type", "linear"),
        ("rope_type", "dynamic"),
        ("rope_type", "longrope"),
      ]
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
    (QWEN2_7B, {"hidden_size": 84}, "heads of 3 .* expected an even size"),
    (QWEN2_7B, {"hidden_size": 8}, "heads of 0 .* expected an even size"),
  ],
)
def test_what_the_decoder_does_not_have_is_refused(base, change, sentence):
  with pytest.raises(ValueError, match=sentence):
    architecture_lib.from_hf(base | change)


SIZE = "expected a positive integer"
NUMBER = "expected a positive number"
SWITCH = "expected true or false"
NO_NUMBERS = [None, "1e-6", True, 0.0, -1e-6, math.nan, math.inf, [1e-6]]


@pytest.mark.parametrize(
  ("key", "value", "expected"),
  [
    *(
      (key, value, SIZE)
      for key in ("num_hidden_layers", "num_attention_heads", "vocab_size")
      for value in (None, "28", 0, -1, True, 28.0, [28])
    ),
    *(("num_key_value_heads", value, SIZE) for value in ("1", 0, True, 4.0)),
    *(("head_dim", value, SIZE) for value in ("64", 0, -2, 64.0)),
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
  with pytest.raises(ValueError) as refusal:
    architecture_lib.from_hf(LLAMA3_8B | {key: value})
  assert str(refusal.value) == f"config.json: {key} is {value!r}, {expected}."


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
  ("change", "sentence"),
  [
    ({"rope_theta": "500000"}, f"rope_theta is '500000', {NUMBER}"),
    ({"factor": "8"}, f"factor is '8', {NUMBER}"),
    ({"low_freq_factor": None}, f"low_freq_factor is None, {NUMBER}"),
    ({"high_freq_factor": [4]}, rf"high_freq_factor is \[4\], {NUMBER}"),
    ({CONTEXT: "8192"}, f"{CONTEXT} is '8192', {SIZE}"),
    ({CONTEXT: 0}, f"{CONTEXT} is 0, {SIZE}"),
  ],
)
def test_a_rope_setting_of_the_wrong_kind_is_refused(key, change, sentence):
  config = without("rope_scaling", LLAMA3_8B)
  with pytest.raises(ValueError, match=sentence):
    architecture_lib.from_hf(config | {key: LLAMA3_ROPE | change})


def test_what_is_missing_is_refused():
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
    (QWEN3_4B, {"partial_rotary_factor": 1.0, "quantization_config": None}),
    (QWEN3_4B, {"rope_scaling": {"rope_type": "default"}}),
    (LLAMA3_8B, {"head_dim": 128, "pretraining_tp": 1}),
    (LLAMA3_8B, {"head_dim": None}),
    # theta in the RoPE settings counts before the one beside them.
    (QWEN3_4B, {"rope_parameters": {"rope_theta": 1e6}, "rope_theta": 5e6}),
  ],
)
def test_an_option_that_changes_nothing_is_accepted(base, change):
  changed = architecture_lib.from_hf(base | change)
  assert changed == architecture_lib.from_hf(base)


def test_biases_are_where_each_family_has_them():
  asked = {"attention_bias": True, "mlp_bias": True}
  qwen2, qwen3, llama = (
    architecture_lib.from_hf(config | asked) for config in PUBLISHED
  )
  # Qwen2 has its own and no key for them.
  assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.mlp_bias) == (True, False, False)
  assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.mlp_bias) == (True, True, False)
  assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias) == (True, True, True)


TINY = dict(
  vocab_size=11,
  d_model=8,
  layers=3,
  heads=4,
  kv_heads=2,
  head_dim=6,
  mlp_dim=10,
)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
  "switches",
  [
    {},
    {"qkv_bias": True},
    {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    {"qk_norm": True},
    {"lora": architecture_lib.Lora(2, 4.0, lora.TARGETS)},
    {"lora": architecture_lib.Lora(2, 4.0, ("v", "down"))},
  ],
)
def test_the_table_is_what_the_modules_declare_each_once(switches, tied):
  a = architecture_lib.Architecture("llama", tied=tied, **switches, **TINY)
  rows = table.rows(a)
  names = [name for row in rows for name in row.names()]
  assert len(set(names)) == len(names)
  assert len({row.path for row in rows}) == len(rows)
  assert all(len(row.axes) == len(row.shape) for row in rows)
  ids = jnp.ones((1, 4), jnp.int32)
  declared = jax.eval_shape(
    transformer.Transformer(a).init, jax.random.key(0), ids, ids, ids
  )["params"]
  assert jax.tree.map(lambda x: x.shape, declared) == weights.tree(
    rows, lambda row: row.shape
  )
