"""How much AnySearch as published loses, by the reliability of memory.

    python -m research.study --config=research/reliability.py:0.65 --seeds=5 \
        --rows=anysearch,priced,no_tool --output=runs/reliability-0.65
    python -m research.reliability --figure=docs/images/reliability.svg

The first command trains three rows in the quickstart's world, where every
memory is right with the probability that the preset names. The second compares
them with docs/objective.md: AnySearch searches for what it remembers below the
switch point and never above. So it should lose nothing below, and above it what
an agent loses that trusts every memory, computed on the same questions.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from absl import app, flags

import anysearch_jax as aj
from anysearch_jax import config as config_lib
from anysearch_jax.configs import quickstart
from research import claims, outcomes, study

RHOS = ("0.2", "0.35", "0.45", "0.5", "0.55", "0.6", "0.65", "0.9")
# Of the first search for a fact, which misses the alternative wording.
SWITCH = 0.65 / 1.65
BUDGETS = tuple(range(1, 9))
_DRAWN = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 1.0)
_FINE = np.linspace(0.1, 1.0, 1801)


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
      aj.optimum.Thorough(world, search_known=False),
    )
  )
  return float(best - trusting)


def predicted(trust: Mapping[float, float], rho: float) -> float:
  """Returns the loss at `rho`: none below `SWITCH`, then that of trust."""
  return float(np.interp(rho, [*trust], [*trust.values()])) * (rho > SWITCH)


def measured(rho: str, row: str) -> aj.inference.Estimate | None:
  """Returns a row's accuracy minus AnySearch's; None without outcomes."""
  path = study.shipped("ablations", f"research/reliability.py:{rho}")
  stored = outcomes.read(path) if path.is_file() else []
  sides = [[o for o in stored if o.row == name] for name in (row, "anysearch")]
  ours, theirs = (claims.first(side, claims.TRAININGS) for side in sides)
  if not ours or not theirs:
    return None
  return claims.difference(ours, theirs, "accuracy").estimate


def define_flags() -> None:
  """Defines the command's flags; importing the module defines none."""
  flags.DEFINE_string("figure", None, "An SVG file.")
  flags.DEFINE_integer("questions", 200, "That predict.", lower_bound=1)


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected argument {argv[1]!r}.")
  f = flags.FLAGS
  trust = {rho: costs_of_trust(rho, f.questions) for rho in _DRAWN}
  figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
  axis.plot([*trust], [*trust.values()], ":", label="trusts every memory")
  line = [predicted(trust, rho) for rho in _FINE]
  axis.plot(_FINE, line, "k", label="predicted")
  print(f"{'rho':>5}{'predicted':>10}  accuracy more than AnySearch's")
  for rho in RHOS:
    words = [f"{rho:>5}{predicted(trust, float(rho)):10.3f}"]
    for i, row in enumerate(("no_tool", "priced")):
      if (found := measured(rho, row)) and found.low is not None:
        words.append(
          f"{row} {found.value:.3f} [{found.low:.3f}, {found.high:.3f}]"
        )
        label = f"measured: {row} - AnySearch" if rho == RHOS[0] else None
        x = float(rho) + 0.01 * i
        points = [found.low, found.value, found.high]
        axis.plot([x] * 3, points, f"C{i + 1}o-", markevery=[1], label=label)
    print(*words, sep="  ")
  axis.set(xlabel="reliability of memory", ylabel="lost accuracy, B = 1 to 8")
  axis.legend(loc="upper right")
  if f.figure:
    figure.savefig(pathlib.Path(f.figure))


if __name__ == "__main__":
  define_flags()
  app.run(main)
