"""A price of searches that no group's deviation divides.

    python -m launch.train --config=configs/quickstart.py \
        --reward=research/price_after_deviation.py:reward \
        --config.objective.normalize=none --output=runs/price_after
    python -m research.price_after_deviation

GRPO divides a group's rewards by their deviation. Where a whole group is right,
that cancels the weight of the tool reward; where answers differ, it makes a
search nearly free (docs/objective.md). Here only the reward of answers is
divided, and the price is subtracted afterwards:

    A = (R - mean of R) / deviation of R
        - PRICE (searches - mean of searches) / B

R is the paper's reward without its tool reward. A search costs the same in
every group, right or wrong. With `objective.normalize=none` the trainer leaves
these advantages as they are. The second command prints the switch points.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import chex
import jax.numpy as jnp
from absl import app

import anysearch_jax as aj
from anysearch_jax import grpo, rewards
from research import chains, price_of_a_search

# Of all searches of a budget, in deviations of the answers' reward. The priced
# preset has .1, and groups in which half are right have a deviation of .3.
PRICE = 0.3
_CHANCES = (1.0, 0.9, 0.7, 0.5, 0.3)
_BUDGETS = (1, 3, 8)


def reward(
  outcomes: aj.Outcomes, config: aj.ExperimentConfig
) -> dict[str, chex.Array]:
  """Returns the advantages as a reward, and its parts, float32 `[Q, G]`.

  `answer` is the standardised reward of answers, `price` what searches cost.
  """
  unpriced = dataclasses.replace(config.reward, gamma_mode="off", charge=0.0)
  of_answers = rewards.composite(
    outcomes.em,
    outcomes.format,
    outcomes.generated_tokens,
    outcomes.searches,
    outcomes.budget,
    outcomes.valid,
    config=unpriced,
  )
  answer = grpo.advantages(
    of_answers.total,
    outcomes.valid,
    epsilon=config.objective.advantage_epsilon,
    normalize="group",
  )
  budget = jnp.asarray(outcomes.budget, float)[..., None]
  price = PRICE * outcomes.searches / jnp.maximum(budget, 1)
  return {"total": answer - price, "answer": answer, "price": price}


def switch(
  chance: float,
  budget: int,
  *,
  found: float = chains.FOUND,
  size: int = chains.GROUP,
) -> float:
  """Returns the switch point in chains, from P(search) = 1/2.

  Whether a sample is right does not depend on a search that was not needed, so
  `wasted` is the price alone. `gained` is that of `chains.limit`, less the
  price.

  Args:
    chance: p, the probability that a sample finds all other facts, above 0.
    budget: B, searches.
    found: q, the probability that the search finds the fact.
    size: G.
  """
  # The sum of (searched - mean) (searched - 1/2) over a group, on average.
  spread = (size - 1) / 4
  cost = PRICE / budget * spread
  # The advantages of a group add up to 0, so the sum of A (searched - 1/2) is
  # that of A over those that search, which `forces` returns.
  _, gain = price_of_a_search.forces(chance, size)
  return 1 - cost / (found * gain)


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected argument {argv[1]!r}.")
  print("switch points at p =", *_CHANCES)
  for budget in _BUDGETS:
    points = (f"{switch(chance, budget):.2f}" for chance in _CHANCES)
    print(f"B = {budget}:", *points)


if __name__ == "__main__":
  app.run(main)
