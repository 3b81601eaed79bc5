"""A feed-forward layer of experts, of which each token uses a few.

Shapes: E experts, of which a token uses k; F is their inner width.

Tokens are sorted into blocks of one expert each. No token is dropped: there are
enough blocks for any choice, and a loop computes only those that are used. TPUs
have a grouped matrix product instead (`jax.lax.ragged_dot`), which XLA's other
compilers expand to a product with every expert. A call of few tokens, as in
decode, computes every expert for all of them: reading the weights then takes
longer than the products.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import sharding

# A call of at most this many tokens computes every expert for all of them.
_FEW = 256
# Rows of a block, all of one expert: a tile of a matrix product.
_BLOCK = 128
# Blocks that an iteration of the loop computes, as one batched product.
_BLOCKS = 32
# Constants of gpt-oss's clamped SwiGLU.
_LIMIT = 7.0
_SLOPE = 1.702


class Weights(NamedTuple):
  """The matrices of a layer's experts.

  Attributes:
    gate: `[E, D, F]`; of gpt-oss gate and up, `[E, 2, D, F]`.
    up: `[E, D, F]`; None for gpt-oss.
    down: `[E, F, D]`.
    bias: of gpt-oss's gate and up, `[E, 2, F]`; otherwise None.
  """

  gate: jax.Array
  up: jax.Array | None
  down: jax.Array
  bias: jax.Array | None = None


class Use(NamedTuple):
  """How real tokens use a layer's experts.

  Attributes:
    load: float32 `[2, E]`, see `load`.
    recorded: share of the tokens that have a record; None without records.
    mismatch: share of the recorded ids that are not among the router's own
      choices; None without records.
  """

  load: jax.Array
  recorded: jax.Array | None = None
  mismatch: jax.Array | None = None


def record(a: architecture_lib.Architecture) -> jax.ShapeDtypeStruct:
  """Returns shape `[L, k]` and dtype of the ids that a token's record holds.

  The largest number of the dtype is no expert's id: it means no record.
  """
  dtype = jnp.uint8 if a.experts < 256 else jnp.uint16
  return jax.ShapeDtypeStruct((a.layers, a.active), dtype)


def route(
  probs: jax.Array,
  a: architecture_lib.Architecture,
  recorded: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Chooses the experts of each token.

  Args:
    probs: the router's softmax over all experts, float32 `[..., E]`.
    a: the architecture.
    recorded: int `[..., k]`, ids to use instead of the top k, for tokens that
      have a record (`record`).

  Returns:
    The weights `[..., k]` of the chosen experts, which sum to 1 if
    `a.renormalized`, and their ids. The router gets its gradients by the
    weights, also those of recorded experts.
  """
  top_probs, expert_ids = jax.lax.top_k(probs, a.active)
  if recorded is not None:
    expert_ids = jnp.where(
      _has_record(recorded, a.experts), recorded, expert_ids
    )
    top_probs = jnp.take_along_axis(probs, expert_ids, axis=-1)
  if a.renormalized:
    top_probs /= top_probs.sum(-1, keepdims=True)
  return top_probs, expert_ids


def measure_use(
  probs: jax.Array,
  expert_ids: jax.Array,
  recorded: jax.Array | None,
  real: jax.Array,
) -> Use:
  """Measures how tokens use experts.

  Args:
    probs: the router's softmax, float32 `[B, T, E]`.
    expert_ids: int `[B, T, k]`, of `route`.
    recorded: int `[B, T, k]`, recorded ids; None without records.
    real: bool `[B, T]`, False for padding, which does not count.
  """
  loads = load(probs, expert_ids, real)
  if recorded is None:
    return Use(loads)
  _, top_ids = jax.lax.top_k(probs, recorded.shape[-1])
  mismatched = ~jnp.any(recorded[..., None] == top_ids[..., None, :], axis=-1)
  has_record = real & _has_record(recorded, probs.shape[-1])[..., 0]
  count = has_record.sum()
  mismatch_sum = jnp.where(has_record, mismatched.mean(-1), 0).sum()
  return Use(
    load=loads,
    recorded=count / jnp.maximum(real.sum(), 1),
    mismatch=mismatch_sum / jnp.maximum(count, 1),
  )


def _has_record(recorded: jax.Array, experts: int) -> jax.Array:
  """Returns whether each token has a record, bool `[..., 1]`."""
  return jnp.all(recorded < experts, axis=-1, keepdims=True)


