"""Recall of a search: how often it finds the gold passages of questions.

Questions are JSON lines in FlashRAG's layout; `metadata.gold_doc_ids` has the
ids of the passages that answer the question.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from anysearch_jax import types
from retrieval.index import search


class Asked(NamedTuple):
  """A question and the passages that answer it."""

  question: str
  gold: frozenset[str]


class Recall(NamedTuple):
  """Shares of `n` questions for which the top k contain any, or all, gold."""

  n: int
  any: float
  all: float


def read(path: str | os.PathLike) -> list[Asked]:
  """Reads the questions of a file that have gold passages.

  Raises:
    ValueError: a line is not a question; the message has its number.
  """
  out = []
  with pathlib.Path(path).open(encoding="utf-8") as file:
    for number, line in enumerate(file, start=1):
      try:
        values = json.loads(line)
        gold = values.get("metadata", {}).get("gold_doc_ids") or ()
        asked = Asked(values["question"], frozenset(map(str, gold)))
      except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
          f"{path}, line {number}: {error!r}; expected a JSON object with a "
          "question and metadata.gold_doc_ids."
        ) from error
      if asked.gold:
        out.append(asked)
  return out


def measure(
  searching: search.SearchIndex, asked: Sequence[Asked], *, k: int
) -> Recall:
  """Searches the questions' texts and returns the recall at k.

  Raises:
    ValueError: there are no questions.
  """
  if not asked:
    raise ValueError(
      "Found no question with gold passages, expected at least one."
    )
  return of(searching.search([each.question for each in asked], k), asked)


def of(
  answers: Sequence[Sequence[types.Passage]], asked: Sequence[Asked]
) -> Recall:
  """Returns the recall of the passages found for each question."""
  found = [frozenset(p.id for p in answer) for answer in answers]
  return Recall(
    len(asked),
    _share(bool(f & a.gold) for f, a in zip(found, asked, strict=True)),
    _share(f >= a.gold for f, a in zip(found, asked, strict=True)),
  )


def _share(values: Iterable[bool]) -> float:
  values = list(values)
  return sum(values) / len(values)
