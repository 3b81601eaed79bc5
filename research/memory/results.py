"""What came out, beside what was predicted: statistics, a table and a figure.

    python -m research.memory.results --chains=R/forced \
        --predictions=R/predictions.json --outcomes=R/decisions/outcomes.jsonl \
        --output=R/decisions

A loss is the accuracy without a tool reward and with the rollout's deviation,
minus AnySearch's. The primary contrast is the mean loss where memory is right
in .5 and .8, minus that at .2. With the pooled accuracy, searches, and accuracy
at budgets that were not trained it is one family: p has Holm's correction over
the four. Trainings of two rows are independent, questions are paired, and each
is a cluster. Writes results.md and losses.svg; `--greedy` takes the policies
played greedily.
"""

from __future__ import annotations

import collections
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from absl import app, flags

import anysearch_jax as aj
from research import outcomes as outcomes_lib
from research.memory import chains as chains_lib
from research.memory import configuration, memories, predictions
from research.memory import rows as rows_lib

Trainings = Sequence[outcomes_lib.Outcomes]
FORMS = tuple(memories.RELIABILITY)
# Of the numbers that `linearised` returns, after those of the forms.
_POOLED, _UNSEEN, _SEARCHES = range(len(FORMS), len(FORMS) + 3)
_FAMILY = ("primary contrast", "accuracy", "searches", "unseen budgets")


def linearised(
  row: Trainings, forms: Sequence[str], *, name: str
) -> aj.inference.Linear:
  """Returns accuracy by form, pooled and at unseen budgets, and searches.

  Args:
    row: trainings of a row.
    forms: of the questions, in the order of their ids.
    name: of the row; trainings of rows with other names are independent.
  """
  budgets = np.array(row[0].budgets)
  right = np.stack([one.right.T for one in row])  # [R, N, B]
  searches = np.stack([one.searches.T for one in row])
  is_unseen = budgets > configuration.MAX_BUDGET
  masks = [np.array(forms) == form for form in FORMS]
  everywhere = np.ones(len(forms), bool)
  columns = [
    *((right, mask, budgets > 0) for mask in masks),
    (right, everywhere, budgets > 0),
    (right, everywhere, is_unseen),
    (searches, everywhere, budgets > 0),
  ]
  numerators, denominators = [], []
  for values, mask, used in columns:
    numerators.append(values[..., used].sum(-1) * mask)
    denominators.append(np.broadcast_to(mask * used.sum(), right.shape[:2]))
  return aj.inference.ratios(
    np.stack(numerators, -1).astype(float),
    np.stack(denominators, -1).astype(float),
    runs=[f"{name} {one.seed}" for one in row],
  )


def losses(
  rows: Mapping[str, Trainings], forms: Sequence[str], base: str, losing: str
) -> aj.inference.Linear:
  """Returns the numbers of `linearised` of a row minus those of another."""
  ours, theirs = (
    linearised(rows[name], forms, name=name) for name in (base, losing)
  )
  return aj.inference.minus(ours, theirs)


def decided(
  numbers: aj.inference.Linear,
) -> list[tuple[str, aj.inference.Effect, float]]:
  """Returns the family of claims: name, difference, p by Holm.

  Args:
    numbers: those of `losses`.
  """
  count = len(numbers.value)
  weights = np.zeros((len(_FAMILY), count))
  # As `predictions.contrast`.
  weights[0, : len(FORMS)] = [-1, *[1 / (len(FORMS) - 1)] * (len(FORMS) - 1)]
  weights[1, _POOLED] = 1
  weights[2, _SEARCHES] = 1
  weights[3, _UNSEEN] = 1
  effects = aj.inference.effects(numbers.combined(weights))
  p = [np.nan if effect.p is None else effect.p for effect in effects]
  return list(zip(_FAMILY, effects, aj.inference.holm(p).tolist(), strict=True))


def _shown(estimate: aj.inference.Estimate) -> str:
  if estimate.value is None or estimate.low is None or estimate.high is None:
    return "" if estimate.value is None else f"{estimate.value:.3f}"
  return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


