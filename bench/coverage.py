"""Checks intervals and tests against simulated evaluations with a known truth.

    python -m bench.coverage --replicates=2000

A simulated policy answers question q right with probability p_q + t, where p_q
is drawn from a beta distribution and t is its training's own deviation. Prints
how often intervals hold the truth (nominal: .95) and how often tests find a
difference of methods that have none (nominal: .05). `before` are the methods
that these replaced: intervals over questions alone, percentiles of a bootstrap,
and the exchange of whole questions. A share of 2,000 replicates has a standard
error of .005.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from absl import app, flags

from anysearch_jax.evaluation import inference, linear, significance

_BUDGETS = 8
_ALPHA, _BETA = 0.35, 0.3  # Most questions are almost always right or wrong.
_MARGIN = 0.02


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

  def scores(self, run: str = "") -> linear.Linear:
    """Linearises accuracy and tool productivity."""
    return linear.ratios(
      np.stack([self.right, self.right], -1),
      np.stack([self.answers, self.searches], -1),
      runs=[f"{run}{i}" for i in range(len(self.right))],
      trials=np.stack([self.answers.sum(0)] * 2, -1),
    )

  def pooled(self) -> Played:
    """Returns the row as if its trainings were one."""
    parts = self.right, self.searches, self.answers
    return Played(*(part.sum(axis=0, keepdims=True) for part in parts))


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


def intervals_of_a_row(
  design: Design, replicates: int, seed: int = 0
) -> dict[str, float]:
  """Returns the coverage of accuracy and TP, before and after.

  With one training the truth is that of its policy.
  """
  rng = np.random.default_rng(seed)
  held = {"before": np.zeros(2), "after": np.zeros(2)}
  fixed = np.zeros(1) if design.trainings == 1 else None
  truth = design.accuracy, design.productivity
  for _ in range(replicates):
    p = difficulties(design, rng)
    played = play(design, p, rng, deviations=fixed)
    for name, row in (("before", played.pooled()), ("after", played)):
      scores = row.scores()
      (accuracy,) = inference.rates(scores.columns([0]), [row.answers.sum()])
      (tp,) = inference.effects(scores.columns([1]))
      held[name] += [_holds(accuracy, truth[0]), _holds(tp, truth[1])]
  return {
    f"{measure}, {name}": float(count[i] / replicates)
    for name, count in held.items()
    for i, measure in enumerate(("EM", "TP"))
  }


def errors_of_comparisons(
  design: Design, replicates: int, seed: int = 0
) -> dict[str, float]:
  """Returns how often two equal methods are found to differ."""
  rng = np.random.default_rng(seed)
  found = {"before": np.zeros(2), "after": np.zeros(2)}
  for _ in range(replicates):
    p = difficulties(design, rng)
    ours, theirs = (play(design, p, rng) for _ in range(2))
    for name, pair in (
      ("before", (ours.pooled(), theirs.pooled())),
      ("after", (ours, theirs)),
    ):
      gap = linear.minus(pair[0].scores("a"), pair[1].scores("b"))
      found[name] += [not _holds(e, 0.0) for e in inference.effects(gap)]
  return {
    f"{measure}, {name}": float(count[i] / replicates)
    for name, count in found.items()
    for i, measure in enumerate(("EM", "TP"))
  }


def errors_of_productivity(
  design: Design, ratio: float, replicates: int, *, draws: int, seed: int = 0
) -> dict[str, float]:
  """Returns how often equal productivities are found to differ.

  The other policy makes `ratio` times the searches and is right `ratio` times
  as often, on other questions.
  """
  rng = np.random.default_rng(seed)
  other = dataclasses.replace(
    design,
    searching=ratio * design.searching,
    low=0.0,
    width=ratio * design.accuracy * (_ALPHA + _BETA) / _ALPHA,
  )
  found = {"before": 0, "after": 0}
  policy = np.zeros(1)
  for replicate in range(replicates):
    p = difficulties(design, rng)
    ours = play(design, p, rng, deviations=policy)
    theirs = play(other, difficulties(other, rng), rng, deviations=policy)
    sides = [(x.right.T, x.searches.T) for x in (ours, theirs)]
    scores = significance.null_scores(*sides)
    p_value = significance.sign_flips([scores], draws=draws, seed=replicate)
    found["after"] += bool(p_value[0, 0] < 0.05)
    found["before"] += exchanged(*sides, draws=draws, rng=rng) < 0.05
  return {name: count / replicates for name, count in found.items()}


def exchanged(
  ours: tuple[np.ndarray, np.ndarray],
  theirs: tuple[np.ndarray, np.ndarray],
  *,
  draws: int,
  rng: np.random.Generator,
) -> float:
  """Returns the p value of exchanging whole questions between two rows.

  It tests that the rows behave alike, not that their ratios are equal.
  """
  tops, bottoms = zip(ours, theirs, strict=True)
  sums = [(a + b).sum() / 2 for a, b in (tops, bottoms)]
  gaps = [(a - b)[:, 0] / 2 for a, b in (tops, bottoms)]
  signs = 1.0 - 2 * rng.integers(2, size=(draws, len(ours[0])))
  signs[0] = 1
  top, bottom = (signs @ gap for gap in gaps)
  gap = np.abs(
    (sums[0] + top) / (sums[1] + bottom) - (sums[0] - top) / (sums[1] - bottom)
  )
  return float((gap >= gap[0] * (1 - 1e-9)).mean())


def differences_of_few(
  design: Design, replicates: int, *, resamples: int = 400, seed: int = 0
) -> dict[str, float]:
  """Returns the coverage of differences over few questions."""
  rng = np.random.default_rng(seed)
  held = {"before": np.zeros(2), "after": np.zeros(2)}
  policy = np.zeros(1)
  for _ in range(replicates):
    p = difficulties(design, rng)
    ours, theirs = (play(design, p, rng, deviations=policy) for _ in range(2))
    gap = linear.minus(ours.scores("a"), theirs.scores("b"))
    held["after"] += [_holds(e, 0.0) for e in inference.effects(gap)]
    chosen = rng.integers(design.questions, size=(resamples, design.questions))
    totals = [
      [x[0][chosen].sum(1) for x in (side.right, side.searches)]
      for side in (ours, theirs)
    ]
    for i, gaps in enumerate(
      (
        totals[0][0] - totals[1][0],
        totals[0][0] / totals[0][1] - totals[1][0] / totals[1][1],
      )
    ):
      low, high = np.quantile(gaps, [0.025, 0.975])
      held["before"][i] += low <= 0 <= high
  return {
    f"{measure}, {name}": float(count[i] / replicates)
    for name, count in held.items()
    for i, measure in enumerate(("EM", "TP"))
  }


def equivalence_of_unequal(
  design: Design, loss: float, replicates: int, seed: int = 0
) -> dict[str, float]:
  """Returns how often a real loss of accuracy is called no difference."""
  rng = np.random.default_rng(seed)
  worse = np.array([-loss])
  met = {"before": 0, "after": 0}
  for _ in range(replicates):
    p = np.clip(difficulties(design, rng), loss, 1)
    ours = play(design, p, rng, deviations=worse)
    theirs = play(design, p, rng, deviations=np.zeros(1))
    gap = linear.minus(ours.scores("a"), theirs.scores("b"))
    effect = inference.effects(gap)[0]
    met["before"] += _holds(effect, 0.0)
    met["after"] += (effect.within(_MARGIN) or 0.0) < 0.05
  return {name: count / replicates for name, count in met.items()}


def _line(title: str, found: dict[str, float]) -> str:
  numbers = "  ".join(f"{name} {value:.3f}" for name, value in found.items())
  return f"{title:<44}{numbers}"


def main(argv) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected argument {argv[1]!r}.")
  n = flags.FLAGS.replicates
  print("coverage of a row's interval, sd between trainings .02")
  for questions, trainings in (
    *((1000, 1), (1000, 2), (1000, 3), (1000, 5)),
    *((7400, 3), (7400, 5), (7400, 10)),
  ):
    found = intervals_of_a_row(Design(questions, trainings), n)
    print(_line(f"{questions} questions, {trainings} trainings", found))
  print("equal methods found to differ, sd between trainings .02")
  for questions, trainings in ((1000, 3), (1000, 5), (7400, 3), (7400, 5)):
    found = errors_of_comparisons(Design(questions, trainings), n)
    print(_line(f"{questions} questions, {trainings} trainings each", found))
  print("equal productivity found to differ, one policy each")
  for ratio in (0.6, 0.4, 0.25):
    design = Design(300, low=0.7, width=0.3)
    found = errors_of_productivity(design, ratio, n, draws=1000)
    print(_line(f"300 questions, {ratio:g} times the searches", found))
  print("coverage of a difference over few questions, one policy each")
  for questions in (8, 15, 30, 100):
    found = differences_of_few(Design(questions), n)
    print(_line(f"{questions} questions", found))
    easy = Design(questions, low=0.97, width=0.03)
    print(
      _line(
        f"{questions} questions, nearly all right", differences_of_few(easy, n)
      )
    )
  print(f"a real loss called no difference (margin {_MARGIN})")
  for questions, loss in ((30, 0.03), (1000, 0.03), (1000, 0.02)):
    found = equivalence_of_unequal(Design(questions), loss, n)
    print(_line(f"{questions} questions, loss {loss}", found))


if __name__ == "__main__":
  flags.DEFINE_integer(
    "replicates", 2000, "Simulated evaluations of a line.", lower_bound=10
  )
  app.run(main)
