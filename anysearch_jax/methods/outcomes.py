"""The outcomes of trajectories: the input of every system's reward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import chex
import jax.numpy as jnp
import numpy as np


class Progress(NamedTuple):
  """How far a training is when a rollout is scored, for rewards in stages.

  A run that was resumed sees the same values.

  Attributes:
    rollout: index of the rollout, from 0.
    step: optimizer steps of all rollouts before this one.
    total: optimizer steps of the whole training, >= 1.
  """

  rollout: chex.Numeric = 0
  step: chex.Numeric = 0
  total: chex.Numeric = 1

  @property
  def share(self) -> chex.Numeric:
    """The share of the training that is done, in [0, 1)."""
    return self.step / self.total


BEGINNING = Progress()


class Outcomes(NamedTuple):
  """Outcomes of the trajectories of groups; arrays `[..., G]`.

  Entries where `valid` is False are ignored.

  Attributes:
    em, f1: scores of the answer, in [0, 1]; 0 without an answer.
    format: 1 if the response is well formed, else 0.
    answered: bool, an answer was given, even an empty one.
    generated_tokens: number of tokens that the model wrote.
    searches: number of charged searches.
    violation: bool, the model tried to search beyond the budget.
    budget: `[...]`, searches assigned to the group.
    valid: bool, False for a failed episode.
    measures: values of the method's `measure`, by name.
    progress: how far the training is; three numbers.
    spent: generated tokens, dollars and seconds, by the name of the unit.
    caps: `[...]` what the group may spend of each, infinite without a cap.
    answers: str, the answer as the environment reads it, None without one.
    trajectories: `types.Trajectory`, None where `valid` is False. It and
      `answers` are object arrays; both are None while JAX traces a reward.
  """

  em: chex.Array
  f1: chex.Array
  format: chex.Array
  answered: chex.Array
  generated_tokens: chex.Array
  searches: chex.Array
  violation: chex.Array
  budget: chex.Array
  valid: chex.Array
  measures: Mapping[str, chex.Array]
  progress: Progress = BEGINNING
  spent: Mapping[str, chex.Array] = {}
  caps: Mapping[str, chex.Array] = {}
  answers: np.ndarray | None = None
  trajectories: np.ndarray | None = None


def parts(valid: chex.Array, **values: chex.Array) -> dict[str, chex.Array]:
  """Returns a reward and its terms in the form that rewards share.

  Args:
    valid: bool `[..., G]`.
    **values: `[..., G]` each; `total` is the reward.

  Returns:
    The values by name as float32, 0 where `valid` is False.
  """
  chex.assert_type(valid, bool)
  chex.assert_equal_shape([valid, *values.values()])
  return {
    name: jnp.where(valid, jnp.asarray(value, float), 0)
    for name, value in values.items()
  }
