"""The cached forward against the full one, for every kind of decoder."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import transformer
from bench import random_models

ADAPTED = dataclasses.replace(
  random_models.architecture("qwen3"),
  lora=architecture_lib.Lora(rank=3, alpha=6.0, targets=("q", "o", "down")),
)
# Hidden states are compared, so a tied head would be the same case again.
ARCHITECTURES = {
  case: random_models.architecture(case)
  for case in random_models.CASES
  if not case.endswith("-tied")
} | {"qwen3-adapted": ADAPTED}


@pytest.mark.parametrize("a", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_cached_forward_is_the_full_forward(a):
  params = random_models.params(a)
  tokens = random_models.random_tokens((3, 40))
  full = jax.jit(transformer.forward, static_argnums=1)(
    params, a, *random_models.one_segment(tokens)
  )
  layers = transformer.layer_params(params, a)

  @jax.jit
  def extend(new, starts, caches):
    return transformer.extend(params, layers, a, new, starts, caches)

  prompts, chunk = np.array([19, 8, 26]), 8
  caches = transformer.empty_caches(a, 3, 48)
  done = np.zeros(3, np.int32)
  garbage = np.random.default_rng(1)
  seen = 0

  def step(take, width):
    """Appends `take` real tokens a row, padded with garbage to `width`."""
    nonlocal caches, done, seen
    new = garbage.integers(0, random_models.TOKENS, (3, width))
    for row, count in enumerate(take):
      new[row, :count] = tokens[row, done[row] : done[row] + count]
    hidden, caches = extend(jnp.asarray(new), jnp.asarray(done), caches)
    for row, count in enumerate(take):
      np.testing.assert_allclose(
        hidden[row, :count],
        full[row, done[row] : done[row] + count],
        rtol=0,
        atol=1e-5,
      )
    done = done + np.asarray(take, np.int32)
    seen += sum(take)

  while (done < prompts).any():
    step(np.minimum(prompts - done, chunk), chunk)
  for turn in range(10):
    # Rows pause and go on, as episodes do; a paused row writes garbage.
    step([1, turn % 2, 1], 1)
  np.testing.assert_array_equal(done, prompts + (10, 5, 10))
  assert seen == done.sum()
