"""How much AnySearch as published loses, by the reliability of memory.

    python -m research.study --config=research/reliability.py:0.65 --seeds=5 \
        --rows=anysearch,priced,no_tool --output=runs/reliability-0.65
    python -m research.reliability --figure=docs/images/reliability.svg

The first command trains three rows in the quickstart's world, where every
memory is right with the probability that the preset names, from the shipped
warm start. The second compares them with what docs/objective.md predicts: with
the group's deviation, a policy searches for what it remembers below the switch
point and never above it. So the prediction is 0 below, and above it the
accuracy of the best agent minus that of an agent that trusts every memory, both
computed on the questions that the rows answered.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Sequence

import matplotlib.pyplot as plt
import numpy as np
from absl import app, flags

import anysearch_jax as aj
from anysearch_jax import config as config_lib
from configs import quickstart
from research import claims, outcomes, study

RHOS = ("0.2", "0.35", "0.65", "0.9")
# Of the first search for a fact, which misses the alternative wording.
SWITCH = 0.65 / 1.65
BUDGETS = tuple(range(1, 9))


def get_config(preset: str = "0.65") -> aj.ExperimentConfig:
  if preset not in RHOS:
    raise ValueError(
      f"research/reliability.py: found preset {preset!r}, expected one of "
      f"{', '.join(RHOS)}."
    )
  return config_lib.changed(
    quickstart.get_config(),
    name=f"reliability-{preset}",
    data={"world_reliability": float(preset)},
  )


def costs_of_trust(rho: float, questions: int) -> float:
  """Returns what an agent loses that trusts every memory, in accuracy.

  It is the best agent's accuracy minus its own, the mean over held-out
  questions and `BUDGETS`, where memories are right with probability `rho`.
  """
  world = aj.World(0, rho)
  ids = [q.id for q in world.evaluation_questions(questions)]
  best, trusting = (
    aj.optimum.accuracy(agent, ids, BUDGETS).mean()
    for agent in (
      aj.optimum.Optimum(world),
      aj.optimum.Thorough(world, known=False),
    )
  )
  return float(best - trusting)


def measured(
  found: Iterable[outcomes.Outcomes], row: str, minus: str
) -> aj.inference.Estimate:
  """Returns the accuracy of one row minus that of another, pooled."""
  by_row: dict[str, list[outcomes.Outcomes]] = {row: [], minus: []}
  for one in found:
    by_row.get(one.row, []).append(one)
  return claims.difference(by_row[row], by_row[minus], "accuracy").estimate


def define_flags() -> None:
  """Defines the command's flags; importing the module defines none."""
  flags.DEFINE_string("figure", None, "An SVG file.")
  flags.DEFINE_integer("questions", 600, "That predict.", lower_bound=1)


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected argument {argv[1]!r}.")
  f = flags.FLAGS
  figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
  shares = np.linspace(0.1, 1.0, 19)
  trust = [costs_of_trust(rho, f.questions) for rho in shares]
  axis.plot(shares, trust, ":", color="gray", label="trusts every memory")
  above = np.append(SWITCH, shares[shares > SWITCH])
  line = [np.interp(SWITCH, shares, trust), *np.array(trust)[shares > SWITCH]]
  axis.plot([0.1, SWITCH, *above], [0, 0, *line], "k", label="predicted")
  print(f"{'rho':6}{'predicted':>10}  no tool - AnySearch, priced - AnySearch")
  for row, color in (("no_tool", "tab:blue"), ("priced", "tab:orange")):
    for rho in RHOS:
      known = study.shipped("ablations", f"research/reliability.py:{rho}")
      if known and known.is_file():
        value, low, high = measured(outcomes.read(known), row, "anysearch")
        predicted = np.interp(float(rho), [0, SWITCH, *above], [0, 0, *line])
        print(
          f"{rho:6}{predicted:10.3f}  {row} {value:.3f} [{low:.3f}, {high:.3f}]"
        )
        ends = [[value - low], [high - value]]
        axis.errorbar(
          float(rho),
          value,
          ends,
          fmt="o",
          color=color,
          capsize=3,
          label=f"{row} - AnySearch" if rho == RHOS[0] else None,
        )
  axis.set(xlabel="reliability of memory", ylabel="lost accuracy, B = 1 to 8")
  axis.legend()
  if f.figure:
    figure.savefig(pathlib.Path(f.figure))
  plt.close(figure)


if __name__ == "__main__":
  define_flags()
  app.run(main)
