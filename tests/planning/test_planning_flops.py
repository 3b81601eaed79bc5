"""Tests FLOPs of a jaxpr against counts by hand: 2 m n k for each product."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import planned
import pytest
from jax.experimental import pallas as pl

from anysearch_jax.planning import flops
from anysearch_jax.policy import decoder, experts
from anysearch_jax.policy.attention import cudnn, self_attention


def count(function, *shapes, trips=1, dtype=jnp.float32, segment=None):
  args = [
    jax.ShapeDtypeStruct(s, dtype) if type(s) is tuple else s for s in shapes
  ]
  jaxpr = jax.jit(function).trace(*args).jaxpr
  return flops.count(jaxpr, trips=trips, segment=segment)


def _scanned(x, ws):
  return jax.lax.scan(lambda x, w: (x @ w, None), x, ws)[0]


@pytest.mark.parametrize(
  ("function", "shapes", "flops"),
  [
    (jnp.dot, [(3, 5), (5, 7)], 2 * 3 * 5 * 7),
    # Two contracted axes.
    (
      lambda x, y: jnp.einsum("btnh,bnhd->btd", x, y),
      [(2, 3, 4, 5), (2, 4, 5, 6)],
      2 * (2 * 3 * 6) * (4 * 5),
    ),
    # Elementwise operations do not count.
    (lambda x: jnp.sum(jnp.exp(x) * 2), [(8, 8)], 0),
    # A scan counts its length, a conditional its most expensive branch.
    (_scanned, [(4, 8), (6, 8, 8)], 6 * 2 * 4 * 8 * 8),
    (
      lambda x, w: jax.lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x),
      [(4, 8), (8, 8)],
      2 * 4 * 8 * 8,
    ),
  ],
)
def test_products_are_counted(function, shapes, flops):
  assert count(function, *shapes) == flops


def test_experts_count_the_rows_that_they_likely_compute():
  tokens, d, f, e, k = 1000, 16, 8, 4, 2
  w = experts.Weights(
    *(
      jax.ShapeDtypeStruct(s, jnp.float32)
      for s in [(e, d, f)] * 2 + [(e, f, d)]
    )
  )

  def loss(x, w, chosen):
    return experts.apply(x, w, jnp.ones((tokens, k)), chosen).sum()

  x = jax.ShapeDtypeStruct((tokens, d), jnp.float32)
  chosen = jax.ShapeDtypeStruct((tokens, k), jnp.int32)
  # Half of each expert's last block is empty.
  rows = tokens * k + e * 128 // 2
  combined = 2 * tokens * k * d
  assert count(loss, x, w, chosen) == 6 * rows * d * f + combined


def test_loops_in_loops_multiply():
  def f(x, w, n):
    def outer(i, x):
      return jax.lax.fori_loop(0, 5, lambda j, x: x @ w, x)

    return jax.lax.fori_loop(0, n, outer, x)

  n = jax.ShapeDtypeStruct((), jnp.int32)
  product = 2 * 4 * 8 * 8
  assert count(f, (4, 8), (8, 8), n) == 5 * product
  assert count(f, (4, 8), (8, 8), n, trips=3) == 3 * 5 * product


def test_recomputation_counts():
  def layer(x, w):
    return jnp.sin(jnp.sin(x @ w[0]) @ w[1])

  def f(x, ws, remat):
    body = jax.checkpoint(layer) if remat else layer
    return jnp.sum(jax.lax.scan(lambda x, w: (body(x, w), None), x, ws)[0])

  def gradient(remat):
    return count(
      jax.grad(lambda x, ws: f(x, ws, remat), (0, 1)), (4, 8), (3, 2, 8, 8)
    )

  product = 2 * 4 * 8 * 8
  assert gradient(remat=False) == 3 * (2 + 4) * product
  assert gradient(remat=True) == 3 * (2 + 2 + 4) * product


@pytest.mark.parametrize(
  ("axes", "times"),
  [
    # Rows are sharded over `fsdp`; over `tensor` the same product runs twice.
    ({"fsdp", "tensor"}, 2),
    # An axis that is left to the compiler does not count.
    ({"fsdp"}, 1),
  ],
)
def test_the_body_of_shard_map_runs_on_every_device(axes, times):
  mesh = jax.make_mesh(
    (4, 2), planned.AXES, axis_types=(jax.sharding.AxisType.Auto,) * 2
  )
  cut = jax.shard_map(
    jnp.dot,
    mesh=mesh,
    in_specs=(jax.P("fsdp"), jax.P()),
    out_specs=jax.P("fsdp"),
    axis_names=axes,
  )
  assert count(cut, (8, 5), (5, 7)) == times * 2 * 8 * 5 * 7


def test_a_kernel_counts_its_body_for_each_block():
  def kernel(x, w, out):
    out[...] = x[...] @ w[...]

  f = pl.pallas_call(
    kernel,
    grid=(4, 2),
    in_specs=[
      pl.BlockSpec((8, 16), lambda i, j: (i, 0)),
      pl.BlockSpec((16, 8), lambda i, j: (0, j)),
    ],
    out_specs=pl.BlockSpec((8, 8), lambda i, j: (i, j)),
    out_shape=jax.ShapeDtypeStruct((32, 16), jnp.float32),
  )
  assert count(f, (32, 16), (16, 16)) == 2 * 32 * 16 * 16


def tiles_with_scores(lengths, *, tiles_of, tile):
  """Counts scores in the tiles that a mask leaves, drawn score by score.

  Tiles of queries and keys begin at the first token of a segment or of the row,
  as `tiles_of` says.
  """
  ids = np.repeat(np.arange(len(lengths)), lengths)
  position = np.arange(len(ids))
  causal = position[:, None] >= position
  if tiles_of == "row":
    return tile**2 * len(_tiles(causal & (ids[:, None] == ids), tile))
  return tile**2 * sum(
    len(_tiles(causal[np.ix_(ids == i, ids == i)], tile))
    for i in range(len(lengths))
  )


def _tiles(mask, tile):
  return {tuple(score) for score in np.argwhere(mask) // tile}


@pytest.mark.parametrize("length", [768, 1024])
def test_kernels_count_the_tiles_that_they_do_not_skip(length):
  segment = 384
  lengths = [segment] * (length // segment) + [length % segment]
  product = 2 * N * H
  for implementation, tiles_of, tile, products in (
    ("cudnn", "segment", 128, 7),
    # Splash takes the largest of its blocks that divides the row.
    ("splash", "row", 512 if length % 768 else 256, 9),
  ):
    f, args = attention(implementation, rows=1, length=length)
    scores = tiles_with_scores(lengths, tiles_of=tiles_of, tile=tile)
    with cudnn.lowering(9.0):
      forward = count(f, *args, segment=segment)
      gradient = count(jax.grad(f, (0, 1, 2)), *args, segment=segment)
    assert forward == 2 * product * scores
    assert gradient == pytest.approx(products * product * scores, rel=0.01)


B, T, N, K, H = 2, 256, 4, 2, 128
PRODUCT = 2 * B * N * T * T * H


def attention(implementation, rows=B, length=T):
  shapes = [(rows, length, n, H) for n in (N, K, K)]
  args = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes]
  ids = jax.ShapeDtypeStruct((rows, length), jnp.int32)

  def f(*args):
    how = {"implementation": implementation, "chunk": length}
    out = self_attention.self_attention(*args, **how)
    return out.astype(jnp.float32).sum()

  return f, (*args, ids)


@pytest.mark.parametrize(
  ("implementation", "backward"),
  [
    # Two gradients for each of two products.
    ("xla", 4),
    # Recomputed scores, then these gradients.
    ("cudnn", 5),
    # Two kernels each recompute the scores and the probabilities' gradient.
    ("splash", 7),
  ],
)
def test_attention_counts_its_products_in_full(implementation, backward):
  f, args = attention(implementation)
  with cudnn.lowering(9.0):
    assert count(f, *args) == 2 * PRODUCT
    gradient = count(jax.grad(f, (0, 1, 2)), *args)
  # Splash computes row sums by a narrow product: 1 %.
  assert gradient == pytest.approx((2 + backward) * PRODUCT, rel=0.01)


@pytest.mark.parametrize("implementation", ["cudnn", "splash"])
def test_only_full_recomputation_runs_the_attention_kernel_twice(
  implementation,
):
  f, args = attention(implementation)
  counts = {}
  with cudnn.lowering(9.0):
    for name, policy in decoder.REMAT.items():
      again = jax.checkpoint(f, policy=policy)
      counts[name] = count(jax.grad(again, (0, 1, 2)), *args)
    once = count(jax.grad(f, (0, 1, 2)), *args)
  expected = {"dots": once, "attention": once, "full": once + 2 * PRODUCT}
  assert counts == expected
