"""The device side of the in-process engine: KV pages and jitted calls.

There are three: `copy` duplicates pages, `prefill` appends known tokens to
rows, `decode` samples tokens. A call takes a fixed number of rows and pads
missing ones, so each size compiles once. The result of a row depends only on
its own tokens, not on the other rows of the call.

Pages are donated: a call updates them in place and returns them. On one CPU,
decode does not attend to pages but to rows that it gathers from them at its
start and writes back at its end (`gathered_attention` explains why).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from anysearch_jax import config as config_lib
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import decoder, experts, serving
from anysearch_jax.policy.attention import (
  gathered_attention,
  layer_options,
  paged_attention,
)
from anysearch_jax.policy.attention import pages as pages_lib
from anysearch_jax.rollout.jax_engine import kv_memory
from anysearch_jax.rollout.jax_engine import sampling as sampling_lib
from anysearch_jax.rollout.jax_engine.sampling import A

GatheredRows = tuple[gathered_attention.Rows, ...]


@dataclasses.dataclass(frozen=True)
class Model:
  """How the rows of all calls are computed.

  Attributes:
    a: the architecture, without adapters.
    dtype: dtype of activations and matrix products.
    stored: dtype of pages.
    paged: attention over pages.
    gathered: attention of decode over gathered rows; None if decode reads the
      pages too.
    fused: see `serving.prepare`.
    mesh: mesh of all arrays.
    records: whether calls return the experts that tokens choose.
    exact: whether attention takes one token at a time, so that a token's result
      does not depend on the other tokens of its row in the call.
    pools: number of pools of pages, 2 if windowed layers have their own.
  """

  a: architecture_lib.Architecture
  dtype: np.dtype
  stored: np.dtype
  paged: paged_attention.Paged
  gathered: gathered_attention.Gathered | None
  fused: bool
  mesh: jax.sharding.Mesh
  records: bool = False
  exact: bool = False
  pools: int = 1

  def prepare(
    self, params: decoder.Params, a: architecture_lib.Architecture
  ) -> decoder.Params:
    """Returns weights for the calls from a policy's, adapters included."""
    return serving.prepare(
      params,
      a,
      dtype=self.dtype,
      fused=self.fused,
      mesh=self._multi_device_mesh,
    )

  @property
  def _multi_device_mesh(self) -> jax.sharding.Mesh | None:
    """The mesh, if it has several devices."""
    return self.mesh if self.mesh.size > 1 else None

  def extend(
    self,
    params: decoder.Params,
    tokens: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
    caches: Any,
    attend: Any,
  ) -> tuple[jax.Array, tuple[Any, ...], jax.Array | None]:
    """Appends tokens to cached rows.

    Args:
      params, tokens, starts, counts, caches, attend: as of `serving.extend`.

    Returns:
      As `serving.extend`, but no experts unless the model `records` them.
    """
    hidden, caches, expert_ids = serving.extend(
      params,
      self.a,
      tokens,
      starts,
      counts,
      caches,
      attend,
      dtype=self.dtype,
      mesh=self._multi_device_mesh,
    )
    return hidden, caches, expert_ids if self.records else None

  def table(self, tables: jax.Array, *, windowed: bool) -> jax.Array:
    """Returns the columns of `[R, pools M]` that list a layer's pages."""
    columns = tables.shape[1] // self.pools
    return tables[:, -columns:] if windowed else tables[:, :columns]

  def over_pages(self, tables: jax.Array) -> serving.Attend[pages_lib.Pages]:
    """Returns attention over pages, which `tables` list for each row."""

    def attend(q, k, v, pages, positions, real, window=None, sinks=None):
      b, t = q.shape[:2]
      windowed = window is not None and window < layer_options.NO_WINDOW
      page_numbers = self.table(tables, windowed=windowed)
      if self.exact:
        # Kernels split the keys of a row into parts whose number depends on the
        # row's last token. As rows of one token, tokens do not affect each
        # other's order of summation.
        page_numbers = jnp.repeat(page_numbers, t, axis=0)
        q, k, v, positions, real = jax.tree.map(
          lambda x: x.reshape(b * t, 1, *x.shape[2:]),
          (q, k, v, positions, real),
        )
      out, pages = self.paged(
        q, k, v, pages, page_numbers, positions, real, window, sinks
      )
      return out.reshape(b, t, *out.shape[2:]), pages

    return attend


