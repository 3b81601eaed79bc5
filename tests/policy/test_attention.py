"""Rotary positions, attention and norms against direct formulas."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import decoder
from anysearch_jax.policy.attention import masks as attention

TINY = dict(
  vocab_size=11,
  d_model=8,
  layers=3,
  heads=4,
  kv_heads=2,
  head_dim=6,
  mlp_dim=10,
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


def test_segments_attend_causally_to_themselves():
  found = attention.segment_mask(jnp.array([[1, 1, 2, 2, 0]]))[0]
  expected = [
    [1, 0, 0, 0, 0],
    [1, 1, 0, 0, 0],
    [0, 0, 1, 0, 0],
    [0, 0, 1, 1, 0],
    [0, 0, 0, 0, 1],
  ]
  np.testing.assert_array_equal(found, np.array(expected, bool))


def test_attention_equals_the_written_out_sum():
  rng = np.random.default_rng(0)
  b, t, s, n, k, h = 2, 3, 5, 4, 2, 6
  q = rng.normal(size=(b, t, n, h)).astype(np.float32)
  keys, values = rng.normal(size=(2, b, k, s, h)).astype(np.float32)
  mask = rng.random((b, t, s)) < 0.6
  mask[..., 0] = True
  # A query that sees nothing gives numbers.
  mask[1, 2] = False
  found = jax.jit(attention.attend)(q, keys, values, mask)
  assert np.isfinite(found).all()
  for i, j, head in np.ndindex(b, t, n):
    kv = head // (n // k)
    seen = np.flatnonzero(mask[i, j])
    if not len(seen):
      continue
    score = keys[i, kv, seen] @ q[i, j, head].astype(np.float64) / h**0.5
    p = np.exp(score - score.max())
    expected = p @ values[i, kv, seen] / p.sum()
    np.testing.assert_allclose(found[i, j, head], expected, atol=2e-6)


def test_rms_norm_is_computed_in_float32():
  x = np.linspace(-300, 300, 64).reshape(2, 32)
  scale = np.linspace(0.5, 2, 32).astype(np.float32)
  expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale
  found = decoder.rms_norm(jnp.asarray(x, jnp.float32), scale, 1e-6)
  np.testing.assert_allclose(found, expected, rtol=1e-5)
  half = decoder.rms_norm(jnp.asarray(x, jnp.float16), scale, 1e-6)
  assert half.dtype == jnp.float16  # 300**2 overflows float16, not the norm.
  np.testing.assert_allclose(half, expected, rtol=2e-3)
