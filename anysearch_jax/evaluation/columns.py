"""A row's episodes as arrays, so that a million of them fit in memory.

Texts, spans and tokens stay in the file; `episodes.Sample` keeps some.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from anysearch_jax.environment import official_scoring, scoring
from anysearch_jax.evaluation import episodes as episodes_lib

# The paper's order; other datasets follow in alphabetical order.
SETS = (
  "nq",
  "triviaqa",
  "popqa",
  "hotpotqa",
  "2wikimultihopqa",
  "musique",
  "bamboogle",
)
OUTCOMES = ("answered", "invalid", "truncated", "failed")
KINDS = ("known", "unknown", "stale")  # State of a fact in the policy's memory.
NONE = -1  # Hops or kind of a question that does not record them.

_INTEGERS = (
  *("question", "budget", "seed", "run"),
  *("hops", "outcome", "kind"),
)
_PRESENT = (
  "em",
  "searches",
  "violation",
  "scaffold",
  "generated_tokens",
  "retrieved_tokens",
  "total_tokens",
)
_OPTIONAL = ("format", "input_tokens", "cost")
_CAPS = ("token_cap", "dollar_cap", "second_cap")
_CAPPED = ("tokens", "dollars", "seconds")
_TYPE = [(name, np.int64) for name in _INTEGERS] + [
  (name, np.float64)
  for name in (
    *(*_PRESENT, *_OPTIONAL, "f1", "asked", "reliability", "optimum"),
    *episodes_lib.Checks._fields,
    *official_scoring.NAMES,
    *_CAPS,
  )
]


@dataclasses.dataclass(frozen=True, eq=False)
class Columns:
  """P episodes over N questions, by question, budget, seed and training.

  Attributes:
    ids: `[N]`, ids of the questions, ascending.
    datasets: names of the datasets, those of SETS first.
    dataset_of: int `[N]`, index in `datasets` of each question.
    question: int `[P]`, index in `ids`.
    runs: names of the trainings whose policies played the episodes.
    budget, seed: int `[P]`.
    run: int `[P]`, index in `runs`.
    hops: int `[P]`, NONE where unknown.
    outcome: int `[P]`, index in OUTCOMES.
    kind: int `[P]`, index in KINDS of the first fact, NONE where unknown.
    asked: float `[P]`, 1 where that fact was searched.
    reliability: float `[P]`, how often memories like that of the fact are
      right; nan where memory does not hold it, or unknown.
    optimum: float `[P]`, P(right answer) of the best agent for the question and
      budget, see `with_optimum`; nan where unknown.
    shown, verified, contradicted, resolved: float `[P]`, see
      `episodes.Checks`.
    em, f1, searches, violation, scaffold, *_tokens: float `[P]`.
    format, input_tokens, cost: float `[P]`, nan where the file has no value.
    official_em, official_f1: float `[P]`, scores of the published script of
      the question's dataset (`environment/official_scoring`); nan where the
      dataset has none.
    token_cap, dollar_cap, second_cap: float `[P]`, what the budget allows
      besides searches; infinite where it has no such cap.
  """

  ids: np.ndarray
  datasets: tuple[str, ...]
  dataset_of: np.ndarray
  runs: tuple[str, ...]
  question: np.ndarray
  budget: np.ndarray
  seed: np.ndarray
  run: np.ndarray
  hops: np.ndarray
  outcome: np.ndarray
  kind: np.ndarray
  asked: np.ndarray
  reliability: np.ndarray
  optimum: np.ndarray
  shown: np.ndarray
  verified: np.ndarray
  contradicted: np.ndarray
  resolved: np.ndarray
  em: np.ndarray
  f1: np.ndarray
  format: np.ndarray
  searches: np.ndarray
  violation: np.ndarray
  scaffold: np.ndarray
  generated_tokens: np.ndarray
  retrieved_tokens: np.ndarray
  total_tokens: np.ndarray
  input_tokens: np.ndarray
  cost: np.ndarray
  official_em: np.ndarray
  official_f1: np.ndarray
  token_cap: np.ndarray
  dollar_cap: np.ndarray
  second_cap: np.ndarray

  def __len__(self) -> int:
    return len(self.question)

  @property
  def dataset(self) -> np.ndarray:
    """The index in `datasets` of each episode, int `[P]`."""
    return self.dataset_of[self.question]

  def where(self, chosen: np.ndarray) -> Columns:
    """Returns the episodes of a mask or of indices.

    Questions keep their indices. The order of episodes is kept if the indices
    ascend.
    """
    return dataclasses.replace(
      self, **{name: getattr(self, name)[chosen] for name, _ in _TYPE}
    )

  def with_optimum(self, best: np.ndarray, budgets: Sequence[int]) -> Columns:
    """Returns the episodes beside the best agent's accuracy.

    Args:
      best: `[N, B]`, P(right answer) of the agent for each question of `ids`
        and each of `budgets`.
      budgets: B budgets, ascending, all that occur.
    """
    at = np.searchsorted(budgets, self.budget)
    return dataclasses.replace(self, optimum=best[self.question, at])

  def scored(self) -> Columns:
    """Returns the episodes that did not fail."""
    return self.where(self.outcome != OUTCOMES.index("failed"))

  def split(self, by: np.ndarray) -> dict[int, Columns]:
    """Splits the episodes by the values `by`, int `[P]`; ascending keys."""
    values, inverse = np.unique(by, return_inverse=True)
    order = np.argsort(inverse, kind="stable")
    ends = np.searchsorted(inverse[order], np.arange(len(values) + 1))
    return {
      int(value): self.where(order[ends[i] : ends[i + 1]])
      for i, value in enumerate(values)
    }


Measured = Columns | Iterable[episodes_lib.Episode]


def of(measured: Measured) -> Columns:
  """Returns the episodes as columns, the failed ones included.

  Raises:
    ValueError: a (question, budget, seed) of a training occurs twice, or a
      question is in two datasets.
  """
  if isinstance(measured, Columns):
    return measured
  return _build(((e.get("run", ""), e) for e in measured), "these episodes")


def read(
  *paths: pathlib.Path,
  runs: Sequence[str] | None = None,
  sample: episodes_lib.Sample | None = None,
) -> Columns:
  """Reads one or more `episodes.jsonl` of a row, holding numbers only.

  Args:
    paths: the files; several are of one method.
    runs: for each file, the training whose policy played it; files of one
      training have equal names. None: all are of one.
    sample: if given, every episode is added to it.

  Raises:
    ValueError: a file is invalid, see `episodes.read`; there is no episode; or
      a (question, budget, seed) of a training occurs twice, in one file or in
      two.
  """

  def all_lines() -> Iterable[tuple[str, episodes_lib.Episode]]:
    for path, run in zip(paths, runs or [""] * len(paths), strict=True):
      with path.open("rb") as lines:
        for episode in episodes_lib.read(lines, source=str(path)):
          if sample is not None:
            sample.add(episode)
          yield run, episode

  source = ", ".join(map(str, paths))
  found = _build(all_lines(), source)
  if not len(found):
    raise ValueError(f"{source}: found no episode, expected at least one.")
  return found


def by_dataset(measured: Measured) -> dict[str, Columns]:
  """Returns one part for each dataset that occurs, in the paper's order."""
  table = of(measured)
  parts = table.split(table.dataset)
  return {table.datasets[code]: part for code, part in parts.items()}


