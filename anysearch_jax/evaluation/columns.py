"""A row's episodes: plain records, and arrays that hold a million of them.

A record is one line of `episodes.jsonl`. Of a whole file, `Columns` keeps
numbers; texts, spans and tokens stay in the file, and `Sample` keeps some.

A failed episode (the engine or the retriever was unavailable) says nothing
about the policy. Failed episodes are counted but excluded from every mean.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import heapq
import math
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from anysearch_jax import budgets as budgets_lib
from anysearch_jax.environment import official_scoring, scoring
from anysearch_jax.evaluation import journal

Episode = Mapping[str, Any]

# The keys that every episode must have, and the types of their values; bool is
# a subclass of int, so it passes.
_REQUIRED: dict[str, tuple[type, ...]] = {
  "question_id": (str, int),
  "answer": (str, type(None)),
  "em": (int, float),
  "format": (int, float, type(None)),
  "question": (str,),
  "outcome": (str,),
  "golden_answers": (list,),
  "spans": (list,),
  "queries": (list,),
  "budget": (int,),
  "seed": (int,),
  "scaffold": (int,),
  "searches": (int,),
  "violation": (int,),
  "generated_tokens": (int,),
  "retrieved_tokens": (int,),
  "total_tokens": (int,),
}
_KINDS = _REQUIRED | {"dataset": (str, type(None)), "metadata": (dict,)}

OUTCOMES = ("answered", "invalid", "truncated", "failed")
_WORLD = "world"  # The dataset of questions that record none.
# The part of a world question's id that names its snapshot.
_SNAPSHOT = re.compile(r"(train|dev|held-out)/\d+(?=/)")
_ADVICE = "Evaluate this row again with this version."
UNKNOWN_HOPS = -1  # Hops of a question that does not record them.

# The columns: integers, then floats. Every episode has the present ones, may
# lack the optional ones (nan), and the derived ones are computed from it.
_INTEGERS = ("question", "budget", "seed", "run", "hops", "outcome")
_PRESENT = (
  "em",
  "searches",
  "violation",
  "scaffold",
  "generated_tokens",
  "retrieved_tokens",
  "total_tokens",
)
EVIDENCE = (
  "gold_recall",
  "evidence_recall",
  "citation_precision",
  "citation_recall",
)
_OPTIONAL = (
  "format",
  "input_tokens",
  "cost",
  *EVIDENCE,
  "judged",
  "confidence",
)
_DERIVED = ("f1", "cover_em", "optimum", "official_em", "official_f1")
# Columns of caps besides searches, with their keys in an episode's `caps`.
_CAPS = {
  "token_cap": "tokens",
  "dollar_cap": "dollars",
  "second_cap": "seconds",
}
_FLOATS = (*_PRESENT, *_OPTIONAL, *_DERIVED, *_CAPS)
_TYPE = [
  *((name, np.int64) for name in _INTEGERS),
  *((name, np.float64) for name in _FLOATS),
]


@dataclasses.dataclass(frozen=True, eq=False)
class Columns:
  """P episodes over N questions, by question, budget, seed and training.

  Attributes:
    ids: `[N]`, ids of the questions, ascending.
    datasets: names of the datasets, those of the paper first.
    dataset_of: int `[N]`, index in `datasets` of each question.
    cluster_of: int `[N]`, equal for questions of one cluster, see `cluster_of`.
    runs: names of the trainings whose policies played the episodes.
    values: the columns, `[P]` each, which are attributes too:
      question: int, index in `ids`.
      budget, seed: int.
      run: int, index in `runs`.
      hops: int, UNKNOWN_HOPS where unknown.
      outcome: int, index in OUTCOMES.
      optimum: float, P(right answer) of the best agent for the question and
        budget, see `with_optimum`; nan where unknown.
      em, f1, searches, violation, scaffold, *_tokens: float.
      cover_em: float, 1 if the answer holds an accepted one, otherwise 0.
      format, input_tokens, cost: float, nan where the file has no value.
      gold_recall, ..., citation_recall: as `data/evidence.measure`, or nan.
      judged, confidence: as `judging.verdict`, or nan.
      official_em, official_f1: float, scores of the published script of the
        question's dataset (`environment/official_scoring`); nan where the
        dataset has none.
      token_cap, dollar_cap, second_cap: float, what the budget allows besides
        searches; infinite where it has no such cap.
  """

  ids: np.ndarray
  datasets: tuple[str, ...]
  dataset_of: np.ndarray
  cluster_of: np.ndarray
  runs: tuple[str, ...]
  values: Mapping[str, np.ndarray]

  def __len__(self) -> int:
    return len(self.values["question"])

  def __getattr__(self, name: str) -> np.ndarray:
    try:
      return self.__dict__["values"][name]
    except KeyError:
      raise AttributeError(f"Found {name!r}, expected a column.") from None

  @property
  def dataset(self) -> np.ndarray:
    """The index in `datasets` of each episode, int `[P]`."""
    return self.dataset_of[self.question]

  def ended(self, outcome: str) -> np.ndarray:
    """Whether each episode ended with an outcome, bool `[P]`."""
    return self.outcome == OUTCOMES.index(outcome)

  def replace(self, **columns: np.ndarray) -> Columns:
    """Returns the episodes with other values of some columns."""
    return dataclasses.replace(self, values={**self.values, **columns})

  def where(self, selection: np.ndarray) -> Columns:
    """Returns the episodes that a mask or indices select.

    Questions keep their indices. The order of episodes is kept if the indices
    ascend.
    """
    return self.replace(**{k: v[selection] for k, v in self.values.items()})

  def with_optimum(self, best: np.ndarray, budgets: Sequence[int]) -> Columns:
    """Returns the episodes beside the best agent's accuracy.

    Args:
      best: float `[N, B]`, the agent's P(right answer) for each question of
        `ids` at each budget.
      budgets: B budgets, ascending; they include every budget of an episode.
    """
    indices = np.searchsorted(budgets, self.budget)
    return self.replace(optimum=best[self.question, indices])

  def priced(self, prices: budgets_lib.Prices) -> Columns:
    """Returns the episodes with the cost that other prices give.

    The cost is nan if a count with a price above 0 is unknown (files of older
    versions do not record the number of tokens read).
    """
    dollars = prices.dollars(
      searches=self.searches,
      input_tokens=self.input_tokens,
      output_tokens=self.generated_tokens,
    )
    return self.replace(cost=np.zeros(len(self)) + dollars)

  def scored(self) -> Columns:
    """Returns the episodes that did not fail."""
    return self.where(~self.ended("failed"))

  def split(self, by: np.ndarray) -> dict[int, Columns]:
    """Splits the episodes by the values `by`, int `[P]`; ascending keys."""
    values, inverse = np.unique(by, return_inverse=True)
    order = np.argsort(inverse, kind="stable")
    ends = np.searchsorted(inverse[order], np.arange(len(values) + 1))
    return {
      int(value): self.where(order[ends[i] : ends[i + 1]])
      for i, value in enumerate(values)
    }


Measured = Columns | Iterable[Episode]


def as_columns(measured: Measured) -> Columns:
  """Returns the episodes as columns, the failed ones included.

  Raises ValueError if a (question, budget, seed) of a training occurs twice, or
  a question is in two datasets.
  """
  if isinstance(measured, Columns):
    return measured
  return _build(((e.get("run", ""), e) for e in measured), "these episodes")


def read(
  *paths: pathlib.Path,
  runs: Sequence[str] | None = None,
  sample: Sample | None = None,
) -> Columns:
  """Reads one or more `episodes.jsonl` of a row, holding numbers only.

  Args:
    paths: the files; several are of one method.
    runs: for each file, the training whose policy played it; files of one
      training have equal names. None: all are of one.
    sample: if given, every episode is added to it.

  Raises:
    ValueError: a file is invalid, see `parse`; there is no episode; or
      a (question, budget, seed) of a training occurs twice, in one file or in
      two.
  """

  def all_lines() -> Iterable[tuple[str, Episode]]:
    for path, run in zip(paths, runs or [""] * len(paths), strict=True):
      with path.open("rb") as lines:
        for episode in parse(lines, source=str(path)):
          if sample is not None:
            sample.add(episode)
          yield run, episode

  source = ", ".join(map(str, paths))
  table = _build(all_lines(), source)
  if not len(table):
    raise ValueError(f"{source}: found no episode, expected at least one.")
  return table


def by_dataset(measured: Measured) -> dict[str, Columns]:
  """Returns one part for each dataset that occurs, in the paper's order."""
  table = as_columns(measured)
  parts = table.split(table.dataset)
  return {table.datasets[code]: part for code, part in parts.items()}


