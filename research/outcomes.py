"""What each training of a study answered, in a few bytes an episode.

The tables of a study need only which questions each training answered at each
budget, and with how many searches. A file of outcomes has one JSON line for
each training.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import pathlib
import string
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

import anysearch_jax as aj

# The number of searches as one character.
_DIGITS = string.digits + string.ascii_letters
_NAMES = ("em", "n", "tool_em", "tool_n", "searches")


@dataclasses.dataclass(frozen=True, eq=False)
class Outcomes:
  """The outcomes of one training's policy on N questions.

  Attributes:
    row: name of the study's row.
    seed: of the training.
    settings: digest of what defines the row; trainings of a row have the same.
    questions: digest of the ids of the questions, in order.
    clusters: number of questions of each cluster (`aj.cluster_of`), in order.
    budgets: the B budgets, ascending.
    right: bool `[B, N]`, whether the answer was right.
    searches: int `[B, N]`, charged searches.
  """

  row: str
  seed: int
  settings: str
  questions: str
  clusters: tuple[int, ...]
  budgets: tuple[int, ...]
  right: np.ndarray
  searches: np.ndarray

  @property
  def key(self) -> tuple[str, int]:
    """The row and the seed, which no other training of a file has."""
    return self.row, self.seed


def of(
  episodes: Iterable[Mapping[str, Any]], *, row: str, seed: int, settings: str
) -> Outcomes:
  """Returns the outcomes of the episodes of one training.

  Args:
    episodes: lines of `episodes.jsonl`.
    row, seed, settings: as of `Outcomes`.

  Raises:
    ValueError: an episode failed, a question was not asked at some budget, or
      it was asked more than once.
  """
  found: dict[tuple[int, str], list[tuple[bool, int]]] = {}
  for one in episodes:
    if one["outcome"] == "failed":
      raise ValueError(
        f"{row}, seed {seed}: found a failed episode, expected none; run the "
        "evaluation again, which plays it again."
      )
    cell = one["budget"], one["question_id"]
    found.setdefault(cell, []).append((one["em"] > 0, one["searches"]))
  budgets = sorted({budget for budget, _ in found})
  ids = sorted({question for _, question in found})
  cells = [[found.get((b, question), []) for question in ids] for b in budgets]
  asked = sorted({len(answers) for line in cells for answers in line})
  if asked != [1]:
    raise ValueError(
      f"{row}, seed {seed}: found questions asked {asked} times at a budget, "
      "expected once each."
    )
  right, searches = (
    np.array([[answers[0][part] for answers in line] for line in cells])
    for part in (0, 1)
  )
  # A cluster's name begins the ids of its questions, which are sorted.
  clusters = [len([*own]) for _, own in itertools.groupby(ids, aj.cluster_of)]
  return Outcomes(
    *(row, seed, settings, digest(ids), tuple(clusters), tuple(budgets)),
    *(right, searches),
  )


def digest(parts: Iterable[str]) -> str:
  """Returns 16 hexadecimal digits that stand for some texts in order."""
  return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def write(path: pathlib.Path, found: Iterable[Outcomes]) -> None:
  """Writes a file of outcomes, by row and seed."""
  lines = [
    json.dumps(_values(one)) + "\n"
    for one in sorted(found, key=lambda one: one.key)
  ]
  beside = path.with_suffix(".writing")
  beside.write_text("".join(lines))
  beside.replace(path)


def read(path: pathlib.Path) -> list[Outcomes]:
  """Reads a file of outcomes.

  Raises:
    ValueError: a line is damaged, or two lines have one row and seed.
  """
  found: dict[tuple[str, int], Outcomes] = {}
  for number, line in enumerate(path.read_text().splitlines(), start=1):
    try:
      one = _outcomes(json.loads(line))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
      raise ValueError(
        f"{path}, line {number}: not the outcomes of a training ({error}); "
        "copy the file again, or delete the line and run the study."
      ) from error
    if one.key in found:
      raise ValueError(
        f"{path}, line {number}: found {one.row} with seed {one.seed} a second "
        "time, expected each training once; delete one of the two lines."
      )
    found[one.key] = one
  return list(found.values())


def sums(
  trainings: Sequence[Outcomes], trained_as: str = ""
) -> aj.measures.Sums:
  """Returns the sums of a row's trainings.

  Args:
    trainings: at least one, all of one row.
    trained_as: name of the row that trained the policies; "": this one.

  Raises:
    ValueError: they differ in settings, in questions or in budgets.
  """
  first = trainings[0]
  for one in trainings[1:]:
    for name in ("settings", "questions", "budgets"):
      if getattr(one, name) != getattr(first, name):
        raise ValueError(
          f"{first.row}: seeds {first.seed} and {one.seed} have different "
          f"{name}, {getattr(first, name)} and {getattr(one, name)}; expected "
          "the same. Run the older one again."
        )
  right = np.stack([one.right for one in trainings]).transpose(0, 2, 1)
  searches = np.stack([one.searches for one in trainings]).transpose(0, 2, 1)
  used = np.asarray(first.budgets) >= 1
  each = np.ones(right.shape)
  values = [right, each, right * used, each * used, searches]
  return aj.measures.Sums(
    np.stack(values, axis=-1).astype(np.float64),
    _NAMES,
    # Rows are paired if they evaluate the same policies. Other trainings are
    # independent draws, also with equal seeds: the accuracies of ten rows had a
    # mean correlation of .07 over seeds.
    tuple(f"{trained_as or one.row}, seed {one.seed}" for one in trainings),
    first.budgets,
    np.zeros(right.shape[1], np.int64),
    np.repeat(np.arange(len(first.clusters)), first.clusters),
    ("",),
  )


def _values(one: Outcomes) -> dict[str, Any]:
  return {
    "row": one.row,
    "seed": one.seed,
    "settings": one.settings,
    "questions": one.questions,
    "clusters": list(one.clusters),
    "right": {
      str(budget): np.packbits(bits).tobytes().hex()
      for budget, bits in zip(one.budgets, one.right, strict=True)
    },
    "searches": {
      str(budget): "".join(_DIGITS[k] for k in searches)
      for budget, searches in zip(one.budgets, one.searches, strict=True)
    },
  }


def _outcomes(values: Mapping[str, Any]) -> Outcomes:
  if "clusters" not in values:
    raise ValueError("it does not say which questions share a snapshot")
  clusters = tuple(map(int, values["clusters"]))
  count, budgets = sum(clusters), sorted(map(int, values["right"]))
  right, searches = [], []
  for budget in map(str, budgets):
    packed = np.frombuffer(bytes.fromhex(values["right"][budget]), np.uint8)
    made = [_DIGITS.index(digit) for digit in values["searches"][budget]]
    if len(packed) != -(-count // 8) or len(made) != count:
      raise ValueError(f"budget {budget}: expected {count} questions")
    right.append(np.unpackbits(packed, count=count).astype(bool))
    searches.append(made)
  return Outcomes(
    str(values["row"]),
    int(values["seed"]),
    str(values["settings"]),
    str(values["questions"]),
    clusters,
    tuple(budgets),
    np.array(right),
    np.array(searches, np.int64),
  )
