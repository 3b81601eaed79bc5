"""Token log-probabilities without a `[B, T, V]` array.

Logits are computed for a chunk of positions at a time, in the forward pass and
again in the backward pass: a vocabulary is much wider than the hidden states,
so the logits of all positions would dominate the memory. On a mesh every device
has a part of the vocabulary and of the rows, as in Megatron-LM
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
from anysearch_jax.policy import decoder, sharding


def token_logprobs(
  params: decoder.Params,
  a: architecture_lib.Architecture,
  tokens: jax.Array,
  targets: jax.Array,
  positions: jax.Array,
  segment_ids: jax.Array,
  *,
  temperature: float = 1.0,
  compute: decoder.Compute = decoder.Compute(),  # noqa: B008
  entropy_trains: bool = False,
) -> tuple[jax.Array, jax.Array]:
  """Returns the log-probability of each target and the prediction's entropy.

  Both are of `log_softmax(logits / temperature)`, as the engine samples.

  Args:
    params, a, tokens, positions, segment_ids: as for `decoder.forward`.
    targets: int `[B, T]`, the token after each of `tokens`.
    temperature: > 0.
    compute: numerics and layout; `logprob_chunk` is lowered to a divisor of T.
    entropy_trains: whether the entropy has a gradient; it is 0 otherwise.

  Returns:
    logp and entropy (nats), float32 `[B, T]` each.
  """
  chex.assert_equal_shape([tokens, targets, positions, segment_ids])
  hidden = decoder.forward(
    params, a, tokens, positions, segment_ids, compute=compute
  )
  t = tokens.shape[1]
  chunk = next(
    c for c in range(min(compute.logprob_chunk, t), 0, -1) if t % c == 0
  )
  head = decoder.head(params)
  how = _How(temperature, chunk, a.lora is None, entropy_trains)
  if (layout := compute.layout) is not None:
    vocab, model = layout.table(head.shape)
    sequence = layout.rules["between"]
    how = how._replace(
      layout=layout, vocab=vocab, model=model, sequence=sequence
    )
  return _logprobs(how, hidden, head, targets)


class _How(NamedTuple):
  """What a pass does, and the mesh axes that arrays are sharded over.

  vocab, model: axes of the head. sequence: positions of the hidden states. None
    is replicated, and so is everything without a layout.
  """

  temperature: float
  chunk: int
  head_trains: bool
  entropy_trains: bool = False
  layout: sharding.Layout | None = None
  vocab: str | None = None
  model: str | None = None
  sequence: str | None = None

  def over_mesh(self, f, ins: str, outs: str):
    """Wraps `f` so that it runs on each device's shards.

    `ins` and `outs` have one letter an array: h for hidden states, w for the
    head's weight, t for values of tokens.
    """
    if self.layout is None:
      return f
    specs = {
      "h": jax.P(sharding.BATCH, self.sequence, None),
      "w": jax.P(self.vocab, self.model),
      "t": jax.P(sharding.BATCH, None),
    }
    return self.layout.local(
      f, tuple(specs[i] for i in ins), tuple(specs[o] for o in outs)
    )


# The gradient is custom because autodiff of the scan over chunks would save the
# probabilities of every chunk, together a `[B, T, V]` array.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _logprobs(how: _How, hidden, head, targets):
  return _forward(how, hidden, head, targets)[0]


def _forward(how: _How, hidden, head, targets):
  logp, entropy, normalizer = how.over_mesh(
    functools.partial(_local_forward, how), "hwt", "ttt"
  )(hidden, head, targets)
  kept = entropy if how.entropy_trains else None
  return (logp, entropy), (hidden, head, targets, normalizer, kept)


def _backward(how: _How, residuals, cotangents):
  hidden, head, targets, normalizer, entropy = residuals
  g, of_entropy = cotangents
  tokens = [targets, normalizer, g]
  if how.entropy_trains:
    tokens += [entropy, of_entropy]
  d_hidden, d_head = how.over_mesh(
    functools.partial(_local_backward, how), "hw" + "t" * len(tokens), "hw"
  )(hidden, head, *tokens)
  return d_hidden, d_head.astype(head.dtype), None


_logprobs.defvjp(_forward, _backward)


def _local_forward(how: _How, hidden, head, targets):
  """Returns logp, entropy and log-normalizer of this device's rows, `[B, T]`.

  Each device reduces its part of the vocabulary relative to its own maximum;
  the parts are then rescaled to the maximum over all devices.
  """
  hidden, head = _gathered(how, hidden, head)
  first = _first(how, head)

  def of_chunk(_, chunk):
    hidden, targets = chunk
    logits = decoder.project(hidden, head) / how.temperature
    top = jnp.max(logits, -1)
    p = jnp.exp(logits - top[..., None])
    # A masked sum instead of a gather: it is exact, and 0 on the devices whose
    # part of the vocabulary does not have the target.
    mine = jnp.sum(jnp.where(_is_target(logits, targets, first), logits, 0), -1)
    return None, (top, jnp.sum(p, -1), jnp.sum(p * logits, -1), mine)

  _, parts = jax.lax.scan(of_chunk, None, _cut(how.chunk, (hidden, targets)))
  top, total, weighted, target = (_joined(x) for x in parts)
  vocab = how.vocab
  if vocab is not None:
    highest = jax.lax.pmax(top, vocab)
    scale = jnp.exp(top - highest)
    total, weighted, target = jax.lax.psum(
      (total * scale, weighted * scale, target), vocab
    )
    top = highest
  normalizer = top + jnp.log(total)
  return target - normalizer, normalizer - weighted / total, normalizer


def _local_backward(how: _How, hidden, head, targets, normalizer, g, *entropy):
  """Returns the gradients of `sum(g * logp)` for this device's hidden and head.

  With p the softmax, the gradient for the logits is g (onehot(target) - p).
  `entropy` is empty, or the entropy H and its cotangent e; these add the
  gradient of `sum(e * H)`, which is -e p (log p + H) for the logits.
  """
  whole, gathered = _gathered(how, hidden, head)
  first = _first(how, gathered)

  def of_chunk(d_head, chunk):
    hidden, targets, normalizer, g, *entropy = chunk
    logits = decoder.project(hidden, gathered) / how.temperature
    logp = logits - normalizer[..., None]
    p = jnp.exp(logp)
    d = jnp.where(_is_target(logits, targets, first), 1 - p, -p)
    d *= (g / how.temperature)[..., None]
    if entropy:
      h, e = (x[..., None] for x in entropy)
      d -= e / how.temperature * p * (logp + h)
    d = d.astype(hidden.dtype)
    if how.head_trains:
      d_head += jnp.einsum(
        "btv,btd->vd", d, hidden, preferred_element_type=jnp.float32
      )
    return d_head, jnp.einsum("btv,vd->btd", d, gathered)

  shape = gathered.shape if how.head_trains else ()
  d_head, d_hidden = jax.lax.scan(
    of_chunk,
    jnp.zeros(shape, jnp.float32),
    _cut(how.chunk, (whole, targets, normalizer, g, *entropy)),
  )
  d_hidden = _joined(d_hidden)
  if not how.head_trains:
    d_head = jnp.zeros(head.shape, jnp.float32)
  elif how.layout is not None:
    d_head = _head_gradient(how, d_head)
  return _hidden_gradient(how, d_hidden, hidden.shape[1]), d_head


def _gathered(how: _How, hidden, head):
  """Gathers all positions of this device's rows, and its head at full width."""
  head = head.astype(hidden.dtype)
  if how.sequence is not None:
    hidden = jax.lax.all_gather(hidden, how.sequence, axis=1, tiled=True)
  if how.model is not None:
    head = jax.lax.all_gather(head, how.model, axis=1, tiled=True)
  return hidden, head


