"""Checks intervals and tests against simulated evaluations with a known truth.

    python -m research.coverage --replicates=2000

A simulated policy answers question q right with probability p_q + t, where p_q
is drawn from a beta distribution and t is its training's own deviation. Prints
how often intervals hold the truth (nominal: .95) and how often tests find a
difference of methods that have none (nominal: .05). A share of 2,000 replicates
has a standard error of .005.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from absl import app, flags

from anysearch_jax import inference, significance

_BUDGETS = 8
_ALPHA, _BETA = 0.35, 0.3  # Most questions are almost always right or wrong.


@dataclasses.dataclass(frozen=True)
class Design:
  """A simulated evaluation of a row.

  Attributes:
    questions: number of questions.
    trainings: number of trainings, each with one evaluation seed.
    spread: standard deviation between trainings, of the probabilities that an
      answer is right and that a search is made.
    low, width: the range of p_q, from `low` to `low + width`.
    searching: mean probability of using a search of the budget.
  """

  questions: int
  trainings: int = 1
  spread: float = 0.02
  low: float = 0.05
  width: float = 0.9
  searching: float = 0.5

  @property
  def accuracy(self) -> float:
    """The true accuracy of the method."""
    return self.low + self.width * _ALPHA / (_ALPHA + _BETA)

  @property
  def productivity(self) -> float:
    """The true number of correct answers per search."""
    return _BUDGETS * self.accuracy / (self.searching * self.offered)

  @property
  def offered(self) -> int:
    """The number of searches that all budgets of a question allow."""
    return _BUDGETS * (_BUDGETS + 1) // 2


@dataclasses.dataclass(frozen=True)
class Played:
  """Right answers, searches and all answers of a row, float `[R, N]`."""

  right: np.ndarray
  searches: np.ndarray
  answers: np.ndarray

  def scores(self, run: str = "") -> inference.Linear:
    """Linearises accuracy and tool productivity."""
    return inference.ratios(
      np.stack([self.right, self.right], -1),
      np.stack([self.answers, self.searches], -1),
      runs=[f"{run}{i}" for i in range(len(self.right))],
      trials=np.stack([self.answers.sum(0)] * 2, -1),
    )


def difficulties(design: Design, rng: np.random.Generator) -> np.ndarray:
  """Draws p_q of each question."""
  drawn = rng.beta(_ALPHA, _BETA, design.questions)
  return design.low + design.width * drawn


def play(
  design: Design,
  p: np.ndarray,
  rng: np.random.Generator,
  *,
  deviations: np.ndarray | None = None,
) -> Played:
  """Simulates the trainings of a method on questions of difficulties `p`.

  Args:
    design: sizes and spreads.
    p: float `[N]`.
    rng: its draws decide everything.
    deviations: float `[R]`, those of the trainings; None: draws them.
  """
  if deviations is None:
    deviations = rng.normal(0, design.spread, design.trainings)
  chance = np.clip(p + deviations[:, None], 0, 1)
  # The policy searches more where it is less often right.
  wanted = design.searching * (1 + 0.5 * (design.accuracy - chance))
  return Played(
    rng.binomial(_BUDGETS, chance).astype(float),
    rng.binomial(design.offered, np.clip(wanted, 0, 1)).astype(float),
    np.full(chance.shape, float(_BUDGETS)),
  )


def _holds(effect: inference.Effect, truth: float) -> bool:
  return not (effect.estimate.above(truth) or effect.estimate.below(truth))


def _measures(counts: np.ndarray, replicates: int) -> dict[str, float]:
  em, tp = counts / replicates
  return {"EM": float(em), "TP": float(tp)}


def intervals_of_a_row(design: Design, replicates: int) -> dict[str, float]:
  """Returns the coverage of accuracy and TP.

  With one training the truth is that of its policy.
  """
  rng = np.random.default_rng(0)
  held = np.zeros(2)
  fixed = np.zeros(1) if design.trainings == 1 else None
  for _ in range(replicates):
    row = play(design, difficulties(design, rng), rng, deviations=fixed)
    scores = row.scores()
    (accuracy,) = inference.rates(scores.columns([0]), [row.answers.sum()])
    (tp,) = inference.effects(scores.columns([1]))
    held += [_holds(accuracy, design.accuracy), _holds(tp, design.productivity)]
  return _measures(held, replicates)


def coverage_of_differences(
  design: Design, replicates: int, *, deviations: np.ndarray | None = None
) -> dict[str, float]:
  """Returns how often intervals of two equal methods' difference hold 0.

  `deviations` are those of `play`.
  """
  rng = np.random.default_rng(0)
  held = np.zeros(2)
  for _ in range(replicates):
    p = difficulties(design, rng)
    ours, theirs = (
      play(design, p, rng, deviations=deviations) for _ in range(2)
    )
    gap = inference.minus(ours.scores("a"), theirs.scores("b"))
    held += [_holds(effect, 0.0) for effect in inference.effects(gap)]
  return _measures(held, replicates)


def errors_of_productivity(
  design: Design, ratio: float, replicates: int, *, draws: int
) -> float:
  """Returns how often equal productivities are found to differ.

  The other policy makes `ratio` times the searches and is right `ratio` times
  as often, on other questions.
  """
  rng = np.random.default_rng(0)
  other = dataclasses.replace(
    design,
    searching=ratio * design.searching,
    low=0.0,
    width=ratio * design.accuracy * (_ALPHA + _BETA) / _ALPHA,
  )
  found = 0
  for replicate in range(replicates):
    sides = [
      play(each, difficulties(each, rng), rng, deviations=np.zeros(1))
      for each in (design, other)
    ]
    scores = significance.null_scores(
      *((side.right.T, side.searches.T) for side in sides)
    )
    p_value = significance.sign_flips([scores], draws=draws, seed=replicate)
    found += bool(p_value[0, 0] < 0.05)
  return found / replicates


def main(argv) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected argument {argv[1]!r}.")
  n = flags.FLAGS.replicates

  def line(title: str, found: dict[str, float] | float) -> None:
    shares = found if isinstance(found, dict) else {"": found}
    numbers = "  ".join(f"{name} {value:.3f}" for name, value in shares.items())
    print(f"{title:<44}{numbers}")

  print("coverage of a row's interval, sd between trainings .02")
  for questions, trainings in (
    *((1000, 1), (1000, 2), (1000, 3), (1000, 5)),
    *((7400, 3), (7400, 5), (7400, 10)),
  ):
    found = intervals_of_a_row(Design(questions, trainings), n)
    line(f"{questions} questions, {trainings} trainings", found)
  print("equal methods found to differ, sd between trainings .02")
  for questions, trainings in ((1000, 3), (1000, 5), (7400, 3), (7400, 5)):
    held = coverage_of_differences(Design(questions, trainings), n)
    found = {name: 1 - share for name, share in held.items()}
    line(f"{questions} questions, {trainings} trainings each", found)
  print("equal productivity found to differ, one policy each")
  for ratio in (0.6, 0.4, 0.25):
    design = Design(300, low=0.7, width=0.3)
    wrong = errors_of_productivity(design, ratio, n, draws=1000)
    line(f"300 questions, {ratio:g} times the searches", wrong)
  print("coverage of a difference over few questions, one policy each")
  for questions in (8, 15, 30, 100):
    for design, label in (
      (Design(questions), ""),
      (Design(questions, low=0.97, width=0.03), ", nearly all right"),
    ):
      found = coverage_of_differences(design, n, deviations=np.zeros(1))
      line(f"{questions} questions{label}", found)


if __name__ == "__main__":
  flags.DEFINE_integer(
    "replicates", 2000, "Simulated evaluations of a line.", lower_bound=10
  )
  app.run(main)