def make_model(
  config: config_lib.EngineConfig,
  a: architecture_lib.Architecture,
  mesh: jax.sharding.Mesh,
  *,
  dtype: Any,
  records: bool = False,
) -> Model:
  """Returns how rows are computed on a mesh.

  Args:
    config: pages, their dtype and the kernels of attention.
    a: the policy's architecture, adapters included or not.
    mesh: mesh of the parameters and pages.
    dtype: compute type.
    records: whether calls return the experts that tokens choose, if the policy
      has any.

  Raises:
    ValueError: `engine.attention` cannot run there or read `engine.kv_dtype`.
  """
  dtype = jnp.dtype(dtype)
  device = mesh.devices.flat[0]
  platform = device.platform
  stored = pages_lib.storage_dtype(config.kv_dtype, dtype, platform)
  several = mesh if mesh.size > 1 else None
  paged = paged_attention.Paged(
    paged_attention.choose(
      config.attention,
      platform=platform,
      head_dim=a.head_dim,
      dtype=dtype,
      page=config.page,
      stored=stored,
      capability=getattr(device, "compute_capability", None),
    ),
    # Small blocks skip more padding; on accelerators loop overhead dominates.
    block=64 if platform == "cpu" else 512,
    mesh=several,
    as_vectors=platform == "tpu",
  )
  gathered = gathered_attention.Gathered(
    paged.block,
    dtype if pages_lib.is_float8(stored) else stored,
    rounds=pages_lib.is_float8(stored),
  )
  return Model(
    a.without_lora(),
    dtype=dtype,
    stored=stored,
    paged=paged,
    gathered=gathered if platform == "cpu" and several is None else None,
    # The GPU compiler would otherwise join the matrices in every decode step. A
    # CPU has fewer products to share among its threads.
    fused=platform in ("gpu", "cuda", "cpu"),
    mesh=mesh,
    records=records and bool(a.experts),
    exact=config.exact,
    pools=len(kv_memory.pool_sizes(config, a, shards=mesh.shape["data"])),
  )


class Chunks(NamedTuple, Generic[A]):
  """The rows of a prefill call; several may be chunks of one sequence.

  Attributes:
    table: int `[R, pools M]`, pages of each row; those of a second pool follow
      those of the first.
    tokens: int `[R, C]`, padded at the end.
    starts: int `[R]`, position of each chunk's first token.
    counts: int `[R]`, tokens of each chunk; 0 for padding rows.
  """

  table: A
  tokens: A
  starts: A
  counts: A


class Turns(NamedTuple, Generic[A]):
  """The rows of a decode call.

  Attributes:
    table: int `[R, pools M]`, as in `Chunks`, with room for the sampled tokens.
    last: int `[R]`, each row's last token, which is not yet cached.
    starts: int `[R]`, number of tokens cached in the row's pages.
    limits: int `[R]`, maximum number of tokens to sample; 0 for padding rows.
    addresses: uint32 `[R, n]`, the turn's address.
    sampled: int `[R]`, number of tokens of this turn that earlier calls
      sampled; it numbers the draws. Negative while tokens are `forced`.
    stops: uint32 `[R]`, the bit of `Draws.halts` that halts the row.
    settings: temperature, top-p and top-k of each row.
    forced: int `[R, steps]`, context tokens that the row takes before it draws,
      then -1; None if every token is drawn. So decode also prefills, and one
      program computes all tokens (`engine.exact`).
  """

  table: A
  last: A
  starts: A
  limits: A
  addresses: A
  sampled: A
  stops: A
  settings: sampling_lib.Settings[A]
  forced: A | None = None


class Draws(NamedTuple):
  """Inputs of a decode call that all rows share.

  Attributes:
    halts: uint32 `[V]`. A token halts the rows whose `Turns.stops` bit it has.
    seed: PRNG key of the run.
  """

  halts: jax.Array
  seed: jax.Array


