"""The device side of the in-process engine: KV pages and jitted calls.

A call takes a fixed number of rows and pads missing ones, so each size compiles
once. The numbers of a row depend only on its own tokens, not on the other rows
of the call.
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

  a: the architecture, without adapters. dtype: of activations and matrix
  products. stored: dtype of pages. paged: attention over pages. gathered:
  attention of decode over gathered rows; None if decode reads the pages too.
  fused: see `serving.prepare`. mesh: of all arrays. records: whether calls
  return the experts that tokens choose. exact: whether pages are attended to
  token by token, so that a token's result does not depend on the other tokens
  of its row in the call.
  pools: of pages, 2 if windowed layers have their own.
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
      mesh=self._several,
    )

  @property
  def _several(self) -> jax.sharding.Mesh | None:
    """The mesh, if it has several devices."""
    return self.mesh if self.mesh.size > 1 else None

  def extend(
    self, params: decoder.Params, *rows: Any
  ) -> tuple[jax.Array, tuple[Any, ...], jax.Array | None]:
    """Appends tokens to cached rows; see `serving.extend`.

    Experts are None unless the model `records` them.
    """
    hidden, caches, chosen = serving.extend(
      params, self.a, *rows, dtype=self.dtype, mesh=self._several
    )
    return hidden, caches, chosen if self.records else None

  def table(self, tables: jax.Array, *, windowed: bool) -> jax.Array:
    """Returns the columns of `[R, pools M]` that list a layer's pages."""
    columns = tables.shape[1] // self.pools
    return tables[:, -columns:] if windowed else tables[:, :columns]

  def over_pages(self, tables: jax.Array) -> serving.Attend[pages_lib.Pages]:
    """Returns attention over pages, which `tables` list for each row."""

    def attend(q, k, v, pages, positions, real, window=None, sinks=None):
      (b, t), tokens = q.shape[:2], (q, k, v, positions, real)
      windowed = window is not None and window < layer_options.NO_WINDOW
      numbers = self.table(tables, windowed=windowed)
      if self.exact:
        # Kernels divide the keys of a row by its last token: each token is one.
        numbers = jnp.repeat(numbers, t, axis=0)
        tokens = jax.tree.map(
          lambda x: x.reshape(b * t, 1, *x.shape[2:]), tokens
        )
      rows = *tokens[:3], pages, numbers, *tokens[3:]
      out, pages = self.paged(*rows, window, sinks)
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

  With `records`, calls return the experts that tokens choose, if there are any.

  Raises:
    ValueError: `engine.attention` cannot run there or read `engine.kv_dtype`.
  """
  dtype = jnp.dtype(dtype)
  stored = pages_lib.storage_dtype(config.kv_dtype, dtype)
  device = mesh.devices.flat[0]
  platform, several = device.platform, mesh if mesh.size > 1 else None
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
    paged.block, dtype, rounds=stored != dtype
  )
  return Model(
    a.without_lora(),
    dtype,
    stored,
    paged,
    gathered if platform == "cpu" and several is None else None,
    # The GPU compiler would otherwise join the matrices in every decode step.
    fused=platform in ("gpu", "cuda"),
    mesh=mesh,
    records=records and bool(a.experts),
    exact=config.exact,
    pools=len(kv_memory.pages(config, a, shards=mesh.shape["data"])),
  )


class Chunks(NamedTuple, Generic[A]):
  """The rows of a prefill call; several may be chunks of one sequence.

  table: int `[R, pools M]`, pages of each row; those of a second pool follow
  those of the first. tokens: int `[R, C]`, padded at the end. starts: int
  `[R]`, position of each chunk's first token. counts: int `[R]`, tokens of each
  chunk; 0 for padding rows.
  """

  table: A
  tokens: A
  starts: A
  counts: A


class Turns(NamedTuple, Generic[A]):
  """The rows of a decode call.

  table: as in `Chunks`, with room for the sampled tokens.
  last: int `[R]`, each row's last token, which is not yet cached. starts: int
  `[R]`, number of tokens cached in the row's pages. limits: int `[R]`, maximum
  number of tokens to sample; 0 for padding rows. addresses: uint32 `[R, n]`,
  the turn's address. sampled: int `[R]`, tokens of this turn sampled in
  earlier calls. stops: uint32 `[R]`, the bit of `Draws.halts` that halts the
  row. given: int `[R, steps]`, tokens that the row takes before it draws, then
  -1; `sampled` then starts below 0. None if every token is drawn.
  """

  table: A
  last: A
  starts: A
  limits: A
  addresses: A
  sampled: A
  stops: A
  settings: sampling_lib.Settings[A]
  given: A | None = None


class Draws(NamedTuple):
  """halts: uint32 `[V]`, the rows that each token halts, by their bit
  `Turns.stops`. seed: PRNG key of the run.
  """

  halts: jax.Array
  seed: jax.Array


class Decoded(NamedTuple):
  """The tokens that a decode call sampled; row r has `counts[r]` of them."""

  tokens: jax.Array  # int32 [R, steps]
  logps: jax.Array  # float32 [R, steps]
  counts: jax.Array  # int32 [R]
  # [R, >= steps, L, K], ids that the call's first `counts[r]` inputs chose, as
  # in `experts.record`; None if the model does not record them.
  experts: jax.Array | None = None


def allocator(
  a: architecture_lib.Architecture,
  pages: Sequence[int],
  size: int,
  dtype: Any,
  *,
  mesh: jax.sharding.Mesh,
) -> Callable[[], pages_lib.Pools]:
  """Returns a function that allocates zeroed pages, which it compiles once.

  They have the sharding that the calls return. With another sharding, the first
  call of each kind would compile twice. Each shard of `data` has `pages` of its
  own in each pool, the padding page included, of `size` tokens each.
  """
  counts = tuple(n * mesh.shape["data"] for n in pages)
  make = functools.partial(pages_lib.empty, a, counts, size, dtype)
  return jax.jit(make, out_shardings=sharding(a, mesh))


def empty_rows(
  model: Model, pages: pages_lib.Pools, *, lanes: int, columns: int, steps: int
) -> GatheredRows:
  """Returns memory for the rows that `decode` gathers, of every layer.

  It is () where decode reads the pages. A call has `lanes` rows of `columns`
  pages and samples at most `steps` tokens.
  """
  if model.gathered is None:
    return ()
  make = functools.partial(
    model.gathered.empty, lanes=lanes, columns=columns, steps=steps
  )
  whole = jax.sharding.NamedSharding(model.mesh, jax.P())
  return tuple(map(jax.jit(make, out_shardings=whole), pages))


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
  # Compiled programs return shardings without None at their ends.
  axes = (tensor, data) if data else (tensor,) if tensor else ()
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

  `pages` are donated. `sources` and `targets`, int `[R]` of each pool, are page
  numbers within each data shard; the first R / shards entries belong to the
  first shard, and so on.
  """
  shards = model.mesh.shape["data"]

  def moved(i: int, x: jax.Array) -> jax.Array:
    """Copies within pages `[K, P, ...]` of pool `i`, not across shards."""
    k, p, *page = x.shape
    cut = x.reshape(k, shards, p // shards, *page)
    shard = jnp.arange(shards)[:, None]
    old, new = (
      numbers[i].reshape(shards, -1) for numbers in (sources, targets)
    )
    return cut.at[:, shard, new].set(cut[:, shard, old]).reshape(x.shape)

  return tuple(
    jax.tree.map(functools.partial(moved, -int(i in model.a.windowed)), layer)
    for i, layer in enumerate(pages)
  )


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
  """Appends known tokens to some rows (chunked prefill), in donated pages.

  Returns the pages and, if the model records them, the tokens' experts
  `[R, C, L, K]`.
  """
  table, tokens, starts, counts = chunks
  _, pages, chosen = model.extend(
    params, tokens, starts, counts, pages, model.over_pages(table)
  )
  return pages, chosen


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

  `params` are of `Model.prepare`, `tokens` int `[T]`, and pages have `size` of
  them. Each of the data `shards` scores the whole sequence.

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
  """What the decode loop changes."""

  step: jax.Array
  last: jax.Array  # int [R], each row's last token
  caches: tuple[Any, ...]  # of each layer: pages, or gathered rows
  done: jax.Array  # bool [R], rows that have halted
  found: Decoded


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

  Args:
    params: the policy's, as returned by `Model.prepare`.
    pages: donated.
    rows: of `empty_rows`, for as many lanes; donated.
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
  # What decode reads and writes of each layer, and its attention.
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

  def goes_on(carry: _Carry) -> jax.Array:
    # Always run one step; a call without a step would be scheduled forever.
    left = jnp.sum(~carry.done)
    return (left > enough) | ((carry.step == 0) & (left > 0))

  def draw(
    logits: jax.Array,
    key: jax.Array,
    count: jax.Array,
    settings: sampling_lib.Settings[jax.Array],
    given: jax.Array | None,
  ) -> tuple[jax.Array, jax.Array]:
    key = jax.random.fold_in(key, count)
    return sampling_lib.sample(
      logits, key, settings, restricted=restricted, given=given
    )

  draws_of_row = jax.vmap(draw, in_axes=(0, None, 0, None, 0))
  update = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=0)
  record: Any = jax.vmap(update)

  def step(carry: _Carry) -> _Carry:
    i, last, caches, done, found = carry
    going = (~done).astype(jnp.int32)
    given = turns.given
    if given is not None:
      at = found.counts[:, None]
      given = jnp.take_along_axis(given, at, 1, mode="fill", fill_value=-1)
    hidden, caches, chosen = model.extend(
      params,
      last[:, None],
      turns.starts + found.counts,
      going,
      caches,
      attend,
    )
    drawn, logps = jax.vmap(draws_of_row)(
      decoder.logits(params, hidden),
      keys,
      (turns.sampled + found.counts)[:, None],
      turns.settings,
      given,
    )
    halts = draws.halts[drawn] & turns.stops[:, None] != 0
    if given is not None:
      halts &= given < 0
    here = (jnp.arange(steps) == found.counts[:, None]) & ~done[:, None]
    counts = found.counts + going
    found = Decoded(
      jnp.where(here, drawn, found.tokens),
      jnp.where(here, logps, found.logps),
      counts,
      None if chosen is None else record(found.experts, chosen, found.counts),
    )
    last = jnp.where(done, last, drawn[:, 0])
    done = done | halts[:, 0] | (counts >= limits)
    return _Carry(i + 1, last, caches, done, found)

  r = len(limits)
  tokens, zeros = jnp.zeros((r, steps), jnp.int32), jnp.zeros(r, jnp.int32)
  logps = jnp.zeros((r, steps), jnp.float32)
  nothing = Decoded(tokens, logps, zeros)
  if model.records:
    like = experts.record(model.a)
    shape = (r, steps + 1, *like.shape)
    nothing = nothing._replace(experts=jnp.zeros(shape, like.dtype))
  first = _Carry(jnp.int32(0), turns.last, caches, limits <= 0, nothing)
  last = jax.lax.while_loop(goes_on, step, first)
  if gathered is None:
    return last.caches, (), last.found
  pages = tuple(
    gathered.write_back(x, row, table, last.found.counts)
    for x, row, table in zip(pages, last.caches, tables, strict=True)
  )
  return pages, last.caches, last.found
