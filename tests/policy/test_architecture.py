"""Reading and writing Hugging Face configs; names and sizes of the table."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import planned
import pytest
import random_models
import transformers

from anysearch_jax import config as config_lib
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import decoder, hf_architecture, table
from anysearch_jax.policy import parameters as weights
from anysearch_jax.policy.attention import rotary

SHAPES = pathlib.Path(__file__).parents[2] / "configs" / "shapes"
PUBLISHED = QWEN2_7B, QWEN3_4B, LLAMA3_8B = [
  json.loads((SHAPES / f"{name}.json").read_text())
  for name in ("Qwen2.5-7B-Instruct", "Qwen3-4B", "Llama-3.1-8B-Instruct")
]
LLAMA3_ROPE = LLAMA3_8B["rope_scaling"]
CONTEXT = "original_max_position_embeddings"


def without(key, values):
  return {k: v for k, v in values.items() if k != key}


@pytest.mark.parametrize(
  ("config", "count"),
  zip(PUBLISHED, [7_615_616_512, 4_022_468_096, 8_030_261_248]),
)
def test_published_models_have_their_published_parameter_counts(config, count):
  rows = table.rows(hf_architecture.from_hf(config))
  assert sum(math.prod(row.shape) for row in rows) == count
  of_files = [
    len(row.tensor_names()) * math.prod(row.file_shape) for row in rows
  ]
  assert sum(of_files) == count


@pytest.mark.parametrize("config", PUBLISHED)
def test_exported_config_reads_back_unchanged(config):
  a = hf_architecture.from_hf(config)
  exported = hf_architecture.to_hf(a, dtype="bfloat16")
  assert hf_architecture.from_hf(exported) == a
  assert exported["dtype"] == "bfloat16"
  for key in config.keys() & exported.keys():
    assert exported[key] == config[key], key


OLMO3 = random_models.config("olmo3").to_dict()
GEMMA3 = random_models.config("gemma3-tied").to_dict()
GPT_OSS = random_models.config("gpt-oss").to_dict()
QWEN3_MOE = random_models.config("qwen3-moe").to_dict()
SHARED = "shared_expert_intermediate_size"  # In files of Qwen3-Coder.


@pytest.mark.parametrize("types", [("sliding",) * 2, ("full",) * 2, None])
@pytest.mark.parametrize("base", [OLMO3, GEMMA3, GPT_OSS])
def test_windows_read_back_unchanged(base, types):
  types = types and [f"{kind}_attention" for kind in types]
  a = hf_architecture.from_hf(base | {"layer_types": types})
  full = types is not None and "full_attention" in types
  every = (0,) if types is None and base is GPT_OSS else (0, 1)
  assert (a.windowed, a.window) == (((), 0) if full else (every, 10))
  exported = hf_architecture.to_hf(a)
  assert hf_architecture.from_hf(exported) == a
  assert exported["sliding_window"] == (512 if full else 10)  # Never null.


@pytest.mark.parametrize("rotated", [[1, 1], [1, 0], [0, 0]])
def test_layers_without_positions_read_back_unchanged(rotated):
  a = random_models.architecture("smollm3", no_rope_layers=rotated)
  assert a.unrotated == tuple(i for i in range(2) if not rotated[i])
  assert hf_architecture.from_hf(hf_architecture.to_hf(a)) == a


def of_transformers(config):
  """Returns the same settings with the key names of transformers 5."""
  prefix = config["architectures"][0].removesuffix("ForCausalLM")
  config = copy.deepcopy(config)  # transformers modifies its argument.
  return getattr(transformers, prefix + "Config")(**config).to_dict()


@pytest.mark.parametrize("config", PUBLISHED)
def test_old_and_new_config_keys_read_alike(config):
  new = of_transformers(config)
  assert new.keys().isdisjoint({"rope_theta", "rope_scaling", "torch_dtype"})
  a = hf_architecture.from_hf(config)
  assert hf_architecture.from_hf(new) == a
  older = config.get("rope_scaling")
  if older:
    older = {k: v for k, v in older.items() if k != "rope_type"}
    older["type"] = "llama3"
    assert hf_architecture.from_hf(config | {"rope_scaling": older}) == a


@pytest.mark.parametrize("config", PUBLISHED)
def test_missing_keys_get_the_defaults_of_transformers(config):
  sizes = ("vocab_size", "hidden_size", "intermediate_size")
  bare = {
    "architectures": config["architectures"],
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
  } | {key: config[key] // 32 * 32 for key in sizes}
  full = hf_architecture.from_hf(of_transformers(bare))
  assert hf_architecture.from_hf(bare) == full


def test_a_rope_key_added_to_the_newer_dialect_counts_as_in_transformers():
  """Model cards recommend adding `rope_scaling` for long contexts."""
  new = without("rope_theta", without("rope_scaling", QWEN3_4B))
  new["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
  assert hf_architecture.from_hf(new).rope_theta == 1e6
  yarn = {"rope_type": "yarn", "factor": 4.0, CONTEXT: 32768}
  a = hf_architecture.from_hf(new | {"rope_scaling": yarn})
  assert (a.rope_theta, a.rope_scaling.factor) == (10_000.0, 4.0)
  assert a.max_context == QWEN3_4B["max_position_embeddings"]


YARN = {"type": "yarn", "factor": 4.0, CONTEXT: 32768}


@pytest.mark.parametrize(
  "change",
  [
    {},  # As model cards recommend.
    {CONTEXT: 60},  # All dimensions are beyond the original length.
    {"factor": 1, "rope_theta": 1e4},
    {"attention_factor": 0.75, "mscale": 0.7, "mscale_all_dim": 1.0},
    {"attention_factor": None, "mscale": 0.7, "mscale_all_dim": 1.4},
    {"mscale": 0.7, "beta_fast": 20, "beta_slow": 2.5, "truncate": False},
    {"beta_fast": 3, "beta_slow": 3, CONTEXT: 5000},
  ],
)
@pytest.mark.parametrize("config", PUBLISHED)
def test_yarn_matches_transformers_and_survives_an_export(
  torch, config, change
):
  from transformers.models.qwen3 import modeling_qwen3

  config = without("rope_scaling", config) | {"rope_scaling": YARN | change}
  a = hf_architecture.from_hf(config)
  new = of_transformers(config)
  prefix = config["architectures"][0].removesuffix("ForCausalLM")
  theirs = modeling_qwen3.Qwen3RotaryEmbedding(
    getattr(transformers, prefix + "Config")(**copy.deepcopy(config))
  )
  np.testing.assert_allclose(
    rotary.inverse_frequencies(a), theirs.inv_freq.numpy(), rtol=1e-5
  )
  positions = np.array([[0, 1, 50, 700]])
  expected = theirs(torch.zeros(1), torch.as_tensor(positions))
  for ours, truth in zip(
    rotary.cos_and_sin(a, jnp.asarray(positions)), expected
  ):
    np.testing.assert_allclose(ours[:, :, 0], truth.numpy(), atol=5e-4)
  assert hf_architecture.from_hf(new) == a
  assert hf_architecture.from_hf(hf_architecture.to_hf(a)) == a


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
def test_llama3_frequencies_match_transformers_for_every_context_key(
  torch, dialect, nested, beside, counts
):
  from transformers.models.llama import modeling_llama

  rope = without(CONTEXT, LLAMA3_ROPE) | nested
  config = without("rope_scaling", LLAMA3_8B) | {dialect: rope} | beside
  a = hf_architecture.from_hf(config)
  assert a.rope_scaling.original_max_position_embeddings == counts
  theirs = modeling_llama.LlamaRotaryEmbedding(
    transformers.LlamaConfig.from_dict(config)
  )
  np.testing.assert_allclose(
    rotary.inverse_frequencies(a), theirs.inv_freq.numpy(), rtol=1e-5
  )


def test_each_family_has_its_biases():
  asked = {"attention_bias": True, "mlp_bias": True}
  qwen2, qwen3, llama = (
    hf_architecture.from_hf(config | asked) for config in PUBLISHED
  )
  # Qwen2 always has q, k and v biases, and no key for them.
  assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.mlp_bias) == (True, False, False)
  assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.mlp_bias) == (True, True, False)
  assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias) == (True, True, True)


@pytest.mark.parametrize(
  "switches",
  [
    {"qkv_bias": True, "tied": True},
    {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    {"qk_norm": True},
    {"lora": architecture_lib.Lora(2, 4.0, config_lib.LoraConfig().targets)},
    {"lora": architecture_lib.Lora(2, 4.0, ("v", "down"))},
  ],
)
def test_table_equals_the_declared_parameters_each_once(switches):
  plain = dataclasses.replace(planned.A, qk_norm=False, tied=False)
  a = dataclasses.replace(plain, **switches)
  rows = table.rows(a)
  names = [name for row in rows for name in row.tensor_names()]
  assert len(set(names)) == len(names)
  assert len({row.path for row in rows}) == len(rows)
  assert all(len(row.axes) == len(row.shape) for row in rows)
  ids = jnp.ones((1, 4), jnp.int32)
  declared = jax.eval_shape(
    decoder.Transformer(a).init, jax.random.key(0), ids, ids, ids
  )["params"]
  assert jax.tree.map(lambda x: x.shape, declared) == weights.tree(
    rows, lambda row: row.shape
  )


SLIDING = {"use_sliding_window": True, "sliding_window": 4096}
SIZE = "expected a positive integer"
NUMBER = "expected a positive number"
SWITCH = "expected true or false"
NAMES = "expected a list of names"
WINDOWS = "sliding-window attention"
UNKNOWN = "unknown key {!r} .*, which may change what the model computes"


def rope(change):
  return {"rope_scaling": LLAMA3_ROPE | change}


@pytest.mark.parametrize(
  ("base", "change", "sentence"),
  [
    # Names of architectures; transformers chooses by model_type alone.
    (QWEN2_7B, {"architectures": ["X"]}, "'X' is not sup.* one of Qwen2ForC"),
    (
      QWEN2_7B,
      {"architectures": None, "model_type": None},
      r"architecture '\(none\)' of model_type None is not supported",
    ),
    (QWEN2_7B, {"model_type": "qwen3"}, "model_type 'qwen3' contradicts arch"),
    # Options with other values, and keys that nobody knows.
    (QWEN2_7B, {"hidden_act": "gelu"}, "hidden_act 'gelu' .*expected 'silu'"),
    (QWEN2_7B, {"is_causal": None}, "is_causal None is not .* expected True"),
    (QWEN2_7B, {"use_mrope": True}, "use_mrope True is not .* expected False"),
    (QWEN3_4B, {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is"),
    (LLAMA3_8B, {"rope_interleaved": True}, "rope_interleaved True is not sup"),
    (LLAMA3_8B, {"quantization_config": {"quant_method": "x"}}, "'x'.* is not"),
    (QWEN2_7B, {"auto_map": {"A": "x.X"}}, "auto_map .* no such key or {}"),
    *(
      (base, {key: 8}, UNKNOWN.format(key))
      for base, key in zip(PUBLISHED, ("chunks", "num_heads", "logit_scale"))
    ),
    # Windows.
    (QWEN2_7B, SLIDING | {"max_window_layers": 27}, WINDOWS),
    # The window size is missing: transformers defaults to 4096.
    (QWEN2_7B, {"use_sliding_window": True, "max_window_layers": 0}, WINDOWS),
    (QWEN2_7B, SLIDING | {"sliding_window": 0}, "sliding_window is 0, expec"),
    (LLAMA3_8B, {"sliding_window": 4096}, WINDOWS),
    (
      QWEN3_4B,
      {"layer_types": ["full_attention"] * 35 + ["sliding_attention"]},
      WINDOWS,
    ),
    (
      QWEN3_4B,
      {"layer_types": []},
      r"\(36\) must be equal .* `layer_types` \(0\)",
    ),
    *(
      (OLMO3, change, sentence)
      for change, sentence in [
        ({"sliding_window": None}, f"sliding_window is None, {SIZE}"),
        ({"layer_types": ["chunked_attention"] * 2}, "'chunked_attention'"),
        ({"rope_parameters": {"rope_theta": 1e6}}, "key 'rope_theta'"),
        ({"rope_parameters": {"full_attention": 1}}, "'int' object"),
        (
          {"rope_parameters": {"sliding_attention": LLAMA3_ROPE}},
          "'llama3' of sliding_attention is not supported; expected 'default'",
        ),
      ]
    ),
    (GEMMA3, {"query_pre_attn_scalar": 0}, f"attn_scalar is 0, {SIZE}"),
    (OLMO3, {"query_pre_attn_scalar": 8}, "key 'query_pre_attn_scalar'"),
    (QWEN3_MOE, {"use_qk_norm": False}, "use_qk_norm False .* expected True"),
    (QWEN3_MOE, {SHARED: 512}, f"{SHARED} 512 is not .* expected 0"),
    (GEMMA3, {"sliding_window_pattern": 0}, f"pattern is 0, {SIZE}"),
    (GEMMA3, {"hidden_activation": "gelu"}, "hidden_activation 'gelu' is not"),
    (GPT_OSS, {"swiglu_limit": 10.0}, "swiglu_limit 10.0 is not supported"),
    (GPT_OSS, {"swiglu_alpha": 1.0}, "expected 1.702"),
    (GPT_OSS, {"sliding_window": None}, f"sliding_window is None, {SIZE}"),
    (GPT_OSS, {"quantization_config": {}}, "expected no such key"),
    (GPT_OSS, {"quantization_config": "mxfp4"}, "expected an object"),
    (GPT_OSS, {"num_experts": 7}, "contradicts num_local_experts 6"),
    # RoPE.
    (
      QWEN2_7B,
      {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
      "RoPE type 'dynamic' is not supported; expected 'default', 'linear', 'l",
    ),
    (
      QWEN3_4B,
      {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
      "unknown key 'full_attention'",
    ),
    (
      QWEN3_4B,
      {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.25}},
      "partial_rotary_factor 0.25 is not supported; expected 1.0",
    ),
    (QWEN2_7B, {"rope_scaling": {"mrope_section": [8]}}, "key 'mrope_section'"),
    (QWEN2_7B, {"rope_scaling": {"type": "linear"}}, "Missing .*'factor'"),
    (LLAMA3_8B, rope({"rope_theta": "5"}), f"rope_theta is '5', {NUMBER}"),
    (LLAMA3_8B, rope({CONTEXT: "8192"}), "'str' and 'int'"),
    (
      LLAMA3_8B,
      rope({"low_freq_factor": 4}),
      "low_freq_factor is 4, expected below high_freq_factor, 4.0",
    ),
    (LLAMA3_8B, rope({"factor": None}), f"factor is None, {NUMBER}"),
    *(
      (QWEN2_7B, {"rope_scaling": YARN | change}, sentence)
      for change, sentence in [
        ({"factor": None}, f"factor is missing, {NUMBER}"),
        ({"factor": 0.5}, "factor 0.5, .* expected a factor of at least 1"),
        ({"beta_fast": 0.5}, "beta_fast 0.5, .* of at least beta_slow"),
        ({"rope_theta": 1}, "rope_theta 1.0; .* a rope_theta above 1"),
        ({"truncate": None}, f"truncate is None, {SWITCH}"),
        ({"mscale": "1"}, f"mscale is '1', {NUMBER}"),
        ({CONTEXT: 0}, "division by zero"),
        ({"long_factor": [1.0]}, UNKNOWN.format("long_factor")),
      ]
    ),
    # Sizes that do not fit each other.
    (QWEN2_7B, {"num_key_value_heads": 5}, "28 attention .* 5 key-value heads"),
    (QWEN3_4B, {"head_dim": 7}, "an even rotary dimension, .* `head_dim`=7"),
    (QWEN2_7B, {"head_dim": 3}, "heads of 3 .* expected an even size"),
    # Values of the wrong kind.
    (QWEN3_4B, {"head_dim": None}, "'head_dim' expected int, got NoneType"),
    (LLAMA3_8B, {"vocab_size": 28.0}, f"vocab_size is 28.0, {SIZE}"),
    (LLAMA3_8B, {"rms_norm_eps": 0.0}, f"eps is 0.0, {NUMBER}"),
    (LLAMA3_8B, {"rms_norm_eps": "1e-6"}, "eps' expected float, got str"),
    (LLAMA3_8B, {"mlp_bias": "no"}, "'mlp_bias' expected bool, got str"),
    (LLAMA3_8B, {"rope_scaling": "llama3"}, "with value 'llama3'"),
    (QWEN3_4B, {"layer_types": [["full_attention"]]}, "'layer_types'"),
    (LLAMA3_8B, {"architectures": "LlamaForCausalLM"}, NAMES),
  ],
)
def test_what_the_decoder_does_not_support_is_refused(base, change, sentence):
  with pytest.raises(ValueError, match=f"^config.json: .*{sentence}"):
    hf_architecture.from_hf(base | change)


@pytest.mark.parametrize(
  ("base", "change"),
  [
    (QWEN2_7B, {"use_sliding_window": True, "sliding_window": None}),
    (QWEN2_7B, SLIDING | {"max_window_layers": 28}),
    (QWEN2_7B, SLIDING | {"layer_types": ["full_attention"] * 28}),
    (QWEN2_7B, {"architectures": None}),
    (QWEN2_7B, {"model_type": None, "use_mrope": False}),
    (QWEN2_7B, {"hidden_act": "swish", "is_causal": True}),
    (QWEN2_7B, {"attention_bias": None, "mlp_bias": None, "head_dim": None}),
    (QWEN3_4B, {"mlp_bias": None, "vision_config": None, "use_mrope": None}),
    (QWEN3_4B, dict.fromkeys(("is_encoder_decoder", "add_cross_attention"))),
    (QWEN3_4B, {"partial_rotary_factor": 1.0, "quantization_config": None}),
    (QWEN3_4B, {"rope_scaling": {"rope_type": "default"}}),
    # theta in the RoPE settings takes precedence over the top-level key.
    (QWEN3_4B, {"rope_parameters": {"rope_theta": 1e6}, "rope_theta": 5e6}),
    (LLAMA3_8B, {"head_dim": None}),
    (LLAMA3_8B, dict.fromkeys(("use_sliding_window", "sliding_window"))),
    # Of Llama 2 and SmolLM2, and what trainers write.
    (LLAMA3_8B, {"max_sequence_length": 2048, "pretraining_tp": 1}),
    (LLAMA3_8B, {"is_llama_config": True, "rope_interleaved": False}),
    (QWEN2_7B, {"unsloth_version": "2025.3.19", "temperature": 0.7}),
    (QWEN2_7B, {"gradient_checkpointing": False, "auto_map": {}}),
    (QWEN3_MOE, {"use_qk_norm": True, "qkv_bias": False, SHARED: 0}),
  ],
)
def test_an_option_that_changes_nothing_is_accepted(base, change):
  changed = hf_architecture.from_hf(base | change)
  assert changed == hf_architecture.from_hf(base)


@pytest.mark.parametrize("case", random_models.CASES)
def test_every_key_that_transformers_writes_is_known(case, tmp_path):
  """Those of all its configurations, and what conversions add."""
  config = random_models.config(case)
  declared = {f.name for f in dataclasses.fields(transformers.PreTrainedConfig)}
  written = {key: getattr(config, key, None) for key in declared}
  config.save_pretrained(tmp_path)
  written |= json.loads((tmp_path / "config.json").read_text())
  written |= {"_model_name_or_path": "a name", "unk_token_id": 0}
  assert hf_architecture.from_hf(written) == random_models.architecture(case)
