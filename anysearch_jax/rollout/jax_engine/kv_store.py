"""The device side of the in-process engine: KV pages and jitted calls.

A call takes a fixed number of rows and pads missing ones, so each size compiles
once. The numbers of a row depend only on its own tokens, not on the other rows
of the call.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from anysearch_jax import config as config_lib
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import decoder
from anysearch_jax.policy.attention import paged_attention
from anysearch_jax.rollout.jax_engine import sampling as sampling_lib

# NumPy arrays on the host, JAX arrays on the devices, abstract ones in a plan.
A = TypeVar("A", np.ndarray, jax.Array, jax.ShapeDtypeStruct)


class Chunks(NamedTuple, Generic[A]):
  """The rows of a prefill call; several may be chunks of one sequence.

  table: int `[R, M]`, pages of each row. tokens: int `[R, C]`, padded at the
  end. starts: int `[R]`, position of each chunk's first token. counts: int
  `[R]`, tokens of each chunk; 0 for padding rows.
  """

  table: A
  tokens: A
  starts: A
  counts: A


class Turns(NamedTuple, Generic[A]):
  """The rows of a decode call.

  table: int `[R, M]`, pages of each row, with room for the sampled tokens.
  tokens: int `[R]`, each row's last token, not yet cached. starts: int `[R]`,
  number of tokens cached in the row's pages. limits: int `[R]`, maximum number
  of tokens to sample; 0 for padding rows. addresses: uint32 `[R, n]`, the
  turn's address. sampled: int `[R]`, tokens of this turn sampled in earlier
  calls.
  """

  table: A
  tokens: A
  starts: A
  limits: A
  addresses: A
  sampled: A


class Draws(NamedTuple):
  """halts: bool `[V]`, tokens that halt a row. seed: PRNG key of the run."""

  halts: jax.Array
  seed: jax.Array


class Decoded(NamedTuple):
  """The tokens that a decode call sampled; row r has `counts[r]` of them."""

  tokens: jax.Array  # int32 [R, steps]
  logps: jax.Array  # float32 [R, steps]
  counts: jax.Array  # int32 [R]


@dataclasses.dataclass(frozen=True)
class Model:
  """How the rows of all calls are computed.

  a: the architecture. dtype: of activations and matrix products. paged: how
  cached attention is computed.
  """

  a: architecture_lib.Architecture
  dtype: np.dtype
  paged: paged_attention.Paged

  def extend(
    self,
    params: decoder.Params,
    pages: paged_attention.Pools,
    table: jax.Array,
    tokens: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
  ) -> tuple[jax.Array, paged_attention.Pools]:
    """Appends tokens to cached rows; see `decoder.extend`."""
    return decoder.extend(
      params,
      self.a,
      tokens,
      starts,
      counts,
      pages,
      table,
      dtype=self.dtype,
      paged=self.paged,
    )


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


def model(
  config: config_lib.EngineConfig,
  a: architecture_lib.Architecture,
  mesh: jax.sharding.Mesh,
  *,
  dtype: Any,
) -> Model:
  """Returns how rows are computed on a mesh.

  Raises:
    ValueError: `engine.attention` cannot run there.
  """
  platform = mesh.devices.flat[0].platform
  paged = paged_attention.Paged(
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
  return Model(a, jnp.dtype(dtype), paged)


apart = jax.jit(decoder.apart, static_argnames="a")


@functools.partial(
  jax.jit, static_argnames=("shards",), donate_argnames=("pages",)
)
def copy(
  pages: paged_attention.Pools,
  sources: jax.Array,
  targets: jax.Array,
  *,
  shards: int,
) -> paged_attention.Pools:
  """Copies pages `sources` to pages `targets`; reads all before writing any.

  Args:
    pages: donated.
    sources, targets: int `[R]`, page numbers within each data shard; the first
      R / shards entries belong to the first shard, and so on.
    shards: number of data shards.
  """
  sources, targets = (x.reshape(shards, -1) for x in (sources, targets))

  def moved(pool: jax.Array) -> jax.Array:
    """Copies within one pool `[K, P, S, H]`, without crossing shards."""
    k, p, *page = pool.shape
    cut = pool.reshape(k, shards, p // shards, *page)
    shard = jnp.arange(shards)[:, None]
    return (
      cut.at[:, shard, targets].set(cut[:, shard, sources]).reshape(pool.shape)
    )

  return jax.tree.map(moved, pages)


@functools.partial(
  jax.jit, static_argnames=("model",), donate_argnames=("pages",)
)
def prefill(
  params: decoder.Params,
  pages: paged_attention.Pools,
  chunks: Chunks[jax.Array],
  *,
  model: Model,
) -> paged_attention.Pools:
  """Appends known tokens to some rows (chunked prefill).

  Args:
    params: the policy's, as returned by `apart`.
    pages: donated.
    chunks: the rows.
    model: how they are computed.
  """
  _, pages = model.extend(params, pages, *chunks)
  return pages


@functools.partial(jax.jit, static_argnames=("model", "size", "shards"))
def score(
  params: decoder.Params,
  tokens: jax.Array,
  *,
  model: Model,
  size: int,
  shards: int,
) -> jax.Array:
  """Scores a sequence by the computation of prefill, in separate pages.

  Args:
    params: the policy's, as returned by `apart`.
    tokens: int `[T]`.
    model: how they are computed.
    size: tokens per page.
    shards: number of data shards; each of them scores the whole sequence.

  Returns:
    float32 `[shards, T - 1]`, log-probabilities of all tokens but the first, at
    temperature 1.
  """
  count = len(tokens) - 1
  table = jnp.arange(1, -(-count // size) + 1)
  rows, table = (
    jnp.broadcast_to(x, (shards, len(x))) for x in (tokens[:-1], table)
  )
  pages = paged_attention.empty(
    model.a, shards * (table.shape[1] + 1), size, model.dtype
  )
  starts = jnp.zeros(shards, jnp.int32)
  hidden, _ = model.extend(params, pages, table, rows, starts, starts + count)
  logps = jax.nn.log_softmax(decoder.logits(params, hidden))
  targets = jnp.broadcast_to(tokens[1:], (shards, count))
  return jnp.take_along_axis(logps, targets[..., None], -1)[..., 0]


class _Carry(NamedTuple):
  """What the decode loop changes.

  step: number of steps taken. tokens: int `[R]`, each row's last token. done:
  bool `[R]`, rows that have halted. found: the tokens that were sampled.
  """

  step: jax.Array
  tokens: jax.Array
  pages: paged_attention.Pools
  done: jax.Array
  found: Decoded


@functools.partial(
  jax.jit,
  static_argnames=("model", "steps", "sampling"),
  donate_argnames=("pages",),
)
def decode(
  params: decoder.Params,
  pages: paged_attention.Pools,
  turns: Turns[jax.Array],
  enough: jax.Array,
  draws: Draws,
  *,
  model: Model,
  steps: int,
  sampling: config_lib.SamplingConfig,
) -> tuple[paged_attention.Pools, Decoded]:
  """Samples up to `steps` tokens for each row, until the row halts.

  Args:
    params: the policy's, as returned by `apart`.
    pages: donated.
    turns: the rows.
    enough: int, the call ends when at most `enough` rows are still running.
    draws: the run's seed and the tokens that halt a row.
    model: how the rows are computed.
    steps: columns of the result.
    sampling: how tokens are drawn.

  Returns:
    The pages with the new tokens (all but each row's last), and the sample.
  """
  row_keys = jax.vmap(functools.partial(sampling_lib.address_key, draws.seed))
  keys = row_keys(turns.addresses)
  limits = jnp.minimum(turns.limits, steps)

  def goes_on(carry: _Carry) -> jax.Array:
    # Always run one step; a call without a step would be scheduled forever.
    left = jnp.sum(~carry.done)
    return (left > enough) | ((carry.step == 0) & (left > 0))

  def draw(
    logits: jax.Array, key: jax.Array, count: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    return sampling_lib.sample(
      logits, jax.random.fold_in(key, count), config=sampling
    )

  def step(carry: _Carry) -> _Carry:
    i, tokens, pages, done, found = carry
    going = (~done).astype(jnp.int32)
    hidden, pages = model.extend(
      params,
      pages,
      turns.table,
      tokens[:, None],
      turns.starts + found.counts,
      going,
    )
    logits = decoder.logits(params, hidden[:, 0])
    drawn, logps = jax.vmap(draw)(logits, keys, turns.sampled + found.counts)
    tokens = jnp.where(done, tokens, drawn)
    found = Decoded(
      found.tokens.at[:, i].set(tokens),
      found.logps.at[:, i].set(logps),
      found.counts + going,
    )
    done = done | draws.halts[tokens] | (found.counts >= limits)
    return _Carry(i + 1, tokens, pages, done, found)

  first = _Carry(
    jnp.int32(0), turns.tokens, pages, limits <= 0, _nothing(limits, steps)
  )
  last = jax.lax.while_loop(goes_on, step, first)
  return last.pages, last.found


def _nothing(limits: jax.Array, steps: int) -> Decoded:
  """Returns the sample of a call before its first step."""
  r = len(limits)
  return Decoded(
    jnp.zeros((r, steps), jnp.int32),
    jnp.zeros((r, steps), jnp.float32),
    jnp.zeros(r, jnp.int32),
  )
