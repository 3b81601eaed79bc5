"""Attention of packed rows against the written-out sums, everywhere it runs.

cuDNN is stood in for by a model of the memory that it reads and writes; it and
splash attention are also compiled for devices that are not there.
"""

from __future__ import annotations

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies

from anysearch_jax.policy import deviceless, self_attention, sharding

# NVIDIA H100 SXM, from its data sheet and the CUDA programming guide.
_H100 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84978434048
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 2 }
runtime_version { major: 12 minor: 9 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
_COLLECTIVE = re.compile(r" (all-|collective-|reduce-scatter)")
_NAMES = ("out", "dq", "dk", "dv")


def _row(*lengths: int, length: int) -> list[int]:
  """Segment ids of a row."""
  ids = [s for s, size in enumerate(lengths, start=1) for _ in range(size)]
  return ids + [0] * (length - len(ids))


def _inputs(ids, *, n=4, k=2, h=8, dtype=jnp.float32):
  """q, k, v, segment ids and a cotangent of the output."""
  ids = np.asarray(ids, np.int32)
  rng = np.random.default_rng(0)
  q, keys, v, g = (
    jnp.asarray(rng.normal(size=(*ids.shape, heads, h)), dtype)
    for heads in (n, k, k, n)
  )
  return q, keys, v, ids, g


def _attend(q, k, v, ids, g, *, policy=None, **kwargs):
  """Output and gradients of queries, keys and values."""
  kwargs = {"implementation": "xla", "chunk": q.shape[1]} | kwargs
  attend = functools.partial(self_attention.self_attention, **kwargs)
  if policy is not None:
    attend = jax.checkpoint(attend, policy=policy)
  out, pullback = jax.vjp(lambda *x: attend(*x, ids), q, k, v)
  return out, *pullback(g)


def _run(*inputs, **kwargs):
  """`_attend`, compiled fast."""
  attend = functools.partial(_attend, **kwargs)
  options = {"xla_backend_optimization_level": 0}
  return jax.jit(attend, compiler_options=options)(*inputs)


def _written_out(q, k, v, g):
  """Causal attention of one segment and its gradients, head by head.

  All `[T, heads, H]`, computed in float64.
  """
  q, k, v, g = (np.asarray(x, np.float64) for x in (q, k, v, g))
  t, n, h = q.shape
  out, dq, dk, dv = (np.zeros_like(x) for x in (q, q, k, v))
  for i in range(n):
    j = i // (n // k.shape[1])
    scores = np.where(np.tri(t), q[:, i] @ k[:, j].T / math.sqrt(h), -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    out[:, i] = p @ v[:, j]
    dp = g[:, i] @ v[:, j].T
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) / math.sqrt(h)
    dq[:, i] = ds @ k[:, j]
    dk[:, j] += ds.T @ q[:, i]
    dv[:, j] += p.T @ g[:, i]
  return out, dq, dk, dv


def _expected(q, k, v, ids, g):
  """`_written_out` of each segment by itself; zeros at padding."""
  found = [np.zeros(x.shape) for x in (q, q, k, v)]
  for b, row in enumerate(ids):
    for segment in set(row.tolist()) - {0}:
      here = np.s_[b, row == segment]
      parts = _written_out(q[here], k[here], v[here], g[here])
      for whole, part in zip(found, parts):
        whole[here] = part
  return found


def _assert_equal(found, expected, tolerance=2e-6):
  for name, x, y in zip(_NAMES, found, expected, strict=True):
    scale = np.abs(y).max()
    np.testing.assert_allclose(x, y, atol=tolerance * scale, err_msg=name)


_ROWS = [(10, 20), (37,), (1, 1, 33, 2), ()]


@pytest.mark.parametrize("chunk", [64, 36, 12, 5])
def test_xla_in_chunks_is_the_written_out_sum(chunk):
  inputs = _inputs([_row(*row, length=37) for row in _ROWS])
  _assert_equal(_run(*inputs, chunk=chunk), _expected(*inputs))


@pytest.mark.parametrize("n, k", [(3, 3), (6, 2)])
def test_each_kv_head_serves_consecutive_query_heads(n, k):
  inputs = _inputs([_row(20, 12, length=32)], n=n, k=k)
  _assert_equal(_run(*inputs, chunk=8), _expected(*inputs))


def test_a_packed_segment_is_what_it_is_alone():
  q, k, v, ids, g = _inputs([_row(7, 16, 5, length=32)])
  packed = _run(q, k, v, ids, g, chunk=8)
  for segment in (1, 2, 3):
    here = np.s_[:, np.flatnonzero(ids[0] == segment)]
    alone = _run(
      *(x[here] for x in (q, k, v)), np.ones_like(ids[here]), g[here]
    )
    _assert_equal([x[here] for x in packed], alone)


@pytest.mark.parametrize("chunk", [32, 8])
def test_padding_gives_and_gets_exactly_nothing(chunk):
  inputs = _inputs([_row(9, 11, length=32), _row(length=32)])
  padding = inputs[3] == 0
  for name, x in zip(_NAMES, _run(*inputs, chunk=chunk)):
    assert np.isfinite(x).all(), name
    assert (np.asarray(x)[padding] == 0).all(), name


def _equations(jaxpr):
  """All equations of a jaxpr, those inside others included."""
  for equation in jaxpr.eqns:
    yield equation
    for value in jax.tree.leaves(
      equation.params, is_leaf=lambda x: hasattr(x, "eqns")
    ):
      inner = getattr(value, "jaxpr", value)
      if hasattr(inner, "eqns"):
        yield from _equations(inner)


def _traced(*inputs, **kwargs):
  return jax.make_jaxpr(functools.partial(_attend, **kwargs))(*inputs).jaxpr


def test_chunks_never_hold_all_scores_at_a_time():
  inputs = _inputs([_row(200, 50, length=256)] * 2)
  b, t, n, _ = inputs[0].shape

  def largest(chunk: int) -> int:
    equations = _equations(_traced(*inputs, chunk=chunk))
    return max(math.prod(v.aval.shape) for e in equations for v in e.outvars)

  assert largest(t) == b * n * t * t
  assert largest(32) == b * n * 32 * t


def test_chunks_skip_keys_after_theirs():
  inputs = _inputs([_row(256, length=256)])

  def multiplications(chunk: int) -> int:
    total = 0
    for e in _equations(_traced(*inputs, chunk=chunk)):
      if e.primitive.name == "scan":
        total += e.params["length"] * sum(
          _products(inner) for inner in _equations(e.params["jaxpr"].jaxpr)
        )
    return total

  def _products(e) -> int:
    if e.primitive.name != "dot_general":
      return 0
    (contracted, _), _ = e.params["dimension_numbers"]
    depth = math.prod(e.invars[0].aval.shape[i] for i in contracted)
    return depth * math.prod(e.outvars[0].aval.shape)

  # Scores twice, their gradient, and those of queries, keys and values, of
  # four parts that see 1, 2, 3 and 4 quarters of the keys; the recomputed
  # output is traced, but its gradient does not ask for it.
  _, t, n, h = inputs[0].shape
  full = n * h * t * t
  assert multiplications(16) / full == pytest.approx(
    (2 + 5) * (1 + 2 + 3 + 4) / 16
  )


def test_sums_over_chunks_are_not_rounded_to_bfloat16():
  inputs = _inputs([_row(256, length=256)], dtype=jnp.bfloat16)
  expected = _expected(*inputs)

  def errors(chunk: int) -> np.ndarray:
    found = _run(*inputs, chunk=chunk)
    return np.array(
      [
        np.sqrt(np.mean((np.asarray(x, np.float64) - y) ** 2))
        for x, y in zip(found, expected)
      ]
    )

  assert (errors(8) <= 1.4 * errors(256)).all()


def test_rows_and_heads_may_be_cut_over_a_mesh():
  inputs = _inputs([_row(30, 20, length=64), _row(64, length=64)] * 4)
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
    return _attend(*local, chunk=32)

  _assert_equal(cut(*inputs), _expected(*inputs))
  program = cut.lower(*inputs).compile().as_text()
  assert not _COLLECTIVE.search(program)


def _as_cudnn(q, k, v, *, q_seqlen, kv_seqlen, q_offsets, kv_offsets, **kwargs):
  """What cuDNN reads and writes, told by JAX's own conversion of the offsets.

  Sequence s is `q_seqlen[s]` tokens from element `q_offsets[s]` on; memory that
  belongs to no sequence is left as NaN.
  """
  assert kwargs.pop("scale") == q.shape[-1] ** -0.5
  assert kwargs.pop("mask_type").name == "PADDING_CAUSAL" and not kwargs
  assert q_seqlen.dtype == kv_seqlen.dtype == jnp.int32
  assert q_offsets.dtype == kv_offsets.dtype == jnp.int32
  assert q_offsets.shape[1] == q_seqlen.shape[1] + 1 > 2
  lengths_q, lengths_k, offsets_q, offsets_k = (
    x.flatten()
    for x in self_attention.fused._fix_seqlen_offsets(
      q_seqlen, kv_seqlen, q_offsets, kv_offsets, q, k
    )
  )

  def on_host(lengths_q, lengths_k, offsets_q, offsets_k, q, k, v, g):
    inputs = [np.asarray(x) for x in (q, k, v, g)]
    out = [np.full(x.shape, np.nan, x.dtype) for x in (q, q, k, v)]

    def sequence(x, s):
      grouped = x.shape[2] == k.shape[2] and x.shape != q.shape
      lengths, offsets = (
        (lengths_k, offsets_k) if grouped else (lengths_q, offsets_q)
      )
      size = int(lengths[s]) * math.prod(x.shape[2:])
      start = int(offsets[s])
      assert start + size <= x.size
      return x.reshape(-1)[start : start + size].reshape(-1, *x.shape[2:])

    for s in np.flatnonzero(lengths_q):
      parts = _written_out(*(sequence(x, s) for x in inputs))
      for whole, part in zip(out, parts):
        sequence(whole, s)[:] = part
    return tuple(out)

  def call(q, k, v, g):
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, q, k, v))
    return jax.pure_callback(
      on_host, shapes, lengths_q, lengths_k, offsets_q, offsets_k, q, k, v, g
    )

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
  monkeypatch.setattr(self_attention.fused, "dot_product_attention", _as_cudnn)


