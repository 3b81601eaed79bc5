"""A feed-forward layer of experts, of which each token uses a few.

Tokens are sorted into blocks of one expert each. No token is dropped: there are
blocks enough for any choice, and a loop computes only those that are used. TPUs
have a grouped matrix product instead (`jax.lax.ragged_dot`), which XLA's other
compilers expand to a product with every expert. Few tokens, as in decode, do
use all experts: reading the weights then takes longer than the products.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import sharding

# Up to so many tokens, every expert computes all of them.
_FEW = 256
# Rows of a block, and blocks of an iteration.
_BLOCK = 128
_BLOCKS = 32
_LIMIT, _SLOPE = 7.0, 1.702  # Of gpt-oss's SwiGLU, which is clamped.


class Weights(NamedTuple):
  """Gate and up `[E, D, F]` and down `[E, F, D]` of a layer's experts.

  With a bias, `[E, 2, F]`, they are gpt-oss's, and `gate` both, `[E, 2, D, F]`.
  """

  gate: jax.Array
  up: jax.Array | None
  down: jax.Array
  bias: jax.Array | None = None


class Use(NamedTuple):
  """How real tokens use a layer's experts.

  load: float32 `[2, E]`, see `load`. recorded: the share of tokens that have a
  record. mismatch: the share of recorded ids that are not among the router's
  own choices. Both are None without records.
  """

  load: jax.Array
  recorded: jax.Array | None = None
  mismatch: jax.Array | None = None


def record(a: architecture_lib.Architecture) -> jax.ShapeDtypeStruct:
  """Returns shape `[L, K]` and dtype of a token's recorded ids.

  The largest number of the dtype is no expert's id: it means no record.
  """
  dtype = jnp.uint8 if a.experts < 256 else jnp.uint16
  return jax.ShapeDtypeStruct((a.layers, a.active), dtype)


def unrecorded(
  tokens: int, like: jax.ShapeDtypeStruct | np.ndarray
) -> np.ndarray:
  """Returns ids `[T, L, K]` of tokens without a record.

  `like` has the dtype, and L and K as its last axes.
  """
  shape = (tokens, *like.shape[-2:])
  return np.full(shape, np.iinfo(like.dtype).max, like.dtype)


def route(
  shares: jax.Array,
  a: architecture_lib.Architecture,
  recorded: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Returns the weights `[..., K]` of the chosen experts, and their ids.

  Gradients reach the router by the weights, whoever chose.

  Args:
    shares: a softmax over all experts, float32 `[..., E]`, of which the largest
      are kept; they sum to 1 again if `a.renormalized`.
    a: the architecture.
    recorded: int `[..., K]`, ids that are kept instead, where a token has them
      (`record`).
  """
  kept, chosen = jax.lax.top_k(shares, a.active)
  if recorded is not None:
    chosen = jnp.where(_known(recorded, a.experts), recorded, chosen)
    kept = jnp.take_along_axis(shares, chosen, axis=-1)
  if a.renormalized:
    kept /= kept.sum(-1, keepdims=True)
  return kept, chosen


def measure_use(
  shares: jax.Array,
  chosen: jax.Array,
  recorded: jax.Array | None,
  real: jax.Array,
) -> Use:
  """Returns how tokens that are `real`, bool `[B, T]`, use experts.

  `shares`, `chosen` and `recorded` are those of `route`.
  """
  found = Use(load(shares, chosen, real))
  if recorded is None:
    return found
  _, own = jax.lax.top_k(shares, recorded.shape[-1])
  missing = ~jnp.any(recorded[..., None] == own[..., None, :], axis=-1)
  known = real & _known(recorded, shares.shape[-1])[..., 0]
  count, other = known.sum(), jnp.where(known, missing.mean(-1), 0).sum()
  share = count / jnp.maximum(real.sum(), 1)
  return found._replace(recorded=share, mismatch=other / jnp.maximum(count, 1))


def _known(recorded: jax.Array, experts: int) -> jax.Array:
  """Returns which tokens have a record, bool `[..., 1]`."""
  return jnp.all(recorded < experts, axis=-1, keepdims=True)


def load(shares: jax.Array, chosen: jax.Array, real: jax.Array) -> jax.Array:
  """Returns how much each expert is used, float32 `[2, E]`.

  Its share of the choices of the tokens that are `real` (bool `[B, T]`), and
  its mean share of the softmax; each sums to 1.
  """
  picked = jax.nn.one_hot(chosen, shares.shape[-1]).mean(-2)
  both = jnp.where(real[..., None], jnp.stack([picked, shares]), 0)
  return both.sum((1, 2)) / jnp.maximum(real.sum(), 1)


def balance(loads: jax.Array) -> jax.Array:
  """Returns the mean over layers of E x sum of both shares, `[L, 2, E]` each.

  1 where all experts are used alike, up to E where a token's choice is always
  the same (https://arxiv.org/abs/2101.03961, equation 4). Its gradient is that
  of the softmax.
  """
  picked, shares = loads[:, 0], loads[:, 1]
  return loads.shape[-1] * jnp.sum(picked * shares, -1).mean()