def load(probs: jax.Array, expert_ids: jax.Array, real: jax.Array) -> jax.Array:
  """Returns each expert's share of the choices and of the softmax.

  Args:
    probs: the router's softmax, float32 `[B, T, E]`.
    expert_ids: int `[B, T, k]`, the chosen experts.
    real: bool `[B, T]`, False for padding, which does not count.

  Returns:
    float32 `[2, E]`: the shares of the choices, and the mean probabilities.
    Each row sums to 1.
  """
  choice_shares = jax.nn.one_hot(expert_ids, probs.shape[-1]).mean(-2)
  shares = jnp.stack([choice_shares, probs])
  shares = jnp.where(real[..., None], shares, 0)
  return shares.sum((1, 2)) / jnp.maximum(real.sum(), 1)


def balance(loads: jax.Array) -> jax.Array:
  """Returns the load-balancing loss, the mean over layers.

  It is E times the sum over experts of both shares' product: 1 if all experts
  are used alike, up to E if all tokens choose the same
  (https://arxiv.org/abs/2101.03961, equation 4). Its gradient is that of the
  softmax.

  Args:
    loads: `[L, 2, E]`, see `load`.
  """
  choice_shares = loads[:, 0]
  mean_probs = loads[:, 1]
  return loads.shape[-1] * jnp.sum(choice_shares * mean_probs, -1).mean()


def dense_weights(
  top_probs: jax.Array, expert_ids: jax.Array, experts: int
) -> jax.Array:
  """Returns the weight of every expert, 0 for those that are not chosen.

  Args:
    top_probs: weights of the chosen experts `[..., k]`.
    expert_ids: their ids, int `[..., k]`; those outside 0 to E - 1 are ignored.
    experts: E.

  Returns:
    `[..., E]`.
  """
  one_hot = jax.nn.one_hot(expert_ids, experts)
  return jnp.sum(top_probs[..., None] * one_hot, axis=-2)


def apply(
  x: jax.Array,
  w: Weights,
  top_probs: jax.Array,
  expert_ids: jax.Array,
  layout: sharding.Layout | None = None,
) -> jax.Array:
  """Returns the weighted sum of the chosen experts' outputs.

  On a mesh, every device computes its own experts for the tokens of its
  neighbours on the axis `expert`: those are gathered, and the sums scattered.
  Of 128 experts on 8 devices a token that uses 8 needs two thirds of the
  devices, so an all-to-all would not move much less, and would need room for
  every token on one device.

  Args:
    x: `[..., D]`; on a mesh `[B, T, D]`, sharded over rows and positions.
    w: the experts' weights.
    top_probs: `[..., k]`, of `route`.
    expert_ids: int `[..., k]`, of `route`.
    layout: how `x` is sharded; None means one device.
  """
  if layout is None:
    return _apply(x, w, top_probs, expert_ids)
  mesh = layout.mesh
  shard_count = mesh.shape["expert"]
  width = "tensor" if w.down.shape[1] % mesh.shape["tensor"] == 0 else None

  def local(x, shards, top_probs, expert_ids):
    w = Weights(*shards)
    if shard_count > 1:
      gather = functools.partial(
        jax.lax.all_gather, axis_name="expert", axis=0, tiled=True
      )
      x, top_probs, expert_ids = map(gather, (x, top_probs, expert_ids))
      # Ids count from this device's first expert; others are out of range.
      expert_ids -= jax.lax.axis_index("expert") * w.down.shape[0]
    y = _apply(x, w, top_probs, expert_ids)
    if width:
      y = jax.lax.psum(y, width)
    if shard_count > 1:
      y = jax.lax.psum_scatter(y, "expert", scatter_dimension=0, tiled=True)
    return y

  tokens = jax.P(*layout.tokens, None)
  up = jax.P("expert", None, width)  # Also of biases.
  gate = up if w.bias is None else jax.P("expert", None, None, width)
  down = jax.P("expert", width, None)
  return layout.shard_map(
    local,
    in_specs=(tokens, (gate, up, down, up), tokens, tokens),
    out_specs=tokens,
  )(x, tuple(w), top_probs, expert_ids)


def _apply(
  x: jax.Array, w: Weights, top_probs: jax.Array, expert_ids: jax.Array
) -> jax.Array:
  """Computes the experts of `w`; ids outside of 0 to E - 1 are ignored."""
  rows = x.reshape(-1, x.shape[-1])
  top_probs = top_probs.reshape(len(rows), -1)
  expert_ids = expert_ids.reshape(len(rows), -1)
  compute = _dense if len(rows) <= _FEW else _sorted
  y = compute(rows, w, top_probs, expert_ids)
  return y.astype(x.dtype).reshape(x.shape)


