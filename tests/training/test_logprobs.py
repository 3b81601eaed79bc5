"""Tests token log-probabilities against a whole softmax, chunked or not."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_policy

from anysearch_jax.policy import decoder
from anysearch_jax.training import logprobs

A = small_policy.architecture(vocab_size=37)
B, T = 2, 12


@pytest.fixture(scope="module")
def params():
  return small_policy.noisy(decoder.initialize(A, 0), 0, 0.3)


@pytest.fixture(scope="module")
def inputs():
  """Two segments and padding in the first row, one segment in the second."""
  rng = np.random.default_rng(1)
  tokens, targets = rng.integers(0, 37, (2, B, T))
  positions = np.stack([[*range(5), *range(4), 0, 0, 0], range(T)])
  segment_ids = np.stack([[1] * 5 + [2] * 4 + [0] * 3, [1] * T])
  return tokens, targets, positions, segment_ids


@functools.partial(jax.jit, static_argnames=("chunk", "temperature"))
def run(params, inputs, *, chunk=64, temperature=1.0):
  compute = decoder.Compute(logprob_chunk=chunk)
  return logprobs.token_logprobs(
    params, A, *inputs, temperature=temperature, compute=compute
  )


def plain_logits(params, inputs):
  tokens, _, positions, segment_ids = inputs
  hidden = decoder.forward(params, A, tokens, positions, segment_ids)
  return decoder.logits(params, hidden)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_are_those_of_the_whole_softmax(params, inputs, temperature):
  logits = np.asarray(jax.jit(plain_logits)(params, inputs), np.float64)
  logits /= temperature
  logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  gathered = np.take_along_axis(logp, inputs[1][..., None], -1)[..., 0]
  found, entropy = run(params, inputs, temperature=temperature, chunk=5)
  assert found.dtype == entropy.dtype == jnp.float32
  np.testing.assert_allclose(found, gathered, atol=2e-6)
  # The tolerance allows for logits of up to 10.
  np.testing.assert_allclose(entropy, -(np.exp(logp) * logp).sum(-1), atol=1e-5)


def test_gradients_are_those_of_the_whole_softmax(params, inputs):
  weight = np.random.default_rng(2).normal(size=(B, T)) / (B * T)

  def loss(params):
    compute = decoder.Compute(logprob_chunk=4)
    logp, entropy = logprobs.token_logprobs(params, A, *inputs, compute=compute)
    # Entropy is reported and not trained on: it must add no gradient.
    return jnp.sum(weight * logp) + jnp.sum(entropy)

  def plain(params):
    logp = jax.nn.log_softmax(plain_logits(params, inputs))
    picked = jnp.take_along_axis(logp, inputs[1][..., None], -1)[..., 0]
    return jnp.sum(weight * picked)

  chunked, whole = (jax.jit(jax.grad(f))(params) for f in (loss, plain))
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6),
    chunked,
    whole,
  )
  assert all(np.abs(g).max() > 1e-4 for g in jax.tree.leaves(chunked))


@pytest.mark.parametrize("count", [0, 1, 7, 24])
def test_only_scored_positions_are_computed(count):
  rng = np.random.default_rng(count)
  hidden, head = rng.normal(size=(B, T, 3)), rng.normal(size=(37, 3))
  of_logp, of_entropy = rng.normal(size=(2, B, T))
  targets = rng.integers(0, 37, (B, T))
  scored = np.isin(np.arange(B * T), rng.permutation(B * T)[:count])
  scored = scored.reshape(B, T)
  # A position that is computed would make everything NaN.
  poisoned = np.where(scored[..., None], hidden, np.nan)

  def whole(hidden, head):
    logp = jax.nn.log_softmax(jnp.einsum("btd,vd->btv", hidden, head))
    picked = jnp.take_along_axis(logp, targets[..., None], -1)[..., 0]
    entropy = -jnp.sum(jnp.exp(logp) * logp, -1)
    return jnp.where(scored, picked, 0), jnp.where(scored, entropy, 0)

  def compact(hidden, head):
    how = logprobs._Plan(1.0, 5, True, True)
    return logprobs._logprobs(how, hidden, head, targets, scored)

  def graded(f):
    def loss(hidden, head):
      logp, entropy = f(hidden, head)
      return jnp.sum(of_logp * logp + of_entropy * entropy), (logp, entropy)

    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))

  found = graded(compact)(*(x.astype(np.float32) for x in (poisoned, head)))
  expected = graded(whole)(*(x.astype(np.float32) for x in (hidden, head)))
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=2e-6),
    found,
    expected,
  )


def test_entropy_and_its_gradient_are_those_of_float64():
  temperature = 0.6
  rng = np.random.default_rng(4)
  hidden, head = rng.normal(size=(2, 6, 3)), rng.normal(size=(7, 3))
  weight, of_logp = rng.normal(size=(2, 2, 6))
  targets = rng.integers(0, 7, (2, 6))

  def loss(hidden, head):
    how = logprobs._Plan(temperature, 2, True, True)
    scored = jnp.ones((2, 6), bool)
    logp, entropy = logprobs._logprobs(how, hidden, head, targets, scored)
    return jnp.sum(weight * entropy) + jnp.sum(of_logp * logp)

  def oracle(hidden, head):
    logits = np.einsum("btd,vd->btv", hidden, head) / temperature
    picked = np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    normalizer = np.log(np.exp(logits).sum(-1))
    p = np.exp(logits - normalizer[..., None])
    entropy = normalizer - np.sum(p * logits, -1)
    return np.sum(weight * entropy) + np.sum(of_logp * (picked - normalizer))

  given = [jnp.asarray(x, jnp.float32) for x in (hidden, head)]
  value, found = jax.jit(jax.value_and_grad(loss, (0, 1)))(*given)
  np.testing.assert_allclose(value, oracle(hidden, head), rtol=1e-5)
  for place, gradient in enumerate(found):
    assert np.abs(gradient).max() > 0.1
    for i in np.ndindex(gradient.shape):
      ends = []
      for step in (-1e-6, 1e-6):
        moved = [hidden.copy(), head.copy()]
        moved[place][i] += step
        ends.append(oracle(*moved))
      slope = (ends[1] - ends[0]) / 2e-6
      np.testing.assert_allclose(gradient[i], slope, rtol=1e-4, atol=1e-5)


def test_values_in_the_padding_have_no_effect(params, inputs):
  tokens, targets, positions, segment_ids = (x.copy() for x in inputs)
  padding = segment_ids == 0
  tokens[padding], targets[padding], positions[padding] = 36, 7, 99
  before = run(params, inputs)
  after = run(params, (tokens, targets, positions, segment_ids))
  for x, y in zip(before, after):
    np.testing.assert_array_equal(x[~padding], y[~padding])


def test_half_precision_compute_stays_near_and_answers_in_float32(
  params, inputs
):
  logp, entropy = jax.jit(
    lambda params: logprobs.token_logprobs(
      params, A, *inputs, compute=decoder.Compute(jnp.bfloat16)
    )
  )(params)
  whole, _ = run(params, inputs)
  assert logp.dtype == entropy.dtype == jnp.float32
  assert 1e-6 < np.abs(logp - whole).mean() < 0.05
