"""Checks intervals and tests against simulated evaluations with a known truth.

    python -m research.coverage --replicates=2000

A simulated policy answers question q right with probability p_q + d_q + t: the
difficulty p_q is common to all rows, d_q is the row's own and t is its
training's own. Questions of a snapshot are alike in both p_q and d_q. Each
training answers each question once at each of eight budgets.

Prints how often the interval of a row does not hold its true value, how often
that of two equal methods excludes 0, and how often a family of twelve claims
about equal methods has any verdict; all are nominally .05. A share of 2,000
replicates has a standard error of .005.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from absl import app, flags

from anysearch_jax import inference

_BUDGETS = 8
_OFFERED = _BUDGETS * (_BUDGETS + 1) // 2  # Searches of all budgets.
_ALPHA, _BETA = 0.35, 0.3  # Most questions are much alike to one of two kinds.
_SEARCHING = 0.5  # Mean probability of using a search of the budget.


@dataclasses.dataclass(frozen=True)
class Design:
  """Simulated evaluations of rows.

  Attributes:
    trainings: number of trainings of a row.
    spreads: standard deviation between trainings, of the probability that an
      answer is right, of one row and of the others.
    apart: standard deviation of d_q.
    clusters, size: number of clusters, and of questions in each.
    alike: correlation of p_q, and of d_q, within a cluster.
    low, width: the range of p_q, from `low` to `low + width`.
    paired: whether rows have trainings with the same seeds.
  """

  trainings: int = 5
  spreads: tuple[float, float] = (0.01, 0.01)
  apart: float = 0.1
  clusters: int = 24
  size: int = 25
  alike: float = 0.02
  low: float = 0.3
  width: float = 0.4
  paired: bool = True

  @property
  def truth(self) -> tuple[float, float]:
    """The true accuracy of the method, and its right answers per search."""
    accuracy = self.low + self.width * _ALPHA / (_ALPHA + _BETA)
    return accuracy, _BUDGETS * accuracy / (_SEARCHING * _OFFERED)


def _drawn(
  design: Design, draw: Callable[[int], np.ndarray], rng: np.random.Generator
) -> np.ndarray:
  """Draws a value of each question; some take that of their cluster."""
  own = draw(design.clusters * design.size)
  common = np.repeat(draw(design.clusters), design.size)
  # Both of two questions take it with probability `alike`.
  return np.where(rng.random(len(own)) < design.alike**0.5, common, own)


def play(
  design: Design, rows: int, rng: np.random.Generator
) -> list[inference.Linear]:
  """Simulates rows of equal methods; linearises accuracy and TP of each."""
  drawn = _drawn(design, lambda n: rng.beta(_ALPHA, _BETA, n), rng)
  difficulty = design.low + design.width * drawn
  found = []
  for row in range(rows):
    own = _drawn(design, lambda n: rng.choice([-1.0, 1.0], n), rng)
    t = rng.normal(0, design.spreads[min(row, 1)], (design.trainings, 1))
    chance = np.clip(difficulty + design.apart * own + t, 0, 1)
    # The policy searches more where it is less often right.
    wanted = _SEARCHING * (1 + 0.5 * (design.truth[0] - chance))
    right = rng.binomial(_BUDGETS, chance).astype(float)
    searches = rng.binomial(_OFFERED, wanted).astype(float)
    answers = np.full(chance.shape, float(_BUDGETS))
    found.append(
      inference.ratios(
        np.stack([right, right], -1),
        np.stack([answers, searches], -1),
        runs=[
          f"{'' if design.paired else row}{i}" for i in range(design.trainings)
        ],
        trials=np.stack([answers.sum(0)] * 2, -1),
        clusters=np.repeat(np.arange(design.clusters), design.size),
      )
    )
  return found


def _misses(effect: inference.Effect, truth: float) -> bool:
  return effect.estimate.above(truth) or effect.estimate.below(truth)


def misses_of_a_row(design: Design, replicates: int) -> np.ndarray:
  """Returns how often accuracy and TP are not in their intervals.

  With one training, give it no spread: the truth is that of its policy.
  """
  rng, missed = np.random.default_rng(0), np.zeros(2)
  for _ in range(replicates):
    (row,) = play(design, 1, rng)
    answers = design.trainings * design.clusters * design.size * _BUDGETS
    (accuracy,) = inference.rates(row.columns([0]), [answers])
    (tp,) = inference.effects(row.columns([1]))
    missed += list(map(_misses, (accuracy, tp), design.truth))
  return missed / replicates


def differences_found(design: Design, replicates: int) -> np.ndarray:
  """Returns how often accuracy and TP of equal methods are found to differ."""
  rng, found = np.random.default_rng(0), np.zeros(2)
  for _ in range(replicates):
    effects = inference.effects(inference.minus(*play(design, 2, rng)))
    found += [_misses(effect, 0.0) for effect in effects]
  return found / replicates


def verdicts(design: Design, replicates: int, claims: int = 12) -> float:
  """Returns how often any of a family's claims on equal methods is decided.

  Each claim is that another row is more accurate than the first one.
  """
  rng, found = np.random.default_rng(0), 0
  for _ in range(replicates):
    first, *others = (row.columns([0]) for row in play(design, 1 + claims, rng))
    p = [inference.effects(inference.minus(row, first))[0].p for row in others]
    decided = inference.holm(np.array(p, float)) < 0.05
    found += bool(decided.any())
  return found / replicates


DESIGNS = {
  "as in the world": Design(),
  "trainings that agree": Design(spreads=(0.0, 0.0)),
  "draws alone differ": Design(spreads=(0.0, 0.0), apart=0.0),
  "trainings differ much": Design(spreads=(0.03, 0.03)),
  "one row's differ 6 times more": Design(spreads=(0.005, 0.03)),
  "rows differ much": Design(apart=0.2),
  "snapshots differ much": Design(apart=0.2, alike=0.1),
  "questions are independent": Design(alike=0.0),
  "other seeds": Design(paired=False),
  "other seeds, 6 times": Design(spreads=(0.005, 0.03), paired=False),
}


def main(argv) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected argument {argv[1]!r}.")
  n = flags.FLAGS.replicates

  def line(title: str, found: np.ndarray | float) -> None:
    print(f"{title:<44}" + " ".join(f"{x:6.3f}" for x in np.atleast_1d(found)))

  print(f"{'a row is outside of its interval':<44}    EM     TP")
  for trainings in (1, 2, 3, 5):
    spread = 0.0 if trainings == 1 else 0.01
    design = Design(trainings, (spread, spread))
    line(f"  {trainings} trainings", misses_of_a_row(design, n))
  for trainings in (2, 3, 5):
    print(f"equal methods differ, {trainings} trainings each")
    for title, design in DESIGNS.items():
      design = dataclasses.replace(design, trainings=trainings)
      line(f"  {title}", differences_found(design, n))
  print("equal policies differ, one training each, questions independent")
  one = Design(1, (0.0, 0.0), apart=0.0, size=1, alike=0.0)
  for questions in (8, 30, 100):
    few = dataclasses.replace(one, clusters=questions)
    line(f"  {questions} questions", differences_found(few, n))
    rare = dataclasses.replace(few, low=0.97, width=0.03)
    line(f"  {questions}, nearly all right", differences_found(rare, n))
  print("any of twelve claims on equal methods is decided")
  for trainings in (2, 3, 5):
    for spread in (0.0, 0.01, 0.03):
      design = Design(trainings, (spread, spread))
      title = f"  {trainings} trainings, spread {spread:g}"
      line(title, verdicts(design, n))


if __name__ == "__main__":
  flags.DEFINE_integer(
    "replicates", 2000, "Simulated evaluations of a line.", lower_bound=10
  )
  app.run(main)
