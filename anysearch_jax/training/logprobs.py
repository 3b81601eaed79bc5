"""Token log-probabilities without a `[B, T, V]` array.

Logits are computed for a chunk of positions at a time, in the forward pass and
again in the backward pass: a vocabulary is much wider than the hidden states,
so the logits of all positions would dominate the memory. Positions that no loss
needs, such as those of passages, have none: each device compacts the others of
its rows and loops over as many chunks as they fill. On a mesh every device has
a part of the vocabulary and of the rows, as in Megatron-LM
(https://arxiv.org/abs/1909.08053, section 3). The head is gathered over fsdp
once a pass, the normalizer is combined from the parts, and the head's gradient
is summed in float32 and scattered back once.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import cpu_bfloat16, decoder, experts, sharding
from anysearch_jax.policy import parameters as weights

# The least number of chunks that all positions of a device fill.
_CHUNKS = 8


def token_logprobs(
  params: decoder.Params,
  a: architecture_lib.Architecture,
  tokens: jax.Array,
  targets: jax.Array,
  positions: jax.Array,
  segment_ids: jax.Array,
  scored: jax.Array | None = None,
  recorded: jax.Array | None = None,
  *,
  temperature: float = 1.0,
  compute: decoder.Compute = decoder.Compute(),  # noqa: B008
  entropy_trains: bool = False,
) -> tuple[jax.Array, jax.Array]:
  """Returns the log-probability of each target and the prediction's entropy.

  Both are of `log_softmax(logits / temperature)`, as the engine samples.

  Args:
    params, a, tokens, positions, segment_ids, compute: as for
      `decoder.forward`.
    targets: int `[B, T]`, the token after each of `tokens`.
    scored: bool `[B, T]`, the positions to compute; None means all of them.
    recorded: experts that replace the router's choice, int `[B, T, L, K]`, see
      `experts.record`.
    temperature: > 0.
    entropy_trains: whether the entropy has a gradient; it is 0 otherwise.

  Returns:
    logp and entropy (nats), float32 `[B, T]` each; 0 where not `scored`.
  """
  logp, entropy, _ = with_use(
    params,
    a,
    tokens,
    targets,
    positions,
    segment_ids,
    scored,
    recorded,
    temperature=temperature,
    compute=compute,
    entropy_trains=entropy_trains,
  )
  return logp, entropy


def with_use(
  params: decoder.Params,
  a: architecture_lib.Architecture,
  tokens: jax.Array,
  targets: jax.Array,
  positions: jax.Array,
  segment_ids: jax.Array,
  scored: jax.Array | None,
  recorded: jax.Array | None,
  *,
  temperature: float,
  compute: decoder.Compute,
  entropy_trains: bool = False,
) -> tuple[jax.Array, jax.Array, experts.Use | None]:
  """Returns what `token_logprobs` does, and how the policy's experts are used.

  Args:
    params, a, tokens, targets, positions, segment_ids, scored, recorded,
      temperature, compute, entropy_trains: as for `token_logprobs`.

  Returns:
    logp, entropy, and the use of the experts; None for a policy without them.
  """
  if scored is None:
    scored = jnp.ones(tokens.shape, bool)
  chex.assert_equal_shape([tokens, targets, positions, segment_ids, scored])
  hidden, use = decoder.forward_with_use(
    params, a, tokens, positions, segment_ids, recorded, compute=compute
  )
  head = decoder.head(params)
  plan = _Plan(
    temperature=temperature,
    chunk=compute.logprob_chunk,
    head_trains=a.lora is None,
    entropy_trains=entropy_trains,
  )
  if (layout := compute.layout) is not None:
    vocab, model = layout.table(head.shape)
    sequence = "tensor" if layout.sequence_parallel else None
    plan = plan._replace(
      layout=layout, vocab=vocab, model=model, sequence=sequence
    )
  logp, entropy = _logprobs(plan, hidden, head, targets, scored)
  return logp, entropy, use


def chunk(rows: int, length: int, row_chunk: int) -> int:
  """Returns the number of positions whose logits a device computes at a time.

  Few positions are cut into several chunks too, because the last one is padded.

  Args:
    rows: of the device.
    length: tokens of a row.
    row_chunk: `batch.logprob_chunk`.
  """
  return min(rows * row_chunk, -(-rows * length // _CHUNKS))


class _Plan(NamedTuple):
  """What a pass computes, and the mesh axes that arrays are sharded over.

  Attributes:
    temperature: divides the logits.
    chunk: `batch.logprob_chunk`.
    head_trains: whether the head gets a gradient.
    entropy_trains: whether the entropy has a gradient.
    layout: the mesh; None: one device, where everything is replicated.
    vocab, model: axes of the head; None: replicated.
    sequence: axis of the positions of hidden states, but not of tokens; None:
      replicated.
  """

  temperature: float
  chunk: int
  head_trains: bool
  entropy_trains: bool = False
  layout: sharding.Layout | None = None
  vocab: str | None = None
  model: weights.Over = None
  sequence: str | None = None

  def over_mesh(self, f, ins: str, outs: str):
    """Wraps a function so that it runs on each device's shards.

    Args:
      f: the function of one device's arrays.
      ins: its arguments, a letter for each: h for hidden states, w for the
        head's weight, t for values of tokens.
      outs: its results, by the same letters.
    """
    if self.layout is None:
      return f
    specs = {
      "h": jax.P(sharding.BATCH, self.layout.rules["between"], None),
      "w": jax.P(self.vocab, self.model),
      "t": self.layout.tokens,
    }
    return self.layout.shard_map(
      f, tuple(specs[i] for i in ins), tuple(specs[o] for o in outs)
    )


# The gradient is custom because a loop with a bound that only the device knows
# has none, and because autodiff would save the probabilities of every chunk,
# together a `[B, T, V]` array.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _logprobs(plan: _Plan, hidden, head, targets, scored):
  return _forward(plan, hidden, head, targets, scored)[0]


def _forward(plan: _Plan, hidden, head, targets, scored):
  logp, entropy, normalizer = plan.over_mesh(
    functools.partial(_local_forward, plan), "hwtt", "ttt"
  )(hidden, head, targets, scored)
  residuals = (
    hidden,
    head,
    targets,
    scored,
    normalizer,
    entropy if plan.entropy_trains else None,
  )
  return (logp, entropy), residuals


def _backward(plan: _Plan, residuals, cotangents):
  hidden, head, targets, scored, normalizer, entropy = residuals
  g, entropy_cotangent = cotangents
  tokens = [targets, scored, normalizer, g]
  if plan.entropy_trains:
    tokens += [entropy, entropy_cotangent]
  d_hidden, d_head = plan.over_mesh(
    functools.partial(_local_backward, plan), "hw" + "t" * len(tokens), "hw"
  )(hidden, head, *tokens)
  return d_hidden, d_head.astype(head.dtype), None, None


_logprobs.defvjp(_forward, _backward)


class _Compact(NamedTuple):
  """The scored positions of a device, `[N]` of its rows one after another.

  Attributes:
    scored: bool `[N]`.
    rank: int `[N]`, number of scored positions before each.
    order: the scored positions, padded with the first of them to whole chunks.
    size: positions of a chunk.
  """

  scored: jax.Array
  rank: jax.Array
  order: jax.Array
  size: int

  @classmethod
  def from_scored(cls, plan: _Plan, scored: jax.Array) -> _Compact:
    """Compacts the positions that are `scored`, bool `[B, T]`."""
    rows, length = scored.shape
    size = chunk(rows, length, plan.chunk)
    scored = jnp.ravel(scored)
    rank = jnp.cumsum(scored) - scored
    order = jnp.full(-(-scored.size // size) * size, jnp.argmax(scored))
    # Positions that are not scored get an index out of range, which drops them.
    indices = jnp.where(scored, rank, order.size)
    order = order.at[indices].set(jnp.arange(scored.size), mode="drop")
    return cls(scored, rank, order, size)

  def loop(self, f, *init):
    """Calls `f(start, positions, real, *values)` for each chunk.

    `start` is the chunk's in `order`, `positions` are `[C]`, and `real` is bool
    `[C]`, False in the padding. `f` returns the next values; `init` are the
    first ones.
    """
    count = jnp.sum(self.scored)

    def body(i, values):
      start = i * self.size
      positions = jax.lax.dynamic_slice_in_dim(self.order, start, self.size)
      real = start + jnp.arange(self.size) < count
      return f(start, positions, real, *values)

    return jax.lax.fori_loop(0, -(-count // self.size), body, init)

  def spread(self, x: jax.Array, shape) -> jax.Array:
    """Returns `[P, ...]` in the order of `order` as `[B, T, ...]`.

    Positions that are not scored get 0.
    """
    scored = self.scored.reshape(-1, *[1] * (x.ndim - 1))
    return jnp.where(scored, x[self.rank], 0).reshape(*shape, *x.shape[1:])


def _local_forward(plan: _Plan, hidden, head, targets, scored):
  """Returns logp, entropy and log-normalizer of this device's rows, `[B, T]`.

  Each device reduces its part of the vocabulary relative to its own maximum;
  the parts are then rescaled to the maximum over all devices.
  """
  hidden, head = _gathered(plan, hidden, head)
  first_token_id = _first_token_id(plan, head)
  compact = _Compact.from_scored(plan, scored)
  states = hidden.reshape(-1, hidden.shape[-1])
  tokens = jnp.ravel(targets)

  def add_chunk(start, positions, real, sums):
    del real
    logits = decoder.project(states[positions], head) / plan.temperature
    top = jnp.max(logits, -1)
    p = jnp.exp(logits - top[:, None])
    # A masked sum instead of a gather: it is exact, and 0 on the devices whose
    # part of the vocabulary does not have the target.
    target = _is_target(logits, tokens[positions], first_token_id)
    chunk_sums = jnp.stack(
      (
        top,
        jnp.sum(p, -1),
        jnp.sum(p * logits, -1),
        jnp.sum(jnp.where(target, logits, 0), -1),
      )
    )
    return (jax.lax.dynamic_update_slice_in_dim(sums, chunk_sums, start, 1),)

  (sums,) = compact.loop(add_chunk, jnp.ones((4, compact.order.size)))
  top, total, weighted, target = sums
  vocab = plan.vocab
  if vocab is not None:
    highest = jax.lax.pmax(top, vocab)
    scale = jnp.exp(top - highest)
    total, weighted, target = jax.lax.psum(
      (total * scale, weighted * scale, target), vocab
    )
    top = highest
  normalizer = top + jnp.log(total)
  logp = target - normalizer
  entropy = normalizer - weighted / total
  return tuple(
    compact.spread(x, targets.shape) for x in (logp, entropy, normalizer)
  )


def _local_backward(
  plan: _Plan, hidden, head, targets, scored, normalizer, g, *entropy
):
  """Returns the gradients of `sum(g * logp)` for this device's hidden and head.

  With p the softmax, the gradient for the logits is g (onehot(target) - p).
  `entropy` is empty, or the entropy H and its cotangent e; these add the
  gradient of `sum(e * H)`, which is -e p (log p + H) for the logits.
  """
  row_states, gathered = _gathered(plan, hidden, head)
  first_token_id = _first_token_id(plan, gathered)
  compact = _Compact.from_scored(plan, scored)
  states = row_states.reshape(-1, row_states.shape[-1])
  tokens = [jnp.ravel(x) for x in (targets, normalizer, g, *entropy)]

  def add_chunk(start, positions, real, d_head, d_hidden):
    targets, normalizer, g, *entropy = (x[positions] for x in tokens)
    hidden = states[positions]
    scale = jnp.where(real, 1 / plan.temperature, 0)
    logits = decoder.project(hidden, gathered) / plan.temperature
    logp = logits - normalizer[:, None]
    p = jnp.exp(logp)
    d = jnp.where(_is_target(logits, targets, first_token_id), 1 - p, -p)
    d *= (g * scale)[:, None]
    if entropy:
      h, e = (x[:, None] for x in entropy)
      d -= e * scale[:, None] * p * (logp + h)
    d = d.astype(hidden.dtype)
    if plan.head_trains:
      d_head += jnp.einsum(
        "cv,cd->vd", d, hidden, preferred_element_type=jnp.float32
      )
    d_states = cpu_bfloat16.project(d, gathered, 1)
    d_hidden = jax.lax.dynamic_update_slice_in_dim(d_hidden, d_states, start, 0)
    return d_head, d_hidden

  d_head, d_hidden = compact.loop(
    add_chunk,
    jnp.zeros(gathered.shape if plan.head_trains else (), jnp.float32),
    jnp.zeros((compact.order.size, row_states.shape[-1]), row_states.dtype),
  )
  d_hidden = compact.spread(d_hidden, targets.shape)
  if not plan.head_trains:
    d_head = jnp.zeros(head.shape, jnp.float32)
  elif plan.layout is not None:
    d_head = _head_gradient(plan, d_head)
  return _hidden_gradient(plan, d_hidden, hidden.shape[1]), d_head


def _gathered(plan: _Plan, hidden, head):
  """Gathers all positions of this device's rows, and its head at full width."""
  head = head.astype(hidden.dtype)
  if plan.sequence is not None:
    hidden = jax.lax.all_gather(hidden, plan.sequence, axis=1, tiled=True)
  if plan.model is not None:
    head = jax.lax.all_gather(head, plan.model, axis=1, tiled=True)
  return hidden, head