def by_budget(measured: Measured) -> dict[int, Columns]:
  """Returns one part for each budget that occurs, ascending."""
  table = of(measured)
  return table.split(table.budget)


def by_hops(measured: Measured) -> dict[int, Columns]:
  """Returns one part for each number of hops, ascending, without unknown."""
  table = of(measured)
  parts = table.split(table.hops)
  return {hops: part for hops, part in parts.items() if hops != NONE}


def by_seed(measured: Measured) -> dict[int, Columns]:
  """Returns one part for each seed that occurs, ascending."""
  table = of(measured)
  return table.split(table.seed)


def by_run(measured: Measured) -> dict[str, Columns]:
  """Returns one part for each training that occurs."""
  table = of(measured)
  parts = table.split(table.run)
  return {table.runs[code]: part for code, part in parts.items()}


def _build(
  measured: Iterable[tuple[str, episodes_lib.Episode]], source: str
) -> Columns:
  index: dict[str, int] = {}
  sets: dict[int, str] = {}
  runs: dict[str, int] = {}
  numbers = np.fromiter(
    (
      _numbers(episode, runs.setdefault(run, len(runs)), index, sets, source)
      for run, episode in measured
    ),
    _TYPE,
  )
  names = sorted(
    set(sets.values()),
    key=lambda s: (SETS.index(s) if s in SETS else len(SETS), s),
  )
  order = sorted(index)
  # Renumber questions from first appearance to id order, so that the order of
  # the file does not matter.
  place = np.empty(len(order), dtype=np.int64)
  place[[index[name] for name in order]] = np.arange(len(order))
  columns = {name: np.ascontiguousarray(numbers[name]) for name, _ in _TYPE}
  columns["question"] = place[columns["question"]]
  names_of_keys = ("run", "seed", *_CAPS, "budget", "question")
  keys = [columns[name] for name in names_of_keys]
  rank = np.lexsort(keys)
  columns = {name: column[rank] for name, column in columns.items()}
  same = np.ones(max(0, len(rank) - 1), dtype=bool)
  for name in names_of_keys:
    same &= columns[name][1:] == columns[name][:-1]
  if same.any():
    first = int(np.argmax(same))
    raise episodes_lib.twice(
      source,
      order[columns["question"][first]],
      int(columns["budget"][first]),
      int(columns["seed"][first]),
    )
  return Columns(
    ids=np.array(order, dtype=object),
    datasets=tuple(names),
    dataset_of=np.array(
      [names.index(sets[index[name]]) for name in order], dtype=np.int64
    ),
    runs=tuple(runs),
    **columns,
  )


