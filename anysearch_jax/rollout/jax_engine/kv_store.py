"""The device side of the in-process engine: pages of KV and jitted calls.

A call takes a fixed number of rows, padded where there are fewer, so that each
size compiles once; a row's numbers depend on its own tokens and on nothing that
runs beside it.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from anysearch_jax import config as config_lib
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import decoder
from anysearch_jax.policy.attention import paged_attention
from anysearch_jax.rollout.jax_engine import sampling as sampling_lib


class Decoded(NamedTuple):
  """What one decode call sampled; `counts` `[R]` of the columns are real."""

  tokens: jax.Array  # int32 [R, steps]
  logps: jax.Array  # float32 [R, steps]
  counts: jax.Array  # int32 [R]


def empty(
  a: architecture_lib.Architecture,
  pages: int,
  size: int,
  dtype: Any,
  *,
  mesh: jax.sharding.Mesh,
) -> paged_attention.Pools:
  """Zeroed pages, placed as the calls hand them back: none compiles twice.

  Args:
    a: the architecture.
    pages: of each part of the rows, the one for padding included.
    size: tokens of a page.
    dtype: of keys and values.
    mesh: of `sharding.AXES`; each part of `data` has its own pages.
  """
  pages *= mesh.shape["data"]
  make = functools.partial(paged_attention.empty, a, pages, size, dtype)
  return jax.jit(make, out_shardings=sharding(a, mesh))()


def sharding(
  a: architecture_lib.Architecture, mesh: jax.sharding.Mesh
) -> jax.sharding.NamedSharding:
  """Of pages `[K, P, S, H]`: kv heads over `tensor`, pages over `data`.

  Raises:
    ValueError: kv heads that do not divide.
  """
  if a.kv_heads % mesh.shape["tensor"]:
    raise ValueError(
      f"Found {a.kv_heads} kv heads over tensor={mesh.shape['tensor']} devices "
      "that sample; expected a divisor of them."
    )
  data, tensor = paged_attention.cut(mesh)
  spec = (tensor, data) if data else (tensor,) if tensor else ()
  return jax.sharding.NamedSharding(mesh, jax.P(*spec))


def paged(
  config: config_lib.EngineConfig,
  a: architecture_lib.Architecture,
  mesh: jax.sharding.Mesh,
  *,
  dtype: Any,
) -> paged_attention.Paged:
  """How cached attention is computed on a mesh.

  Raises:
    ValueError: `engine.attention` names what cannot run there.
  """
  platform = mesh.devices.flat[0].platform
  return paged_attention.Paged(
    paged_attention.choose(
      config.attention,
      platform=platform,
      head_dim=a.head_dim,
      dtype=dtype,
      page=config.page,
    ),
    # Short blocks skip more of what no row has; loops cost more elsewhere.
    block=64 if platform == "cpu" else 512,
    mesh=mesh if mesh.size > 1 else None,
  )


apart = jax.jit(decoder.apart, static_argnames="a")


@functools.partial(
  jax.jit, static_argnames=("parts",), donate_argnames=("pages",)
)
def copy(
  pages: paged_attention.Pools,
  sources: jax.Array,
  targets: jax.Array,
  *,
  parts: int,
) -> paged_attention.Pools:
  """Makes some pages equal to others, all of them as they stand before.

  Args:
    pages: donated.
    sources, targets: int `[R]`, each part's own pages in its share of them.
    parts: of the rows.
  """
  sources, targets = (x.reshape(parts, -1) for x in (sources, targets))

  def moved(pool: jax.Array) -> jax.Array:
    """Of a pool `[K, P, S, H]`."""
    k, p, *page = pool.shape
    cut = pool.reshape(k, parts, p // parts, *page)
    part = jnp.arange(parts)[:, None]
    return (
      cut.at[:, part, targets].set(cut[:, part, sources]).reshape(pool.shape)
    )

  return jax.tree.map(moved, pages)


@functools.partial(
  jax.jit, static_argnames=("a", "dtype", "paged"), donate_argnames=("pages",)
)
def prefill(
  params: decoder.Params,
  pages: paged_attention.Pools,
  table: jax.Array,
  tokens: jax.Array,
  starts: jax.Array,
  counts: jax.Array,
  *,
  a: architecture_lib.Architecture,
  dtype: Any,
  paged: paged_attention.Paged,
) -> paged_attention.Pools:
  """Appends known tokens to some rows.

  Args:
    params: the policy's, `apart`.
    pages: donated.
    table: int `[R, M]`, pages of each row.
    tokens: int `[R, C]`, padded at the end. Several rows may be stretches of
      one sequence.
    starts: int `[R]`, where each stretch begins.
    counts: int `[R]`, tokens of each; 0 for padding rows.
    a: the architecture.
    dtype: compute type.
    paged: how cached attention is computed.
  """
  _, pages = decoder.extend(
    params, a, tokens, starts, counts, pages, table, dtype=dtype, paged=paged
  )
  return pages


@functools.partial(
  jax.jit, static_argnames=("a", "size", "parts", "dtype", "paged")
)
def score(
  params: decoder.Params,
  tokens: jax.Array,
  *,
  a: architecture_lib.Architecture,
  size: int,
  parts: int,
  dtype: Any,
  paged: paged_attention.Paged,
) -> jax.Array:
  """Scores a sequence as prefill computes it, in pages of its own.

  Args:
    params: the policy's, `apart`.
    tokens: int `[T]`.
    a: the architecture.
    size: tokens of a page.
    parts: of the rows; each of them scores the sequence.
    dtype: compute type.
    paged: how cached attention is computed.

  Returns:
    float32 `[parts, T - 1]`, the log-probabilities of all tokens but the first
    at temperature 1.
  """
  count = len(tokens) - 1
  table = jnp.arange(1, -(-count // size) + 1)
  rows, table = (
    jnp.broadcast_to(x, (parts, len(x))) for x in (tokens[:-1], table)
  )
  pages = paged_attention.empty(a, parts * (table.shape[1] + 1), size, dtype)
  starts = jnp.zeros(parts, jnp.int32)
  hidden, _ = decoder.extend(
    params,
    a,
    rows,
    starts,
    starts + count,
    pages,
    table,
    dtype=dtype,
    paged=paged,
  )
  logps = jax.nn.log_softmax(decoder.logits(params, hidden))
  targets = jnp.broadcast_to(tokens[1:], (parts, count))
  return jnp.take_along_axis(logps, targets[..., None], -1)[..., 0]


@functools.partial(
  jax.jit,
  static_argnames=("a", "steps", "sampling", "dtype", "paged"),
  donate_argnames=("pages",),
)
def decode(
  params: decoder.Params,
  pages: paged_attention.Pools,
  table: jax.Array,
  tokens: jax.Array,
  starts: jax.Array,
  limits: jax.Array,
  enough: jax.Array,
  addresses: jax.Array,
  sampled: jax.Array,
  halts: jax.Array,
  seed: jax.Array,
  *,
  a: architecture_lib.Architecture,
  steps: int,
  sampling: config_lib.SamplingConfig,
  dtype: Any,
  paged: paged_attention.Paged,
) -> tuple[paged_attention.Pools, Decoded]:
  """Samples up to `steps` tokens for each row, until it halts.

  Args:
    params: the policy's, `apart`.
    pages: donated.
    table: int `[R, M]`, pages of each row, for what it samples too.
    tokens: int `[R]`, each row's last token, not yet cached.
    starts: int `[R]`, tokens that stand in its pages.
    limits: int `[R]`, tokens to sample at most, 0 for padding rows.
    enough: int, the call is over when so many rows or fewer go on.
    addresses: uint32 `[R, n]`, the turn's address.
    sampled: int `[R]`, tokens of this turn sampled in earlier calls.
    halts: bool `[V]`, tokens that halt a row.
    seed: PRNG key of the run.
    a: the architecture.
    steps: columns of the result.
    sampling: how to draw.
    dtype: compute type.
    paged: how cached attention is computed.
  """
  chex.assert_equal_shape([tokens, starts, limits, sampled])
  keys = jax.vmap(lambda address: sampling_lib.address_key(seed, address))(
    addresses
  )
  limits = jnp.minimum(limits, steps)

  def draw(logits, key, count):
    return sampling_lib.sample(
      logits, jax.random.fold_in(key, count), config=sampling
    )

  def go_on(carry):
    i, _, _, _, done, _ = carry
    # The first token is for all: a call that does nothing would come again.
    left = jnp.sum(~done)
    return (left > enough) | ((i == 0) & (left > 0))

  def step(carry):
    i, token, pages, out, done, counts = carry
    going = (~done).astype(jnp.int32)
    hidden, pages = decoder.extend(
      params,
      a,
      token[:, None],
      starts + counts,
      going,
      pages,
      table,
      dtype=dtype,
      paged=paged,
    )
    logits = decoder.logits(params, hidden[:, 0])
    drawn, logp = jax.vmap(draw)(logits, keys, sampled + counts)
    token = jnp.where(done, token, drawn)
    counts = counts + going
    out = (out[0].at[:, i].set(token), out[1].at[:, i].set(logp))
    done = done | halts[token] | (counts >= limits)
    return i + 1, token, pages, out, done, counts

  r = tokens.shape[0]
  out = (jnp.zeros((r, steps), jnp.int32), jnp.zeros((r, steps), jnp.float32))
  carry = (
    jnp.int32(0),
    tokens,
    pages,
    out,
    limits <= 0,
    jnp.zeros(r, jnp.int32),
  )
  _, _, pages, out, _, counts = jax.lax.while_loop(go_on, step, carry)
  return pages, Decoded(*out, counts)