def test_cudnn_is_told_every_segment(cudnn_model):
  inputs = _inputs([_row(*row, length=37) for row in _ROWS])
  found = _run(*inputs, implementation="cudnn", max_segments=4)
  _assert_equal(found, _expected(*inputs))
  padding = inputs[3] == 0
  assert all((np.asarray(x)[padding] == 0).all() for x in found)


def test_cudnn_takes_one_segment_a_row(cudnn_model):
  inputs = _inputs([_row(37, length=37), _row(30, length=37)])
  found = _run(*inputs, implementation="cudnn", max_segments=1)
  _assert_equal(found, _expected(*inputs))


def test_a_row_of_too_many_segments_is_not_a_number(cudnn_model):
  rows = [_row(8, 8, 8, length=32), _row(8, 8, 8, 8, length=32)]
  inputs = _inputs([*rows, _row(8, 8, 8, 7, 1, length=32)])
  out = _run(*inputs, implementation="cudnn", max_segments=3)[0]
  expected = _expected(*inputs)[0]
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


def test_splash_is_the_written_out_sum(splash_interpreted):
  inputs = _inputs(
    [_row(100, 120, length=256), _row(256, length=256)], n=2, k=1, h=16
  )
  found = _run(*inputs, implementation="splash")
  _assert_equal(found, _expected(*inputs))
  padding = inputs[3] == 0
  assert all((np.asarray(x)[padding] == 0).all() for x in found)


