"""Configurations of ModernBERT and Nomic encoders."""

from __future__ import annotations

import json

import published_encoders as published
import pytest

from retrieval.encoder import encoder as encoder_lib
from retrieval.encoder import modernbert, nomic


def test_both_spellings_of_a_configuration_are_one():
  ours = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 256,
    "layer_norm_eps": 1e-6,
    "hidden_act": "silu",
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 70.0},
  }
  a = nomic.from_hf(published.NOMIC)
  assert nomic.from_hf(published.NOMIC | ours) == a
  alone = ours | {"model_type": "nomic_bert", "vocab_size": 300}
  assert nomic.from_hf(alone) == a


def test_sizes_that_a_file_omits_are_those_of_transformers():
  kept = ("model_type", *published.SIZES)
  a = modernbert.from_hf({key: published.MODERNBERT[key] for key in kept})
  assert (a.positions, a.window, a.norm_eps) == (8192, 128, 1e-5)
  assert (a.global_theta, a.local_theta) == (160_000, 10_000)
  assert a.windowed == (False, True, True)


ROPE = {"full_attention": {"rope_type": "default", "rope_theta": 900.0}}


def test_newer_names_of_settings_come_before_older_ones():
  types_ = ["full_attention"] * 2 + ["sliding_attention"]
  a = modernbert.from_hf(
    published.MODERNBERT | {"rope_parameters": ROPE, "layer_types": types_}
  )
  assert (a.global_theta, a.local_theta) == (900, 30)
  assert a.windowed == (False, False, True)


@pytest.mark.parametrize(
  ("change", "sentence"),
  [
    ({"hidden_activation": "silu"}, "hidden_activation 'silu' is not supp"),
    ({"is_causal": True}, "is_causal True is not supported"),
    ({"rope_scaling": {"type": "linear"}}, "rope_scaling .* is not supported"),
    ({"rope_parameters": {"rope_theta": 1e4}}, "unknown key 'rope_theta'"),
    (
      {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
      "rope_type 'yarn' is not supported",
    ),
    (
      {"rope_parameters": {"sliding_attention": {"factor": 2.0}}},
      "unknown key 'factor'",
    ),
    ({"rope_parameters": [1]}, r"rope_parameters is \[1\], expected an object"),
    ({"local_rope_theta": None}, "local_rope_theta is None, expected a posit"),
    ({"global_attn_every_n_layers": 0}, "global_attn_every_n_layers is 0, exp"),
    ({"layer_types": ["full_attention"]}, "layer_types is .* of 3 layers"),
    ({"layer_types": ["chunked_attention"] * 3}, "layer_types is .* expected"),
    ({"local_attention": -1}, "local_attention is -1, expected a positive"),
    ({"sliding_window": 5}, "unknown key 'sliding_window'"),
    ({"head_dim": 8}, "unknown key 'head_dim'"),
    ({"mlp_bias": None}, "mlp_bias is None, expected true or false"),
    ({"num_attention_heads": 16}, "hidden_size 48 .* 16 .* of an even width"),
    ({"quantization_config": {"bits": 8}}, "quantization_config .* is not"),
  ],
)
def test_modernbert_refuses_an_unsupported_option_by_name(change, sentence):
  with pytest.raises(ValueError, match=f"config.json: {sentence}"):
    modernbert.from_hf(published.MODERNBERT | change)


@pytest.mark.parametrize(
  ("change", "sentence"),
  [
    ({"activation_function": "gelu"}, "activation_function 'gelu' is not supp"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    ({"qkv_proj_bias": True}, "qkv_proj_bias True is not supported"),
    ({"mlp_fc1_bias": True}, "mlp_fc1_bias True is not supported"),
    ({"prenorm": True}, "prenorm True is not supported"),
    ({"causal": True}, "causal True is not supported"),
    ({"rotary_emb_fraction": 0.5}, "rotary_emb_fraction 0.5 is not supported"),
    ({"rotary_emb_interleaved": True}, "rotary_emb_interleaved True is not"),
    ({"rotary_emb_scale_base": 512}, "rotary_emb_scale_base 512 is not supp"),
    ({"moe_every_n_layers": 2}, "unknown key 'moe_every_n_layers'"),
    (
      {"auto_map": {"AutoModel": "other.Model"}},
      "auto_map .* is not supported",
    ),
    ({"hidden_size": 64}, "n_embd is 48, but hidden_size is 64; expected the"),
    (
      {"rope_parameters": {"rope_theta": 80.0}},
      "rotary_emb_base is 70, but rope_theta is 80.0",
    ),
    ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_type 'dynamic' is"),
    ({"head_dim": 8}, "head_dim is 8, expected 16"),
    ({"n_inner": None}, "intermediate_size is None, expected a positive"),
  ],
)
def test_nomic_refuses_an_unsupported_option_by_name(change, sentence):
  with pytest.raises(ValueError, match=f"config.json: {sentence}"):
    nomic.from_hf(published.NOMIC | change)


def test_an_option_with_another_default_in_nomics_code_must_be_said():
  config = {k: v for k, v in published.NOMIC.items() if k != "qkv_proj_bias"}
  with pytest.raises(ValueError, match="qkv_proj_bias is missing, expected F"):
    nomic.from_hf(config)


@pytest.mark.parametrize("kind", ["deberta-v2", None, []])
def test_another_family_is_refused_by_name(tmp_path, kind):
  (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
  with pytest.raises(ValueError, match="model_type .* expected one of 'bert',"):
    encoder_lib.Encoder.load(tmp_path)