def page(
  rows: Mapping[str, Trainings],
  forms: Sequence[str],
  predicted: Mapping[str, Any],
  optimum: Mapping[str, Sequence[float]] | None,
) -> str:
  """Returns the tables in Markdown.

  Args:
    rows: trainings by row; those of `predictions.BASE` and `LOSING` decide.
    forms: of the questions.
    predicted: the file of `predictions`.
    optimum: of `decisions`, where there is one.
  """
  head = ["row", "trainings", *FORMS, "pooled", "B > 4", "searches"]
  lines = []
  for name, label in rows_lib.LABELS.items():
    if name in rows:
      effects = aj.inference.effects(linearised(rows[name], forms, name=name))
      shown = [_shown(effect.estimate) for effect in effects]
      lines.append([label, str(len(rows[name])), *shown])
  if optimum:
    means = [f"{np.mean(optimum[form]):.3f}" for form in (*FORMS, "all")]
    lines.append(["best decisions", "", *means, "", ""])
  text = _table(head, lines)
  numbers = losses(rows, forms, predictions.BASE, predictions.LOSING)
  by_form = aj.inference.effects(numbers)[: len(FORMS)]
  text += "\n" + _table(
    ["memory", "predicted loss", "measured loss"],
    [
      [f"{form}, {rho}", f"{predicted['losses'][form]:.3f}", _shown(e.estimate)]
      for (form, rho), e in zip(
        memories.RELIABILITY.items(), by_form, strict=True
      )
    ],
  )
  lines = []
  for name, effect, p in decided(numbers):
    is_primary = name == _FAMILY[0]
    guess = f"{predicted['contrast']:.3f}" if is_primary else ""
    detectable = effect.detectable
    lines.append(
      [
        name,
        guess,
        _shown(effect.estimate),
        "" if np.isnan(p) else f"{p:.4f}",
        "" if detectable is None else f"{detectable:.3f}",
      ]
    )
  head = ["no tool reward, batch, minus AnySearch", "predicted", "measured"]
  return text + "\n" + _table([*head, "p (Holm)", "detectable"], lines)


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
  """Returns a table in Markdown."""
  rows = [head, ["---"] * len(head), *lines]
  return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def figure(
  rows: Mapping[str, Trainings],
  forms: Sequence[str],
  predicted: Mapping[str, Any],
) -> plt.Figure:
  """Draws losses by the reliability of memory, predicted and measured."""
  drawn, axis = plt.subplots(figsize=(6, 4), layout="constrained")
  rho = np.array([*memories.RELIABILITY.values()])
  axis.plot(
    rho, [predicted["losses"][form] for form in FORMS], "ks:", label="predicted"
  )
  for place, base in enumerate((predictions.BASE, "batch_anysearch")):
    if base not in rows:
      continue
    numbers = losses(rows, forms, base, predictions.LOSING)
    effects = aj.inference.effects(numbers)[: len(FORMS)]
    values = np.array(
      [effect.estimate for effect in effects], float
    )  # None becomes nan.
    spread = np.abs(values[:, 1:] - values[:, :1]).T
    axis.errorbar(
      rho + 0.01 * (place + 1),
      values[:, 0],
      spread,
      fmt=f"C{place}o",
      label=f"measured: {rows_lib.LABELS[base]} - AnySearch",
    )
  axis.axhline(0, color="grey", lw=0.5)
  axis.set(xlabel="reliability of memory", ylabel="lost accuracy, B = 1 to 6")
  axis.legend()
  return drawn


def by_row(
  stored: Sequence[outcomes_lib.Outcomes],
  chains: chains_lib.Chains,
  *,
  greedy: bool,
) -> dict[str, list[outcomes_lib.Outcomes]]:
  """Returns the trainings of each row, sampled or greedy.

  Raises:
    ValueError: they are of other questions, or a row that decides is missing.
  """
  rows: dict[str, list[outcomes_lib.Outcomes]] = collections.defaultdict(list)
  for one in stored:
    if one.questions != outcomes_lib.digest(chains.ids):
      raise ValueError(
        f"{one.row}, seed {one.seed}: found answers to other questions than "
        "the chains of the split test; expected the same."
      )
    if one.row.endswith(rows_lib.GREEDY) == greedy:
      rows[one.row.removesuffix(rows_lib.GREEDY)].append(one)
  for name in (predictions.BASE, predictions.LOSING):
    if name not in rows:
      raise ValueError(
        f"found no training of {name}, expected some: it decides. Train it."
      )
  return rows


def define_flags() -> None:
  """Defines the command's flags; importing the module defines none."""
  flags.DEFINE_string("chains", None, "Folder of both splits.", required=True)
  flags.DEFINE_string("predictions", None, "Written before.", required=True)
  flags.DEFINE_string("outcomes", None, "Of trainings.", required=True)
  flags.DEFINE_string("output", None, "Folder to write to.", required=True)
  flags.DEFINE_bool("greedy", False, "Of policies played greedily.")


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected argument {argv[1]!r}.")
  f = flags.FLAGS
  output = pathlib.Path(f.output)
  try:
    chains = chains_lib.read(f.chains)["test"]
    stored = outcomes_lib.read(pathlib.Path(f.outcomes))
    rows = by_row(stored, chains, greedy=f.greedy)
  except (OSError, ValueError) as error:
    sys.exit(f"research.memory.results: {error}")
  predicted = json.loads(pathlib.Path(f.predictions).read_text())
  best = pathlib.Path(f.outcomes).with_name("optimum.json")
  optimum = json.loads(best.read_text()) if best.is_file() else None
  made = page(rows, chains.forms, predicted, optimum)
  output.mkdir(parents=True, exist_ok=True)
  (output / "results.md").write_text(made)
  drawn = figure(rows, chains.forms, predicted)
  drawn.savefig(output / "losses.svg")
  print(made)


if __name__ == "__main__":
  define_flags()
  app.run(main)
