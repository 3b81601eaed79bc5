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
    params: the policy's parameters.
    a: its architecture.
    tokens: int `[B, T]`.
    targets: int `[B, T]`, the token after each of `tokens`.
    positions: int `[B, T]`, position of each token in its segment.
    segment_ids: int `[B, T]`, 0 is padding.
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
  parts = _Parts.of(head, compute.layout)
  how = _How(
    temperature, chunk, a.lora is None, parts, compute.layout, entropy_trains
  )
  return _logprobs(how, hidden, head, targets)


class _Parts(NamedTuple):
  """The mesh axes that arrays are sharded over; None is replicated.

  vocab, model: axes of the head. sequence: positions of the hidden states.
  """

  vocab: str | None = None
  model: str | None = None
  sequence: str | None = None

  @classmethod
  def of(
    cls,
    head: jax.Array,
    layout: sharding.Layout | None,
  ) -> _Parts:
    if layout is None:
      return cls()
    vocab_size, d_model = head.shape
    vocab, model = layout.table((vocab_size, d_model))
    return cls(vocab, model, layout.rules["between"])


class _How(NamedTuple):
  temperature: float
  chunk: int
  head_trains: bool
  parts: _Parts
  layout: sharding.Layout | None
  entropy_trains: bool = False

  def over_mesh(self, f, ins: str, outs: str):
    """Wraps `f` so that it runs on each device's shards.

    `ins` and `outs` have one letter an array: h for hidden states, w for the
    head's weight, t for values of tokens.
    """
    if self.layout is None:
      return f
    specs = {
      "h": jax.P(sharding.BATCH, self.parts.sequence, None),
      "w": jax.P(self.parts.vocab, self.parts.model),
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
  hidden, head = _gathered(how.parts, hidden, head)
  first = _first(how.parts, head)

  def of_chunk(_, chunk):
    hidden, targets = chunk
    logits = _logits(hidden, head, how.temperature)
    top = jnp.max(logits, -1)
    p = jnp.exp(logits - top[..., None])
    # A masked sum instead of a gather: it is exact, and 0 on the devices whose
    # part of the vocabulary does not have the target.
    mine = jnp.sum(jnp.where(_is_target(logits, targets, first), logits, 0), -1)
    return None, (top, jnp.sum(p, -1), jnp.sum(p * logits, -1), mine)

  _, parts = jax.lax.scan(of_chunk, None, _cut(how.chunk, (hidden, targets)))
  top, total, weighted, target = (_joined(x) for x in parts)
  vocab = how.parts.vocab
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
  whole, gathered = _gathered(how.parts, hidden, head)
  first = _first(how.parts, gathered)

  def of_chunk(d_head, chunk):
    hidden, targets, normalizer, g, *entropy = chunk
    logits = _logits(hidden, gathered, how.temperature)
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
    d_head = _head_gradient(how.parts, d_head)
  return _hidden_gradient(how.parts, d_hidden, hidden.shape[1]), d_head


def _gathered(parts: _Parts, hidden, head):
  """Gathers all positions of this device's rows, and its head at full width."""
  head = head.astype(hidden.dtype)
  if parts.sequence is not None:
    hidden = jax.lax.all_gather(hidden, parts.sequence, axis=1, tiled=True)
  if parts.model is not None:
    head = jax.lax.all_gather(head, parts.model, axis=1, tiled=True)
  return hidden, head


def _hidden_gradient(parts: _Parts, d_hidden, length: int):
  """Sums over the vocabulary's parts; returns this device's positions."""
  if parts.sequence is None:
    return d_hidden if parts.vocab is None else jax.lax.psum(d_hidden, "tensor")
  if parts.vocab is None:
    start = jax.lax.axis_index(parts.sequence) * length
    return jax.lax.dynamic_slice_in_dim(d_hidden, start, length, axis=1)
  return jax.lax.psum_scatter(
    d_hidden, parts.sequence, scatter_dimension=1, tiled=True
  )


def _head_gradient(parts: _Parts, d_head):
  """Sums over all rows; returns this device's part of the head's gradient."""
  if parts.model is None:
    return jax.lax.psum(d_head, sharding.BATCH)
  d_head = jax.lax.psum_scatter(
    d_head, parts.model, scatter_dimension=1, tiled=True
  )
  others = tuple(axis for axis in sharding.BATCH if axis != parts.model)
  return jax.lax.psum(d_head, others)


def _first(parts: _Parts, head) -> jax.Array | int:
  """Returns the first token id of this device's part of the vocabulary."""
  if parts.vocab is None:
    return 0
  return jax.lax.axis_index(parts.vocab) * head.shape[0]


def _logits(hidden, head, temperature: float) -> jax.Array:
  return decoder.project(hidden, head) / temperature


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
