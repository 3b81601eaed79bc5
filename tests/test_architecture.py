"""Hugging Face configs in and out, the table's sizes, rotary and attention."""

from __future__ import annotations

import dataclasses
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anysearch_jax import weights
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import attention, table, transformer

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


@pytest.mark.parametrize("config", PUBLISHED)
def test_both_dialects_of_rope_read_alike(config):
  new = {k: v for k, v in config.items() if not k.startswith("rope_")}
  scaling = config.get("rope_scaling") or {"rope_type": "default"}
  new["rope_parameters"] = scaling | {"rope_theta": config["rope_theta"]}
  assert architecture_lib.from_hf(new) == architecture_lib.from_hf(config)


@pytest.mark.parametrize(
  ("base", "change", "sentence"),
  [
    (
      QWEN2_7B,
      {"architectures": ["GPT2LMHeadModel"]},
      "'GPT2LMHeadModel' is not supported; expected one of Qwen2ForCausalLM",
    ),
    (QWEN2_7B, {"architectures": None}, r"architecture '\(none\)'"),
    (QWEN2_7B, {"hidden_act": "gelu"}, "hidden_act 'gelu', expected 'silu'"),
    (QWEN2_7B, {"use_sliding_window": True}, "sliding-window attention"),
    (QWEN3_4B, {"attention_bias": True}, "attention_bias .* for qwen3"),
    (LLAMA3_8B, {"attention_bias": True}, "attention_bias .* for llama"),
    (LLAMA3_8B, {"mlp_bias": True}, "mlp_bias is not supported"),
    (
      QWEN2_7B,
      {"rope_scaling": {"type": "yarn", "factor": 4.0}},
      "RoPE type 'yarn' is not supported; expected 'default' or 'llama3'",
    ),
  ],
)
def test_what_the_decoder_does_not_have_is_refused(base, change, sentence):
  with pytest.raises(ValueError, match=sentence):
    architecture_lib.from_hf(base | change)


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
  "switches", [{}, {"qkv_bias": True}, {"qk_norm": True}]
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


def test_unscaled_frequencies_are_powers_of_theta():
  a = architecture_lib.Architecture(
    "qwen2", **TINY | {"head_dim": 8}, rope_theta=10_000.0
  )
  np.testing.assert_allclose(
    attention.inverse_frequencies(a), [1.0, 0.1, 0.01, 0.001], rtol=1e-6
  )


def test_llama3_scaling_keeps_short_divides_long_and_blends_between():
  rope = architecture_lib.Llama3Rope(8.0, 1.0, 4.0, 8192)
  a = architecture_lib.Architecture(
    "llama",
    **TINY | {"head_dim": 128},
    rope_theta=500_000.0,
    rope_scaling=rope,
  )
  plain = attention.inverse_frequencies(
    dataclasses.replace(a, rope_scaling=None)
  )
  scaled = attention.inverse_frequencies(a)
  seen = set()
  for before, after in zip(plain.tolist(), scaled.tolist()):
    wavelength = 2 * math.pi / before
    if wavelength < 8192 / 4:
      kind, expected = "short", before
    elif wavelength > 8192 / 1:
      kind, expected = "long", before / 8
    else:
      smooth = (8192 / wavelength - 1) / (4 - 1)
      kind, expected = "between", (1 - smooth) * before / 8 + smooth * before
    seen.add(kind)
    assert after == pytest.approx(expected, rel=1e-6)
  assert seen == {"short", "between", "long"}


def test_rotation_is_multiplication_by_a_complex_phase():
  a = architecture_lib.Architecture("qwen2", **TINY | {"head_dim": 8})
  rng = np.random.default_rng(0)
  x = rng.normal(size=(2, 3, 4, 8)).astype(np.float32)
  positions = np.array([[0, 1, 2], [7, 100, 3]])
  phase = np.exp(1j * positions[..., None] * attention.inverse_frequencies(a))[
    :, :, None
  ]
  turned = (x[..., :4] + 1j * x[..., 4:]) * phase
  found = attention.rotate(
    jnp.asarray(x), *attention.rotary(a, jnp.asarray(positions))
  )
  expected = np.concatenate([turned.real, turned.imag], -1)
  np.testing.assert_allclose(found, expected, atol=2e-5)


def test_segments_see_themselves_and_back():
  found = attention.segment_mask(jnp.array([[1, 1, 2, 2, 0]]))[0]
  expected = [
    [1, 0, 0, 0, 0],
    [1, 1, 0, 0, 0],
    [0, 0, 1, 0, 0],
    [0, 0, 1, 1, 0],
    [0, 0, 0, 0, 1],
  ]
  np.testing.assert_array_equal(found, np.array(expected, bool))


class AttendTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  def test_equals_the_written_out_sum(self):
    rng = np.random.default_rng(0)
    b, t, s, n, k, h = 2, 3, 5, 4, 2, 6
    q = rng.normal(size=(b, t, n, h)).astype(np.float32)
    keys = rng.normal(size=(b, k, s, h)).astype(np.float32)
    values = rng.normal(size=(b, k, s, h)).astype(np.float32)
    mask = rng.random((b, t, s)) < 0.6
    mask[..., 0] = True
    found = self.variant(attention.attend)(q, keys, values, mask)
    for i, j, head in np.ndindex(b, t, n):
      kv = head // (n // k)
      seen = np.flatnonzero(mask[i, j])
      score = keys[i, kv, seen] @ q[i, j, head].astype(np.float64) / h**0.5
      p = np.exp(score - score.max())
      expected = p @ values[i, kv, seen] / p.sum()
      np.testing.assert_allclose(found[i, j, head], expected, atol=2e-6)

  def test_a_query_that_sees_nothing_gives_numbers(self):
    x = jnp.ones((1, 1, 2, 4))
    kv = jnp.ones((1, 1, 3, 4))
    out = attention.attend(x, kv, kv, jnp.zeros((1, 1, 3), bool))
    assert np.isfinite(out).all()


def test_rms_norm_is_computed_in_float32():
  x = np.linspace(-300, 300, 64).reshape(2, 32)
  scale = np.linspace(0.5, 2, 32).astype(np.float32)
  expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale
  found = transformer.rms_norm(jnp.asarray(x, jnp.float32), scale, 1e-6)
  np.testing.assert_allclose(found, expected, rtol=1e-5)
  half = transformer.rms_norm(jnp.asarray(x, jnp.float16), scale, 1e-6)
  assert half.dtype == jnp.float16  # 300**2 overflows it; the norm does not.
  np.testing.assert_allclose(half, expected, rtol=2e-3)
