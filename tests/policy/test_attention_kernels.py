"""cuDNN and splash attention, on machines without their devices.

A model of the memory that cuDNN reads and writes replaces cuDNN; splash
attention runs in interpret mode. Both are compiled ahead of time for devices
that are absent.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import packed_rows
import planned
import pytest

from anysearch_jax.planning import targets
from anysearch_jax.policy import sharding
from anysearch_jax.policy.attention import cudnn, self_attention


def _as_cudnn(q, k, v, *, lengths, offsets):
  """Models what cuDNN reads and writes, with JAX's conversion of the offsets.

  Sequence s consists of `lengths[s]` tokens, starting at position
  `offsets[s]`. Memory that belongs to no sequence remains NaN.
  """
  assert lengths.dtype == offsets.dtype == jnp.int32
  assert offsets.shape[1] == lengths.shape[1] + 1 > 2
  fixed = cudnn._fused._fix_seqlen_offsets(
    lengths, lengths, offsets, offsets, q, k
  )

  def on_host(fixed, q, k, v, g):
    lengths_q, lengths_k, offsets_q, offsets_k = (
      np.asarray(x).flatten() for x in fixed
    )

    def sequences(x, lengths, offsets):
      """Yields views into the memory of `x`; trailing ones may be unused."""
      for length, start in zip(lengths[lengths > 0], offsets):
        end = start + length * math.prod(x.shape[2:])
        assert end <= x.size
        yield x.reshape(-1)[start:end].reshape(-1, *x.shape[2:])

    of_q = functools.partial(sequences, lengths=lengths_q, offsets=offsets_q)
    of_k = functools.partial(sequences, lengths=lengths_k, offsets=offsets_k)
    q, k, v, g = (np.asarray(x) for x in (q, k, v, g))
    out, dq, dk, dv = (np.full_like(x, np.nan) for x in (q, q, k, v))
    inputs = zip(of_q(q), of_k(k), of_k(v), of_q(g))
    outputs = zip(of_q(out), of_q(dq), of_k(dk), of_k(dv))
    for known, unknown in zip(inputs, outputs):
      for view, value in zip(unknown, packed_rows.written_out(*known)):
        view[:] = value
    return out, dq, dk, dv

  def call(q, k, v, g):
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, q, k, v))
    return jax.pure_callback(on_host, shapes, fixed, q, k, v, g)

  @jax.custom_vjp
  def attend(q, k, v):
    return call(q, k, v, q)[0]

  attend.defvjp(
    lambda q, k, v: (attend(q, k, v), (q, k, v)),
    lambda residuals, g: call(*residuals, g)[1:],
  )
  return attend(q, k, v)


@pytest.fixture
def cudnn_model(monkeypatch):
  monkeypatch.setattr(cudnn, "packed_attention", _as_cudnn)


@pytest.mark.parametrize(
  ("rows", "most"), [(packed_rows.ROWS, 4), (((37,), (30,)), 1)]
)
def test_cudnn_gets_every_segment(cudnn_model, rows, most):
  inputs = packed_rows.inputs(*rows, length=37)
  found = packed_rows.run(*inputs, implementation="cudnn", max_segments=most)
  packed_rows.assert_equal(found, packed_rows.expected(*inputs))
  padding = inputs[3] == 0
  assert all((np.asarray(x)[padding] == 0).all() for x in found)


def test_row_with_too_many_segments_is_nan(cudnn_model):
  inputs = packed_rows.inputs(
    (8, 8, 8), (8, 8, 8, 8), (8, 8, 8, 7, 1), length=32
  )
  out = packed_rows.run(*inputs, implementation="cudnn", max_segments=3)[0]
  expected = packed_rows.expected(*inputs)[0]
  np.testing.assert_allclose(out[:2], expected[:2], atol=1e-5)
  assert np.isnan(out[2]).all()


def test_cudnn_refuses_more_elements_than_its_offsets_count():
  q, ids = (
    jax.ShapeDtypeStruct((64, 8192, 32, 128), jnp.bfloat16),
    jax.ShapeDtypeStruct((64, 8192), jnp.int32),
  )
  with pytest.raises(ValueError, match="64 rows x 8192 tokens x 32 heads"):
    jax.eval_shape(
      functools.partial(
        self_attention.self_attention, implementation="cudnn", chunk=512
      ),
      *(q, q, q, ids),
    )


@pytest.fixture
def splash_interpreted(monkeypatch):
  monkeypatch.setattr(
    self_attention.splash_attention,
    "make_splash_mha_single_device",
    functools.partial(
      self_attention.splash_attention.make_splash_mha_single_device,
      interpret=True,
    ),
  )


def test_splash_skips_the_blocks_of_other_segments(splash_interpreted):
  # Blocks of 128: the second segment ends in the second block, where the third
  # one begins; the last block is padding.
  rows = ((128, 60, 68), (256,))
  q, k, v, ids, g = packed_rows.inputs(*rows, length=384, n=2, k=1, h=16)
  clean = packed_rows.run(q, k, v, ids, g, implementation="splash")
  packed_rows.assert_equal(clean, packed_rows.expected(q, k, v, ids, g))
  assert all((np.asarray(x)[ids == 0] == 0).all() for x in clean)
  # A block that is computed multiplies its values by 0 where they are masked,
  # and 0 x NaN is NaN. So NaN in the first block shows who computes with it.
  bad = jnp.full((128, 1, 16), jnp.nan)
  values = v.at[0, :128].set(bad)
  out, dq, dk, dv = packed_rows.run(
    q, k, values, ids, g, implementation="splash"
  )
  assert np.isnan(out[0, :128]).all()
  for found, expected in zip((out, dq, dk, dv), clean, strict=True):
    np.testing.assert_array_equal(found[0, 128:], expected[0, 128:])
    np.testing.assert_array_equal(found[1], expected[1])


def test_splash_gives_the_bits_that_it_gave_without_skipping(
  splash_interpreted, monkeypatch
):
  inputs = packed_rows.inputs((150, 20, 214), length=384, n=2, k=1, h=16)
  found = packed_rows.run(*inputs, implementation="splash")
  monkeypatch.setattr(
    self_attention, "_within_segments", lambda kernel, shared: kernel
  )
  every = packed_rows.run(*inputs, implementation="splash")
  for x, y in zip(found, every, strict=True):
    np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("block", [1, 16])
@pytest.mark.parametrize("lengths", [(16, 16, 32), (3, 30, 31), (5, 40)])
def test_shared_blocks_have_a_pair_to_attend_to(lengths, block):
  ids = np.zeros(64, np.int32)
  ids[: sum(lengths)] = np.repeat(np.arange(len(lengths)) + 1, lengths)
  pairs = np.tri(64, dtype=bool) & (ids[:, None] == ids)
  n = 64 // block
  expected = pairs.reshape(n, block, n, block).any((1, 3))
  found = self_attention.shared_blocks(jnp.asarray(ids), block)
  np.testing.assert_array_equal(found, expected)


def test_lowering_asks_the_target_and_then_the_device_again():
  before = cudnn._fused.check_compute_capability
  with pytest.raises(RuntimeError, match="within"), cudnn.lowering(9.0):
    assert cudnn._fused.check_compute_capability("9.0")
    assert not cudnn._fused.check_compute_capability("10.0")
    assert cudnn._fused.is_cuda_compute_capability_equal("9.0")
    raise RuntimeError("within")
  assert cudnn._fused.check_compute_capability is before


@pytest.mark.parametrize(
  "policy, kernels",
  [(self_attention.saves, 1), (jax.checkpoint_policies.nothing_saveable, 2)],
)
def test_saved_attention_is_not_computed_again(policy, kernels):
  inputs = packed_rows.inputs((128,), length=128, dtype=jnp.bfloat16)
  with cudnn.lowering(9.0):
    jaxpr = packed_rows.traced(*inputs, implementation="cudnn", policy=policy)
  found = [e.primitive.name for e in packed_rows.equations(jaxpr)]
  assert found.count("dot_product_attention_fwd_wrapper") == kernels


@planned.optimized()
def _compiled(target: str, implementation: str) -> str:
  """Returns the compiled attention with gradients for four such devices."""
  planned.need(target)
  devices = targets.devices(targets.parse(target))
  mesh = sharding.mesh(fsdp=2, tensor=2, devices=devices)
  heads = jax.P(sharding.BATCH, None, "tensor", None)
  specs = (heads, heads, heads, jax.P(sharding.BATCH, None), heads)
  cut = jax.shard_map(
    functools.partial(
      packed_rows.attend,
      implementation=implementation,
      policy=self_attention.saves,
    ),
    mesh=mesh,
    in_specs=specs,
    out_specs=(heads,) * 4,
    check_vma=False,
  )
  rows = packed_rows.inputs((512,), (512,), length=512, h=128, dtype="bfloat16")
  inputs = [
    jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=jax.sharding.NamedSharding(mesh, spec)
    )
    for x, spec in zip(rows, specs, strict=True)
  ]
  return jax.jit(cut).lower(*inputs).compile().as_text()


def test_cudnn_compiles_for_an_absent_nvidia_gpu():
  with cudnn.lowering(9.0):
    program = _compiled("h100:4", "cudnn")
  assert program.count('"__cudnn$fmhaSoftmax"') == 1
  assert program.count('"__cudnn$fmhaSoftmaxBackward"') == 1
  # Both get each of at most 64 segments, and padding, as a sequence.
  assert program.count('"mask_type": "PADDING_CAUSAL"') == 2
  assert program.count('"max_seg_per_batch": 65') == 2
  assert not packed_rows.COLLECTIVE.search(program)


def test_splash_compiles_for_an_absent_tpu(monkeypatch):
  # Another process may have loaded libtpu too.
  monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
  program = _compiled("v5e:2x2", "splash")
  # One forward and two backward kernels: the forward is not recomputed.
  assert program.count('custom_call_target="tpu_custom_call"') == 3
  assert not packed_rows.COLLECTIVE.search(program)
