"""Predicts what each row loses, from measured numbers, before any training.

    python -m research.memory.predictions --chains=R/forced \
        --output=R/predictions.json

By the chain rule, an agent that searches until it finds, at most n times, is
right with the probability

    sum over k <= n of (1 - q_1) ... (1 - q_(k-1)) q_k read
    + (1 - q_1) ... (1 - q_n) (p kept + (1 - p) lucky)

and one that trusts its memory with p. A row learns to search for a form if the
expected gradient of P(search) at 1/2 points there (docs/objective.md). It is
computed with the row's own reward and advantages, over all splits of a group
into trajectories that search and that do not, and all outcomes. A question's
memory, and what searches find, are the same for its whole group. What is
learned is decided by the trained questions, accuracies are of the evaluated.

Gates must hold before training: if one does not, the command says which and
writes nothing. It refuses to change a file that exists.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import app, flags
from scipy import stats

import anysearch_jax as aj
from research.memory import chains as chains_lib
from research.memory import configuration, memories
from research.memory import rows as rows_lib

# Of well-formed episodes; distance of memories from their reliability; the
# least predicted contrast, which the experiment could detect.
FORMAT, NEAR, CONTRAST = 0.98, 0.1, 0.055
# Rows between which a loss is predicted and measured.
BASE, LOSING = "batch_no_tool", "anysearch"


class Outcome(NamedTuple):
  """What may happen to a question, whoever of its group searches.

  Attributes:
    chance: its probability.
    remembers: whether the memory is right.
    succeeds: whether an answer after searching is.
    searches: how many searches that takes.
  """

  chance: float
  remembers: bool
  succeeds: bool
  searches: int


def outcomes(m: chains_lib.Measured, budget: int) -> list[Outcome]:
  """Returns the outcomes of a form's questions; their chances sum to 1."""
  most = min(budget, len(m.q))
  found = []
  for remembers, chance in ((True, m.p), (False, 1 - m.p)):
    missing = chance
    for k in range(most):
      finds = missing * m.q[k]
      found.append(Outcome(finds * m.read, remembers, True, k + 1))
      found.append(Outcome(finds * (1 - m.read), remembers, False, k + 1))
      missing -= finds
    kept = m.kept if remembers else m.lucky
    found.append(Outcome(missing * kept, remembers, True, most))
    found.append(Outcome(missing * (1 - kept), remembers, False, most))
  return found


def accuracy(m: chains_lib.Measured, budget: int, *, searches: bool) -> float:
  """Returns how often an agent is right that searches, or that remembers."""
  if not searches:
    return m.p
  return sum(o.chance for o in outcomes(m, budget) if o.succeeds)


def force(
  config: aj.ExperimentConfig, some: Sequence[Outcome], budget: int
) -> float:
  """Returns the expected push of P(search) at 1/2; above 0 it rises.

  It is the sum of the advantages of the trajectories of a group that search.
  With `batch`, which divides the whole rollout by one number, it is in units of
  that number.
  """
  group = config.group
  splits = np.arange(1, group)
  is_search = np.arange(group) < splits[:, None]
  shape = (len(some), *is_search.shape)
  succeeds, remembers, searches = (
    np.array([getattr(o, name) for o in some])[:, None, None]
    for name in ("succeeds", "remembers", "searches")
  )
  valid = np.ones(shape, bool)
  reward = aj.rewards.composite(
    np.where(is_search, succeeds, remembers).astype(float),
    np.ones(shape),
    np.zeros(shape),
    np.broadcast_to(np.where(is_search, searches, 0), shape).astype(float),
    np.full(shape[:-1], budget),
    valid,
    config=config.reward,
  )
  is_divided = config.objective.normalize == "group"
  advantages = aj.grpo.advantages(
    reward.total,
    valid,
    epsilon=config.objective.advantage_epsilon,
    normalize="group" if is_divided else "none",
    deviation=config.objective.deviation,
  )
  pushes = (np.asarray(advantages) * is_search).sum(-1)
  weights = stats.binom.pmf(splits, group, 0.5)
  chances = np.array([o.chance for o in some])
  return float(chances @ pushes @ weights)


Gates = Mapping[str, Mapping[str, chains_lib.Measured]]


