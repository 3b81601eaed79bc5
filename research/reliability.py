"""How much AnySearch as published loses, by the reliability of memory.

    python -m research.study --config=research/reliability.py:0.65 --seeds=5 \
        --rows=anysearch,priced,no_tool --output=runs/reliability-0.65
    python -m research.reliability --figure=docs/images/reliability.svg

The first command trains three rows in the quickstart's world, where every
memory is right with the probability that the preset names. The second compares
them with the switch points of docs/objective.md: AnySearch searches for what it
remembers below the switch point and never above. So it should lose nothing
below, and above it what an agent loses that trusts every memory, computed on
the same questions.

There are three predictions. `alone` has the switch point of a fact alone.
`chains` has that of the chains which the warm start plays, for one policy that
does the same at every budget; `budgets` has that of each budget. Both were
computed before the trainings at .45, .5, .55 and .6, from evaluations of the
warm start with eight seeds:

    python -m anysearch_jax.launch.evaluate --budgets=1..8 \
        --config=research/reliability.py:0.5 --output=runs/start-0.5 \
        --config.evaluation.questions=100 \
        --config.evaluation.seeds=1,2,3,4,5,6,7,8
    python -m research.chains runs/start-0.5 \
        --switches=research/evidence/switches.json
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

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
SWITCHES = study.EVIDENCE / "switches.json"
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


def costs_of_trust(rho: float, questions: int) -> np.ndarray:
  """Returns what an agent loses that trusts every memory, in accuracy.

  It is the best agent's accuracy minus its own, the mean over held-out
  questions, at each of `BUDGETS`, where memories are right with probability
  `rho`.
  """
  world = aj.World(0, rho)
  ids = [q.id for q in world.evaluation_questions(questions)]
  best, trusting = (
    aj.optimum.accuracy(agent, ids, BUDGETS).mean(axis=0)
    for agent in (
      aj.optimum.Optimum(world),
      aj.optimum.Thorough(world, search_known=False),
    )
  )
  return best - trusting


class Switch(NamedTuple):
  """The switch points of the warm start's chains.

  Attributes:
    rhos: reliabilities of the worlds that it played, ascending, `[K]`.
    by_budget: `[K, 8]`, of each of `BUDGETS`.
    of_all: `[K]`, of one policy that does the same at every budget.
  """

  rhos: np.ndarray
  by_budget: np.ndarray
  of_all: np.ndarray

  def at(self, rho: float) -> tuple[np.ndarray, float]:
    """Returns those of each budget and that of all, between the worlds."""
    by_budget = [
      np.interp(rho, self.rhos, points) for points in self.by_budget.T
    ]
    return np.array(by_budget), float(np.interp(rho, self.rhos, self.of_all))


def switch_of_chains(path: pathlib.Path = SWITCHES) -> Switch:
  """Reads the switch points of the warm start in all worlds of `RHOS`."""
  stored = json.loads(path.read_text())
  worlds = [stored[f"start-{rho}"] for rho in RHOS]
  by_budget = [
    [world["by_budget"][str(budget)] for budget in BUDGETS] for world in worlds
  ]
  return Switch(
    np.array(RHOS, dtype=float),
    np.array(by_budget),
    np.array([world["of_all"] for world in worlds]),
  )


class Predictions(NamedTuple):
  """Predicted losses of accuracy, the mean over `BUDGETS`.

  Attributes:
    alone: by the switch point of a fact alone.
    chains: by that of all budgets in chains.
    budgets: by that of each budget in chains.
  """

  alone: float
  chains: float
  budgets: float


def predicted(
  trust: Mapping[float, np.ndarray], switch: Switch, rho: float
) -> Predictions:
  """Returns the losses at `rho`: none below a switch point, then that of trust.

  Args:
    trust: `costs_of_trust` of some reliabilities, ascending.
    switch: the switch points in chains.
    rho: reliability of memory, in [0, 1].
  """
  costs = np.array([np.interp(rho, [*trust], x) for x in zip(*trust.values())])
  by_budget, of_all = switch.at(rho)
  return Predictions(
    alone=float(costs.mean() * (rho > SWITCH)),
    chains=float(costs.mean() * (rho > of_all)),
    budgets=float((costs * (rho > by_budget)).mean()),
  )


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
  switch = switch_of_chains()
  means = [costs.mean() for costs in trust.values()]
  axis.plot([*trust], means, ":", color="gray", label="trusts every memory")
  lines = [predicted(trust, switch, rho) for rho in _FINE]
  for name, style in (("alone", "k:"), ("budgets", "k--"), ("chains", "k")):
    losses_of_rule = [getattr(x, name) for x in lines]
    axis.plot(_FINE, losses_of_rule, style, label=f"predicted: {name}")
  print(f"{'rho':>5}{'alone':>8}{'chains':>8}{'budgets':>8}  more accurate")
  for rho in RHOS:
    losses = predicted(trust, switch, float(rho))
    words = ["".join((f"{rho:>5}", *(f"{loss:8.3f}" for loss in losses)))]
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
  axis.set_ylim(top=0.65)  # Room for the legend.
  axis.legend(loc="upper right", ncols=2)
  if f.figure:
    figure.savefig(pathlib.Path(f.figure))


if __name__ == "__main__":
  define_flags()
  app.run(main)
