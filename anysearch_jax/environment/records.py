"""Trajectories as JSON lines: what runs leave behind for people and tools.

A training file holds one group a line, in the input format of
`python -m launch.score`; an evaluation file holds one episode a line.
"""

from __future__ import annotations

import itertools
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.environment import official_scoring, scoring


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


def group(
  sampled: types.Group, worths: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
  """One group, as `launch.score` reads it.

  Args:
    sampled: the group.
    worths: what each trajectory was worth, by name.
  """
  return {
    "question_id": sampled.question.id,
    "question": sampled.question.text,
    "golden_answers": list(sampled.question.golden_answers),
    **{
      name: sampled.question.metadata[name]
      for name in ("dataset", official_scoring.ANSWERS)
      if name in sampled.question.metadata
    },
    "budget": sampled.budget,
    "scaffold": sampled.scaffold,
    "trajectories": [
      {**trajectory(t), **worth}
      for t, worth in zip(sampled.trajectories, worths, strict=True)
    ],
  }


def episode(
  t: types.Trajectory,
  verdict: scoring.Verdict,
  *,
  seed: int,
  prices: config_lib.EvaluationConfig,
) -> dict[str, Any]:
  """One evaluated episode with its verdict (answer, EM, format) and its tokens.

  `input_tokens` is what a policy behind an API would be billed to read: the
  contexts of all turns together.

  Args:
    t: the episode.
    verdict: on it.
    seed: of the evaluation.
    prices: of searches and tokens, for its `cost` in US dollars.
  """
  read = sum(contexts(t))
  return {
    "question_id": t.question.id,
    "question": t.question.text,
    "golden_answers": list(t.question.golden_answers),
    "corpus": t.question.corpus,
    "dataset": t.question.metadata.get("dataset", "world"),
    "budget": t.budget,
    "scaffold": t.scaffold,
    "seed": seed,
    "answer": verdict.answer,
    "em": verdict.em,
    "format": verdict.format,
    **trajectory(t),
    "documents": [[d._asdict() for d in found] for found in t.documents],
    "prompt_tokens": int(np.sum(t.authors == types.Author.PROMPT)),
    "input_tokens": read,
    "cost": round(
      t.searches * prices.search_price / 1e3
      + read * prices.input_price / 1e6
      + t.generated_tokens * prices.output_price / 1e6,
      9,
    ),
    "tokens": tokens(t),
    "metadata": dict(t.question.metadata),
  }


def contexts(t: types.Trajectory) -> list[int]:
  """Tokens that each turn was given to read.

  The environment writes between any two turns, so a run of model tokens is one.
  """
  runs = _runs(t.authors)
  starts = itertools.accumulate((n for _, n in runs), initial=0)
  return [
    start
    for (author, _), start in zip(runs, starts, strict=False)
    if author == types.Author.MODEL
  ]


def tokens(t: types.Trajectory) -> dict[str, Any]:
  """Every position of an episode: its id, and who wrote it with what.

  Log-probabilities and versions are of model positions only.
  """
  by_model = t.authors == types.Author.MODEL
  return {
    "ids": t.token_ids.tolist(),
    "authors": [
      [types.Author(author).name.lower(), n] for author, n in _runs(t.authors)
    ],
    "logps": [round(x, 5) for x in t.logps[by_model].tolist()],
    "versions": _runs(t.versions[by_model]),
  }


def _runs(values: np.ndarray) -> list[list[int]]:
  """Equal values that stand together, and how many they are."""
  return [
    [value, len(list(same))]
    for value, same in itertools.groupby(values.tolist())
  ]


def write(path: pathlib.Path, rows: Iterable[Mapping[str, Any]]) -> None:
  """Writes JSON lines beside `path` and renames: whole or not at all."""
  beside = path.with_name(path.name + ".writing")
  with beside.open("w") as file:
    for row in rows:
      file.write(json.dumps(row) + "\n")
  beside.rename(path)
