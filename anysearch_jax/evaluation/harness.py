"""Evaluation: every question under every budget and seed, in one pass.

All episodes share one pool of slots, which stays full until the last episodes.
The episodes of a question are played next to each other, so that they share
prompt prefixes and searches.

An episode's random numbers are addressed by (seed, question). Budgets and
policies share them, so their differences are paired, and the other questions of
a run do not affect an episode.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import pathlib
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from anysearch_jax import budgets as budgets_lib
from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.data import evidence
from anysearch_jax.environment import official_scoring, records, scoring, spec
from anysearch_jax.evaluation import journal
from anysearch_jax.host import counting, loop
from anysearch_jax.rollout import driver, searching

_log = logging.getLogger(__name__)

EPISODES = "episodes.jsonl"
# The engine's own seed; the evaluation's seeds are part of the addresses.
ENGINE_SEED = 0
_SUMS = (
  "em",
  "f1",
  "cover_em",
  "searches",
  "generated_tokens",
  "retrieved_tokens",
  "input_tokens",
  "cost",
)
_Job = TypeVar("_Job")


class Player(NamedTuple):
  """The evaluated policy: an engine, and the codec of its tokens."""

  engine: types.Engine
  codec: types.TextCodec


class Playing(NamedTuple):
  """How episodes are played.

  Attributes:
    episode: limits of an episode.
    environment: what is played; a controller steers it (`control.steered`).
    slots: number of episodes at a time.
    quiet_seconds: seconds without progress until a warning; 0: no warning.
    program: plays the episodes; None: `driver.run_episode` does.
  """

  episode: config_lib.EpisodeConfig
  environment: spec.Environment
  slots: int
  quiet_seconds: float = 0.0
  program: driver.Player | None = None


def evaluate(
  evaluation: config_lib.EvaluationConfig,
  playing: Playing,
  *,
  player: Player,
  questions: Sequence[types.Question],
  retriever: types.Retriever,
  folder: pathlib.Path,
  on_done: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
  """Plays every (seed, budget, question) once and writes `episodes.jsonl`.

  Episodes of an earlier call are kept, and only its failed ones are played
  again. The file is ordered by seed, budget and question.

  Args:
    evaluation: seeds, budgets, prices and scorer.
    playing: the environment and the limits of an episode.
    player: the policy.
    questions: the questions; their ids differ.
    retriever: answers the searches.
    folder: an existing folder, for `episodes.jsonl`.
    on_done: called after each episode with (episodes done, episodes in total).

  Returns:
    `episodes` and `cells` of the whole evaluation; `last_start` has the cost
    and the savings of this call alone, see docs/evaluation.md.

  Raises:
    ValueError: the evaluation is invalid, or the folder cannot be used.
  """
  grid = Grid(evaluation, questions)
  started = time.monotonic()
  played = 0
  path = folder / EPISODES
  if path.is_file() and any(row["failed"] for row in journal.read(path)):
    journal.reopen(path)
  if not path.is_file():
    with journal.Journal(
      path, len(grid), grid.place, again=lambda row: row["failed"]
    ) as rows:
      played = len(grid) - len(rows)
      _play(evaluation, playing, grid, player, retriever, rows, on_done)
      rows.finish()
  return {
    "episodes": len(grid),
    "last_start": {
      "played": played,
      "seconds": time.monotonic() - started,
      "slots": playing.slots,
      **savings(player.engine, retriever),
      **({"agents": dict(playing.program.counters)} if playing.program else {}),
    },
    "cells": cells(journal.read(path)),
  }


def _play(
  evaluation: config_lib.EvaluationConfig,
  playing: Playing,
  grid: Grid,
  player: Player,
  retriever: types.Retriever,
  rows: journal.Journal,
  on_done: Callable[[int, int], None],
) -> None:
  """Plays the episodes that `rows` lacks and adds them."""
  env = playing.environment
  prices = env.prices(evaluation.prices)
  finished = itertools.count(len(rows) + 1)
  failed: list[types.Trajectory] = []
  inflight = driver.InFlight(playing.quiet_seconds)
  searching.attach(retriever, player.engine, player.codec)
  parts = driver.EpisodeParts(
    player.engine,
    retriever,
    playing.episode,
    player.codec,
    env,
    player=playing.program,
  )

  async def play(place: int) -> None:
    seed, budget, question = grid.cell(place)
    trajectory = await driver.run_episode(
      question,
      parts,
      budget=budget,
      scaffold=evaluation.scaffold,
      address=types.evaluation_address(question.id, seed=seed, variant=place),
      inflight=inflight,
    )
    verdict = env.judge(trajectory)
    row = records.episode(trajectory, verdict, seed=seed, prices=prices)
    row |= evidence.measure(trajectory, env.cited(trajectory))
    if evaluation.scorer == "official":
      row |= official_scoring.of_question(question, verdict.answer)
    rows.add(row)
    if trajectory.failed:
      failed.append(trajectory)
    on_done(next(finished), len(grid))

  async def play_all() -> None:
    missing = (place for place in grid.order() if place not in rows)
    with inflight.watch_progress():
      await run_each(missing, play, at_once=playing.slots)

  try:
    loop.run(play_all())
  finally:
    if failed:
      reasons = driver.failure_summary(failed)
      _log.warning("%d episodes failed: %s", len(failed), reasons)


async def run_each(
  jobs: Iterable[_Job], work: Callable[[_Job], Awaitable[None]], *, at_once: int
) -> None:
  """Runs a coroutine function on every job.

  Args:
    jobs: the jobs; each is drawn when the work on it begins.
    work: called with a job.
    at_once: number of jobs at a time.
  """
  jobs = iter(jobs)

  async def worker() -> None:
    for job in jobs:
      await work(job)

  async with asyncio.TaskGroup() as tasks:
    for _ in range(at_once):
      tasks.create_task(worker())


def savings(engine: types.Engine, retriever: types.Retriever) -> dict[str, Any]:
  """Returns the counters of engine and retriever, and the saved shares.

  Returns:
    `engine` and `search`: the counters, empty if there are none. `shares`, in
    [0, 1] or None if undefined: `prompts`, of context tokens that needed no
    prefill; `searches`, of searches that needed no query; `lanes`, of the
    engine's lanes that sampled.
  """
  engine_counts = dict(counting.counters(engine))
  search_counts = dict(counting.counters(retriever))
  shared = engine_counts.get("shared_tokens", 0)
  saved = search_counts.get("cache_hits", 0)
  saved += search_counts.get("deduplicated", 0)
  fractions = {
    "prompts": (shared, shared + engine_counts.get("prefilled_tokens", 0)),
    "searches": (saved, search_counts.get("searches", 0)),
    "lanes": (
      engine_counts.get("lanes_used", 0),
      engine_counts.get("lanes_offered", 0),
    ),
  }
  shares = {
    name: part / total if total else None
    for name, (part, total) in fractions.items()
  }
  return {"engine": engine_counts, "search": search_counts, "shares": shares}


def cells(episodes: Iterable[journal.Row]) -> list[dict[str, Any]]:
  """Sums the episodes of each dataset and budget.

  `n` is the number of episodes that did not fail, `failed` that of failed ones;
  the sums are over the `n`, also of the official scores if the dataset has
  them. `f1` and `cover_em` are right where `em` is, and also give credit to
  sentences: for common words, and for holding an accepted answer.
  `caps` is the budget as text, if it is one of more than searches.
  """
  table: dict[tuple[str, int, str], dict[str, Any]] = {}
  for row in episodes:
    key = row["dataset"], row["budget"], str(budgets_lib.of_row(row))
    empty = {"n": 0, "failed": 0, **dict.fromkeys(_SUMS, 0)}
    sums = table.setdefault(key, empty)
    if row["failed"]:
      sums["failed"] += 1
      continue
    sums["n"] += 1
    answer = row.get("answer") or ""
    accepted = row.get("golden_answers", ())
    scores = {
      **row,
      "f1": scoring.f1(answer, accepted),
      "cover_em": int(scoring.contains(answer, accepted)),
    }
    for name in (*_SUMS, *official_scoring.NAMES):
      # A failed episode has no official scores, and it may be the first row.
      if scores.get(name) is not None:
        sums[name] = sums.get(name, 0) + scores[name]
  return [
    {"dataset": dataset, "budget": budget}
    | ({} if caps.isdecimal() else {"caps": caps})
    | sums
    for (dataset, budget, caps), sums in sorted(table.items())
  ]


class Grid:
  """The grid of seeds, budgets and questions, in the order of its file.

  A place is the index of an episode's line in the file. Raises ValueError if
  an axis is empty or holds a value twice, or a budget is out of range.
  """

  def __init__(
    self,
    config: config_lib.EvaluationConfig,
    questions: Sequence[types.Question],
  ):
    budgets = (
      *map(budgets_lib.of, config.budgets),
      *(budgets_lib.parse(text, config.prices) for text in config.pairs),
    )
    self._axes = config.seeds, budgets, questions
    keys = {
      "evaluation.seeds": config.seeds,
      "evaluation.budgets": list(map(str, budgets)),
      "questions": [question.id for question in questions],
    }
    for name, values in keys.items():
      if not values or len(set(values)) < len(values):
        raise ValueError(
          f"{name}: found {len(values)} values, {len(set(values))} of them "
          "different; expected at least one value, and each value once."
        )
    # For each axis, the index of each key.
    self._index = [{k: i for i, k in enumerate(axis)} for axis in keys.values()]
    shape = tuple(map(len, self._axes))
    self._places = np.arange(math.prod(shape)).reshape(shape)

  def __len__(self) -> int:
    return self._places.size

  def cell(self, place: int) -> tuple[int, budgets_lib.Budget, types.Question]:
    """Returns seed, budget and question of the episode at `place`."""
    seeds, budgets, questions = self._axes
    indices = np.unravel_index(place, self._places.shape)
    seed, budget, question = map(int, indices)
    return seeds[seed], budgets[budget], questions[question]

  def place(self, row: journal.Row) -> int:
    """Returns a row's place. Raises KeyError if it is of another evaluation."""
    keys = row["seed"], str(budgets_lib.of_row(row)), row["question_id"]
    indices = [axis[key] for axis, key in zip(self._index, keys, strict=True)]
    return int(self._places[tuple(indices)])

  def order(self) -> list[int]:
    """Returns all places in the order of play: question, budget, seed.

    Neighbours share most of their prompt, or all of it, and so the engine's
    cached prefixes.
    """
    return self._places.T.ravel().tolist()
