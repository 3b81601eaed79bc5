"""Measures what a search costs under each reward and each normaliser.

    python -m research.price_of_a_search --figure=price.svg

GRPO learns one decision, with the library's own rewards and advantages: to
search for a fact, or to trust a memory that is right with probability rho. A
memory is right or wrong for the whole group, and a search always finds the
fact. Each policy is a table: P(search) for each rho and each budget.
docs/objective.md derives the rho above which searches stop: dotted lines.
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

import anysearch_jax as aj
from anysearch_jax import grpo, rewards

BUDGETS, RHO = np.array([1, 3, 8]), np.arange(0.405, 1, 0.01)
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


def predicted(c, normalize: str) -> np.ndarray:
  """Returns the switch point for each budget, from P(search) = 1/2."""
  fixed, saved = c.gamma_mode == "fixed", (BUDGETS - 1) / BUDGETS
  gamma = c.gamma_fixed if fixed else c.gamma_max
  cost = gamma * (np.ones(len(BUDGETS)) if c.use_rel else 1 / BUDGETS)
  gain = c.alpha + gamma * saved * (1 if fixed else 0.5)
  return gain / (gain + (gain if normalize == "group" else cost))


def learned(c, normalize: str, seed: int = 0) -> np.ndarray:
  """Returns P(search) `[rho, budget]` after STEPS steps from 1/2."""
  shape = (len(RHO), len(BUDGETS), GROUPS, SIZE)
  budget = jnp.broadcast_to(jnp.array(BUDGETS)[:, None], shape[:-1])
  valid, tx = jnp.ones(shape, bool), optax.adam(0.1)

  def step(carry, key):
    logits, state = carry
    p = jax.nn.sigmoid(logits)[..., None, None]
    drawn = jax.random.uniform(key, (2, *shape))
    search, right = drawn[0] < p, drawn[1, ..., :1] < RHO[:, None, None, None]
    reward = rewards.composite(
      search | right, valid, valid, search, budget, valid, config=c
    )
    advantage = grpo.advantages(
      reward.total, valid, epsilon=1e-6, normalize=normalize
    )
    gradient = jnp.mean(advantage * (search - p), (2, 3))
    updates, state = tx.update(-gradient, state)
    return (optax.apply_updates(logits, updates), state), None

  start = jnp.zeros(shape[:2])
  keys = jax.random.split(jax.random.key(seed, impl="rbg"), STEPS)
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
    searches, switches = learned(c, normalize), predicted(c, normalize)
    measured = 0.4 + 0.01 * (searches > 0.5).sum(0)
    pairs = (f"{x:.2f} / {y:.2f}" for x, y in zip(switches, measured))
    print(f"{name:22}{normalize:8}", *pairs, sep="  ")
    lines = axis.plot(RHO, searches, label=[f"B = {b}" for b in BUDGETS])
    for line, switch in zip(lines, switches):
      axis.axvline(switch, color=line.get_color(), linestyle=":")
    axis.set(title=f"{name}, {normalize}", xlabel="rho", ylabel="P(search)")
  if args.figure:
    axes.flat[0].legend()
    figure.savefig(args.figure)
  plt.close(figure)


if __name__ == "__main__":
  main()
