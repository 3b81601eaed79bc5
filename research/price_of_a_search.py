"""Measures what a search costs under each reward and each normaliser.

    python -m research.price_of_a_search --figure=price.svg

GRPO learns one decision, with the library's own rewards and advantages: to
search for a fact, or to trust a memory that is right with probability rho. A
memory is right or wrong for the whole group. A search finds the fact with
probability q; the memory is used where it does not. Each policy is a table:
P(search) for each rho and each budget. docs/objective.md derives the rho above
which searches stop: dotted lines, for q = 1 as the figure.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from scipy import stats

import anysearch_jax as aj
from anysearch_jax import grpo, rewards

BUDGETS, RHO = np.array([1, 3, 8]), np.arange(0.305, 1, 0.01)
FOUND = (1.0, 0.65)  # The second is the generated world's.
GROUPS, SIZE, STEPS = 16, 5, 100
ABS = {"gamma_mode": "fixed", "use_rel": False}  # The tool reward is R_abs.
ROWS: list[tuple[str, str, dict]] = [
  ("AnySearch, gamma .3", "group", {}),
  ("AnySearch, gamma .03", "group", {"gamma_max": 0.03}),
  ("AnySearch, gamma .3", "none", {}),
  ("R_abs, gamma .3", "group", {**ABS, "gamma_fixed": 0.3}),
  ("R_abs, gamma .3", "batch", {**ABS, "gamma_fixed": 0.3}),
  ("R_abs, gamma .1", "batch", {**ABS, "gamma_fixed": 0.1}),
]


def predicted(c, normalize: str, found: float = 1.0) -> np.ndarray:
  """Returns the switch point for each budget, from P(search) = 1/2."""
  if normalize == "group":
    cost, gain = forces(found)
    return np.full(len(BUDGETS), gain / (gain + cost))
  fixed, saved = c.gamma_mode == "fixed", (BUDGETS - 1) / BUDGETS
  gamma = c.gamma_fixed if fixed else c.gamma_max
  cost = gamma * (np.ones(len(BUDGETS)) if c.use_rel else 1 / BUDGETS)
  gain = found * (c.alpha + gamma * saved * (1 if fixed else found / 2))
  return gain / (gain + cost)


def forces(found: float, size: int = SIZE, p: float = 0.5) -> tuple[float, ...]:
  """Returns what pushes a group from searching and towards it.

  They are the expected sums of |A| over the m trajectories that search, if the
  memory is right and if it is wrong: sqrt(m (G - m)), and, if k of m searches
  find the fact, (G - m) sqrt(k / (G - k)).
  """
  m, k = np.arange(size + 1)[:, None], np.arange(size + 1)
  chance = stats.binom.pmf(m, size, p) * stats.binom.pmf(k, m, found)
  right = (size - m) * np.sqrt(k / np.maximum(size - k, 1))
  return float((chance * np.sqrt(m * (size - m))).sum()), float(
    (chance * right).sum()
  )


def learned(c, normalize: str, found: float = 1.0) -> np.ndarray:
  """Returns P(search) `[rho, budget]` after STEPS steps from 1/2."""
  shape = (len(RHO), len(BUDGETS), GROUPS, SIZE)
  budget = jnp.broadcast_to(jnp.array(BUDGETS)[:, None], shape[:-1])
  valid, tx = jnp.ones(shape, bool), optax.adam(0.1)

  def step(carry, key):
    logits, state = carry
    p = jax.nn.sigmoid(logits)[..., None, None]
    drawn = jax.random.uniform(key, (3, *shape))
    search, known = drawn[0] < p, drawn[1, ..., :1] < RHO[:, None, None, None]
    right = known | search & (drawn[2] < found)
    reward = rewards.composite(
      right, valid, valid, search, budget, valid, config=c
    )
    advantage = grpo.advantages(
      reward.total, valid, epsilon=1e-6, normalize=normalize
    )
    gradient = jnp.mean(advantage * (search - p), (2, 3))
    updates, state = tx.update(-gradient, state)
    return (optax.apply_updates(logits, updates), state), None

  start = jnp.zeros(shape[:2])
  keys = jax.random.split(jax.random.key(0, impl="rbg"), STEPS)
  run = jax.jit(lambda carry: jax.lax.scan(step, carry, keys)[0][0])
  return np.asarray(jax.nn.sigmoid(run((start, tx.init(start)))))


def main(argv: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--figure", type=pathlib.Path, help="an SVG file")
  args = parser.parse_args(argv)
  figure, axes = plt.subplots(2, 3, figsize=(10, 6), layout="constrained")
  print("searches stop above rho, predicted / measured, for B =", *BUDGETS)
  for axis, (name, normalize, changes) in zip(axes.flat, ROWS):
    c = dataclasses.replace(aj.ExperimentConfig().reward, **changes)
    for found in reversed(FOUND):
      searches = learned(c, normalize, found)
      switches = predicted(c, normalize, found)
      measured = 0.3 + 0.01 * (searches > 0.5).sum(0)
      pairs = (f"{x:.2f} / {y:.2f}" for x, y in zip(switches, measured))
      print(f"{name:22}{normalize:8} q = {found:<5}", *pairs, sep="  ")
    lines = axis.plot(RHO, searches, label=[f"B = {b}" for b in BUDGETS])
    for line, switch in zip(lines, switches):
      axis.axvline(switch, color=line.get_color(), linestyle=":")
    axis.set(title=f"{name}, {normalize}", xlabel="rho", ylabel="P(search)")
  if args.figure:
    axes.flat[0].legend()
    figure.savefig(args.figure)


if __name__ == "__main__":
  main()
