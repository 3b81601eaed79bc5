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
  **dict.fromkeys(("question", "outcome"), (str,)),
  **dict.fromkeys(("golden_answers", "spans", "queries"), (list,)),
  **dict.fromkeys(("budget", "seed", "scaffold", "searches"), (int,)),
  "violation": (int,),
  **dict.fromkeys(("generated_tokens", "retrieved_tokens"), (int,)),
  "total_tokens": (int,),
}
_KINDS = _REQUIRED | {"dataset": (str, type(None)), "metadata": (dict,)}

OUTCOMES = ("answered", "invalid", "truncated", "failed")
_WORLD = "world"  # The dataset of questions that record none.
_OF_A_SNAPSHOT = re.compile(r"(train|dev|held-out)/\d+(?=/)")
_AGAIN = "Evaluate this row again with this version."
NONE = -1  # Hops of a question that does not record them.

# The columns: integers, then floats; of the latter what every episode has, what
# it may lack (nan), and what is derived.
_INTEGERS = "question budget seed run hops outcome".split()
_PRESENT = (
  "em searches violation scaffold generated_tokens retrieved_tokens "
  "total_tokens"
).split()
FOUND = "gold_recall evidence_recall citation_precision citation_recall".split()
_OPTIONAL = ["format", "input_tokens", "cost", *FOUND, "judged", "confidence"]
_DERIVED = "f1 optimum official_em official_f1".split()
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
      hops: int, NONE where unknown.
      outcome: int, index in OUTCOMES.
      optimum: float, P(right answer) of the best agent for the question and
        budget, see `with_optimum`; nan where unknown.
      em, f1, searches, violation, scaffold, *_tokens: float.
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

  def where(self, chosen: np.ndarray) -> Columns:
    """Returns the episodes of a mask or of indices.

    Questions keep their indices. The order of episodes is kept if the indices
    ascend.
    """
    return self.replace(**{k: v[chosen] for k, v in self.values.items()})

  def with_optimum(self, best: np.ndarray, budgets: Sequence[int]) -> Columns:
    """Returns the episodes beside the best agent's accuracy.

    `best` is `[N, B]`, P(right answer) of the agent for each question of `ids`
    at B `budgets`, all that occur, ascending.
    """
    places = np.searchsorted(budgets, self.budget)
    return self.replace(optimum=best[self.question, places])

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


def of(measured: Measured) -> Columns:
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


def _build(measured: Iterable[tuple[str, Episode]], source: str) -> Columns:
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
  present, known = set(sets.values()), official_scoring.DATASETS
  names = [*(s for s in known if s in present), *sorted(present - {*known})]
  order = sorted(index)
  own = [sets[index[name]] for name in order]
  # Renumber questions from first appearance to id order, so that the order of
  # the file does not matter.
  place = np.empty(len(order), dtype=np.int64)
  place[[index[name] for name in order]] = np.arange(len(order))
  numbers["question"] = place[numbers["question"]]
  keys = ["run", "seed", *_CAPS, "budget", "question"]
  numbers = numbers[np.lexsort([numbers[key] for key in keys])]
  values = {
    name: np.ascontiguousarray(numbers[name])
    for name in numbers.dtype.names or ()
  }
  same = numbers[keys][1:] == numbers[keys][:-1]
  if same.any():
    first = int(np.argmax(same))
    raise ValueError(
      f"{source}: question {order[values['question'][first]]!r} occurs twice "
      f"at budget {values['budget'][first]} and seed {values['seed'][first]} "
      "in one training; expected once. Name each evaluation of a row once, and "
      "give those of one policy different seeds."
    )
  return Columns(
    ids=np.array(order, dtype=object),
    datasets=tuple(names),
    dataset_of=np.array([names.index(of) for of in own], dtype=np.int64),
    cluster_of=np.unique(
      np.array(list(map(cluster_of, order, own)), object), return_inverse=True
    )[1],
    runs=tuple(runs),
    values=values,
  )


