"""Token log-probabilities without a `[B, T, V]` array.

The vocabulary is reached for some positions at a time, in the forward pass and
again in the backward pass. On a mesh every device holds its part of the
vocabulary and of the rows: the head is gathered over fsdp once a pass, the
normalizer is put together from the parts, and the head's gradient is summed in
float32 and scattered back once.
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
) -> tuple[jax.Array, jax.Array]:
  """Log-probability of each target and entropy of each prediction.

  Both are of `log_softmax(logits / temperature)`, as the engine samples.

  Args:
    params: the policy's.
    a: its sizes.
    tokens: int `[B, T]`.
    targets: int `[B, T]`, the token after each.
    positions: int `[B, T]`.
    segment_ids: int `[B, T]`, 0 is padding.
    temperature: > 0.
    compute: how; `logprob_chunk` is lowered to a divisor of T.

  Returns:
    logp and entropy (nats), float32 `[B, T]` each. No gradient goes through
    the entropy.
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
  parts = _Parts.of(head.shape, compute.layout)
  how = _How(temperature, chunk, a.lora is None, parts, compute.layout)
  return _logprobs(how, hidden, head, targets)


class _Parts(NamedTuple):
  """Mesh axes over which something is cut; None: every device has it whole.

  vocab, model: the head's axes. sequence: the hidden states' positions.
  """

  vocab: str | None = None
  model: str | None = None
  sequence: str | None = None

  @classmethod
  def of(
    cls,
    shape: tuple[int, int],
    layout: sharding.Layout | None,
  ) -> _Parts:
    if layout is None:
      return cls()
    vocab, model = layout.table(shape)
    return cls(vocab, model, layout.rules["between"])


class _How(NamedTuple):
  temperature: float
  chunk: int
  head_trains: bool
  parts: _Parts
  layout: sharding.Layout | None

  def over_mesh(self, f, ins: str, outs: str):
    """`f` on each device's part; letters: hidden, weight of the head, token."""
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _logprobs(how: _How, hidden, head, targets):
  return _forward(how, hidden, head, targets)[0]


def _forward(how: _How, hidden, head, targets):
  logp, entropy, normalizer = how.over_mesh(
    functools.partial(_local_forward, how), "hwt", "ttt"
  )(hidden, head, targets)
  return (logp, entropy), (hidden, head, targets, normalizer)


def _backward(how: _How, residuals, cotangents):
  hidden, head, targets, normalizer = residuals
  g, _ = cotangents
  d_hidden, d_head = how.over_mesh(
    functools.partial(_local_backward, how), "hwttt", "hw"
  )(hidden, head, targets, normalizer, g)
  return d_hidden, d_head.astype(head.dtype), None


_logprobs.defvjp(_forward, _backward)


def _local_forward(how: _How, hidden, head, targets):
  """logp, entropy and log-normalizer of this device's rows, `[B, T]` each."""
  hidden, head = _gathered(how.parts, hidden, head)
  first = _first(how.parts, head)

  def of_chunk(_, chunk):
    hidden, targets = chunk
    logits = _logits(hidden, head, how.temperature)
    top = jnp.max(logits, -1)
    p = jnp.exp(logits - top[..., None])
    # A masked sum, not a gather: exact, and 0 where another device has it.
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


def _local_backward(how: _How, hidden, head, targets, normalizer, g):
  """Gradients of `sum(g * logp)` by this device's parts of hidden and head."""
  whole, gathered = _gathered(how.parts, hidden, head)
  first = _first(how.parts, gathered)

  def of_chunk(d_head, chunk):
    hidden, targets, normalizer, g = chunk
    logits = _logits(hidden, gathered, how.temperature)
    p = jnp.exp(logits - normalizer[..., None])
    d = jnp.where(_is_target(logits, targets, first), 1 - p, -p)
    d = (d * (g / how.temperature)[..., None]).astype(hidden.dtype)
    if how.head_trains:
      d_head += jnp.einsum(
        "btv,btd->vd", d, hidden, preferred_element_type=jnp.float32
      )
    return d_head, jnp.einsum("btv,vd->btd", d, gathered)

  shape = gathered.shape if how.head_trains else ()
  d_head, d_hidden = jax.lax.scan(
    of_chunk,
    jnp.zeros(shape, jnp.float32),
    _cut(how.chunk, (whole, targets, normalizer, g)),
  )
  d_hidden = _joined(d_hidden)
  if not how.head_trains:
    d_head = jnp.zeros(head.shape, jnp.float32)
  elif how.layout is not None:
    d_head = _head_gradient(how.parts, d_head)
  return _hidden_gradient(how.parts, d_hidden, hidden.shape[1]), d_head


def _gathered(parts: _Parts, hidden, head):
  """All positions of this device's rows; its vocabulary at full width."""
  head = head.astype(hidden.dtype)
  if parts.sequence is not None:
    hidden = jax.lax.all_gather(hidden, parts.sequence, axis=1, tiled=True)
  if parts.model is not None:
    head = jax.lax.all_gather(head, parts.model, axis=1, tiled=True)
  return hidden, head


def _hidden_gradient(parts: _Parts, d_hidden, length: int):
  """The sum over the vocabulary's parts, at this device's positions."""
  if parts.sequence is None:
    return d_hidden if parts.vocab is None else jax.lax.psum(d_hidden, "tensor")
  if parts.vocab is None:
    start = jax.lax.axis_index(parts.sequence) * length
    return jax.lax.dynamic_slice_in_dim(d_hidden, start, length, axis=1)
  return jax.lax.psum_scatter(
    d_hidden, parts.sequence, scatter_dimension=1, tiled=True
  )


def _head_gradient(parts: _Parts, d_head):
  """The sum over all rows, at this device's part of the head."""
  if parts.model is None:
    return jax.lax.psum(d_head, sharding.BATCH)
  d_head = jax.lax.psum_scatter(
    d_head, parts.model, scatter_dimension=1, tiled=True
  )
  others = tuple(axis for axis in sharding.BATCH if axis != parts.model)
  return jax.lax.psum(d_head, others)


def _first(parts: _Parts, head) -> jax.Array | int:
  """The first token of this device's vocabulary."""
  if parts.vocab is None:
    return 0
  return jax.lax.axis_index(parts.vocab) * head.shape[0]


def _logits(hidden, head, temperature: float) -> jax.Array:
  return decoder.project(hidden, head) / temperature


def _is_target(logits, targets, first) -> jax.Array:
  tokens = first + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2)
  return tokens == targets[..., None]


def _cut(chunk: int, arrays):
  """`[B, T, ...]` to `[T / chunk, B, chunk, ...]`, each."""

  def cut(x):
    return x.reshape(x.shape[0], -1, chunk, *x.shape[2:]).swapaxes(0, 1)

  return jax.tree.map(cut, arrays)


def _joined(x: jax.Array) -> jax.Array:
  """What `_cut` cut."""
  x = x.swapaxes(0, 1)
  return x.reshape(x.shape[0], -1, *x.shape[3:])