def by_budget(measured: Measured) -> dict[int, Columns]:
  """Returns one part for each budget that occurs, ascending."""
  table = as_columns(measured)
  return table.split(table.budget)


def _build(measured: Iterable[tuple[str, Episode]], source: str) -> Columns:
  """Returns (training, episode) pairs as columns; `source` names the file."""
  question_index: dict[str, int] = {}
  question_datasets: dict[int, str] = {}
  runs: dict[str, int] = {}
  rows = np.fromiter(
    (
      _values(
        episode,
        run=runs.setdefault(run, len(runs)),
        question_index=question_index,
        question_datasets=question_datasets,
        source=source,
      )
      for run, episode in measured
    ),
    _TYPE,
  )
  present = set(question_datasets.values())
  datasets = [s for s in official_scoring.DATASETS if s in present]
  datasets += sorted(present.difference(datasets))
  ids = sorted(question_index)
  dataset_names = [question_datasets[question_index[id_]] for id_ in ids]
  # Renumber questions from first appearance to id order, so that the order of
  # the file does not matter.
  rank = np.empty(len(ids), dtype=np.int64)
  rank[[question_index[id_] for id_ in ids]] = np.arange(len(ids))
  rows["question"] = rank[rows["question"]]
  keys = ["run", "seed", *_CAPS, "budget", "question"]
  rows = rows[np.lexsort([rows[key] for key in keys])]
  values = {
    name: np.ascontiguousarray(rows[name]) for name in rows.dtype.names or ()
  }
  repeated = rows[keys][1:] == rows[keys][:-1]
  if repeated.any():
    first = int(np.argmax(repeated))
    raise ValueError(
      f"{source}: question {ids[values['question'][first]]!r} occurs twice "
      f"at budget {values['budget'][first]} and seed {values['seed'][first]} "
      "in one training; expected once. Name each evaluation of a row once, and "
      "give those of one policy different seeds."
    )
  clusters = list(map(cluster_of, ids, dataset_names))
  _, cluster_index = np.unique(np.array(clusters, object), return_inverse=True)
  return Columns(
    ids=np.array(ids, dtype=object),
    datasets=tuple(datasets),
    dataset_of=np.array(
      [datasets.index(name) for name in dataset_names], dtype=np.int64
    ),
    cluster_of=cluster_index,
    runs=tuple(runs),
    values=values,
  )