def _numbers(
  episode: Episode,
  run: int,
  index: dict[str, int],
  sets: dict[int, str],
  source: str,
) -> tuple[Any, ...]:
  """Returns an episode's values in the order of _TYPE."""
  name = str(episode["question_id"])
  where = f"{source}: question {name!r}"
  question = index.setdefault(name, len(index))
  dataset = dataset_of(episode)
  if sets.setdefault(question, dataset) != dataset:
    raise ValueError(
      f"{where} is of dataset {sets[question]!r} and of {dataset!r}; expected "
      "one dataset. Give each question an id of its own."
    )
  if episode["outcome"] not in OUTCOMES:
    raise ValueError(
      f"{where} ended as {episode['outcome']!r}; expected one of "
      f"{', '.join(OUTCOMES)}. {_AGAIN}"
    )
  metadata = episode.get("metadata", {})
  try:
    accepted = official_scoring.accepted(episode["golden_answers"], metadata)
  except ValueError as error:
    raise ValueError(f"{where}: {error} {_AGAIN}") from error
  official = _official_score(dataset, episode["answer"], accepted)
  f1 = float(episode["em"])
  if not f1 and episode["answer"] is not None:
    f1 = _token_f1(episode["answer"], tuple(episode["golden_answers"]))
  hops, optional = metadata.get("hops"), map(episode.get, _OPTIONAL)
  return (
    question,
    episode["budget"],
    episode["seed"],
    run,
    NONE if hops is None else hops,
    OUTCOMES.index(episode["outcome"]),
    *(episode[key] for key in _PRESENT),
    *(math.nan if value is None else value for value in optional),
    f1,
    math.nan,
    *((math.nan, math.nan) if official is None else official),
    *(episode.get("caps", {}).get(unit, math.inf) for unit in _CAPS.values()),
  )


# Memoised because answers repeat across budgets and seeds.
_token_f1 = functools.lru_cache(maxsize=4096)(scoring.f1)
_official_score = functools.lru_cache(maxsize=4096)(official_scoring.score)


def parse(lines: Iterable[str | bytes], *, source: str) -> Iterator[Episode]:
  """Reads the lines of an `episodes.jsonl`, one at a time.

  Blank lines are skipped; `source` names the file in messages. Raises
  ValueError if a line is not a JSON object, or a key is missing or its value
  has the wrong type.
  """
  for where, episode in journal.parse(lines, source=source):
    if missing := [key for key in _REQUIRED if key not in episode]:
      raise ValueError(
        f"{where}: the episode lacks {', '.join(missing)}. {_AGAIN}"
      )
    for key, kinds in _KINDS.items():
      if key in episode and not isinstance(episode[key], kinds):
        raise ValueError(
          f"{where}: found {key} {episode[key]!r:.60}, expected "
          f"{' or '.join(kind.__name__ for kind in kinds)}. {_AGAIN}"
        )
    yield episode


class Sample:
  """A random sample of a stream of episodes; only the sample is in memory.

  Each episode gets a priority, the hash of its (question, budget, seed), and
  the `n` smallest are kept. Rows over the same questions, budgets and seeds
  therefore keep the same episodes, whatever the order of their lines.
  """

  def __init__(self, n: int, seed: int = 0):
    self._n, self._seed = n, seed
    # Draws are negated: heapq pops the smallest item, here the largest draw.
    self._kept: list[tuple[int, int, Episode]] = []
    self._seen = 0

  def add(self, episode: Episode) -> None:
    """Adds an episode; if there are more than `n`, drops the largest draw."""
    self._seen += 1
    drawn = -draw(episode, self._seed), self._seen, episode
    heapq.heappush(self._kept, drawn)
    if len(self._kept) > self._n:
      heapq.heappop(self._kept)

  def episodes(self) -> list[Episode]:
    """Returns the sample, ordered by (question, budget, seed)."""
    return sorted((episode for *_, episode in self._kept), key=key_of)


def key_of(episode: Episode) -> tuple[str, int, int]:
  """Returns (question, budget, seed), which pairs episodes across rows."""
  return str(episode["question_id"]), episode["budget"], episode["seed"]


def draw(episode: Episode, seed: int = 0) -> int:
  """Returns a number in [0, 2^128), a hash of `seed` and `key_of`."""
  text = repr((seed, *key_of(episode))).encode("utf-8", "replace")
  return int.from_bytes(hashlib.blake2b(text, digest_size=16).digest())


def dataset_of(episode: Episode) -> str:
  """Returns the dataset of an episode's question; `world` if unrecorded."""
  known = episode.get("dataset") or episode.get("metadata", {}).get("dataset")
  return known or _WORLD


def cluster_of(question: str, dataset: str = _WORLD) -> str:
  """Returns the name of the cluster of a question, by its id.

  Questions of one snapshot of the generated world share its memories, right and
  wrong ones: `held-out/38/entity/relations` is of the cluster `held-out/38`.
  Any other question is a cluster of its own, named by its id.
  """
  found = _OF_A_SNAPSHOT.match(question) if dataset == _WORLD else None
  return found[0] if found else question
