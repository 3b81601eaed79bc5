"""The cached forward against the full one, for every kind of decoder."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_models

from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import decoder, serving
from anysearch_jax.policy.attention import paged_attention
from anysearch_jax.policy.attention import pages as pages_lib

ADAPTED = dataclasses.replace(
  random_models.architecture("qwen3"),
  lora=architecture_lib.Lora(rank=3, alpha=6.0, targets=("q", "o", "down")),
)
# The tests compare hidden states, so tied heads need no separate case.
ARCHITECTURES = {
  case: random_models.architecture(case)
  for case in random_models.CASES
  if not case.endswith("-tied")
} | {"qwen3-adapted": ADAPTED}


def prepared(params, a, *, fused=False):
  return serving.prepare(params, a, dtype=jnp.float32, fused=fused)


@pytest.mark.parametrize(
  ("case", "fused"),
  [*((case, True) for case in ARCHITECTURES), ("qwen3-adapted", False)],
)
def test_cached_forward_equals_the_full_forward(case, fused):
  a = ARCHITECTURES[case]
  params = random_models.params(a)
  tokens = random_models.random_tokens((3, 40))
  full = jax.jit(decoder.forward, static_argnums=1)(
    params, a, *random_models.one_segment(tokens)
  )
  size, columns = 4, 12
  table = 1 + np.arange(3 * columns).reshape(3, columns)
  weights = prepared(params, a, fused=fused)
  paged = paged_attention.Paged(block=8)

  @jax.jit
  def extend(new, starts, counts, pages):
    return serving.extend(
      weights, a.without_lora(), new, starts, counts, pages, attend
    )

  def attend(q, k, v, pages, positions, real, *differ):
    return paged(q, k, v, pages, table, positions, real, *differ)

  prompts, chunk = np.array([19, 8, 26]), 8
  pages = pages_lib.empty(a, [1 + table.size], size, jnp.float32)
  done = np.zeros(3, np.int32)
  garbage = np.random.default_rng(1)
  seen = 0

  def step(take, width):
    """Appends `take` real tokens per row, padded to `width` with garbage."""
    nonlocal pages, done, seen
    new = garbage.integers(0, random_models.TOKENS, (3, width))
    for row, count in enumerate(take):
      new[row, :count] = tokens[row, done[row] : done[row] + count]
    take = np.asarray(take, np.int32)
    hidden, pages, _ = extend(jnp.asarray(new), done, take, pages)
    for row, count in enumerate(take):
      np.testing.assert_allclose(
        hidden[row, :count],
        full[row, done[row] : done[row] + count],
        rtol=0,
        atol=1e-5,
      )
    done = done + take
    seen += sum(take)

  while (done < prompts).any():
    step(np.minimum(prompts - done, chunk), chunk)
  for turn in range(10):
    # Rows pause and resume, as episodes do; a paused row writes only padding.
    step([1, turn % 2, 1], 1)
  np.testing.assert_array_equal(done, prompts + (10, 5, 10))
  assert seen == done.sum()


@pytest.mark.parametrize(
  "case",
  [
    *("qwen2", "qwen3-moe", "smollm3", "olmo3", "gemma3-biased", "gpt-oss"),
    pytest.param("qwen3", marks=pytest.mark.slow),
    pytest.param("llama", marks=pytest.mark.slow),
  ],
)
def test_rows_of_one_call_may_be_any_chunks_of_one_sequence(case):
  a, rng = random_models.architecture(case), np.random.default_rng(0)
  params = random_models.params(a)
  tokens = random_models.random_tokens((1, 24))
  full = jax.jit(decoder.forward, static_argnums=1)(
    params, a, *random_models.one_segment(tokens)
  )
  table = jnp.tile(jnp.arange(1, 7), (3, 1))

  def attend(q, k, v, pages, positions, real, *differ):
    paged = paged_attention.Paged()
    return paged(q, k, v, pages, table, positions, real, *differ)

  extend = jax.jit(functools.partial(serving.extend, a=a, attend=attend))
  for cuts in [(8, 16), *(rng.choice(25, 2) for _ in range(6))]:
    starts = np.array([0, *sorted(cuts)])
    counts = np.diff(starts, append=24)
    new = rng.integers(0, random_models.TOKENS, (3, 24))
    for row, start, count in zip(new, starts, counts):
      row[:count] = tokens[0, start : start + count]
    hidden, *_ = extend(
      prepared(params, a),
      tokens=new,
      starts=starts,
      counts=counts,
      caches=pages_lib.empty(a, [7], 4, jnp.float32),
    )
    found = np.concatenate([x[:n] for x, n in zip(hidden, counts)])
    np.testing.assert_allclose(found, full[0], atol=1e-5)