def _hidden_gradient(how: _How, d_hidden, length: int):
  """Sums over the vocabulary's parts; returns this device's positions."""
  if how.sequence is None:
    return d_hidden if how.vocab is None else jax.lax.psum(d_hidden, "tensor")
  if how.vocab is None:
    start = jax.lax.axis_index(how.sequence) * length
    return jax.lax.dynamic_slice_in_dim(d_hidden, start, length, axis=1)
  return jax.lax.psum_scatter(
    d_hidden, how.sequence, scatter_dimension=1, tiled=True
  )


def _head_gradient(how: _How, d_head):
  """Sums over all rows; returns this device's part of the head's gradient."""
  if how.model is None:
    return jax.lax.psum(d_head, sharding.BATCH)
  d_head = jax.lax.psum_scatter(
    d_head, how.model, scatter_dimension=1, tiled=True
  )
  others = tuple(axis for axis in sharding.BATCH if axis != how.model)
  return jax.lax.psum(d_head, others)


def _first(how: _How, head) -> jax.Array | int:
  """Returns the first token id of this device's part of the vocabulary."""
  if how.vocab is None:
    return 0
  return jax.lax.axis_index(how.vocab) * head.shape[0]


def _is_target(logits, targets, first) -> jax.Array:
  tokens = first + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2)
  return tokens == targets[..., None]


def _cut(chunk: int, arrays):
  """Reshapes arrays from `[B, T, ...]` to `[T / chunk, B, chunk, ...]`."""

  def cut(x):
    return x.reshape(x.shape[0], -1, chunk, *x.shape[2:]).swapaxes(0, 1)

  return jax.tree.map(cut, arrays)


def _joined(x: jax.Array) -> jax.Array:
  """Reverts `_cut`."""
  x = x.swapaxes(0, 1)
  return x.reshape(x.shape[0], -1, *x.shape[3:])