def _dense(
  x: jax.Array, w: Weights, top_probs: jax.Array, expert_ids: jax.Array
) -> jax.Array:
  """Computes all experts for all tokens `[tokens, D]`, most with weight 0."""
  shares = dense_weights(top_probs, expert_ids, len(w.down))
  # One product an expert: as one product, GPUs would transpose the weights.
  hidden = _hidden(jnp.broadcast_to(x, (len(w.down), *x.shape)), w)
  hidden *= shares.T[..., None].astype(hidden.dtype)
  return jnp.einsum("enf,efd->nd", hidden, w.down)


def _hidden(x: jax.Array, w: Weights) -> jax.Array:
  """Returns the input `[E, tokens, F]` of `down`, of rows `[E, tokens, D]`."""
  if w.bias is None:
    assert w.up is not None
    return jax.nn.silu(x @ w.gate) * (x @ w.up)
  # One product for both: slices of the weights would be copies.
  twice = jnp.broadcast_to(x[:, None], (len(x), 2, *x.shape[1:]))
  gate_and_up = twice @ w.gate
  return _clamped(gate_and_up[:, 0], gate_and_up[:, 1], w.bias[:, :, None])


def _clamped(gate: jax.Array, up: jax.Array, bias: jax.Array) -> jax.Array:
  """Returns gpt-oss's SwiGLU; its biases are `bias[:, 0]` and `bias[:, 1]`."""
  gate = jnp.minimum(gate + bias[:, 0], _LIMIT)
  up = jnp.clip(up + bias[:, 1], -_LIMIT, _LIMIT)
  return gate * jax.nn.sigmoid(_SLOPE * gate) * (up + 1)


