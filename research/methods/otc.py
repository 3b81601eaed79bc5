"""OTC-PO: a right answer is worth more if it took fewer searches.

    r = alpha r_tool r_correct

It is played in Search-R1's environment. The method itself has no budget; the
comparison states one in the prompt. The reward follows the paper's formulas
(https://arxiv.org/abs/2504.14870); its code is not public. Only charged
searches count. The paper leaves the constant `c` open; the default here is the
maximum number of turns of Search-R1, on which OTC-PO is built.
"""

from __future__ import annotations

import dataclasses

import chex
import jax.numpy as jnp

import anysearch_jax as aj


@dataclasses.dataclass(frozen=True)
class Options:
  """OTC-PO's tool productivity reward."""

  alpha: float = aj.settings.learning(1.0, aj.settings.POSITIVE)
  """Factor of the reward."""
  c: float = aj.settings.learning(4.0, aj.settings.POSITIVE)
  """Smoothing constant of the cosine; a larger one makes a search cost less."""
  form: str = aj.settings.learning("grpo", aj.settings.one_of("grpo", "ppo"))
  """`grpo` compares a trajectory's searches with the fewest searches of a right
  answer in its group, `ppo` with zero searches."""


@aj.method.jitted
def reward(o: aj.Outcomes, c: Options) -> aj.method.Terms:
  """Returns alpha r_tool r_correct, where r_correct is the exact match.

  The term `tool` is r_tool for right answers, and 0 for the others.
  """
  correct = o.valid & (o.em != 0)
  m = jnp.where(correct, jnp.asarray(o.searches, float), 0)
  if c.form == "ppo":
    tool = ppo_productivity(m, c=c.c)
  else:
    tool = grpo_productivity(m, correct, c=c.c)
  tool = jnp.where(correct, tool, 0)
  return {"tool": tool, "total": c.alpha * tool}


def ppo_productivity(m: chex.Array, *, c: float) -> chex.Array:
  """Returns r_tool = cos(m pi / (2 m + c)).

  It is 1 without a search and approaches 0 as m grows.

  `m`, of any shape, is the number of searches; `c` is above 0.
  """
  return jnp.cos(m * jnp.pi / (2 * m + c))


def grpo_productivity(
  m: chex.Array, correct: chex.Array, *, c: float
) -> chex.Array:
  """Returns r_tool relative to n, the fewest searches of a right answer.

      f = 2 n m / (m + n)
      r_tool = sin(f pi / (2 n))         if n > 0: 1 at m = n, falls with m
      r_tool = cos(m pi / (2 m + c))     if n = 0: 1 at m = 0, falls with m

  n is the minimum over the right answers of a group, those that are `correct`,
  bool `[..., G]`; c is above 0. The result is float32 `[..., G]`, meaningless
  where `correct` is False.
  """
  n = jnp.min(m, -1, keepdims=True, where=correct, initial=jnp.inf)
  n = jnp.where(jnp.isinf(n), 0, n)
  f = 2 * n * m / jnp.maximum(m + n, 1)
  against_fewest = jnp.sin(f * jnp.pi / (2 * jnp.maximum(n, 1)))
  return jnp.where(n > 0, against_fewest, ppo_productivity(m, c=c))


METHOD = aj.method.compared(
  "otc",
  "OTC-PO",
  aj.search_r1.WORDINGS,
  reward,
  options=Options(),
)