def predict(
  config: aj.ExperimentConfig, gates: Gates, budgets: Sequence[int]
) -> dict[str, Any]:
  """Returns decisions and accuracies of each row, and the losses, by form.

  Args:
    config: of AnySearch, which the other rows change.
    gates: what was measured, by split and form.
    budgets: the budgets to pool.
  """
  rows: dict[str, dict[str, Any]] = {}
  for name, changes in rows_lib.CHANGES.items():
    changed = aj.config.changed(config, **changes)
    rows[name] = {}
    for form in memories.RELIABILITY:
      trained, evaluated = (gates[split][form] for split in chains_lib.SPLITS)
      searches = [
        force(changed, outcomes(trained, budget), budget) > 0
        for budget in budgets
      ]
      right = [
        accuracy(evaluated, budget, searches=does)
        for budget, does in zip(budgets, searches, strict=True)
      ]
      rows[name][form] = {
        "searches": searches,
        "by_budget": right,
        "accuracy": float(np.mean(right)),
      }
  losses = {
    form: rows[BASE][form]["accuracy"] - rows[LOSING][form]["accuracy"]
    for form in memories.RELIABILITY
  }
  return {
    "rows": rows,
    "losses": losses,
    "contrast": contrast([losses[form] for form in memories.RELIABILITY]),
  }


def contrast(losses: Sequence[float]) -> float:
  """Returns the mean loss of the surer memories minus that of the first."""
  return float(np.mean(losses[1:]) - losses[0])


def broken_gates(gates: Gates, predicted_contrast: float) -> list[str]:
  """Returns in words which gates do not hold."""
  broken = []
  for (split, forms), (form, reliability) in itertools.product(
    gates.items(), memories.RELIABILITY.items()
  ):
    own = forms[form]
    where = f"{form}, {split}"
    if own.well_formed < FORMAT:
      broken.append(
        f"{where}: found {own.well_formed:.3f} of the episodes well formed, "
        f"expected at least {FORMAT}; train longer on the warm rows."
      )
    if abs(own.p - reliability) > NEAR:
      broken.append(
        f"{where}: found a memory that is right in {own.p:.3f}, expected "
        f"{reliability} within {NEAR}; train longer on the closed book."
      )
  if predicted_contrast < CONTRAST:
    broken.append(
      f"found a predicted contrast of {predicted_contrast:.3f}, expected at "
      f"least {CONTRAST}: a null result would say nothing. The policy has to "
      "read what it finds."
    )
  return broken


def table(predicted: Mapping[str, Any]) -> str:
  """Returns what was measured and what is predicted, in Markdown."""
  lines = [
    "| form | reliability | p | q | read | kept | "
    + " | ".join(rows_lib.LABELS.values())
    + " | loss |",
    "|---" * (7 + len(rows_lib.LABELS)) + "|",
  ]
  for form, reliability in memories.RELIABILITY.items():
    own = predicted["gates"]["test"][form]
    q = ", ".join(f"{x:.2f}" for x in own["q"])
    right = [
      f"{predicted['rows'][name][form]['accuracy']:.3f}"
      for name in rows_lib.LABELS
    ]
    numbers = [f"{own[name]:.3f}" for name in ("read", "kept")]
    lines.append(
      f"| {form} | {reliability} | {own['p']:.3f} | {q} | "
      f"{' | '.join([*numbers, *right])} | {predicted['losses'][form]:.3f} |"
    )
  return "\n".join(lines) + "\n"


def define_flags() -> None:
  """Defines the command's flags; importing the module defines none."""
  flags.DEFINE_string("chains", None, "Folder of both splits.", required=True)
  flags.DEFINE_string("output", None, "A new JSON file.", required=True)
  flags.DEFINE_bool("allow_gates", False, "Predict with broken gates.")


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected argument {argv[1]!r}.")
  f = flags.FLAGS
  try:
    chains = chains_lib.read(f.chains)
  except ValueError as error:
    sys.exit(f"research.memory.predictions: {error}")
  gates = {
    split: {
      form: chains_lib.measured(own.of_form(form))
      for form in memories.RELIABILITY
    }
    for split, own in chains.items()
  }
  # Rows differ in rewards alone, which both presets share.
  predicted = predict(configuration.get_config(), gates, configuration.BUDGETS)
  broken = broken_gates(gates, predicted["contrast"])
  predicted |= {
    "gates": {
      split: {form: own._asdict() for form, own in forms.items()}
      for split, forms in gates.items()
    },
    "broken": broken,
  }
  print(table(predicted))
  print(f"predicted contrast: {predicted['contrast']:.3f}")
  if broken and not f.allow_gates:
    sys.exit("\n".join(broken))
  text = json.dumps(predicted, indent=2) + "\n"
  path = pathlib.Path(f.output)
  if path.is_file() and path.read_text() != text:
    sys.exit(
      f"{path}: found other predictions, expected none: they are not changed "
      "afterwards. Name another file, for another experiment."
    )
  path.write_text(text)


if __name__ == "__main__":
  define_flags()
  app.run(main)
