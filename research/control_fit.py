r"""Fits a rule that steers searching, from counterfactual ends.

    python -m research.control_fit --branches=runs/x/dev/branches \
        --tokens=40,60,90,140 --kind=stopping --output=rule.py
    python -m launch.evaluate --hf=runs/x/policy --output=runs/x/steered \
        --config.episode.control=rule.py:rule \
        --config.episode.budget_file=silent \
        --budgets='searches=1|3|5,tokens=40|60|90|140' ...

--branches names folders of `research.branching`, of an evaluation on other
questions than those that the rule will be judged by (launch.evaluate
--split=dev). The file is a few lines of Python with a rule of one kind:
`stopping` is a logistic regression of what a search does, `value` tables of
what searching and answering earn, whose difference is scored by what the search
takes of the remaining budget. docs/budgets.md has the formulas.

An end has exact match and a number of written tokens, so what it earns under a
cap on tokens is known without playing it under that cap: its exact match, or 0
if it wrote more. Each end is counted under several caps.

* A turn that asks (`stop` cuts): refusing earns what the refused end earns.
  Searching earns what follows in the stored episode, where the rule that is
  being fitted decides about the later searches. As in Longstaff and Schwartz,
  "Valuing American Options by Simulation" (2001), the fit and the decisions
  alternate: the first fit assumes that all later searches are granted.
* A turn that answers with searches left (`continue` cuts): accepting earns what
  the stored answer earns. Searching earns what the granted end earns, charged
  with the discarded answer and the tries; without one that asked in time, the
  stored answer under the same charge.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import json
import pathlib
import pprint
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import app, flags

import anysearch_jax as aj

control = aj.control
_ROUNDS = 4
_RIDGE = 1.0
# Cells of a table, by lower edges, and by quantiles of the likelihood. A cell
# counts this many ends of all numbers of searches besides its own.
_LEFT = (0.0, 2.0, 4.0)
_TURNS = (0.0, 1.5, 2.5, 4.0, 6.0)
_QUANTILES = (0.0, 0.2, 0.4, 0.7)
_PRIOR = 8.0

Seen = aj.control.Seen
FEATURES = ("made", "left", "turns_left", "repeated", "logp")


def features(found: aj.control.Seen, cap: float) -> np.ndarray:
  """Returns the values of `FEATURES` under a cap on tokens, float64 `[5]`."""
  values = {**found._asdict(), "turns_left": found.turns_left(cap)}
  return np.array([values[name] for name in FEATURES], float)


@dataclasses.dataclass(frozen=True)
class Stopping:
  """A logistic regression: the log odds that a search helps and does not hurt.

  Attributes:
    mean, scale: of the features, each `[5]`.
    weights: of the standardised features, `[5]`.
    bias: the log odds at their means.
  """

  mean: tuple[float, ...]
  scale: tuple[float, ...]
  weights: tuple[float, ...]
  bias: float

  def __call__(self, found: aj.control.Seen, cap: float) -> float:
    standard = (features(found, cap) - self.mean) / self.scale
    return float(standard @ self.weights + self.bias)


Table = tuple[tuple[tuple[float, ...], ...], ...]


@dataclasses.dataclass(frozen=True)
class Value:
  """The value of information of a search for each unit of what is left.

  With the tables' exact match if searching, S, and if answering, A, in the cell
  of (searches left, turns left, likelihood of the turn):

      score = (S - A) / cost - penalty * spent
      cost = (1 / left + 1 / turns left) / 2
      spent = (share of the searches spent + share of the tokens spent) / 2

  where `cost` is the share of both remaining budgets that a search takes.

  Attributes:
    left, turns_left, logp: lower edges of the cells, ascending; the first cell
      also has what is below its edge.
    search, answer: mean exact match, nested in the order of the edges.
    penalty: exact match that a search must be worth besides, for each unit,
      where all is spent.
  """

  left: tuple[float, ...]
  turns_left: tuple[float, ...]
  logp: tuple[float, ...]
  search: Table
  answer: Table
  penalty: float = 0.0

  def cell(self, found: aj.control.Seen, cap: float) -> tuple[int, int, int]:
    """Returns the cell of an episode."""
    i, j, k = (
      max(0, bisect.bisect(edges, value) - 1)
      for edges, value in (
        (self.left, found.left),
        (self.turns_left, found.turns_left(cap)),
        (self.logp, found.logp),
      )
    )
    return i, j, k

  def __call__(self, found: aj.control.Seen, cap: float) -> float:
    i, j, k = self.cell(found, cap)
    value = self.search[i][j][k] - self.answer[i][j][k]
    turns = max(found.turns_left(cap), 0.1)
    cost = (1 / max(found.left, 1) + 1 / turns) / 2
    tokens = found.written / cap
    searches = found.made / max(found.made + found.left, 1)
    return value / cost - self.penalty * (searches + tokens) / 2


SCORES = {"stopping": Stopping, "value": Value}


def rule(values: Mapping[str, Any]) -> aj.control.Rule:
  """Returns the rule of fitted values.

  Args:
    values: `kind` and `tries`, and by proposal the values of its score; a
      proposal without a score is accepted.
  """
  scores = {
    proposal: SCORES[values["kind"]](**values[proposal])
    for proposal in (control.ASK, control.ANSWER)
    if proposal in values
  }

  def searches(proposal: str, found: aj.control.Seen, cap: float) -> bool:
    if proposal not in scores:
      return proposal == control.ASK
    return scores[proposal](found, cap) > 0

  return aj.control.Rule(searches, values["tries"])


class Plan(NamedTuple):
  """What is fitted.

  kind: of the rule, one of `SCORES`.
  tokens: caps on tokens under which ends are counted; no cap is counted too.
  max_generated: tokens that the episodes could write without a cap.
  tries: of the rule, see `control.Rule`; 0: answers are never replaced.
  penalty: of a rule of values, see `Value`.
  """

  kind: str
  tokens: tuple[int, ...]
  max_generated: int
  tries: int
  penalty: float = 0.0


class _End(NamedTuple):
  """Exact match and written tokens."""

  em: float
  tokens: float

  def earns(self, cap: float) -> float:
    return self.em if self.tokens <= cap else 0.0


class _Cut(NamedTuple):
  """A turn, and the ends of replacing what it proposes."""

  seen: Any
  replaced: list[_End]


class _Chain(NamedTuple):
  """The cuts of an episode in order, and its stored end."""

  cuts: list[_Cut]
  stored: _End


class _Example(NamedTuple):
  """What searching and answering earn at a turn, under a cap."""

  seen: Any
  cap: float
  search: float
  answer: float


def fit(
  rows: Iterable[Mapping[str, Any]], plan: Plan
) -> tuple[dict[str, Any], dict[str, Any]]:
  """Fits a rule.

  Args:
    rows: rows of `branches.jsonl`.
    plan: what is fitted.

  Returns:
    The values of the rule's file, and by proposal what was fitted to: `turns`,
    the number of turns and caps, with the mean exact match if all of them are
    accepted (`accept`), if all are replaced (`replace`), and if the rule
    decides (`rule`), each on the data of the fit; `replaced`, the share that
    the rule replaces.

  Raises:
    ValueError: the rows are of an earlier version, or no end is of use.
  """
  asks, answers = _chains(rows, plan.tries)
  if not asks and not answers:
    raise ValueError(
      "Found no end that did not fail; expected the branches.jsonl of "
      "research.branching."
    )
  assigned = (*plan.tokens, aj.budgets.UNCAPPED)
  caps = sorted({control.cap(cap, plan.max_generated) for cap in assigned})
  values: dict[str, Any] = {"kind": plan.kind, "tries": plan.tries}
  fitted: dict[str, Any] = {}
  decides: aj.control.Rule | None = None
  for name, chains, rounds in (
    (control.ASK, asks, _ROUNDS),
    (control.ANSWER, answers if plan.tries else [], 1),
  ):
    if not chains:
      continue
    for _ in range(rounds):
      examples = _examples(name, chains, caps, decides)
      values[name] = (
        _table(examples, plan.penalty)
        if plan.kind == "value"
        else _regression(examples)
      )
      decides = rule(values)
    examples = _examples(name, chains, caps, decides)
    fitted[name] = _measured(name, examples, rule(values))
  return values, fitted


def _chains(
  rows: Iterable[Mapping[str, Any]], tries: int
) -> tuple[list[_Chain], list[_Chain]]:
  """Returns the episodes whose searches, and whose answers, are cuts."""
  # By episode and searches made.
  grouped: dict[Any, dict[int, list[Mapping[str, Any]]]] = {}
  for row in rows:
    if "seen" not in row:
      raise ValueError(
        f"Found the end of {row.get('question_id')} without what a rule sees; "
        "run research.branching again."
      )
    if row["outcome"] != "failed" and row["seen"] is not None:
      key = row["kind"], row["question_id"], row["budget"], row["seed"]
      grouped.setdefault(key, {}).setdefault(row["cut"], []).append(row)
  found: dict[str, list[_Chain]] = {"stop": [], "continue": []}
  for (kind, *_), by_cut in grouped.items():
    ends = [by_cut[cut] for cut in sorted(by_cut)]
    cuts = [
      _Cut(Seen(**each[0]["seen"]), [_replaced(row, tries) for row in each])
      for each in ends
    ]
    first = ends[0][0]
    stored = _End(first["stored_em"], first["stored_tokens"])
    found[kind].append(_Chain(cuts, stored))
  return found["stop"], found["continue"]


def _replaced(row: Mapping[str, Any], tries: int) -> _End:
  """Returns the end of a replaced search or answer, with what that costs."""
  if row["kind"] == "stop":
    found = row["sampled"]["refused"]
    return _End(found["em"], found["tokens"])
  if "granted" in row["sampled"] and row["tries"] <= tries:
    found = row["sampled"]["granted"]
    # Of the stored turns, the last one is discarded; its length is near their
    # mean.
    charged = row["discarded"] + row["seen"]["turn"]
    return _End(found["em"], found["tokens"] + charged)
  share = min(1.0, tries / row["tries"])
  extra = share * row["discarded"]
  return _End(row["stored_em"], row["stored_tokens"] + extra)


def _examples(
  name: str,
  chains: Sequence[_Chain],
  caps: Sequence[float],
  rule: Any | None,
) -> list[_Example]:
  """Returns an example for each cut and cap.

  The rule decides about later searches; without one all are granted. A turn
  that a cap does not even allow is left out.
  """
  out = []
  for chain, cap in itertools.product(chains, caps):
    follows = chain.stored.earns(cap)
    for cut in reversed(chain.cuts):
      other = float(np.mean([end.earns(cap) for end in cut.replaced]))
      search, answer = (
        (follows, other) if name == control.ASK else (other, follows)
      )
      if cut.seen.written <= cap:
        out.append(_Example(cut.seen, cap, search, answer))
      if name == control.ASK and rule is not None:
        if not rule.searches(name, cut.seen, cap):
          follows = other
  return out


def _regression(examples: Sequence[_Example]) -> dict[str, Any]:
  """Fits a logistic regression to the ends of which one alone is right.

  The value of a search has the sign of its log odds: with independent ends, the
  chance that only searching is right minus that only answering is.
  """
  x = np.array([features(each.seen, each.cap) for each in examples])
  search, answer = _earned(examples)
  helps, hurts = search * (1 - answer), answer * (1 - search)
  total = helps + hurts
  if not total.sum():
    helps, hurts, total = helps + 0.5, hurts + 0.5, total + 1.0
  mean = np.average(x, axis=0, weights=total)
  scale = np.sqrt(np.average((x - mean) ** 2, axis=0, weights=total))
  scale = np.where(scale > 1e-6, scale, 1.0)
  standard = np.column_stack([(x - mean) / scale, np.ones(len(x))])
  penalty = np.diag([_RIDGE] * len(mean) + [1e-3])
  weights = np.zeros(standard.shape[1])
  for _ in range(50):  # Newton's method; the ridge makes it strictly convex.
    odds = 1 / (1 + np.exp(-np.clip(standard @ weights, -30, 30)))
    slope = standard.T @ (helps - total * odds) - penalty @ weights
    curve = (standard.T * (total * odds * (1 - odds))) @ standard + penalty
    step = np.linalg.solve(curve, slope)
    weights += step
    if np.abs(step).max() < 1e-9:
      break
  return {
    "mean": _rounded(mean),
    "scale": _rounded(scale),
    "weights": _rounded(weights[:-1]),
    "bias": round(float(weights[-1]), 6),
  }


def _table(examples: Sequence[_Example], penalty: float) -> dict[str, Any]:
  """Tabulates mean exact match; sparse cells lean on other searches left."""
  logp = np.quantile([each.seen.logp for each in examples], _QUANTILES)
  edges = tuple(sorted(set(_rounded(logp))))
  shape = (len(_LEFT), len(_TURNS), len(edges))
  sums, counts = np.zeros((2, *shape)), np.zeros(shape)
  grid = Value(_LEFT, _TURNS, edges, (), ())
  for each in examples:
    cell = grid.cell(each.seen, each.cap)
    sums[(0, *cell)] += each.search
    sums[(1, *cell)] += each.answer
    counts[cell] += 1
  column = sums.sum(1) / np.maximum(counts.sum(0), 1.0)
  means = (sums + _PRIOR * column[:, None]) / (counts + _PRIOR)
  return {
    "left": list(_LEFT),
    "turns_left": list(_TURNS),
    "logp": list(edges),
    "search": means[0].round(6).tolist(),
    "answer": means[1].round(6).tolist(),
    "penalty": penalty,
  }


def _earned(examples: Sequence[_Example]) -> tuple[np.ndarray, np.ndarray]:
  """Returns what searching and answering earn, each `[N]`."""
  search, answer = np.array([(e.search, e.answer) for e in examples]).T
  return search, answer


def _measured(
  name: str, examples: Sequence[_Example], rule: Any
) -> dict[str, Any]:
  """Returns the mean exact match by who decides."""
  searched = np.array([rule.searches(name, e.seen, e.cap) for e in examples])
  search, answer = _earned(examples)
  asks = name == control.ASK
  accept, replace = (search, answer) if asks else (answer, search)
  return {
    "turns": len(examples),
    "replaced": round(float(np.mean(searched != asks)), 4),
    "accept": round(float(accept.mean()), 4),
    "replace": round(float(replace.mean()), 4),
    "rule": round(float(np.where(searched, search, answer).mean()), 4),
  }


def _rounded(values: np.ndarray) -> list[float]:
  return [round(float(value), 6) for value in values]


def branches(
  folders: Sequence[str],
) -> tuple[list[Mapping[str, Any]], list[str], int]:
  """Reads folders of branches.

  Returns:
    The rows of all, the policies, and the tokens that the episodes could write
    without a cap.

  Raises:
    OSError: a folder is unfinished.
    ValueError: the folders are of several policies or limits.
  """
  rows: list[Mapping[str, Any]] = []
  noted = []
  for folder in map(pathlib.Path, folders):
    rows += aj.read_episodes(folder / "branches.jsonl")
    noted.append(json.loads((folder / "config.json").read_text()))
  for name in ("policy", "max_generated"):
    found = [one[name] for one in noted]
    if len({*found}) > 1:
      shown = ", ".join(f"{v} ({f})" for v, f in zip(found, folders))
      raise ValueError(
        f"--branches: found more than one {name}: {shown}; expected branches "
        "of one policy under one limit. Fit a rule for each."
      )
  return rows, [one["policy"] for one in noted], noted[0]["max_generated"]


def define_flags() -> None:
  """Defines the command's flags; importing the module defines none."""
  flags.DEFINE_list(
    "branches", None, "Folders of research.branching.", required=True
  )
  flags.DEFINE_string("output", None, "File to write.", required=True)
  flags.DEFINE_enum("kind", "stopping", [*SCORES], "Form of the rule.")
  flags.DEFINE_list(
    "tokens", [], "Caps on tokens under which ends are counted."
  )
  flags.DEFINE_integer(
    "tries",
    4,
    "How often an answer is sampled again until it searches; 0: never.",
    lower_bound=0,
  )
  flags.DEFINE_float(
    "penalty",
    0.0,
    "Of --kind=value: exact match that a search must be worth besides, for "
    "each share of the budget that it takes, where all is spent.",
    lower_bound=0,
  )


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected argument {argv[1]!r}.")
  f = flags.FLAGS
  if not all(text.isdecimal() and int(text) for text in f.tokens):
    raise app.UsageError(
      f"--tokens={','.join(f.tokens)}: expected numbers above 0, as 40,60,90."
    )
  tokens = tuple(sorted({int(text) for text in f.tokens}))
  try:
    rows, policies, most = branches(f.branches)
    plan = Plan(f.kind, tokens, most, f.tries, f.penalty)
    values, fitted = fit(rows, plan)
  except (OSError, ValueError) as error:
    sys.exit(f"research.control_fit: {error}")
  noted = {"to": policies, "tokens": list(tokens), **fitted}
  pathlib.Path(f.output).write_text(
    f'"""A rule that `research.control_fit` fitted to {policies}."""\n\n'
    "from research import control_fit\n\n"
    f"VALUES = {pprint.pformat(values, sort_dicts=False)}\n"
    f"FITTED = {pprint.pformat(noted, sort_dicts=False)}\n"
    "rule = control_fit.rule(VALUES)\n"
  )
  for name, found in fitted.items():
    print(
      f"{name}: {found['turns']} turns and caps, {found['replaced']:.0%} "
      f"replaced; exact match {found['accept']:.3f} if all are accepted, "
      f"{found['replace']:.3f} if all are replaced, {found['rule']:.3f} by the "
      "rule"
    )


if __name__ == "__main__":
  define_flags()
  app.run(main)
