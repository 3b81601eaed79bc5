"""The device side of the in-process engine: KV slots and jitted calls.

Every call gathers some rows' caches at one bucket length, extends them, and
scatters them back. Rows are padded to a fixed number with a scratch slot, so
each bucket compiles once; a row's numbers depend on its own tokens and bucket
and on nothing that runs beside it.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from anysearch_jax import config as config_lib
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import transformer
from anysearch_jax.rollout import sampling as sampling_lib

Caches = tuple[transformer.LayerCache, ...]


class Decoded(NamedTuple):
  """What one decode call sampled; `counts` `[R]` of the columns are real."""

  tokens: jax.Array  # int32 [R, steps]
  logps: jax.Array  # float32 [R, steps]
  counts: jax.Array  # int32 [R]


def empty(
  a: architecture_lib.Architecture,
  slots: int,
  length: int,
  dtype: Any,
  *,
  mesh: jax.sharding.Mesh,
) -> Caches:
  """A zeroed store, placed as the calls hand it back: none compiles twice.

  Args:
    a: the architecture.
    slots: rows.
    length: positions of each.
    dtype: of keys and values.
    mesh: of `sharding.AXES`.
  """
  make = functools.partial(transformer.empty_caches, a, slots, length, dtype)
  return jax.jit(make, out_shardings=sharding(a, mesh))()


def sharding(
  a: architecture_lib.Architecture, mesh: jax.sharding.Mesh
) -> jax.sharding.NamedSharding:
  """Of caches `[slots, K, S, H]`: kv heads over `tensor` where they divide."""
  over = None if a.kv_heads % mesh.shape["tensor"] else "tensor"
  return jax.sharding.NamedSharding(mesh, jax.P(None, over))


def gather(store: Caches, rows: jax.Array, length: int) -> Caches:
  """The first `length` positions of some slots."""
  return jax.tree.map(lambda x: x[rows, :, :length], store)


def scatter(store: Caches, rows: jax.Array, caches: Caches) -> Caches:
  """Writes rows back; duplicate rows are the scratch slot only."""
  length = caches[0].k.shape[2]
  return jax.tree.map(
    lambda x, new: x.at[rows, :, :length].set(new), store, caches
  )


@functools.partial(jax.jit, donate_argnames=("store",))
def copy(store: Caches, sources: jax.Array, targets: jax.Array) -> Caches:
  """Copies whole slots: a prompt prefilled once serves its group."""
  return jax.tree.map(lambda x: x.at[targets].set(x[sources]), store)


@functools.partial(
  jax.jit, static_argnames=("a", "length", "dtype"), donate_argnames=("store",)
)
def prefill(
  params: transformer.Params,
  store: Caches,
  rows: jax.Array,
  tokens: jax.Array,
  starts: jax.Array,
  *,
  a: architecture_lib.Architecture,
  length: int,
  dtype: Any,
) -> Caches:
  """Appends a chunk of known tokens to some slots.

  Args:
    params: the policy's.
    store: all slots, donated.
    rows: int `[P]` slots.
    tokens: int `[P, C]`, padded at the end.
    starts: int `[P]` tokens already cached; start + C <= length.
    a: the architecture.
    length: the bucket.
    dtype: compute type.
  """
  layers = transformer.layer_params(params, a)
  caches = gather(store, rows, length)
  _, caches = transformer.extend(
    params, layers, a, tokens, starts, caches, dtype=dtype
  )
  return scatter(store, rows, caches)


@functools.partial(
  jax.jit,
  static_argnames=("a", "length", "steps", "sampling", "dtype"),
  donate_argnames=("store",),
)
def decode(
  params: transformer.Params,
  store: Caches,
  rows: jax.Array,
  tokens: jax.Array,
  starts: jax.Array,
  limits: jax.Array,
  addresses: jax.Array,
  sampled: jax.Array,
  halts: jax.Array,
  seed: jax.Array,
  *,
  a: architecture_lib.Architecture,
  length: int,
  steps: int,
  sampling: config_lib.SamplingConfig,
  dtype: Any,
) -> tuple[Caches, Decoded]:
  """Samples up to `steps` tokens for each row, until it halts.

  Args:
    params: the policy's.
    store: all slots, donated.
    rows: int `[R]` slots.
    tokens: int `[R]`, each row's last token, not yet cached.
    starts: int `[R]` tokens already cached; start + steps <= length.
    limits: int `[R]`, tokens to sample at most, 0 for padding rows.
    addresses: uint32 `[R, n]`, the turn's address.
    sampled: int `[R]`, tokens of this turn sampled in earlier calls.
    halts: bool `[V]`, tokens that halt a row.
    seed: PRNG key of the run.
    a: the architecture.
    length: the bucket.
    steps: columns of the result.
    sampling: how to draw.
    dtype: compute type.
  """
  layers = transformer.layer_params(params, a)
  keys = jax.vmap(lambda address: sampling_lib.address_key(seed, address))(
    addresses
  )
  limits = jnp.minimum(limits, steps)

  def draw(logits, key, count):
    return sampling_lib.sample(
      logits, jax.random.fold_in(key, count), config=sampling
    )

  def go_on(carry):
    _, _, _, _, done, _ = carry
    return ~jnp.all(done)

  def step(carry):
    i, token, caches, out, done, counts = carry
    hidden, caches = transformer.extend(
      params, layers, a, token[:, None], starts + counts, caches, dtype=dtype
    )
    logits = transformer.logits(params, hidden[:, 0])
    drawn, logp = jax.vmap(draw)(logits, keys, sampled + counts)
    token = jnp.where(done, token, drawn)
    counts = counts + ~done
    out = (out[0].at[:, i].set(token), out[1].at[:, i].set(logp))
    done = done | halts[token] | (counts >= limits)
    return i + 1, token, caches, out, done, counts

  r = rows.shape[0]
  out = (jnp.zeros((r, steps), jnp.int32), jnp.zeros((r, steps), jnp.float32))
  carry = (
    jnp.int32(0),
    tokens,
    gather(store, rows, length),
    out,
    limits <= 0,
    jnp.zeros(r, jnp.int32),
  )
  _, _, caches, out, _, counts = jax.lax.while_loop(go_on, step, carry)
  return scatter(store, rows, caches), Decoded(*out, counts)