class Decoded(NamedTuple):
  """The tokens that a decode call sampled.

  Attributes:
    tokens: int32 `[R, steps]`; only the first `counts[r]` of row r count.
    logps: float32 `[R, steps]`, their log-probabilities.
    counts: int32 `[R]`, number of sampled tokens of each row.
    experts: `[R, >= steps, L, K]`, the experts that the call's first
      `counts[r]` input tokens chose, as in `experts.record`; None if the model
      does not record them.
  """

  tokens: jax.Array
  logps: jax.Array
  counts: jax.Array
  experts: jax.Array | None = None


def allocator(
  a: architecture_lib.Architecture,
  pages: Sequence[int],
  size: int,
  dtype: Any,
  *,
  mesh: jax.sharding.Mesh,
) -> Callable[[], pages_lib.Pools]:
  """Returns a function that allocates zeroed pages; it compiles once.

  The pages have the sharding that the calls return. With another sharding, the
  first call of each kind would compile twice.

  Args:
    a: the architecture.
    pages: number of pages of each pool and shard, see `kv_memory.pool_sizes`.
    size: number of tokens of a page.
    dtype: dtype of keys and values.
    mesh: each shard of its `data` axis has `pages` of its own.
  """
  shards = mesh.shape["data"]
  counts = tuple(pool_pages * shards for pool_pages in pages)
  make = functools.partial(pages_lib.empty, a, counts, size, dtype)
  return jax.jit(make, out_shardings=sharding(a, mesh))


def empty_rows(
  model: Model, pages: pages_lib.Pools, *, lanes: int, columns: int, steps: int
) -> GatheredRows:
  """Returns memory for the rows that `decode` gathers, of every layer.

  Args:
    model: how rows are computed.
    pages: the pages of all layers; only their shapes matter.
    lanes: number of rows of a call.
    columns: number of pages of a row.
    steps: maximum number of tokens that a call samples.

  Returns:
    Memory for each layer; () if decode reads the pages.
  """
  if model.gathered is None:
    return ()
  make = functools.partial(
    model.gathered.empty, lanes=lanes, columns=columns, steps=steps
  )
  replicated = jax.sharding.NamedSharding(model.mesh, jax.P())
  return tuple(map(jax.jit(make, out_shardings=replicated), pages))


def sharding(
  a: architecture_lib.Architecture, mesh: jax.sharding.Mesh
) -> jax.sharding.NamedSharding:
  """Returns the sharding of pages `[K, P, S, H]` and of scales `[K, P, S]`.

  Kv heads are sharded over `tensor`, pages over `data`.

  Raises:
    ValueError: `tensor` does not divide the kv heads.
  """
  if a.kv_heads % mesh.shape["tensor"]:
    raise ValueError(
      f"Found {a.kv_heads} kv heads over tensor={mesh.shape['tensor']} devices "
      "that sample; expected a divisor of them."
    )
  data, tensor = paged_attention.row_and_head_axes(mesh)
  # Compiled programs return shardings without None at their ends. An equal
  # sharding that is spelled otherwise would compile the calls again.
  axes = [tensor, data]
  while axes and not axes[-1]:
    axes.pop()
  return jax.sharding.NamedSharding(mesh, jax.P(*axes))