def _sorted(
  x: jax.Array, w: Weights, top_probs: jax.Array, expert_ids: jax.Array
) -> jax.Array:
  """Computes each token `[tokens, D]` by its own experts, in blocks.

  Every choice of a token gets a slot. The slots of an expert are neighbours,
  and its first slot begins a block, so that a block needs one expert's weights.
  """
  tokens, active = expert_ids.shape
  experts = len(w.down)
  inside = (expert_ids >= 0) & (expert_ids < experts)
  # `experts` stands for the choices of other devices' experts, which sort last.
  ids = jnp.where(inside, expert_ids, experts).reshape(-1)
  sizes = jnp.bincount(ids, length=experts + 1)[:experts]
  blocks = -(-sizes // _BLOCK)
  ends = jnp.cumsum(blocks)
  # Blocks for any choice, in whole iterations: each expert's last block may be
  # incomplete.
  max_blocks = -(-(ids.size // _BLOCK + experts) // _BLOCKS) * _BLOCKS
  owner = jnp.searchsorted(ends, jnp.arange(max_blocks), side="right")
  owner = jnp.minimum(owner, experts - 1)  # Of blocks past the last used one.
  # The slot of a choice: its expert's first slot, and its rank among the
  # expert's choices.
  order = jnp.argsort(ids, stable=True)
  rank = jnp.zeros_like(ids).at[order].set(jnp.arange(ids.size))
  rank -= jnp.append(jnp.cumsum(sizes) - sizes, 0)[ids]
  slot = jnp.append((ends - blocks) * _BLOCK, 0)[ids] + rank
  slot = jnp.where(inside.reshape(-1), slot, max_blocks * _BLOCK)
  token_of_slot = jnp.full(max_blocks * _BLOCK, tokens, jnp.int32)
  token_of_slot = token_of_slot.at[slot].set(
    jnp.arange(ids.size) // active, mode="drop"
  )
  rows = jnp.take(x, token_of_slot, axis=0, mode="fill", fill_value=0)
  y = _blocks(rows, w, owner, blocks * _BLOCK)
  outputs = jnp.take(
    y, slot.reshape(tokens, active), axis=0, mode="fill", fill_value=0
  )
  return jnp.einsum("nkd,nk->nd", outputs.astype(jnp.float32), top_probs)


@jax.custom_vjp
def _blocks(
  x: jax.Array, w: Weights, owner: jax.Array, sizes: jax.Array
) -> jax.Array:
  """Computes blocks of rows by the expert that owns each.

  Args:
    x: `[blocks x _BLOCK, D]`; rows after the last used block are not read.
    w: the experts' weights.
    owner: int `[blocks]`, the expert of each block, ascending.
    sizes: int `[E]`, rows in the blocks of each expert.
  """
  # Chosen when the program is lowered, which knows the platform.
  return jax.lax.platform_dependent(
    x, w, owner, sizes, tpu=_grouped, default=_looped
  )


def _forward(x, w, owner, sizes):
  """Returns `_blocks` and what its backward pass reads."""
  return _blocks(x, w, owner, sizes), (x, w, owner, sizes)


def _backward(residuals, g):
  x, w, owner, sizes = residuals

  def grouped(x, w, owner, sizes, g):
    _, vjp = jax.vjp(lambda x, w: _grouped(x, w, owner, sizes), x, w)
    return vjp(g)

  dx, dw = jax.lax.platform_dependent(
    x, w, owner, sizes, g, tpu=grouped, default=_looped_backward
  )
  return dx, dw, None, None


_blocks.defvjp(_forward, _backward)


def _grouped(x, w, owner, sizes):
  """Computes `_blocks` by grouped matrix products."""
  product = functools.partial(jax.lax.ragged_dot, group_sizes=sizes)
  if w.bias is None:
    hidden = jax.nn.silu(product(x, w.gate)) * product(x, w.up)
  else:
    gate = product(x, w.gate[:, 0])
    up = product(x, w.gate[:, 1])
    hidden = _clamped(gate, up, w.bias[jnp.repeat(owner, _BLOCK)])
  return product(hidden, w.down)


def _batched(x: jax.Array, w: Weights) -> jax.Array:
  """Computes blocks `[_BLOCKS, _BLOCK, D]`, each with weights of its own."""
  return _hidden(x, w) @ w.down


def _looped(x, w, owner, sizes):
  """Computes `_blocks` by a loop over the blocks that are used.

  An iteration gathers the weights of its blocks' experts. The number of
  iterations is known only on the device, so reverse-mode differentiation needs
  `_looped_backward`.
  """

  def step(i, y):
    cut, block_weights = _iteration(i, w, owner)
    return _put(y, _batched(cut(x), block_weights), i)

  return jax.lax.fori_loop(0, _iterations(sizes), step, jnp.zeros_like(x))


def _looped_backward(x, w, owner, sizes, g):
  """Returns the gradients of `_looped` for its rows and its weights."""

  def step(i, carry):
    dx, dw = carry
    cut, block_weights = _iteration(i, w, owner)
    _, vjp = jax.vjp(_batched, cut(x), block_weights)
    dx_blocks, dw_blocks = vjp(cut(g))
    ids = jax.lax.dynamic_slice_in_dim(owner, i * _BLOCKS, _BLOCKS)

    def add(total, gradient):
      # Blocks of an expert add up in float32, one after another.
      gradient = gradient.astype(jnp.float32)
      return total + jax.ops.segment_sum(
        gradient, ids, len(total), indices_are_sorted=True
      )

    return _put(dx, dx_blocks, i), jax.tree.map(add, dw, dw_blocks)

  zeros = jax.tree.map(lambda m: jnp.zeros(m.shape, jnp.float32), w)
  carry = (jnp.zeros_like(x), zeros)
  dx, dw = jax.lax.fori_loop(0, _iterations(sizes), step, carry)
  return dx, jax.tree.map(lambda d, m: d.astype(m.dtype), dw, w)


def _iterations(sizes: jax.Array) -> jax.Array:
  """Returns the number of iterations for blocks with these rows."""
  return -(-sizes.sum() // (_BLOCK * _BLOCKS))


def _iteration(i, w, owner):
  """Returns how to cut the rows of an iteration, and its blocks' weights."""
  ids = jax.lax.dynamic_slice_in_dim(owner, i * _BLOCKS, _BLOCKS)

  def cut(x):
    size = _BLOCKS * _BLOCK
    rows = jax.lax.dynamic_slice_in_dim(x, i * size, size)
    return rows.reshape(_BLOCKS, _BLOCK, -1)

  return cut, jax.tree.map(lambda m: m[ids], w)


def _put(y, blocks, i):
  """Writes the blocks of iteration `i` to the rows `y`."""
  rows = blocks.reshape(-1, y.shape[1]).astype(y.dtype)
  return jax.lax.dynamic_update_slice_in_dim(y, rows, i * len(rows), 0)
