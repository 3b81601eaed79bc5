"""Self-attention of packed rows whose positions are sharded over devices.

Ring attention (https://arxiv.org/abs/2310.01889): each device keeps its queries
and passes keys and values on to the next one, so that no device holds those of
a whole row. It skips keys that are later, or of other segments. Where a row is
one segment, the last device computes in every step and the first one in one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from anysearch_jax.policy.attention import pages

_einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


# The gradient is custom because autodiff would keep the keys, the values and
# the scores of every step.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def ring_attention(
  axis: str,
  chunk: int,
  name: str,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  segment_ids: jax.Array,
) -> jax.Array:
  """Computes causal attention inside segments, under `shard_map`.

  Device i of the mesh axis has positions i T to (i + 1) T - 1 of each row.

  Args:
    axis: mesh axis that positions are sharded over.
    chunk: number of queries whose scores are in memory at a time.
    name: checkpoint name of what the backward pass reads.
    q: `[B, T, N, H]`; each kv head serves N / K query heads.
    k: `[B, T, K, H]`, dtype of `q`. v: as `k`.
    segment_ids: int `[B, T]`, 0 is padding. Segments are contiguous.

  Returns:
    `[B, T, N, H]`, dtype of `q`; padding attends to padding.
  """
  return _forward(axis, chunk, name, q, k, v, segment_ids)[0]


def _forward(axis, chunk, name, q, k, v, ids):
  # Otherwise JAX computes the masks of all steps and chunks ahead of the loops,
  # because they do not depend on parameters: gigabytes for a long row.
  q, k, v, ids = jax.lax.optimization_barrier((q, k, v, ids))
  t, h = q.shape[1], q.shape[3]
  queries = _chunks(axis, chunk, ids, _grouped(q, k))

  def step(sums, moving, source):
    keys, values, key_ids = moving

    def of_chunk(xs):
      (ids, places, q), (out, top, total) = xs
      scores = _scores(q, ids, places, keys, key_ids, source)
      highest = jnp.maximum(top, scores.max(-1))
      # Every query meets itself in the first step, so that the highest score
      # is a real one, and masked scores weigh 0.
      p = jnp.exp(scores - highest[..., None])
      before = jnp.exp(top - highest)
      found = _einsum("bkrts,bskh->bkrth", p.astype(values.dtype), values)
      total = total * before + p.sum(-1)
      return out * before[..., None] + found, highest, total

    return jax.lax.map(of_chunk, (queries, sums)), moving

  c, b, size, heads, group, _ = queries[-1].shape
  shape = (c, b, heads, group, size)
  start = (
    jnp.zeros((*shape, h), jnp.float32),
    jnp.full(shape, pages.MASKED, jnp.float32),
    jnp.zeros(shape, jnp.float32),
  )
  (out, top, total), _ = _around(axis, step, start, (k, v, ids))
  out = (out / total[..., None]).astype(q.dtype)
  kept = (out, top + jnp.log(total))
  out, normalizer = (checkpoint_name(x, name) for x in kept)
  whole = out.transpose(1, 0, 4, 2, 3, 5).reshape(b, c * size, -1, h)[:, :t]
  return whole, (q, k, v, ids, out, normalizer)


def _backward(axis, chunk, name, residuals, g):
  del name
  g, (q, k, v, ids, out, normalizer) = jax.lax.optimization_barrier(
    (g, residuals)
  )
  queries = _chunks(axis, chunk, ids, _grouped(q, k), _grouped(g, k))
  g = queries[-1].transpose(0, 1, 3, 4, 2, 5)  # As `out`.
  delta = jnp.sum(g.astype(jnp.float32) * out.astype(jnp.float32), -1)

  def step(d_q, moving, source):
    keys, values, d_keys, d_values, key_ids = moving

    def of_chunk(sums, xs):
      d_keys, d_values = sums
      (ids, places, q, _), g, normalizer, delta, d_q = xs
      scores = _scores(q, ids, places, keys, key_ids, source)
      p = jnp.exp(scores - normalizer[..., None])
      d_values += _einsum("bkrts,bkrth->bskh", p.astype(g.dtype), g)
      d_p = _einsum("bkrth,bskh->bkrts", g, values)
      d_scores = p * (d_p - delta[..., None]) * q.shape[-1] ** -0.5
      d_scores = d_scores.astype(q.dtype)
      d_keys += _einsum("bkrts,btkrh->bskh", d_scores, q)
      d_q += _einsum("bkrts,bskh->btkrh", d_scores, keys)
      return (d_keys, d_values), d_q

    (d_keys, d_values), d_q = jax.lax.scan(
      of_chunk, (d_keys, d_values), (queries, g, normalizer, delta, d_q)
    )
    return d_q, (keys, values, d_keys, d_values, key_ids)

  zeros = jnp.zeros(k.shape, jnp.float32)
  d_q, (_, _, d_k, d_v, _) = _around(
    axis,
    step,
    jnp.zeros(queries[-1].shape, jnp.float32),
    (k, v, zeros, zeros, ids),
  )
  b, t, n, h = q.shape
  d_q = d_q.swapaxes(0, 1).reshape(b, -1, n, h)[:, :t]
  return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), None


ring_attention.defvjp(_forward, _backward)


def _around(
  axis: str, step: Callable, carry: Any, moving: tuple[jax.Array, ...]
) -> tuple[Any, tuple[jax.Array, ...]]:
  """Passes arrays once around the ring; returns the carry, and them at home.

  `step(carry, moving, source)` sees the arrays of device `source`, the last of
  which are its segment ids. It is skipped where that has nothing to attend to.
  """
  size, here = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
  to_next = [(i, (i + 1) % size) for i in range(size)]
  own = moving[-1]

  def body(i, state):
    carry, moving = state
    source = (here - i) % size
    # Segments are contiguous: earlier keys share one with these queries if it
    # is the first one of the queries.
    first, last = own[:, 0], moving[-1][:, -1]
    shared = (source < here) & jnp.any((first == last) & (first > 0))
    carry, moving = jax.lax.cond(
      (source == here) | shared,
      lambda: step(carry, moving, source),
      lambda: (carry, moving),
    )
    return carry, jax.lax.ppermute(moving, axis, to_next)

  return jax.lax.fori_loop(0, size, body, (carry, moving))


def _grouped(x: jax.Array, k: jax.Array) -> jax.Array:
  """Returns `[B, T, K, N / K, H]`, the query heads of each kv head."""
  b, t, n, h = x.shape
  return x.reshape(b, t, k.shape[2], n // k.shape[2], h)


def _chunks(
  axis: str, chunk: int, ids: jax.Array, *arrays: jax.Array
) -> tuple[jax.Array, ...]:
  """Cuts ids, places in the row and arrays `[B, T, ...]` into chunks.

  They are `[chunks, B, size, ...]`, of equal size: the last one is padded by
  fewer than `chunks` tokens.
  """
  t = ids.shape[1]
  chunks = -(-t // chunk)
  size = -(-t // chunks)
  here = jax.lax.axis_index(axis)
  places = jnp.broadcast_to(_places(here, t), ids.shape)

  def cut(x: jax.Array) -> jax.Array:
    after = [(0, 0), (0, chunks * size - t)] + [(0, 0)] * (x.ndim - 2)
    x = jnp.pad(x, after)
    return x.reshape(len(x), chunks, size, *x.shape[2:]).swapaxes(0, 1)

  return tuple(cut(x) for x in (ids, places, *arrays))


def _places(device, t: int) -> jax.Array:
  return device * t + jnp.arange(t)


def _scores(q, ids, places, keys, key_ids, source) -> jax.Array:
  """Returns masked scores `[B, K, R, T, S]` in float32."""
  mask = ids[:, :, None] == key_ids[:, None, :]
  mask &= places[:, :, None] >= _places(source, keys.shape[1])
  scores = _einsum("btkrh,bskh->bkrts", q, keys) * q.shape[-1] ** -0.5
  return jnp.where(mask[:, None, None], scores, pages.MASKED)