@functools.partial(
  jax.jit, static_argnames=("model",), donate_argnames=("pages",)
)
def copy(
  pages: pages_lib.Pools,
  sources: Sequence[jax.Array],
  targets: Sequence[jax.Array],
  *,
  model: Model,
) -> pages_lib.Pools:
  """Copies pages `sources` to pages `targets`; reads all before writing any.

  Args:
    pages: donated.
    sources: int `[R]` for each pool, page numbers within each data shard; the
      first R / shards entries belong to the first shard, and so on.
    targets: as `sources`.
    model: how rows are computed.

  Returns:
    The pages with the copies.
  """
  shards = model.mesh.shape["data"]

  def copied(pool: int, x: jax.Array) -> jax.Array:
    """Copies within pages `[K, P, ...]` of a pool, not across shards."""
    k, p, *page = x.shape
    by_shard = x.reshape(k, shards, p // shards, *page)
    shard = jnp.arange(shards)[:, None]
    source = sources[pool].reshape(shards, -1)
    target = targets[pool].reshape(shards, -1)
    content = by_shard[:, shard, source]
    return by_shard.at[:, shard, target].set(content).reshape(x.shape)

  layers = []
  for i, layer in enumerate(pages):
    pool = -1 if i in model.a.windowed else 0  # The last pool has the windows.
    layers.append(jax.tree.map(functools.partial(copied, pool), layer))
  return tuple(layers)


@functools.partial(
  jax.jit, static_argnames=("model",), donate_argnames=("pages",)
)
def prefill(
  params: decoder.Params,
  pages: pages_lib.Pools,
  chunks: Chunks[jax.Array],
  *,
  model: Model,
) -> tuple[pages_lib.Pools, jax.Array | None]:
  """Appends known tokens to some rows (chunked prefill).

  Args:
    params: the policy's, as returned by `Model.prepare`.
    pages: donated.
    chunks: the rows.
    model: how the rows are computed.

  Returns:
    The pages with the tokens and, if the model records them, the tokens'
    experts `[R, C, L, K]`.
  """
  _, pages, expert_ids = model.extend(
    params,
    tokens=chunks.tokens,
    starts=chunks.starts,
    counts=chunks.counts,
    caches=pages,
    attend=model.over_pages(chunks.table),
  )
  return pages, expert_ids


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

  Each data shard scores the whole sequence: a comparison then finds a device
  whose weights are wrong.

  Args:
    params: the policy's, as returned by `Model.prepare`.
    tokens: int `[T]`.
    model: how rows are computed.
    size: number of tokens of a page.
    shards: number of data shards.

  Returns:
    float32 `[shards, T - 1]`, log-probabilities of all tokens but the first, at
    temperature 1.
  """
  count = len(tokens) - 1
  table = jnp.arange(1, -(-count // size) + 1)
  rows, table = (
    jnp.broadcast_to(x, (shards, len(x))) for x in (tokens[:-1], table)
  )
  pages = pages_lib.empty(
    model.a, [shards * (table.shape[1] + 1)], size, model.stored
  )
  table = jnp.tile(table, model.pools)
  starts = jnp.zeros(shards, jnp.int32)
  hidden, *_ = model.extend(
    params, rows, starts, starts + count, pages, model.over_pages(table)
  )
  logps = jax.nn.log_softmax(decoder.logits(params, hidden))
  targets = jnp.broadcast_to(tokens[1:], (shards, count))
  return jnp.take_along_axis(logps, targets[..., None], -1)[..., 0]


class _Carry(NamedTuple):
  """The state of the decode loop."""

  step: jax.Array
  last: jax.Array  # int [R], each row's last token
  caches: tuple[Any, ...]  # of each layer: pages, or gathered rows
  done: jax.Array  # bool [R], rows that have halted
  decoded: Decoded  # the tokens so far


@functools.partial(
  jax.jit,
  static_argnames=("model", "steps", "restricted"),
  donate_argnames=("pages", "rows"),
)
def decode(
  params: decoder.Params,
  pages: pages_lib.Pools,
  rows: GatheredRows,
  turns: Turns[jax.Array],
  enough: jax.Array,
  draws: Draws,
  *,
  model: Model,
  steps: int,
  restricted: bool,
) -> tuple[pages_lib.Pools, GatheredRows, Decoded]:
  """Samples up to `steps` tokens for each row, until the row halts.

  The steps are one loop on the device, so the host schedules once for all of
  them. A row that halts stays in the loop and changes nothing, because shapes
  are fixed. The loop ends early once few rows (`enough`) are running, so that
  the host can give the other lanes to turns that wait.

  Args:
    params: the policy's, as returned by `Model.prepare`.
    pages: donated.
    rows: memory from `empty_rows`, for as many lanes; donated.
    turns: the rows.
    enough: int, the call ends when at most `enough` rows are still running.
    draws: the run's seed and the tokens that halt a row.
    model: how the rows are computed.
    steps: columns of the result.
    restricted: see `sampling.sample`.

  Returns:
    The pages with the new tokens (all but each row's last), `rows` for the next
    call, and the sample.
  """
  row_keys = jax.vmap(functools.partial(sampling_lib.address_key, draws.seed))
  keys = row_keys(turns.addresses)
  limits = jnp.minimum(turns.limits, steps)
  gathered = model.gathered
  # The cache of each layer that decode reads and writes, and its attention.
  caches: tuple[Any, ...] = pages
  attend: Any = model.over_pages(turns.table)
  tables = [
    model.table(turns.table, windowed=i in model.a.windowed)
    for i in range(model.a.layers)
  ]
  if gathered is not None:
    attend = gathered
    caches = tuple(
      gathered.gather(row, x, table, turns.starts)
      for row, x, table in zip(rows, pages, tables, strict=True)
    )

  def continues(carry: _Carry) -> jax.Array:
    # Always run one step; a call without a step would be scheduled forever.
    running = jnp.sum(~carry.done)
    return (running > enough) | ((carry.step == 0) & (running > 0))

  def draw(
    logits: jax.Array,
    key: jax.Array,
    count: jax.Array,
    settings: sampling_lib.Settings[jax.Array],
    forced: jax.Array | None,
  ) -> tuple[jax.Array, jax.Array]:
    key = jax.random.fold_in(key, count)
    return sampling_lib.sample(
      logits, key, settings, restricted=restricted, forced=forced
    )

  draw_row = jax.vmap(draw, in_axes=(0, None, 0, None, 0))
  update = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=0)
  record: Any = jax.vmap(update)

  def step(carry: _Carry) -> _Carry:
    done = carry.done
    decoded = carry.decoded
    new_tokens = (~done).astype(jnp.int32)  # 1, or 0 for rows that halted.
    forced = turns.forced
    if forced is not None:
      columns = decoded.counts[:, None]
      # Past the last column every token is drawn.
      forced = jnp.take_along_axis(
        forced, columns, 1, mode="fill", fill_value=-1
      )
    hidden, caches, expert_ids = model.extend(
      params,
      tokens=carry.last[:, None],
      starts=turns.starts + decoded.counts,
      counts=new_tokens,
      caches=carry.caches,
      attend=attend,
    )
    drawn, logps = jax.vmap(draw_row)(
      decoder.logits(params, hidden),
      keys,
      (turns.sampled + decoded.counts)[:, None],
      turns.settings,
      forced,
    )
    halts = draws.halts[drawn] & turns.stops[:, None] != 0
    if forced is not None:
      halts &= forced < 0
    # Rows have different counts, so each writes to a column of its own.
    is_column = jnp.arange(steps) == decoded.counts[:, None]
    is_new = is_column & ~done[:, None]
    counts = decoded.counts + new_tokens
    recorded = None
    if expert_ids is not None:
      recorded = record(decoded.experts, expert_ids, decoded.counts)
    return _Carry(
      step=carry.step + 1,
      last=jnp.where(done, carry.last, drawn[:, 0]),
      caches=caches,
      done=done | halts[:, 0] | (counts >= limits),
      decoded=Decoded(
        tokens=jnp.where(is_new, drawn, decoded.tokens),
        logps=jnp.where(is_new, logps, decoded.logps),
        counts=counts,
        experts=recorded,
      ),
    )

  rows_count = len(limits)
  empty = Decoded(
    tokens=jnp.zeros((rows_count, steps), jnp.int32),
    logps=jnp.zeros((rows_count, steps), jnp.float32),
    counts=jnp.zeros(rows_count, jnp.int32),
  )
  if model.records:
    like = experts.record(model.a)
    # One column more, because halted rows still write, after their last token.
    shape = (rows_count, steps + 1, *like.shape)
    empty = empty._replace(experts=jnp.zeros(shape, like.dtype))
  begin = _Carry(
    step=jnp.int32(0),
    last=turns.last,
    caches=caches,
    done=limits <= 0,
    decoded=empty,
  )
  end = jax.lax.while_loop(continues, step, begin)
  if gathered is None:
    return end.caches, (), end.decoded
  pages = tuple(
    gathered.write_back(x, row, table, end.decoded.counts)
    for x, row, table in zip(pages, end.caches, tables, strict=True)
  )
  return pages, end.caches, end.decoded
