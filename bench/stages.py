"""Measures what a pipeline costs beyond its retrievers and its reranker.

    python -m bench.stages --pipeline=pipeline.toml --questions=nq_test.jsonl

Batches of different questions go through the pipeline, and then to each of its
retrievers and rerankers directly, with the requests that the pipeline made.
Prints the CPU time of both for all questions, and the overhead: fusing,
sorting, caches, deadlines and counters. Set `cache = 0` in all stages of the
file, because each batch is searched several times. Questions are JSON lines
with a `question`.
"""

from __future__ import annotations

import asyncio
import json
import pathlib
import time
from collections.abc import Callable, Coroutine
from typing import Any

from absl import flags

from anysearch_jax import types
from bench import harness

Call = Callable[[Any], Coroutine[Any, Any, Any]]


class _Noted:
  """A retriever or a reranker whose calls are noted in `calls`."""

  def __init__(self, part: Any, calls: list[tuple[Call, Any]]):
    self._part, self._calls = part, calls

  def identity(self) -> Any:
    return self._part.identity()

  async def search(self, request: types.SearchRequest) -> Any:
    return await self._part.search(request)

  async def search_many(self, asked: Any) -> Any:
    self._calls.append((self._part.search_many, asked))
    return await self._part.search_many(asked)

  async def scores(self, asked: Any) -> Any:
    self._calls.append((self._part.scores, asked))
    return await self._part.scores(asked)


def main() -> dict[str, float]:
  from launch import pipelines, retrievers
  from retrieval.pipeline import stages

  f = flags.FLAGS
  made = pipelines.make(f.pipeline, retrievers.open_one)
  calls: list[tuple[Call, Any]] = []
  for stage in made.stages:
    if stage.settings.cache and not isinstance(stage, stages.Cut):
      raise ValueError(f"stage {stage.settings.name!r}: expected cache = 0.")
    if stage.part is not None:
      stage.part = _Noted(stage.part, calls)
  lines = (
    line
    for path in f.questions
    for line in pathlib.Path(path).read_text().splitlines()
  )
  questions = list(dict.fromkeys(json.loads(x)["question"] for x in lines))
  questions = questions[: f.queries]
  if not questions:
    raise ValueError("Found no question, expected at least one.")
  spent = {"parts": 0.0, "pipeline": 0.0}

  async def directly(noted: list[tuple[Call, Any]]) -> None:
    for call, asked in noted:
      await call(asked)

  async def measure() -> None:
    for start in range(0, len(questions), f.batch):
      some = questions[start : start + f.batch]
      asked = [types.SearchRequest(question, 3) for question in some]
      calls.clear()
      # The first time compiles the shapes of the batch.
      await made.search_many(asked)
      noted = list(calls)
      for side in ("parts", "pipeline", "pipeline", "parts"):
        begun = time.process_time()
        if side == "parts":
          await directly(noted)
        else:
          await made.search_many(asked)
        spent[side] += (time.process_time() - begun) / 2

  asyncio.run(measure())
  print(f"{len(questions)} questions, CPU seconds")
  table = harness.Table("", "CPU seconds")
  for side, taken in spent.items():
    table.row(side, taken)
  overhead = spent["pipeline"] / spent["parts"] - 1
  print(f"overhead {overhead:.1%}")
  return {**spent, "overhead": overhead, "questions": len(questions)}


if __name__ == "__main__":
  flags.DEFINE_string("pipeline", None, "TOML file.", required=True)
  flags.DEFINE_list("questions", None, "JSON lines.", required=True)
  flags.DEFINE_integer("queries", 256, "The most questions.", 1)
  flags.DEFINE_integer("batch", 32, "Questions of a batch.", 1)
  harness.run(main)
