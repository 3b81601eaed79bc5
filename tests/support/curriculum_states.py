"""States of the curriculum, and outcomes of episodes for it to record."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from anysearch_jax import config as config_lib
from anysearch_jax.algorithms import curriculum

CONFIG = config_lib.CurriculumConfig()


def at(step, *, config=CONFIG, accuracies=None, seed=0):
  """Returns a state at `step` with full windows of these accuracies."""
  state = curriculum.init(config, seed)._replace(step=jnp.int32(step))
  if accuracies is None:
    return state
  right = np.rint(np.array(accuracies) * config.window)
  windows = np.arange(config.window) < right[:, None]
  return state._replace(
    windows=jnp.asarray(windows, jnp.int8),
    counts=jnp.full(config.max_budget, config.window, jnp.int32),
  )


def held(state, budget):
  """Returns a level's window from its ring buffer, oldest first."""
  ring = np.asarray(state.windows)[budget - 1]
  count = int(state.counts[budget - 1])
  first = max(count - len(ring), 0)
  return [int(ring[i % len(ring)]) for i in range(first, count)]


def outcomes(rng, size, *, levels=5):
  """Draws budgets (some without a window), correctness and validity."""
  return (
    rng.integers(-1, levels + 3, size).astype(np.int32),
    rng.integers(0, 2, size).astype(np.int32),
    rng.random(size) < 0.8,
  )
