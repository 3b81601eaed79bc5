"""Reading and writing Hugging Face configs; names and sizes of the table."""

from __future__ import annotations

import copy
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from published_configs import (
  CONTEXT,
  LLAMA3_8B,
  LLAMA3_ROPE,
  PUBLISHED,
  QWEN3_4B,
  without,
)

from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import decoder, lora, table
from anysearch_jax.policy import parameters as weights
from anysearch_jax.policy.attention import masks as attention


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
def test_exported_config_reads_back_unchanged(config):
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


def of_transformers(config):
  """Returns the same settings with the key names of transformers 5."""
  prefix = config["architectures"][0].removesuffix("ForCausalLM")
  config = copy.deepcopy(config)  # transformers modifies its argument.
  return getattr(transformers, prefix + "Config")(**config).to_dict()


@pytest.mark.parametrize("config", PUBLISHED)
def test_old_and_new_config_keys_read_alike(config):
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
def test_missing_keys_get_the_defaults_of_transformers(config):
  sizes = ("vocab_size", "hidden_size", "intermediate_size")
  bare = {
    "architectures": config["architectures"],
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
  } | {key: config[key] // 32 * 32 for key in sizes}
  full = architecture_lib.from_hf(of_transformers(bare))
  assert architecture_lib.from_hf(bare) == full


def test_a_rope_key_added_to_the_newer_dialect_counts_as_in_transformers():
  """Model cards recommend adding `rope_scaling` for long contexts."""
  new = without("rope_theta", without("rope_scaling", QWEN3_4B))
  new["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
  assert architecture_lib.from_hf(new).rope_theta == 1e6
  yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}
  with pytest.raises(ValueError, match="RoPE type 'yarn' is not supported"):
    architecture_lib.from_hf(new | {"rope_scaling": yarn})


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
  a = architecture_lib.from_hf(config)
  assert a.rope_scaling.original_max_position_embeddings == counts
  theirs = modeling_llama.LlamaRotaryEmbedding(
    transformers.LlamaConfig.from_dict(config)
  )
  np.testing.assert_allclose(
    attention.inverse_frequencies(a), theirs.inv_freq.numpy(), rtol=1e-5
  )


def test_each_family_has_its_biases():
  asked = {"attention_bias": True, "mlp_bias": True}
  qwen2, qwen3, llama = (
    architecture_lib.from_hf(config | asked) for config in PUBLISHED
  )
  # Qwen2 always has q, k and v biases, and no key for them.
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
def test_table_equals_the_declared_parameters_each_once(switches, tied):
  a = architecture_lib.Architecture("llama", tied=tied, **switches, **TINY)
  rows = table.rows(a)
  names = [name for row in rows for name in row.names()]
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
