"""What episodes spent; and trajectories as JSON lines, for people and tools.

A training file has one group per line, in the input format of
`python -m launch.score`; an evaluation file has one episode per line.
"""

from __future__ import annotations

import itertools
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from anysearch_jax import budgets, types
from anysearch_jax.environment import (
  citations,
  official_scoring,
  protocol,
  scoring,
)
from anysearch_jax.host import disk


def input_tokens(t: types.Trajectory) -> int:
  """Returns the total length of the contexts of all turns.

  This is what an API bills as input. The environment writes between any two
  turns, so each run of consecutive model tokens is one turn.
  """
  model = t.authors == types.Author.MODEL
  starts = model & ~np.concatenate([[False], model[:-1]])
  return int(np.sum(np.flatnonzero(starts))) + t.discarded_input


def dollars(t: types.Trajectory, prices: budgets.Prices | None = None) -> float:
  """Returns what an episode cost; None: by the prices of its budget."""
  tools = [each.tool for each in t.observations]
  prices = t.caps.prices if prices is None else prices
  return prices.of_calls(
    [*tools, *[protocol.SEARCH] * (t.searches - len(tools))],
    input_tokens=input_tokens(t),
    output_tokens=t.written_tokens,
  )


def passage(value: Mapping[str, Any]) -> types.Passage:
  """Returns a passage of `citations.passage_values`."""
  source = types.Source(**value.get("source", {}))
  return types.Passage(**{**value, "source": source})


def observation_values(
  found: Sequence[types.Observation],
) -> list[dict[str, Any]]:
  """Returns observations as JSON values."""
  return [
    {
      "tool": each.tool,
      "argument": each.argument,
      "turn": each.turn,
      "tokens": each.tokens,
      "passages": citations.passage_values(each.passages),
      **({"numbers": list(each.numbers)} if each.numbers else {}),
      **({} if each.answer is None else {"answer": each.answer}),
    }
    for each in found
  ]


def observations(
  values: Sequence[Mapping[str, Any]],
) -> tuple[types.Observation, ...]:
  """Returns the observations of `observation_values`."""
  return tuple(
    types.Observation(**each)._replace(
      passages=tuple(map(passage, each["passages"])),
      numbers=tuple(each.get("numbers", ())),
    )
    for each in values
  )


def trajectory(t: types.Trajectory) -> dict[str, Any]:
  """Returns a trajectory as plain values: text by author, counts, outcome.

  `retrieved_tokens` counts the tokens of the environment: observations, error
  lines and, with the scaffold, budget blocks. `total_tokens` is generated plus
  retrieved tokens, as the paper counts; it does not include the prompt. `caps`
  are those of a budget of more than searches. `discarded_tokens`, if there are
  any, are a part of the generated ones, of turns that are not in `spans`.
  `servers` are those of `types.Trajectory`, if there are any.
  """
  environment = int(np.sum(t.authors == types.Author.ENVIRONMENT))
  return {
    "spans": [
      {"author": span.author.name.lower(), "text": span.text}
      for span in t.spans
    ],
    "searches": t.searches,
    "queries": list(t.queries),
    "observations": observation_values(t.observations),
    "violation": t.violation,
    "outcome": t.outcome.value,
    "reason": t.reason,
    "failed": t.failed,
    "generated_tokens": t.written_tokens,
    "retrieved_tokens": environment,
    "total_tokens": t.written_tokens + environment,
    **({"discarded_tokens": t.discarded_tokens} if t.discarded_tokens else {}),
    **({"caps": t.caps.record()} if t.caps.units else {}),
    **({"seconds": round(t.seconds, 3)} if t.seconds else {}),
    **({"servers": list(t.servers)} if t.servers else {}),
  }


def group(
  sampled: types.Group, scores: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
  """Returns a group as plain values, in the input format of `launch.score`.

  `scores` are named scores of each trajectory, such as its rewards.
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
      {**trajectory(t), **named}
      for t, named in zip(sampled.trajectories, scores, strict=True)
    ],
  }


def episode(
  t: types.Trajectory,
  verdict: scoring.Verdict,
  *,
  seed: int,
  prices: budgets.Prices,
) -> dict[str, Any]:
  """Returns an evaluated episode with its verdict, cost and tokens.

  `prices` are those of `cost`.
  """
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
    "prompt_tokens": int(np.sum(t.authors == types.Author.PROMPT)),
    "input_tokens": input_tokens(t),
    "cost": round(dollars(t, prices), 9),
    "tokens": tokens(t),
    "metadata": dict(t.question.metadata),
  }


def tokens(t: types.Trajectory) -> dict[str, Any]:
  """Returns the token ids of an episode with authors, log-probs and versions.

  Authors and versions are run-length encoded. Log-probabilities and versions
  are given for model positions only.
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
  """Returns the run-length encoding of an array, as [value, count] pairs."""
  return [
    [value, len(list(same))]
    for value, same in itertools.groupby(values.tolist())
  ]


def write(path: pathlib.Path, rows: Iterable[Mapping[str, Any]]) -> None:
  """Writes JSON lines atomically: to a temporary file, then renamed."""
  with disk.replacing(path) as beside, beside.open("w") as file:
    for row in rows:
      file.write(json.dumps(row) + "\n")
