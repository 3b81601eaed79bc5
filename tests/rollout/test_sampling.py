"""Sampling one token: frequencies, restrictions, log-probs, addresses."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anysearch_jax import config as config_lib
from anysearch_jax.rollout.jax_engine import sampling
from anysearch_jax.training import validation

P = np.array([0.4, 0.05, 0.3, 0.1, 0.15])
LOGITS = jnp.log(jnp.asarray(P, jnp.float32)) + 3.0
DRAWS = 20_000


def draw(**kwargs):
  """Returns counts of each token over many keys, and each draw's log-prob."""
  config = config_lib.SamplingConfig(**kwargs)
  keys = jax.random.split(jax.random.key(0), DRAWS)
  rows = sampling.settings([config] * DRAWS)
  tokens, logps = drawn(sampling.restricts(config))(LOGITS, keys, rows)
  return np.bincount(tokens, minlength=len(P)), np.asarray(tokens), logps


@functools.cache
def drawn(restricted):
  one = functools.partial(sampling.sample, restricted=restricted)
  return jax.jit(jax.vmap(one, (None, 0, 0)))


def assert_frequencies(counts, p):
  """Checks that each count is within five standard deviations of its mean."""
  deviation = np.sqrt(DRAWS * p * (1 - p))
  assert (np.abs(counts - DRAWS * p) <= 5 * deviation).all(), counts


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_frequencies_and_logps_match_the_tempered_softmax(temperature):
  counts, tokens, logps = draw(temperature=temperature)
  p = P ** (1 / temperature) / np.sum(P ** (1 / temperature))
  assert_frequencies(counts, p)
  np.testing.assert_allclose(logps, np.log(p)[tokens], atol=1e-6)


@pytest.mark.parametrize(
  ("kwargs", "kept"),
  [
    ({"top_k": 2}, [0, 2]),
    ({"top_p": 0.6}, [0, 2]),  # 0.4 < 0.6, so the next one is needed too.
    ({"top_p": 0.8}, [0, 2, 4]),
    ({"top_k": 3, "top_p": 0.5}, [0, 2]),  # 0.4 / 0.85 < 0.5.
  ],
)
def test_restrictions_keep_the_likeliest_and_logps_ignore_them(kwargs, kept):
  counts, tokens, logps = draw(**kwargs)
  p = np.zeros_like(P)
  p[kept] = P[kept] / P[kept].sum()
  assert_frequencies(counts, p)
  np.testing.assert_allclose(logps, np.log(P)[tokens], atol=1e-6)


def test_rows_of_one_call_are_drawn_by_their_own_settings():
  """A row draws what it draws in a call whose rows all have its settings."""
  configs = [
    config_lib.SamplingConfig(),
    config_lib.SamplingConfig(temperature=0.0),
    config_lib.SamplingConfig(temperature=0.5, top_p=0.8),
    config_lib.SamplingConfig(top_k=2),
    config_lib.SamplingConfig(temperature=2.0, top_p=0.9, top_k=4),
  ]
  count = 40 * len(configs)
  keys = jax.random.split(jax.random.key(3), count)
  mixed = drawn(True)(LOGITS, keys, sampling.settings(configs * 40))
  for i, config in enumerate(configs):
    alone = drawn(sampling.restricts(config))(
      LOGITS, keys, sampling.settings([config] * count)
    )
    for one, other in zip(mixed, alone, strict=True):
      np.testing.assert_array_equal(
        one[i :: len(configs)], other[i :: len(configs)]
      )


def test_an_unrestricted_draw_is_that_of_jax():
  key = jax.random.key(11)
  keys = jax.random.split(key, 500)
  rows = sampling.settings([config_lib.SamplingConfig(temperature=0.5)] * 500)
  tokens, _ = drawn(False)(LOGITS, keys, rows)
  logps = jax.nn.log_softmax(LOGITS / 0.5)
  expected = jax.vmap(lambda k: jax.random.categorical(k, logps))(keys)
  np.testing.assert_array_equal(tokens, expected)


def test_ties_go_to_the_first_token_and_no_draw_leaves_the_vocabulary():
  rows = sampling.settings([config_lib.SamplingConfig(temperature=0.0)] * 2)
  logits = jnp.array([[1.0, 2.0, 2.0], [jnp.nan, 0.0, 1.0]])
  one = functools.partial(sampling.sample, restricted=False)
  keys = jax.random.split(jax.random.key(0), 2)
  tokens, found = jax.jit(jax.vmap(one))(logits, keys, rows)
  assert tokens[0] == 1
  assert 0 <= tokens[1] < 3
  # Log-probabilities are those at temperature 1.
  np.testing.assert_allclose(found[0], jax.nn.log_softmax(logits[0])[1])


@pytest.mark.parametrize(
  "kwargs",
  [{"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 5}, {"temperature": -1.0}],
)
def test_training_refuses_what_changes_the_distribution(kwargs):
  sampling = config_lib.SamplingConfig(**kwargs)
  with pytest.raises(ValueError, match="training needs temperature > 0"):
    validation._learning(config_lib.ExperimentConfig(sampling=sampling))


def test_key_of_an_address_is_successive_fold_ins():
  seed = jax.random.key(7)
  for address in ((), (5,), (3, 1, 4, 1, 5), (2, 1)):
    expected = functools.reduce(jax.random.fold_in, address, seed)
    numbers = jnp.asarray(address, jnp.uint32)
    for fold in (sampling.address_key, jax.jit(sampling.address_key)):
      found = jax.random.key_data(fold(seed, numbers))
      np.testing.assert_array_equal(found, jax.random.key_data(expected))