def _values(
  episode: Episode,
  *,
  run: int,
  question_index: dict[str, int],
  question_datasets: dict[int, str],
  source: str,
) -> tuple[Any, ...]:
  """Returns an episode's values in the order of _TYPE.

  A new question is added to `question_index`, its dataset to
  `question_datasets`.
  """
  name = str(episode["question_id"])
  where = f"{source}: question {name!r}"
  question = question_index.setdefault(name, len(question_index))
  dataset = dataset_of(episode)
  first_dataset = question_datasets.setdefault(question, dataset)
  if first_dataset != dataset:
    raise ValueError(
      f"{where} is of dataset {first_dataset!r} and of {dataset!r}; expected "
      "one dataset. Give each question an id of its own."
    )
  if episode["outcome"] not in OUTCOMES:
    raise ValueError(
      f"{where} ended as {episode['outcome']!r}; expected one of "
      f"{', '.join(OUTCOMES)}. {_ADVICE}"
    )
  metadata = episode.get("metadata", {})
  try:
    accepted = official_scoring.accepted(episode["golden_answers"], metadata)
  except ValueError as error:
    raise ValueError(f"{where}: {error} {_ADVICE}") from error
  official = _official_score(dataset, episode["answer"], accepted)
  f1 = float(episode["em"])
  cover = f1
  if not f1 and episode["answer"] is not None:
    texts = episode["answer"], tuple(episode["golden_answers"])
    f1 = _token_f1(*texts)
    cover = float(_contains(*texts))
  hops = metadata.get("hops")
  caps = episode.get("caps", {})
  values = {
    "question": question,
    "budget": episode["budget"],
    "seed": episode["seed"],
    "run": run,
    "hops": UNKNOWN_HOPS if hops is None else hops,
    "outcome": OUTCOMES.index(episode["outcome"]),
    "f1": f1,
    "cover_em": cover,
    "optimum": math.nan,  # See `Columns.with_optimum`.
    "official_em": math.nan if official is None else official[0],
    "official_f1": math.nan if official is None else official[1],
  }
  for name in _PRESENT:
    values[name] = episode[name]
  for name in _OPTIONAL:
    value = episode.get(name)
    values[name] = math.nan if value is None else value
  for name, unit in _CAPS.items():
    values[name] = caps.get(unit, math.inf)
  return tuple(values[name] for name, _ in _TYPE)


