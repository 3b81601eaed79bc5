"""What is measured on finished episodes: one cell per row and budget.

An episode is a plain record, one line of `episodes.jsonl`. Failed episodes
(engine or retriever out of reach) are nobody's doing: they are counted and
enter no mean.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

Episode = Mapping[str, Any]

REQUIRED = (
  "question_id",
  "question",
  "golden_answers",
  "budget",
  "scaffold",
  "seed",
  "spans",
  "answer",
  "em",
  "format",
  "searches",
  "queries",
  "violation",
  "outcome",
  "generated_tokens",
  "retrieved_tokens",
  "total_tokens",
)


@dataclasses.dataclass(frozen=True)
class Row:
  """One line of the report: a label and all its evaluated episodes.

  run: the folder of the training run the episodes come from, "" if unknown.
  """

  label: str
  episodes: tuple[Episode, ...]
  run: str = ""


@dataclasses.dataclass(frozen=True)
class Training:
  """One training run: its rollout records, in order, and resolved config."""

  label: str
  records: tuple[Mapping[str, Any], ...]
  config: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Cell:
  """The measurements of some episodes; None where nothing defines a value.

  Attributes:
    n: scored episodes; failed: left out of everything else.
    correct, searches_total: sums over the scored episodes.
    accuracy, searches, format_rate, *_tokens: means over scored episodes.
    tp: tool productivity, correct / searches; None without any search.
    *_spread: sample standard deviation over seeds; None under two seeds.
    retrieval_share: retrieved / total tokens, in [0, 1].
  """

  n: int
  failed: int
  truncated: int
  invalid: int
  violations: int
  correct: int
  searches_total: int
  accuracy: float | None
  accuracy_spread: float | None
  searches: float | None
  tp: float | None
  tp_spread: float | None
  format_rate: float | None
  generated_tokens: float | None
  retrieved_tokens: float | None
  total_tokens: float | None
  retrieval_share: float | None


def parse_episodes(lines: Iterable[str], *, source: str) -> tuple[Episode, ...]:
  """Reads the lines of an `episodes.jsonl`.

  Args:
    lines: one JSON object each; blank lines are skipped.
    source: what to call the file in an error.

  Raises:
    ValueError: no episode, a line that is not JSON, a key that is missing, or
      a (question, budget, seed) that occurs twice.
  """
  episodes, seen = [], set()
  for number, line in enumerate(lines, start=1):
    if not line.strip():
      continue
    try:
      episode = json.loads(line)
    except json.JSONDecodeError as error:
      raise ValueError(
        f"{source}, line {number}: found text that is not JSON ({error}); "
        "expected one episode a line. Evaluate this row again."
      ) from error
    missing = [key for key in REQUIRED if key not in episode]
    if missing:
      raise ValueError(
        f"{source}, line {number}: the episode lacks {', '.join(missing)}; "
        "evaluate this row again with this version."
      )
    if key_of(episode) in seen:
      raise ValueError(
        f"{source}, line {number}: question {episode['question_id']!r} occurs "
        f"twice at budget {episode['budget']} and seed {episode['seed']}; "
        "expected once. Evaluate this row again into an empty folder."
      )
    seen.add(key_of(episode))
    episodes.append(episode)
  if not episodes:
    raise ValueError(f"{source}: found no episode, expected at least one.")
  return tuple(episodes)


def key_of(episode: Episode) -> tuple[str, int, int]:
  """What pairs an episode with another row's: question, budget, seed."""
  return str(episode["question_id"]), episode["budget"], episode["seed"]


def scored(episodes: Iterable[Episode]) -> list[Episode]:
  """The episodes that count: all but the failed ones."""
  return [e for e in episodes if e["outcome"] != "failed"]


def budgets(episodes: Iterable[Episode]) -> list[int]:
  """The budgets that occur, ascending."""
  return sorted({episode["budget"] for episode in episodes})


def productivity(correct: float, searches: float) -> float | None:
  """Tool productivity: correct answers per search (the paper's TP).

  Returns:
    correct / searches, or None when no search was made: the ratio is not
    defined then, neither 0 nor infinite.
  """
  return None if searches == 0 else correct / searches