def dense_weights(
  kept: jax.Array, chosen: jax.Array, experts: int
) -> jax.Array:
  """Returns the weight of each expert, `[..., E]`; others' choices count 0."""
  return jnp.sum(kept[..., None] * jax.nn.one_hot(chosen, experts), axis=-2)


def apply(
  x: jax.Array,
  w: Weights,
  kept: jax.Array,
  chosen: jax.Array,
  layout: sharding.Layout | None = None,
) -> jax.Array:
  """Returns the weighted sum of the chosen experts' outputs.

  On a mesh, every device computes its own experts for the tokens of its
  neighbours on the axis `expert`: those are gathered, and the sums scattered.
  Of 128 experts on 8 devices a token that uses 8 needs two thirds of the
  devices, so an all-to-all would not move much less, and would have to expect
  every token on one device.

  Args:
    x: `[..., D]`; on a mesh `[B, T, D]`, sharded over rows and positions.
    w: the experts' weights.
    kept: `[..., K]`. chosen: int `[..., K]`; both of `route`.
    layout: of `x`, if it is on a mesh.
  """
  if layout is None:
    return _apply(x, w, kept, chosen)
  mesh, parts = layout.mesh, layout.mesh.shape["expert"]
  width = "tensor" if w.down.shape[1] % mesh.shape["tensor"] == 0 else None

  def local(x, shards, kept, chosen):
    w = Weights(*shards)
    if parts > 1:
      gather = functools.partial(
        jax.lax.all_gather, axis_name="expert", axis=0, tiled=True
      )
      x, kept, chosen = gather(x), gather(kept), gather(chosen)
      chosen -= jax.lax.axis_index("expert") * w.down.shape[0]
    y = _apply(x, w, kept, chosen, parts=parts)
    if width:
      y = jax.lax.psum(y, width)
    if parts > 1:
      y = jax.lax.psum_scatter(y, "expert", scatter_dimension=0, tiled=True)
    return y

  tokens = jax.P(*layout.tokens, None)
  into = jax.P("expert", None, width)
  gate = into if w.bias is None else jax.P("expert", None, None, width)
  out = jax.P("expert", width, None)
  return layout.shard_map(
    local,
    in_specs=(tokens, (gate, into, out, into), tokens, tokens),
    out_specs=tokens,
  )(x, tuple(w), kept, chosen)


def _apply(
  x: jax.Array,
  w: Weights,
  kept: jax.Array,
  chosen: jax.Array,
  *,
  parts: int = 1,
) -> jax.Array:
  """Computes the experts of `w`; choices outside of 0 to E - 1 count as 0."""
  rows = x.reshape(-1, x.shape[-1])
  kept, chosen = (c.reshape(len(rows), -1) for c in (kept, chosen))
  if len(rows) <= _FEW:
    y = _every(rows, w, kept, chosen)
  else:
    y = _sorted(rows, w, kept, chosen, parts=parts)
  return y.astype(x.dtype).reshape(x.shape)


def _every(
  x: jax.Array, w: Weights, kept: jax.Array, chosen: jax.Array
) -> jax.Array:
  """Computes all experts for all tokens `[N, D]`, weighted with 0 or `kept`."""
  shares = dense_weights(kept, chosen, len(w.down))
  # One product an expert: as one product, GPUs would transpose the weights.
  hidden = _hidden(jnp.broadcast_to(x, (len(w.down), *x.shape)), w)
  hidden *= shares.T[..., None].astype(hidden.dtype)
  return jnp.einsum("enf,efd->nd", hidden, w.down)


def _hidden(x: jax.Array, w: Weights) -> jax.Array:
  """Returns what `down` multiplies, of rows `[E, N, D]` of each expert."""
  if w.bias is None:
    assert w.up is not None
    return jax.nn.silu(x @ w.gate) * (x @ w.up)
  # One product for both: slices of the weights would be copies.
  both = jnp.broadcast_to(x[:, None], (len(x), 2, *x.shape[1:])) @ w.gate
  return _clamped(both[:, 0], both[:, 1], w.bias[:, :, None])


def _clamped(gate: jax.Array, up: jax.Array, bias: jax.Array) -> jax.Array:
  """Returns gpt-oss's SwiGLU; its biases are `[:, 0]` and `[:, 1]`."""
  gate = jnp.minimum(gate + bias[:, 0], _LIMIT)
  up = jnp.clip(up + bias[:, 1], -_LIMIT, _LIMIT)
  return gate * jax.nn.sigmoid(_SLOPE * gate) * (up + 1)