def _hidden_gradient(plan: _Plan, d_hidden, length: int):
  """Sums over the vocabulary's parts; returns this device's positions."""
  if plan.sequence is None:
    return d_hidden if plan.vocab is None else jax.lax.psum(d_hidden, "tensor")
  if plan.vocab is None:
    start = jax.lax.axis_index(plan.sequence) * length
    return jax.lax.dynamic_slice_in_dim(d_hidden, start, length, axis=1)
  return jax.lax.psum_scatter(
    d_hidden, plan.sequence, scatter_dimension=1, tiled=True
  )


def _head_gradient(plan: _Plan, d_head):
  """Sums over all rows; returns this device's part of the head's gradient."""
  assert plan.layout is not None
  if plan.model is not None:
    d_head = jax.lax.psum_scatter(
      d_head, plan.model, scatter_dimension=1, tiled=True
    )
  return jax.lax.psum(d_head, plan.layout.token_axes_without(plan.model))


def _first_token_id(plan: _Plan, head) -> jax.Array | int:
  """Returns the first token id of this device's part of the vocabulary."""
  if plan.vocab is None:
    return 0
  return jax.lax.axis_index(plan.vocab) * head.shape[0]


def _is_target(logits, targets, first) -> jax.Array:
  """Returns which logits are of the targets, bool `[C, V]`."""
  tokens = first + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
  return tokens == targets[:, None]