def cell(episodes: Sequence[Episode]) -> Cell:
  """Measures some episodes together, usually those of one budget."""
  kept = scored(episodes)

  def total(key: str) -> int:
    return sum(int(e[key]) for e in kept)

  def mean(key: str) -> float | None:
    return total(key) / len(kept) if kept else None

  def ended(outcome: str) -> int:
    return sum(e["outcome"] == outcome for e in kept)

  by_seed: dict[int, list[Episode]] = {}
  for episode in kept:
    by_seed.setdefault(episode["seed"], []).append(episode)
  sums = [
    (sum(e["em"] for e in s), sum(e["searches"] for e in s), len(s))
    for s in by_seed.values()
  ]
  tokens = total("total_tokens")
  return Cell(
    n=len(kept),
    failed=len(episodes) - len(kept),
    truncated=ended("truncated"),
    invalid=ended("invalid"),
    violations=total("violation"),
    correct=total("em"),
    searches_total=total("searches"),
    accuracy=mean("em"),
    accuracy_spread=_spread([em / n for em, _, n in sums]),
    searches=mean("searches"),
    tp=productivity(total("em"), total("searches")),
    tp_spread=_spread([productivity(em, s) for em, s, _ in sums]),
    format_rate=mean("format"),
    generated_tokens=mean("generated_tokens"),
    retrieved_tokens=mean("retrieved_tokens"),
    total_tokens=mean("total_tokens"),
    retrieval_share=total("retrieved_tokens") / tokens if tokens else None,
  )


def _spread(values: Sequence[float | None]) -> float | None:
  if len(values) < 2 or None in values:
    return None
  return float(np.std(values, ddof=1))


def by_budget(episodes: Iterable[Episode]) -> dict[int, Cell]:
  """One cell for each budget that occurs, ascending."""
  groups: dict[int, list[Episode]] = {}
  for episode in episodes:
    groups.setdefault(episode["budget"], []).append(episode)
  return {budget: cell(groups[budget]) for budget in sorted(groups)}


def average(cells: Sequence[Cell]) -> Cell:
  """The average over budgets: every budget weighs the same.

  Counts are added; tool productivity is pooled (all correct answers over all
  searches), because a mean of ratios is ruled by the budgets that search
  least; spreads over seeds are not averaged.
  """

  def combine(name: str) -> int | float | None:
    values = [getattr(c, name) for c in cells]
    if all(isinstance(value, int) for value in values):
      return sum(values)
    defined = [value for value in values if value is not None]
    return sum(defined) / len(defined) if defined else None

  pooled = {f.name: combine(f.name) for f in dataclasses.fields(Cell)}
  pooled["tp"] = productivity(pooled["correct"], pooled["searches_total"])
  return Cell(**pooled | {"accuracy_spread": None, "tp_spread": None})


def by_hops(
  episodes: Iterable[Episode],
) -> dict[int, dict[int, tuple[int, int]]]:
  """Accuracy by the number of hops of the question.

  Returns:
    hops -> budget -> (correct, scored); empty when no episode tells its hops.
  """
  table: dict[int, dict[int, tuple[int, int]]] = {}
  for episode in scored(episodes):
    hops = episode.get("metadata", {}).get("hops")
    if hops is None:
      continue
    cells = table.setdefault(hops, {})
    correct, n = cells.get(episode["budget"], (0, 0))
    cells[episode["budget"]] = (correct + episode["em"], n + 1)
  return {hops: dict(sorted(table[hops].items())) for hops in sorted(table)}


def words(text: str) -> str:
  """Lower-case words between single spaces, a space at both ends."""
  return " " + " ".join(re.findall(r"\w+", text.lower())) + " "


def mentions(query: str, *phrases: str) -> bool:
  """Whether `query` holds every phrase, as whole words and in one piece."""
  spaced = words(query)
  return all(phrase.strip() and words(phrase) in spaced for phrase in phrases)


def asks_for(query: str, fact: Mapping[str, Any]) -> bool:
  """Whether `query` names the entity and either wording of the relation."""
  return any(
    mentions(query, fact["entity"], fact.get(wording) or "")
    for wording in ("relation", "alternative")
  )


def first_hop(episodes: Iterable[Episode]) -> list[tuple[str, str, bool]]:
  """Whether the first fact of the chain was searched, episode by episode.

  The first fact is the only one that every episode reaches. A stale fact (the
  model's memory holds an old value) is neither known nor unknown.

  Returns:
    (question id, `known` | `unknown` | `stale`, searched) for every scored
    episode with a budget of at least one and a question that lists its facts.
  """
  found = []
  for episode in scored(episodes):
    facts = episode.get("metadata", {}).get("facts")
    if episode["budget"] < 1 or not facts:
      continue
    fact = facts[0]
    kind = (
      "stale"
      if fact.get("stale")
      else "known"
      if fact.get("known")
      else "unknown"
    )
    searched = any(asks_for(query, fact) for query in episode["queries"])
    found.append((str(episode["question_id"]), kind, searched))
  return found