def test_splash_refuses_a_row_that_is_not_made_of_blocks():
  with pytest.raises(ValueError, match="multiple of 128 tokens; found 130"):
    _run(*_inputs([_row(130, length=130)]), implementation="splash")


@pytest.mark.parametrize(
  "policy, kernels",
  [
    (self_attention.saves, 1),
    (jax.checkpoint_policies.nothing_saveable, 2),
  ],
)
def test_saved_attention_is_not_computed_again(policy, kernels):
  inputs = _inputs([_row(128, length=128)], dtype=jnp.bfloat16)
  with deviceless.cudnn(9.0):
    jaxpr = _traced(*inputs, implementation="cudnn", policy=policy)
  name = self_attention.fused._dot_product_attention_fwd_p_wrapper.name
  assert sum(e.primitive.name == name for e in _equations(jaxpr)) == kernels


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
def test_auto_is_the_best_that_can_run(device, auto):
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
    ("cudnn", _HOPPER | {"dtype": "float32"}, "bfloat16.*found float32"),
    ("cudnn", _HOPPER | {"head_dim": 100}, "multiple of 8; found 100"),
    ("cudnn", _HOPPER | {"length": 577}, "even length; found 577"),
    ("splash", {"platform": "tpu", "length": 576}, "128 tokens; found 576"),
    ("splash", {}, "TPUs; found platform cpu"),
    ("flash", {}, "found 'flash', expected auto or one of xla, cudnn"),
  ],
)
def test_what_cannot_run_is_refused_by_a_sentence(asked, device, sentence):
  with pytest.raises(ValueError, match=sentence):
    self_attention.choose(asked, **_GOOD | device)