def _numbers(
  episode: episodes_lib.Episode,
  run: int,
  index: dict[str, int],
  sets: dict[int, str],
  source: str,
) -> tuple[float, ...]:
  name = str(episode["question_id"])
  question = index.setdefault(name, len(index))
  dataset = episodes_lib.dataset_of(episode)
  if sets.setdefault(question, dataset) != dataset:
    raise ValueError(
      f"{source}: question {name!r} is of dataset {sets[question]!r} and of "
      f"{dataset!r}; expected one dataset. Give each question an id of its own."
    )
  hop = episodes_lib.first_hop(episode)
  hops = episode.get("metadata", {}).get("hops")
  reliability = episodes_lib.reliability(episode)
  return (
    question,
    episode["budget"],
    episode["seed"],
    run,
    NONE if hops is None else hops,
    _outcome(episode, source),
    NONE if hop is None else KINDS.index(hop[0]),
    *(episode[key] for key in _PRESENT),
    *(_optional(episode, key) for key in _OPTIONAL),
    _f1(episode),
    0 if hop is None else hop[1],
    math.nan if reliability is None else reliability,
    math.nan,
    *episodes_lib.checks(episode),
    *_official(episode, dataset, source),
    *(episode.get("caps", {}).get(unit, math.inf) for unit in _CAPPED),
  )


def _outcome(episode: episodes_lib.Episode, source: str) -> int:
  if episode["outcome"] not in OUTCOMES:
    raise ValueError(
      f"{source}: question {str(episode['question_id'])!r} ended as "
      f"{episode['outcome']!r}; expected one of {', '.join(OUTCOMES)}. "
      "Evaluate this row again with this version."
    )
  return OUTCOMES.index(episode["outcome"])


def _optional(episode: Mapping[str, Any], key: str) -> float:
  value = episode.get(key)
  return math.nan if value is None else value


def _f1(episode: Mapping[str, Any]) -> float:
  if episode["em"] or episode["answer"] is None:
    return float(episode["em"])
  return _token_f1(episode["answer"], tuple(episode["golden_answers"]))


def _official(
  episode: Mapping[str, Any], dataset: str, source: str
) -> tuple[float, float]:
  try:
    accepted = official_scoring.accepted(
      episode["golden_answers"], episode.get("metadata", {})
    )
  except ValueError as error:
    raise ValueError(
      f"{source}: question {str(episode['question_id'])!r}: {error} Evaluate "
      "this row again with this version."
    ) from error
  found = _official_score(dataset, episode["answer"], accepted)
  return (math.nan, math.nan) if found is None else found


# Memoised because answers repeat across budgets and seeds.
_token_f1 = functools.lru_cache(maxsize=4096)(scoring.f1)
_official_score = functools.lru_cache(maxsize=4096)(official_scoring.score)
