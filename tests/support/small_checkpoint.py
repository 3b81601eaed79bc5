"""Artificial checkpoints: made, written, read and compared."""

from __future__ import annotations

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from anysearch_jax import config as config_lib
from anysearch_jax.algorithms import curriculum
from anysearch_jax.config import settings
from anysearch_jax.training import checkpoint, train_step

CONFIG = config_lib.ExperimentConfig(
  name="small", curriculum=config_lib.CurriculumConfig(max_budget=2, window=3)
)
QUALITY = 0.5


def saved(rollout: int) -> checkpoint.Saved:
  """Returns a checkpoint of `rollout`; all arrays differ between rollouts."""
  rng = np.random.default_rng(rollout)
  normal = rng.normal(size=(8, 16)).astype(np.float32)
  normal[0, :4] = np.nan, -0.0, np.inf, 1e-42
  params = {
    "layers": {"q": jnp.asarray(normal)},
    "norm": jnp.asarray(rng.normal(size=16), jnp.bfloat16),
  }
  tx = optax.chain(optax.clip_by_global_norm(1e9), optax.adamw(1e-3))
  grads = jax.tree.map(lambda p: jnp.full_like(p, 1 + rollout), params)
  _, opt_state = tx.update(grads, tx.init(params), params)
  seen = curriculum.record(
    curriculum.init(CONFIG.curriculum, rollout),
    jnp.asarray([1, 2, 2]),
    jnp.asarray([0, 1, 1]),
    jnp.asarray([True, True, False]),
    config=CONFIG.curriculum,
  )
  return checkpoint.Saved(
    rollout,
    train_step.TrainState(params, opt_state, jnp.int32(5 * rollout)),
    seen,
    {"seed": 42, "counters": {"run": {"failed": rollout}}},
  )


def abstract(tree, sharding=None):
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=sharding(x) if sharding else x.sharding
    ),
    tree,
  )


def bits(saved: checkpoint.Saved):
  """Returns the whole checkpoint as a value whose == compares every bit."""
  leaves, structure = jax.tree.flatten((saved.state, saved.curriculum))
  arrays = [(x.shape, x.dtype, np.asarray(x).tobytes()) for x in leaves]
  return saved.rollout, structure, arrays, saved.progress


def opened(folder, **keep) -> checkpoint.Checkpoints:
  return checkpoint.Checkpoints(
    folder,
    config=settings.to_dict(CONFIG),
    keep=config_lib.CheckpointConfig(**keep),
  )


def write(folder, *rollouts: int) -> None:
  """Saves a checkpoint of each of these rollouts."""
  with opened(folder) as checkpoints:
    for rollout in rollouts:
      checkpoints.save(saved(rollout), QUALITY)


def restore(folder) -> checkpoint.Saved | None:
  """Restores the newest checkpoint; returns None without one."""
  with opened(folder) as checkpoints:
    found = checkpoint.rollouts(folder)
    return checkpoints.restore(found[-1], saved(0)) if found else None


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
  folder = tmp_path_factory.mktemp("pristine")
  write(folder, 2, 4)
  return folder


@pytest.fixture
def folder(pristine, tmp_path):
  """Returns a folder with checkpoints 2 and 4, which tests damage."""
  return shutil.copytree(pristine, tmp_path / "checkpoints")