def _sorted(
  x: jax.Array, w: Weights, kept: jax.Array, chosen: jax.Array, *, parts: int
) -> jax.Array:
  """Computes each token `[N, D]` by its own experts, in blocks.

  `w` is one of so many parts of the experts.
  """
  count, active = chosen.shape
  experts = len(w.down)
  inside = (chosen >= 0) & (chosen < experts)
  ids = jnp.where(inside, chosen, experts).reshape(-1)
  sizes = jnp.bincount(ids, length=experts + 1)[:experts]
  blocks = -(-sizes // _BLOCK)
  ends = jnp.cumsum(blocks)
  # Whole iterations of blocks that suffice for any choice.
  most = -(-(ids.size // _BLOCK + experts) // _BLOCKS) * _BLOCKS
  owner = jnp.searchsorted(ends, jnp.arange(most), side="right")
  owner = jnp.minimum(owner, experts - 1)
  # The place of a choice: its expert's first block, and its rank there.
  order = jnp.argsort(ids, stable=True)
  rank = jnp.zeros_like(ids).at[order].set(jnp.arange(ids.size))
  rank -= jnp.append(jnp.cumsum(sizes) - sizes, 0)[ids]
  place = jnp.append((ends - blocks) * _BLOCK, 0)[ids] + rank
  place = jnp.where(inside.reshape(-1), place, most * _BLOCK)
  source = jnp.full(most * _BLOCK, count, jnp.int32)
  source = source.at[place].set(jnp.arange(ids.size) // active, mode="drop")
  taken = jnp.take(x, source, axis=0, mode="fill", fill_value=0)
  y = _blocks(taken, w, owner, blocks * _BLOCK)
  found = jnp.take(
    y, place.reshape(count, active), axis=0, mode="fill", fill_value=0
  )
  return jnp.einsum("nkd,nk->nd", found.astype(jnp.float32), kept)


@jax.custom_vjp
def _blocks(
  x: jax.Array, w: Weights, owner: jax.Array, sizes: jax.Array
) -> jax.Array:
  """Computes blocks of rows by the expert that owns each.

  Args:
    x: `[blocks x _BLOCK, D]`; rows after the last used block are not read.
    w: the experts' weights.
    owner: int `[blocks]`, ascending.
    sizes: int `[E]`, rows in the blocks of each expert.
  """
  return jax.lax.platform_dependent(
    *(x, w, owner, sizes), tpu=_grouped, default=_looped
  )


def _forward(x, w, owner, sizes):
  return _blocks(x, w, owner, sizes), (x, w, owner, sizes)


def _backward(residuals, g):
  x, w, owner, sizes = residuals

  def grouped(x, w, owner, sizes, g):
    _, pull = jax.vjp(lambda x, w: _grouped(x, w, owner, sizes), x, w)
    return pull(g)

  dx, dw = jax.lax.platform_dependent(
    *(x, w, owner, sizes, g), tpu=grouped, default=_looped_backward
  )
  return dx, dw, None, None


_blocks.defvjp(_forward, _backward)


def _grouped(x, w, owner, sizes):
  product = functools.partial(jax.lax.ragged_dot, group_sizes=sizes)
  if w.bias is None:
    hidden = jax.nn.silu(product(x, w.gate)) * product(x, w.up)
  else:
    gate, up = (product(x, w.gate[:, i]) for i in range(2))
    hidden = _clamped(gate, up, w.bias[jnp.repeat(owner, _BLOCK)])
  return product(hidden, w.down)


def _batched(x: jax.Array, w: Weights) -> jax.Array:
  """Computes blocks `[_BLOCKS, _BLOCK, D]`, each with weights of its own."""
  return _hidden(x, w) @ w.down


def _looped(x, w, owner, sizes):
  def step(i, y):
    cut, mine = _iteration(i, w, owner)
    return _put(y, _batched(cut(x), mine), i)

  return jax.lax.fori_loop(0, _iterations(sizes), step, jnp.zeros_like(x))


def _looped_backward(x, w, owner, sizes, g):
  def step(i, carry):
    dx, dw = carry
    cut, mine = _iteration(i, w, owner)
    _, pull = jax.vjp(_batched, cut(x), mine)
    of_x, of_w = pull(cut(g))
    ids = jax.lax.dynamic_slice_in_dim(owner, i * _BLOCKS, _BLOCKS)

    def added(total, new):
      # Blocks of an expert add up in float32, one after another.
      new = new.astype(jnp.float32)
      return total + jax.ops.segment_sum(new, ids, len(total), True)

    return _put(dx, of_x, i), jax.tree.map(added, dw, of_w)

  zeros = jax.tree.map(lambda m: jnp.zeros(m.shape, jnp.float32), w)
  start = jnp.zeros_like(x), zeros
  dx, dw = jax.lax.fori_loop(0, _iterations(sizes), step, start)
  return dx, jax.tree.map(lambda d, m: d.astype(m.dtype), dw, w)


def _iterations(sizes: jax.Array) -> jax.Array:
  return -(-sizes.sum() // (_BLOCK * _BLOCKS))


def _iteration(i, w, owner):
  """Returns how to cut the rows of an iteration, and its blocks' weights."""
  ids = jax.lax.dynamic_slice_in_dim(owner, i * _BLOCKS, _BLOCKS)

  def cut(x):
    size = _BLOCKS * _BLOCK
    found = jax.lax.dynamic_slice_in_dim(x, i * size, size)
    return found.reshape(_BLOCKS, _BLOCK, -1)

  return cut, jax.tree.map(lambda m: m[ids], w)


def _put(y, new, i):
  new = new.reshape(-1, y.shape[1]).astype(y.dtype)
  return jax.lax.dynamic_update_slice_in_dim(y, new, i * len(new), 0)