def _compiled(topology, implementation: str, *, length: int = 512) -> str:
  """The program of attention and its gradients on four such devices."""
  mesh = sharding.mesh(fsdp=2, tensor=2, devices=topology.devices)
  heads = jax.P(sharding.BATCH, None, "tensor", None)
  rows = jax.P(sharding.BATCH, None)

  def local(q, k, v, ids, g):
    return _attend(
      *(q, k, v, ids, g),
      implementation=implementation,
      policy=self_attention.saves,
    )

  specs = (heads, heads, heads, rows, heads)
  cut = jax.shard_map(
    local, mesh=mesh, in_specs=specs, out_specs=(heads,) * 4, check_vma=False
  )
  inputs = [
    jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=jax.sharding.NamedSharding(mesh, spec)
    )
    for x, spec in zip(
      _inputs([_row(length, length=length)] * 2, h=128, dtype=jnp.bfloat16),
      specs,
    )
  ]
  return jax.jit(cut).lower(*inputs).compile().as_text()


def test_cudnn_compiles_for_an_nvidia_gpu_that_is_not_there():
  for package in ("jax_cuda12_plugin", "nvidia.cuda_nvcc"):
    pytest.importorskip(package, reason="needs requirements-plan.txt")
  h100 = topologies.get_topology_desc(
    platform="cuda", target_config=_H100, topology="1x1x4"
  )
  with deviceless.cudnn(9.0):
    program = _compiled(h100, "cudnn")
  assert program.count('"__cudnn$fmhaSoftmax"') == 1
  assert program.count('"__cudnn$fmhaSoftmaxBackward"') == 1
  assert not _COLLECTIVE.search(program)


def test_splash_compiles_for_a_tpu_that_is_not_there(monkeypatch):
  pytest.importorskip("libtpu", reason="needs requirements-plan.txt")
  # Another process may have loaded it as well.
  monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
  v5e = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")
  program = _compiled(v5e, "splash")
  # Forward, and two backward: the first is not computed again.
  assert program.count('custom_call_target="tpu_custom_call"') == 3
  assert not _COLLECTIVE.search(program)
