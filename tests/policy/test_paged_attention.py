"""Paged attention against float64 NumPy over contiguous rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import planned
import pytest

from anysearch_jax.planning import targets
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import sharding
from anysearch_jax.policy.attention import paged_attention
from anysearch_jax.policy.attention import pages as pages_lib

B, K, G, H, S, M = 4, 2, 3, 8, 4, 6
LENGTHS = np.array([1, 9, 24, 14])


def case(t, seed=0):
  """Returns rows whose last `t` tokens are new, with shuffled pages."""
  rng = np.random.default_rng(seed)
  keys, values = rng.normal(size=(2, B, M * S, K, H))
  q = rng.normal(size=(B, t, K * G, H))
  table = rng.permutation(np.arange(1, 1 + B * M)).reshape(B, M)
  positions = LENGTHS[:, None] - t + np.arange(t)
  real = positions >= 0
  return q, keys, values, table, np.maximum(positions, 0), real


def in_pages(keys, values, table, new):
  """Returns pages with all but the last `new` tokens, garbage elsewhere."""
  pools = np.random.default_rng(9).normal(size=(2, K, 1 + B * M, S, H))
  for row, length in enumerate(LENGTHS):
    for at in range(max(length - new, 0)):
      page, offset = table[row, at // S], at % S
      pools[0, :, page, offset] = keys[row, at]
      pools[1, :, page, offset] = values[row, at]
  return pages_lib.Pages(*map(jnp.float32, pools))


def expected(q, keys, values, positions):
  out = np.zeros_like(q)
  for b, t, n in np.ndindex(q.shape[:3]):
    seen = positions[b, t] + 1
    scores = keys[b, :seen, n // G] @ q[b, t, n] / np.sqrt(H)
    p = np.exp(scores - scores.max())
    out[b, t, n] = p / p.sum() @ values[b, :seen, n // G]
  return out


def run(paged, t, **changes):
  q, keys, values, table, positions, real = case(t)
  pages = in_pages(keys, values, table, t)
  take = (np.arange(B)[:, None], positions)
  found = paged(
    *map(jnp.float32, (q, keys[take], values[take])),
    changes.get("pages", pages),
    jnp.asarray(table),
    jnp.asarray(positions),
    jnp.asarray(real),
  )
  return found, expected(q, keys, values, positions), real


@pytest.mark.parametrize("block", [1, 4, 8, 100])
@pytest.mark.parametrize("t", [1, 5])
def test_paged_attention_equals_contiguous_attention(t, block):
  (out, _), wanted, real = run(paged_attention.Paged(block=block), t)
  np.testing.assert_allclose(out[real], wanted[real], atol=2e-6)


def test_a_row_does_not_depend_on_the_longest_to_the_bit():
  paged = jax.jit(paged_attention.Paged(block=4))
  q, keys, values, table, positions, real = case(1)
  pages = in_pages(keys, values, table, 1)
  new = [
    jnp.float32(x[np.arange(B)[:, None], positions]) for x in (keys, values)
  ]

  def first_row(last):
    at = positions.copy()
    at[2] = last
    out, _ = paged(jnp.float32(q), *new, pages, table, at, real)
    return np.asarray(out)[[0, 1]]

  np.testing.assert_array_equal(first_row(0), first_row(23))


def test_padding_is_written_to_the_reserved_page():
  (_, after), _, real = run(paged_attention.Paged(), 5)
  _, keys, values, table, positions, _ = case(5)
  before = in_pages(keys, values, table, 5)
  changed = np.argwhere(np.any(np.asarray(after.k != before.k), (0, 3)))
  wanted = {
    (table[b, p // S], p % S)
    for b, t in zip(*np.nonzero(real))
    for p in [positions[b, t]]
  }
  others = {(page, at) for page, at in map(tuple, changed) if page != 0}
  assert others == wanted


def test_a_mesh_cuts_rows_pages_and_heads():
  mesh = sharding.mesh(data=2, tensor=2)
  whole, wanted, _ = run(paged_attention.Paged(), 1)
  q, keys, values, table, positions, real = case(1)
  pages = in_pages(keys, values, table, 1)
  # Each half of the rows has its own pages, counted from 0.
  halves, tables = [], []
  for rows in (slice(0, 2), slice(2, 4)):
    numbers = np.unique(table[rows])
    halves.append(np.concatenate([[0], numbers]))
    lookup = {page: i + 1 for i, page in enumerate(numbers)}
    tables.append(np.vectorize(lookup.get)(table[rows]))
  apart = jax.tree.map(lambda x: x[:, np.concatenate(halves)], pages)
  paged = jax.jit(paged_attention.Paged(mesh=mesh))
  take = (np.arange(B)[:, None], positions)
  out, _ = paged(
    *map(jnp.float32, (q, keys[take], values[take])),
    apart,
    np.concatenate(tables),
    positions,
    real,
  )
  np.testing.assert_allclose(out, whole[0], atol=1e-6)
  np.testing.assert_allclose(out, wanted, atol=2e-6)


@pytest.mark.parametrize(
  ("platform", "head_dim", "dtype", "page", "best"),
  [
    ("cpu", 128, "bfloat16", 64, "xla"),
    ("cuda", 128, "bfloat16", 64, "triton"),
    ("cuda", 96, "bfloat16", 64, "xla"),
    ("cuda", 128, "float32", 64, "xla"),
    ("tpu", 128, "bfloat16", 64, "tpu"),
    ("tpu", 64, "bfloat16", 64, "xla"),
  ],
)
def test_auto_chooses_the_best_kernel_that_runs(
  platform, head_dim, dtype, page, best
):
  how = {"head_dim": head_dim, "dtype": dtype, "page": page}
  assert paged_attention.choose("auto", platform=platform, **how) == best


@pytest.mark.parametrize("tokens", [1, 64])
@pytest.mark.parametrize(
  ("target", "implementation"),
  [("h100:1", "triton"), ("h100:1", "xla"), ("v5p:1x1x1", "tpu")],
)
def test_kernels_compile_for_absent_devices(target, implementation, tokens):
  planned.need(target)
  (device, *_) = targets.devices(targets.parse(target))
  mesh = jax.sharding.Mesh(np.array([[[device]]]), sharding.AXES)
  stand = jax.sharding.NamedSharding(mesh, jax.P())
  a = architecture_lib.Architecture(
    family="qwen3",
    vocab_size=64,
    d_model=64,
    layers=1,
    heads=32,
    kv_heads=8,
    head_dim=128,
    mlp_dim=64,
    qk_norm=True,
    tied=True,
  )

  def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=stand)

  (pages,) = pages_lib.empty(a, 9, 64, jnp.bfloat16)
  compiled = (
    jax.jit(paged_attention.Paged(implementation))
    .trace(
      array(8, tokens, 32, 128),
      array(8, tokens, 8, 128),
      array(8, tokens, 8, 128),
      jax.tree.map(lambda x: array(*x.shape), pages),
      array(8, 20, dtype=jnp.int32),
      array(8, tokens, dtype=jnp.int32),
      array(8, tokens, dtype=jnp.bool_),
    )
    .lower()
    .compile()
  )
  text = compiled.as_text()
  assert ("custom-call" in text) or implementation == "xla"
