"""The device side of the in-process engine: KV pages and jitted calls.

A call takes a fixed number of rows and pads missing ones, so each size compiles
once. The numbers of a row depend only on its own tokens, not on the other rows
of the call.
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
  """The tokens that a decode call sampled; row r has `counts[r]` of them."""

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
  """Returns zeroed pages with the sharding that the calls return.

  With another sharding, the first call of each kind would compile twice.

  Args:
    a: the architecture.
    pages: number of pages of each data shard, the padding page included.
    size: tokens per page.
    dtype: of keys and values.
    mesh: has the axes `sharding.AXES`; each shard of `data` has its own pages.
  """
  pages *= mesh.shape["data"]
  make = functools.partial(paged_attention.empty, a, pages, size, dtype)
  return jax.jit(make, out_shardings=sharding(a, mesh))()


def sharding(
  a: architecture_lib.Architecture, mesh: jax.sharding.Mesh
) -> jax.sharding.NamedSharding:
  """Returns the sharding of pages `[K, P, S, H]`.

  Kv heads are sharded over `tensor`, pages over `data`.

  Raises:
    ValueError: `tensor` does not divide the kv heads.
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
  """Returns how cached attention is computed on a mesh.

  Raises:
    ValueError: `engine.attention` cannot run there.
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
    # Small blocks skip more padding; on accelerators loop overhead dominates.
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
  """Copies pages `sources` to pages `targets`; reads all before writing any.

  Args:
    pages: donated.
    sources, targets: int `[R]`, page numbers within each data shard; the first
      R / parts entries belong to the first shard, and so on.
    parts: number of data shards.
  """
  sources, targets = (x.reshape(parts, -1) for x in (sources, targets))

  def moved(pool: jax.Array) -> jax.Array:
    """Copies within one pool `[K, P, S, H]`, without crossing shards."""
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
  """Appends known tokens to some rows (chunked prefill).

  Args:
    params: the policy's, as returned by `apart`.
    pages: donated.
    table: int `[R, M]`, pages of each row.
    tokens: int `[R, C]`, padded at the end. Several rows may be chunks of one
      sequence.
    starts: int `[R]`, position of each chunk's first token.
    counts: int `[R]`, tokens of each chunk; 0 for padding rows.
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
  """Scores a sequence by the computation of prefill, in separate pages.

  Args:
    params: the policy's, as returned by `apart`.
    tokens: int `[T]`.
    a: the architecture.
    size: tokens per page.
    parts: number of data shards; each of them scores the whole sequence.
    dtype: compute type.
    paged: how cached attention is computed.

  Returns:
    float32 `[parts, T - 1]`, log-probabilities of all tokens but the first, at
    temperature 1.
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
  """Samples up to `steps` tokens for each row, until the row halts.

  Args:
    params: the policy's, as returned by `apart`.
    pages: donated.
    table: int `[R, M]`, pages of each row, with room for the sampled tokens.
    tokens: int `[R]`, each row's last token, not yet cached.
    starts: int `[R]`, number of tokens cached in the row's pages.
    limits: int `[R]`, maximum number of tokens to sample; 0 for padding rows.
    enough: int, the call ends when at most `enough` rows are still running.
    addresses: uint32 `[R, n]`, the turn's address.
    sampled: int `[R]`, tokens of this turn sampled in earlier calls.
    halts: bool `[V]`, tokens that halt a row.
    seed: PRNG key of the run.
    a: the architecture.
    steps: columns of the result.
    sampling: how tokens are drawn.
    dtype: compute type.
    paged: how cached attention is computed.

  Returns:
    The pages with the new tokens (all but each row's last), and the sample.
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
    # Always run one step; a call without a step would be scheduled forever.
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
