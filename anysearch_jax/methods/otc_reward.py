"""OTC-PO's reward: a right answer counts by how few searches it took.

    r = alpha r_tool r_correct

From the paper's formulas (arXiv 2504.14870); its code is not public. Searches
are the charged ones. `c` of the paper is a constant to choose; ours is the most
turns of Search-R1, which OTC-PO is built on.
"""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp

from anysearch_jax.config import methods as config_methods
from anysearch_jax.methods import outcomes as outcomes_lib

FORMS = ("grpo", "ppo")


@functools.partial(jax.jit, static_argnames="config")
def reward(
  outcomes: outcomes_lib.Outcomes, *, config: config_methods.OtcConfig
) -> dict[str, chex.Array]:
  """alpha r_tool r_correct, with r_correct the exact match.

  Args:
    outcomes: of groups.
    config: the form of r_tool and its constants.

  Returns:
    `em`; `tool`, r_tool of the right answers and 0 for the others; `total`.

  Raises:
    ValueError: an unknown form, or a c that is not positive.
  """
  if config.c <= 0:
    raise ValueError(f"Found c {config.c}; expected more than 0.")
  correct = outcomes.valid & (outcomes.em != 0)
  m = jnp.where(correct, jnp.asarray(outcomes.searches, float), 0)
  match config.form:
    case "ppo":
      tool = ppo_productivity(m, c=config.c)
    case "grpo":
      tool = grpo_productivity(m, correct, c=config.c)
    case _:
      raise ValueError(
        f"Found form {config.form!r}; expected one of {', '.join(FORMS)}."
      )
  tool = jnp.where(correct, tool, 0)
  return outcomes_lib.parts(
    outcomes.valid, em=outcomes.em, tool=tool, total=config.alpha * tool
  )


def ppo_productivity(m: chex.Array, *, c: float) -> chex.Array:
  """r_tool = cos(m pi / (2 m + c)): 1 without a search, towards 0 with many.

  Args:
    m: searches, any shape.
    c: > 0.
  """
  return jnp.cos(m * jnp.pi / (2 * m + c))


def grpo_productivity(
  m: chex.Array, correct: chex.Array, *, c: float
) -> chex.Array:
  """r_tool against n, the fewest searches of a right answer of the group.

      f = 2 n m / (m + n)
      r_tool = sin(f pi / (2 n))         where n > 0: 1 at m = n, falling
      r_tool = cos(m pi / (2 m + c))     where n = 0: 1 at m = 0, falling

  Args:
    m: `[..., G]` searches.
    correct: bool `[..., G]`, valid and right.
    c: > 0.

  Returns:
    float32 `[..., G]`; of no meaning where not correct.
  """
  n = jnp.min(m, -1, keepdims=True, where=correct, initial=jnp.inf)
  n = jnp.where(jnp.isinf(n), 0, n)
  f = 2 * n * m / jnp.maximum(m + n, 1)
  against_fewest = jnp.sin(f * jnp.pi / (2 * jnp.maximum(n, 1)))
  return jnp.where(n > 0, against_fewest, ppo_productivity(m, c=c))
