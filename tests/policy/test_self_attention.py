"""Rotary positions, norms and attention against direct formulas."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import jaxpr_flops
import numpy as np
import packed_rows
import planned
import pytest
import random_models

from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import decoder, sharding
from anysearch_jax.policy.attention import (
  dense_attention,
  rotary,
  self_attention,
)


def test_llama3_scaling_keeps_short_divides_long_and_blends_between():
  rope = architecture_lib.Llama3Rope(8.0, 1.0, 4.0, 8192)
  a = dataclasses.replace(
    planned.A, head_dim=128, rope_theta=500_000.0, rope_scaling=rope
  )
  plain = rotary.inverse_frequencies(dataclasses.replace(a, rope_scaling=None))
  scaled = rotary.inverse_frequencies(a)
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
  a = dataclasses.replace(planned.A, head_dim=8)
  rng = np.random.default_rng(0)
  x = rng.normal(size=(2, 3, 4, 8)).astype(np.float32)
  positions = np.array([[0, 1, 2], [7, 100, 3]])
  phase = np.exp(1j * positions[..., None] * rotary.inverse_frequencies(a))[
    :, :, None
  ]
  turned = (x[..., :4] + 1j * x[..., 4:]) * phase
  found = rotary.rotate(
    jnp.asarray(x), *rotary.cos_and_sin(a, jnp.asarray(positions))
  )
  expected = np.concatenate([turned.real, turned.imag], -1)
  np.testing.assert_allclose(found, expected, atol=2e-5)


def test_segments_attend_causally_to_themselves():
  found = dense_attention.segment_mask(jnp.array([[1, 1, 2, 2, 0]]))[0]
  expected = [
    [1, 0, 0, 0, 0],
    [1, 1, 0, 0, 0],
    [0, 0, 1, 0, 0],
    [0, 0, 1, 1, 0],
    [0, 0, 0, 0, 1],
  ]
  np.testing.assert_array_equal(found, np.array(expected, bool))


@pytest.mark.parametrize("sinks", [None, np.float32([-30, 0, 1, 2])])
def test_attention_equals_the_written_out_sum(sinks):
  rng = np.random.default_rng(0)
  b, t, s, n, k, h = 2, 3, 5, 4, 2, 6
  q = rng.normal(size=(b, t, n, h)).astype(np.float32)
  keys, values = rng.normal(size=(2, b, k, s, h)).astype(np.float32)
  mask = rng.random((b, t, s)) < 0.6
  mask[..., 0] = True
  # A query that sees nothing gives numbers.
  mask[1, 2] = False
  found = jax.jit(dense_attention.attend)(q, keys, values, mask, sinks)
  assert np.isfinite(found).all()
  for i, j, head in np.ndindex(b, t, n):
    kv = head // (n // k)
    seen = np.flatnonzero(mask[i, j])
    if not len(seen):
      continue
    score = keys[i, kv, seen] @ q[i, j, head].astype(np.float64) / h**0.5
    p, sink = np.exp(score), 0 if sinks is None else np.exp(sinks[head])
    expected = p @ values[i, kv, seen] / (p.sum() + sink)
    np.testing.assert_allclose(found[i, j, head], expected, atol=2e-6)


def test_rms_norm_is_computed_in_float32():
  a = random_models.architecture("qwen3")
  x = np.linspace(-300, 300, 64).reshape(2, 32)
  scale = np.linspace(0.5, 2, 32).astype(np.float32)
  expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale
  found = decoder.rms_norm(jnp.asarray(x, jnp.float32), scale, a)
  np.testing.assert_allclose(found, expected, rtol=1e-5)
  half = decoder.rms_norm(jnp.asarray(x, jnp.float16), scale, a)
  assert half.dtype == jnp.float16  # 300**2 overflows float16, not the norm.
  np.testing.assert_allclose(half, expected, rtol=2e-3)


# Self-attention of packed rows, and its choice.


@pytest.mark.parametrize("chunk", [64, 12])
def test_chunked_xla_equals_the_written_out_sum(chunk):
  inputs = packed_rows.inputs(*packed_rows.ROWS, length=37)
  packed_rows.assert_equal(
    packed_rows.run(*inputs, chunk=chunk), packed_rows.expected(*inputs)
  )


def test_padding_has_zero_output_and_zero_gradient():
  inputs = packed_rows.inputs((9, 11), (), length=32)
  padding = inputs[3] == 0
  for name, x in zip(packed_rows.NAMES, packed_rows.run(*inputs, chunk=8)):
    assert np.isfinite(x).all(), name
    assert (np.asarray(x)[padding] == 0).all(), name


def test_chunks_never_hold_all_scores_at_a_time():
  inputs = packed_rows.inputs(*[(200, 50)] * 2, length=256)
  b, t, n, _ = inputs[0].shape

  def largest(chunk: int) -> int:
    equations = packed_rows.equations(packed_rows.traced(*inputs, chunk=chunk))
    return max(math.prod(v.aval.shape) for e in equations for v in e.outvars)

  assert largest(t) == b * n * t * t
  assert largest(32) == b * n * 32 * t


def test_chunks_skip_later_keys():
  inputs = packed_rows.inputs((256,), length=256)

  jaxpr = packed_rows.traced(*inputs, chunk=16)
  # Two products forward. Backward: the recomputed scores, and the gradients of
  # weights, values, queries and keys. The four parts attend to 1, 2, 3 and 4
  # quarters of the keys.
  _, t, n, h = inputs[0].shape
  share = (1 + 2 + 3 + 4) / 16
  assert jaxpr_flops.count(jaxpr) == 7 * share * 2 * n * h * t * t


def test_sums_over_chunks_are_not_rounded_to_bfloat16():
  inputs = packed_rows.inputs((256,), length=256, dtype=jnp.bfloat16)
  expected = packed_rows.expected(*inputs)

  def errors(chunk: int) -> np.ndarray:
    found = packed_rows.run(*inputs, chunk=chunk)
    off = (np.asarray(x, np.float64) - y for x, y in zip(found, expected))
    return np.array([np.sqrt(np.mean(x**2)) for x in off])

  assert (errors(8) <= 1.4 * errors(256)).all()


def test_rows_and_heads_may_be_cut_over_a_mesh():
  inputs = packed_rows.inputs(*[(30, 20), (64,)] * 4, length=64)
  mesh = sharding.mesh(data=2, fsdp=2, tensor=2)
  heads = jax.P(sharding.BATCH, None, "tensor", None)
  rows = jax.P(sharding.BATCH, None)

  @jax.jit
  @functools.partial(
    jax.shard_map,
    mesh=mesh,
    in_specs=(heads, heads, heads, rows, heads),
    out_specs=(heads,) * 4,
  )
  def cut(*local):
    return packed_rows.attend(*local, chunk=32)

  packed_rows.assert_equal(cut(*inputs), packed_rows.expected(*inputs))
  program = cut.lower(*inputs).compile().as_text()
  assert not packed_rows.COLLECTIVE.search(program)


@pytest.mark.parametrize(("context", "chunk"), [(8, 5), (4, 4), (2, 64)])
def test_sharded_positions_give_the_written_out_sum(context, chunk):
  """Rows of one segment, of several, with padding, and an empty one."""
  inputs = packed_rows.inputs(*packed_rows.ROWS, length=40)
  mesh = sharding.mesh(context=context, tensor=2 if context < 8 else 1)
  layout = sharding.Layout(mesh)
  heads = jax.P(None, "context", "tensor", None)

  @functools.partial(
    layout.shard_map,
    in_specs=(heads, heads, heads, jax.P(None, "context"), heads),
    out_specs=(heads,) * 4,
  )
  def cut(*local):
    return packed_rows.attend(
      *local, chunk=chunk, implementation=self_attention.GATHERED
    )

  packed_rows.assert_equal(jax.jit(cut)(*inputs), packed_rows.expected(*inputs))


@pytest.mark.parametrize("case", ["olmo3", "gpt-oss"])
def test_sharded_positions_keep_windows_and_sinks(case):
  a = random_models.architecture(case)
  params = random_models.params(a)
  tokens, positions, ids = random_models.one_segment(
    random_models.random_tokens((2, 24))
  )

  def gradient(**compute):
    def loss(params):
      how = decoder.Compute(attention_chunk=8, **compute)
      hidden = decoder.forward(params, a, tokens, positions, ids, compute=how)
      return jnp.sum(
        hidden * jnp.cos(jnp.arange(hidden.size)).reshape(hidden.shape)
      )

    return jax.jit(jax.value_and_grad(loss))(params)

  expected = gradient()
  layout = sharding.Layout(sharding.mesh(context=4))
  found = gradient(layout=layout, attention=self_attention.GATHERED)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(
      x, y, atol=1e-4 * np.abs(y).max() + 1e-6
    ),
    found,
    expected,
  )


def test_sharded_positions_hold_the_scores_and_masks_of_one_chunk():
  """Also where a layer is recomputed, and masks depend on no parameter."""
  (q, k, v, ids, g), chunk = packed_rows.inputs((256,), length=256), 8
  heads = jax.P(None, "context")

  def gradients(q, k, v, g, ids):
    attend = functools.partial(
      self_attention.self_attention,
      implementation=self_attention.GATHERED,
      chunk=chunk,
    )
    cut = sharding.Layout(sharding.mesh(context=4)).shard_map(
      attend, in_specs=(heads,) * 4, out_specs=heads
    )
    layer = jax.checkpoint(cut, policy=self_attention.saves, prevent_cse=False)

    def layers(q, k, v):
      step = lambda x, _: (layer(x, k, v, ids), None)  # noqa: E731
      return jax.lax.scan(step, q, length=2)[0]

    return jax.vjp(layers, q, k, v)[1](g)

  jaxpr = jax.make_jaxpr(gradients)(q, k, v, g, ids).jaxpr
  largest = max(
    math.prod(x.aval.shape)
    for equation in packed_rows.equations(jaxpr)
    for x in equation.outvars
  )
  # Four heads of a chunk, by a device's keys; or queries kept for two layers.
  assert largest <= max(4 * chunk * 256 // 4, 2 * q.size)


_GOOD = dict(
  platform="cpu",
  head_dim=128,
  dtype=jnp.bfloat16,
  length=8192,
  compute_capability=None,
)
_HOPPER = dict(platform="gpu", compute_capability=9.0)


@pytest.mark.parametrize(
  "device, auto",
  [
    ({}, "xla"),
    (_HOPPER, "cudnn"),
    (_HOPPER | {"platform": "cuda", "compute_capability": 10.3}, "cudnn"),
    (_HOPPER | {"head_dim": 256, "dtype": jnp.float16}, "cudnn"),
    (_HOPPER | {"compute_capability": 8.0}, "xla"),
    (_HOPPER | {"compute_capability": None}, "xla"),
    (_HOPPER | {"dtype": jnp.float32}, "xla"),
    (_HOPPER | {"head_dim": 264}, "xla"),
    (_HOPPER | {"head_dim": 100}, "xla"),
    (_HOPPER | {"length": 577}, "xla"),
    ({"platform": "rocm", "compute_capability": 9.0}, "xla"),
    ({"platform": "tpu"}, "splash"),
    ({"platform": "tpu", "dtype": jnp.float32, "length": 384}, "splash"),
    ({"platform": "tpu", "length": 576}, "xla"),
  ],
)
def test_auto_chooses_the_best_that_can_run(device, auto):
  device = _GOOD | device
  assert self_attention.choose("auto", **device) == auto
  for name in self_attention.IMPLEMENTATIONS:
    if name in ("xla", auto):
      assert self_attention.choose(name, **device) == name
    else:
      with pytest.raises(ValueError, match=f"batch.attention={name}.*found"):
        self_attention.choose(name, **device)


@pytest.mark.parametrize(
  "asked, device, sentence",
  [
    ("cudnn", _HOPPER | {"compute_capability": 8.0}, "Hopper.*found 8.0"),
    ("splash", {"platform": "tpu", "length": 576}, "128 tokens; found 576"),
    ("flash", {}, "found 'flash', expected auto or one of xla, cudnn"),
    (
      "cudnn",
      _HOPPER | {"xla_only_feature": "windows"},
      "has no windows, which this",
    ),
  ],
)
def test_implementation_that_cannot_run_is_refused(asked, device, sentence):
  with pytest.raises(ValueError, match=sentence):
    self_attention.choose(asked, **_GOOD | device)
