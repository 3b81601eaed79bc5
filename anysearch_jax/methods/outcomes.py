"""What trajectories came to, as the rewards of all systems read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import chex
import jax.numpy as jnp


class Outcomes(NamedTuple):
  """What the trajectories of groups came to; arrays `[..., G]`.

  What stands where a member is not valid counts nowhere.

  Attributes:
    em, f1: of the answer, in [0, 1]; 0 without one.
    format: 1 if the response is well formed, else 0.
    answered: bool, an answer was given, be it an empty one.
    generated_tokens: that the model wrote.
    searches: charged.
    violation: bool, a search beyond the budget was tried.
    budget: `[...]`, searches assigned to the group.
    valid: bool, False for an episode that failed.
    measures: what the method's `measure` says of each trajectory, by name.
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


def parts(valid: chex.Array, **values: chex.Array) -> dict[str, chex.Array]:
  """A reward and its parts, as every reward function returns them.

  Args:
    valid: bool `[..., G]`.
    **values: `[..., G]` each; `total` is the reward.

  Returns:
    The values by name as float32, 0 where not valid.
  """
  chex.assert_type(valid, bool)
  chex.assert_equal_shape([valid, *values.values()])
  return {
    name: jnp.where(valid, jnp.asarray(value, float), 0)
    for name, value in values.items()
  }
