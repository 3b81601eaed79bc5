"""Recall of a pipeline after each of its stages, and their times."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from retrieval.index import recall
from retrieval.pipeline import pipeline, stages

# Queries of a batch, as a run has them.
_BATCH = 64


class Stage(NamedTuple):
  """What `n` questions find after a stage.

  Attributes:
    stage: name of the stage.
    n: number of questions.
    any, all: see `recall.Recall`.
    seconds: time of the stage for all questions; that of the fusion includes
      the retrievers, which are asked at the same time.
  """

  stage: str
  n: int
  any: float
  all: float
  seconds: float


def measure(
  retriever: pipeline.PipelineRetriever,
  asked: Sequence[recall.Asked],
  *,
  k: int,
) -> list[Stage]:
  """Searches the questions' texts and returns the recall at k of each stage.

  Raises:
    RetrievalError: a search failed.
    ValueError: there are no questions.
  """
  if not asked:
    raise ValueError(
      "Found no question with gold passages, expected at least one."
    )
  queries = [stages.Query(each.question) for each in asked]
  names: list[str] = []
  seconds: dict[str, float] = {}
  answers: dict[str, list[stages.Answer]] = {}
  for steps in asyncio.run(_steps(retriever, queries)):
    names = [step.name for step in steps]
    for step in steps:
      seconds[step.name] = seconds.get(step.name, 0.0) + step.seconds
      for answer in step.answers:
        if isinstance(answer, Exception):
          if step is steps[-1]:
            raise answer
          # An optional retriever that was left out found nothing.
          answer = ()
        answers.setdefault(step.name, []).append(answer[:k])
  return [
    Stage(name, *recall.of(answers[name], asked), seconds[name])
    for name in names
  ]


async def _steps(
  retriever: pipeline.PipelineRetriever, queries: Sequence[stages.Query]
) -> list[list[pipeline.Step]]:
  """Returns the steps of each batch; equal queries of one are asked twice."""
  return [
    await retriever.steps(queries[start : start + _BATCH])
    for start in range(0, len(queries), _BATCH)
  ]