# Memoised because answers repeat across budgets and seeds.
_token_f1 = functools.lru_cache(maxsize=4096)(scoring.f1)
_contains = functools.lru_cache(maxsize=4096)(scoring.contains)
_official_score = functools.lru_cache(maxsize=4096)(official_scoring.score)


def parse(lines: Iterable[str | bytes], *, source: str) -> Iterator[Episode]:
  """Reads the lines of an `episodes.jsonl`, one at a time.

  Blank lines are skipped; `source` names the file in messages.

  Raises:
    ValueError: a line is not a JSON object, or a key is missing or its value
      has the wrong type.
  """
  for where, episode in journal.parse(lines, source=source):
    if missing := [key for key in _REQUIRED if key not in episode]:
      raise ValueError(
        f"{where}: the episode lacks {', '.join(missing)}. {_ADVICE}"
      )
    for key, kinds in _KINDS.items():
      if key in episode and not isinstance(episode[key], kinds):
        raise ValueError(
          f"{where}: found {key} {episode[key]!r:.60}, expected "
          f"{' or '.join(kind.__name__ for kind in kinds)}. {_ADVICE}"
        )
    yield episode


class Sample:
  """A random sample of a stream of episodes; only the sample is in memory.

  Each episode gets a priority, the hash of its (question, budget, seed), and
  the `n` smallest are kept. Rows over the same questions, budgets and seeds
  therefore keep the same episodes, whatever the order of their lines.
  """

  def __init__(self, n: int, seed: int = 0):
    self._n = n
    self._seed = seed
    # Draws are negated: heapq pops the smallest item, here the largest draw.
    # The count of episodes breaks ties, because episodes cannot be compared.
    self._heap: list[tuple[int, int, Episode]] = []
    self._count = 0

  def add(self, episode: Episode) -> None:
    """Adds an episode; if there are more than `n`, drops the largest draw."""
    self._count += 1
    item = -draw(episode, self._seed), self._count, episode
    heapq.heappush(self._heap, item)
    if len(self._heap) > self._n:
      heapq.heappop(self._heap)

  def episodes(self) -> list[Episode]:
    """Returns the sample, ordered by (question, budget, seed)."""
    return sorted((episode for *_, episode in self._heap), key=key_of)


def key_of(episode: Episode) -> tuple[str, int, int]:
  """Returns (question, budget, seed), which pairs episodes across rows."""
  return str(episode["question_id"]), episode["budget"], episode["seed"]


def draw(episode: Episode, seed: int = 0) -> int:
  """Returns a number in [0, 2^128), a hash of `seed` and `key_of`."""
  text = repr((seed, *key_of(episode))).encode("utf-8", "replace")
  return int.from_bytes(hashlib.blake2b(text, digest_size=16).digest())


def dataset_of(episode: Episode) -> str:
  """Returns the dataset of an episode's question; `world` if unrecorded."""
  metadata = episode.get("metadata", {})
  return episode.get("dataset") or metadata.get("dataset") or _WORLD


def cluster_of(question: str, dataset: str = _WORLD) -> str:
  """Returns the name of the cluster of a question, by its id.

  Questions of one snapshot of the generated world share its memories, right and
  wrong ones: `held-out/38/entity/relations` is of the cluster `held-out/38`.
  Any other question is a cluster of its own, named by its id.
  """
  match = _SNAPSHOT.match(question) if dataset == _WORLD else None
  return match[0] if match else question
