"""Trajectories as JSON lines: what runs leave behind for people and tools.

A training file holds one group a line, in the input format of
`python -m launch.score`; an evaluation file holds one episode a line.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from anysearch_jax import scoring, types


def trajectory(t: types.Trajectory) -> dict[str, Any]:
  """One trajectory as plain values: text by author, counts, outcome.

  `retrieved_tokens` counts what the environment wrote: without the scaffold,
  observations and the rare error line. `total_tokens` is generated plus
  retrieved, as the paper counts; the prompt is not in it.
  """
  environment = int(np.sum(t.authors == types.Author.ENVIRONMENT))
  return {
    "spans": [
      {"author": span.author.name.lower(), "text": span.text}
      for span in t.spans
    ],
    "searches": t.searches,
    "queries": list(t.queries),
    "violation": t.violation,
    "outcome": t.outcome.value,
    "reason": t.reason,
    "failed": t.failed,
    "generated_tokens": t.generated_tokens,
    "retrieved_tokens": environment,
    "total_tokens": t.generated_tokens + environment,
  }


def group(sampled: types.Group) -> dict[str, Any]:
  """One group, as `launch.score` reads it."""
  return {
    "question_id": sampled.question.id,
    "question": sampled.question.text,
    "golden_answers": list(sampled.question.golden_answers),
    "budget": sampled.budget,
    "scaffold": sampled.scaffold,
    "trajectories": [trajectory(t) for t in sampled.trajectories],
  }


def episode(t: types.Trajectory, *, seed: int) -> dict[str, Any]:
  """One evaluated episode with its verdict (answer, EM, format)."""
  verdict = scoring.judge(
    t.spans,
    golden_answers=t.question.golden_answers,
    budget=t.budget,
    searches=t.searches,
    scaffold=t.scaffold,
  )
  return {
    "question_id": t.question.id,
    "question": t.question.text,
    "golden_answers": list(t.question.golden_answers),
    "budget": t.budget,
    "scaffold": t.scaffold,
    "seed": seed,
    "answer": verdict.answer,
    "em": verdict.em,
    "format": verdict.format,
    **trajectory(t),
    "metadata": dict(t.question.metadata),
  }


def write(path: pathlib.Path, rows: Iterable[Mapping[str, Any]]) -> None:
  """Writes JSON lines beside `path` and renames: whole or not at all."""
  beside = path.with_name(path.name + ".writing")
  with beside.open("w") as file:
    for row in rows:
      file.write(json.dumps(row) + "\n")
  beside.rename(path)
