"""Chains of forced depth as arrays, and what is measured on them.

Of N questions and depths 0 to D, a chain of depth d searches d times and
answers. `Chains.of` reads the episodes of `forced`; `measured` has the numbers
from which losses are predicted; `optimum` is the best that decisions can do.
"""

from __future__ import annotations

import collections
import dataclasses
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

import anysearch_jax as aj
from research.memory import memories

SPLITS = ("train", "test")
Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Chains:
  """The chains of the questions of a split, by id.

  Attributes:
    ids: of the N questions, ascending.
    forms: the form of each.
    right, well_formed: bool `[N, D + 1]`.
    found: bool `[N, D + 1]`, whether the passages hold an accepted answer.
    searches, tokens: int `[N, D + 1]`, charged searches and written tokens.
  """

  ids: tuple[str, ...]
  forms: tuple[str, ...]
  right: np.ndarray
  well_formed: np.ndarray
  found: np.ndarray
  searches: np.ndarray
  tokens: np.ndarray

  @classmethod
  def of(cls, episodes: Iterable[Row]) -> Chains:
    """Returns the chains of an evaluation whose seeds are depths.

    Raises:
      ValueError: an episode failed, or a question lacks a depth.
    """
    cells: dict[str, dict[int, Row]] = collections.defaultdict(dict)
    for row in episodes:
      if row["failed"]:
        raise ValueError(
          f"{row['question_id']}: found a failed episode, expected none; run "
          "the evaluation again, which plays it again."
        )
      cells[row["question_id"]][row["seed"]] = row
    ids = tuple(sorted(cells))
    depths = range(max((max(own) for own in cells.values()), default=0) + 1)
    for id_ in ids:
      if set(cells[id_]) != set(depths):
        raise ValueError(
          f"{id_}: found the depths {sorted(cells[id_])}, expected "
          f"{[*depths]}; evaluate with --config.evaluation.seeds=0,1,2,3,4."
        )
    rows = [[cells[id_][depth] for depth in depths] for id_ in ids]

    def array(value) -> np.ndarray:
      return np.array([[value(row) for row in own] for own in rows])

    return cls(
      ids,
      tuple(memories.form_of(own[0]["question"]) for own in rows),
      array(lambda row: row["em"] > 0),
      array(lambda row: row["format"] == 1),
      array(_is_found),
      array(lambda row: row["searches"]),
      array(lambda row: row["generated_tokens"]),
    )

  @property
  def depth(self) -> int:
    """The largest depth D."""
    return self.right.shape[1] - 1

  @property
  def limit(self) -> np.ndarray:
    """Searches that the policy's words allow, int `[N]`.

    A turn that was forced to search and did not ends its chain.
    """
    return self.searches[:, -1]

  def of_form(self, form: str) -> Chains:
    """Returns the chains of one form."""
    mask = np.array([own == form for own in self.forms], bool)
    arrays = ("right", "well_formed", "found", "searches", "tokens")
    return Chains(
      tuple(np.array(self.ids, object)[mask]),
      (form,) * int(mask.sum()),
      *(getattr(self, name)[mask] for name in arrays),
    )


def _is_found(row: Row) -> bool:
  """Whether a passage that an episode was shown holds an accepted answer."""
  return any(
    aj.scoring.contains(passage["text"], row["golden_answers"])
    for observation in row["observations"]
    for passage in observation["passages"]
  )


def read(folder: str) -> dict[str, Chains]:
  """Returns the chains of both splits, of `FOLDER/train` and `FOLDER/test`."""
  return {
    split: Chains.of(
      aj.read_episodes(pathlib.Path(folder) / split / memories.EPISODES)
    )
    for split in SPLITS
  }


class Measured(NamedTuple):
  """What a form's memory, searches and reading are worth.

  Attributes:
    questions: their number.
    well_formed: share of well-formed episodes.
    p: share that the memory answers, without a search.
    q: share of k-th searches that find, of those that follow no find.
    read: share of right answers right after the first find.
    kept: share of right answers after searches that found nothing, of
      questions whose memory is right.
    lucky: the same of questions whose memory is wrong.
  """

  questions: int
  well_formed: float
  p: float
  q: tuple[float, ...]
  read: float
  kept: float
  lucky: float


def measured(chains: Chains) -> Measured:
  """Returns what is measured on chains; a share of nothing is 0."""

  def share(values: np.ndarray, of: np.ndarray) -> float:
    return float(values[of].mean()) if of.any() else 0.0

  right, found = chains.right, chains.found
  remembered = right[:, :1] & np.ones(chains.depth, bool)
  missed = ~found[:, 1:]
  is_first = found[:, 1:] & ~found[:, :-1]
  return Measured(
    questions=len(right),
    well_formed=float(chains.well_formed.mean()) if len(right) else 0.0,
    p=share(right[:, 0], np.ones(len(right), bool)),
    q=tuple(share(found[:, k + 1], ~found[:, k]) for k in range(chains.depth)),
    read=share(right[:, 1:], is_first),
    kept=share(right[:, 1:], missed & remembered),
    lucky=share(right[:, 1:], missed & ~remembered),
  )


def optimum(chains: Chains, budget: int) -> np.ndarray:
  """Returns the stops of the best agent, int `[N]`, depths of its answers.

  The agent knows the form, the budget and which of its searches found, and the
  statistics of all these chains. It is exact: questions that look alike stop
  alike, and no such rule is right more often.
  """
  deepest = min(budget, chains.depth)
  stops = np.full(len(chains.ids), deepest)
  rows = range(len(chains.ids))
  for depth in reversed(range(deepest)):
    alike: dict[tuple, list[int]] = collections.defaultdict(list)
    for row in rows:
      key = chains.forms[row], *chains.found[row, 1 : depth + 1].tolist()
      alike[key].append(row)
    for some in alike.values():
      goes_on = chains.right[some, stops[some]].sum()
      # Of equals, the cheaper one.
      if chains.right[some, depth].sum() >= goes_on:
        stops[some] = depth
  return np.minimum(stops, chains.limit)


def by_form(chains: Chains, values: np.ndarray) -> dict[str, float]:
  """Returns the mean of values `[N]` over the questions of each form."""
  forms = np.array(chains.forms, object)
  return {
    form: float(values[forms == form].mean())
    for form in memories.RELIABILITY
    if (forms == form).any()
  }
