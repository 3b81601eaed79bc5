"""Spending of episodes, and trajectories as JSON lines.

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

  These are the tokens that an API bills as input. The environment writes
  between any two turns, so each run of consecutive model tokens is one turn.
  """
  model = t.authors == types.Author.MODEL
  starts = np.flatnonzero(model & ~np.concatenate([[False], model[:-1]]))
  # A turn reads its own segment.
  segments = np.searchsorted(t.segment_starts, starts, side="right") - 1
  contexts = starts - np.asarray(t.segment_starts)[segments]
  return int(np.sum(contexts)) + t.discarded_input


def dollars(t: types.Trajectory, prices: budgets.Prices | None = None) -> float:
  """Returns the cost of an episode in US dollars.

  Args:
    t: the episode.
    prices: None: those of the episode's budget.
  """
  tools = [observation.tool for observation in t.observations]
  # Searches of branches that an episode left are charged, but not observed.
  tools += [protocol.SEARCH] * (t.searches - len(tools))
  prices = t.caps.prices if prices is None else prices
  return prices.of_calls(
    tools,
    input_tokens=input_tokens(t),
    output_tokens=t.written_tokens,
  )


def passage(value: Mapping[str, Any]) -> types.Passage:
  """Returns a passage from its value of `citations.passage_values`."""
  source = types.Source(**value.get("source", {}))
  fields = {**value, "source": source}
  return types.Passage(**fields)


def observation_values(
  observations: Sequence[types.Observation],
) -> list[dict[str, Any]]:
  """Returns observations as JSON values."""
  values = []
  for observation in observations:
    value: dict[str, Any] = {
      "tool": observation.tool,
      "argument": observation.argument,
      "turn": observation.turn,
      "tokens": observation.tokens,
      "passages": citations.passage_values(observation.passages, exact=True),
    }
    if observation.numbers:
      value["numbers"] = list(observation.numbers)
    if observation.answer is not None:
      value["answer"] = observation.answer
    if observation.value is not None:
      value["value"] = observation.value
    values.append(value)
  return values


def observations(
  values: Sequence[Mapping[str, Any]],
) -> tuple[types.Observation, ...]:
  """Returns observations from their values of `observation_values`."""
  return tuple(
    types.Observation(**value)._replace(
      passages=tuple(map(passage, value["passages"])),
      numbers=tuple(value.get("numbers", ())),
    )
    for value in values
  )


def trajectory(t: types.Trajectory) -> dict[str, Any]:
  """Returns a trajectory as plain values: text by author, counts, outcome.

  `retrieved_tokens` counts the tokens of the environment: observations, error
  lines and, with the scaffold, budget blocks. `total_tokens` is generated plus
  retrieved tokens, as the paper counts; it does not include the prompt.

  The values below are omitted if they are 0 or empty: `discarded_tokens`, the
  generated tokens of turns that are not in `spans`; `caps`, those besides
  searches; `seconds`; and `servers`, `segment_starts`, `reported_answer` and
  `reported_reward`, as in `types.Trajectory`.
  """
  environment_tokens = int(np.sum(t.authors == types.Author.ENVIRONMENT))
  values: dict[str, Any] = {
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
    "retrieved_tokens": environment_tokens,
    "total_tokens": t.written_tokens + environment_tokens,
  }
  if t.discarded_tokens:
    values["discarded_tokens"] = t.discarded_tokens
  if t.caps.units:
    values["caps"] = t.caps.record()
  if t.seconds:
    values["seconds"] = round(t.seconds, 3)
  if t.servers:
    values["servers"] = list(t.servers)
  if len(t.segment_starts) > 1:
    values["segment_starts"] = list(t.segment_starts)
  if t.reported_answer is not None:
    values["reported_answer"] = t.reported_answer
  if t.reported_reward is not None:
    values["reported_reward"] = t.reported_reward
  return values


def group(
  sampled: types.Group, scores: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
  """Returns a group as plain values, in the input format of `launch.score`.

  Args:
    sampled: the group.
    scores: for each trajectory its scores by name, such as its rewards.
  """
  question = sampled.question
  official = {
    name: question.metadata[name]
    for name in ("dataset", official_scoring.ANSWERS)
    if name in question.metadata
  }
  return {
    "question_id": question.id,
    "question": question.text,
    "golden_answers": list(question.golden_answers),
    **official,
    "budget": sampled.budget,
    "scaffold": sampled.scaffold,
    "trajectories": [
      {**trajectory(t), **named_scores}
      for t, named_scores in zip(sampled.trajectories, scores, strict=True)
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

  Args:
    t: the episode.
    verdict: its scores.
    seed: of the evaluation.
    prices: by which `cost` is computed.
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
  are those of the model's tokens only.
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
  with disk.replacing(path) as temporary, temporary.open("w") as file:
    for row in rows:
      file.write(json.dumps(row) + "\n")
