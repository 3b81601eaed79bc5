"""Evaluation: every question under every budget and seed, in one pass.

All episodes go through one pool of slots, those of a question one after the
other: they meet in prompts and searches, and no slot is empty before the end.
Budgets share their random numbers, for an episode is a function of the policy,
its question, budget and seed, and is addressed by (seed, question): so
differences between budgets, and between policies, are paired. What else is
asked in the same run changes no episode.
"""

from __future__ import annotations

import asyncio
import itertools
import pathlib
import time
import zlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.environment import official_scoring, records
from anysearch_jax.evaluation import journal
from anysearch_jax.generative_retrieval import text_model
from anysearch_jax.methods import systems
from anysearch_jax.rollout import driver
from anysearch_jax.rollout import inflight as inflight_lib

EPISODES = "episodes.jsonl"
# An engine's seed; those of the evaluation are in the addresses.
ENGINE_SEED = 0
_SUMS = (
  "em",
  "searches",
  "generated_tokens",
  "retrieved_tokens",
  "input_tokens",
  "cost",
)
_Job = TypeVar("_Job")


class Player(NamedTuple):
  """Who answers the turns: an engine, and the text side of its policy."""

  engine: types.Engine
  codec: types.TextCodec


def evaluate(
  config: config_lib.ExperimentConfig,
  *,
  player: Player,
  questions: Sequence[types.Question],
  retriever: types.Retriever,
  folder: pathlib.Path,
  on_done: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
  """Plays every (seed, budget, question) once and writes `episodes.jsonl`.

  What an earlier call has left there is not played again, but for episodes that
  failed. The file stands in the order of seeds, budgets and questions.

  Args:
    config: `evaluation` says which budgets, seeds, prompt and prices;
      `episode` and `engine.slots` how.
    player: what is evaluated.
    questions: all of them are asked; their ids differ.
    retriever: answers the searches.
    folder: that exists.
    on_done: called with (episodes done, episodes in all).

  Returns:
    What this call took and saved: see docs/evaluation.md.

  Raises:
    ValueError: what cannot be evaluated, or a folder that cannot be used.
  """
  grid = _Grid(config.evaluation, questions)
  started = time.monotonic()
  played = 0
  if not (folder / EPISODES).is_file():
    played = _play(config, grid, player, retriever, folder, on_done)
  return {
    "episodes": len(grid),
    "played": played,
    "seconds": time.monotonic() - started,
    "slots": config.engine.slots,
    **savings(player.engine, retriever),
    "cells": cells(journal.read(folder / EPISODES)),
  }


def _play(
  config: config_lib.ExperimentConfig,
  grid: _Grid,
  player: Player,
  retriever: types.Retriever,
  folder: pathlib.Path,
  on_done: Callable[[int, int], None],
) -> int:
  """Plays what is not there yet; how many episodes that were."""
  e = config.evaluation
  env = systems.environment(config.episode.prompts)
  text_model.attach(retriever, player.engine, player.codec)
  with journal.Journal(
    folder / EPISODES, len(grid), grid.place, again=lambda row: row["failed"]
  ) as rows:
    before = len(rows)
    finished = itertools.count(before + 1)
    inflight = inflight_lib.InFlight(config.watch.quiet_seconds)

    async def play(place: int) -> None:
      seed, budget, question = grid.cell(place)
      trajectory = await driver.run_episode(
        question,
        budget=budget,
        scaffold=e.scaffold,
        address=address(question.id, seed=seed, variant=place),
        engine=player.engine,
        retriever=retriever,
        config=config.episode,
        codec=player.codec,
        inflight=inflight,
      )
      verdict = env.judge(trajectory)
      row = records.episode(trajectory, verdict, seed=seed, prices=e)
      if e.scorer == "official":
        row |= official_scoring.of_question(question, verdict.answer)
      rows.add(row)
      on_done(next(finished), len(grid))

    async def play_all() -> None:
      left = (place for place in grid.order() if place not in rows)
      with inflight.watched():
        await each(left, play, at_once=config.engine.slots)

    asyncio.run(play_all())
    rows.finish()
  return len(grid) - before


def address(question_id: str, *, seed: int, variant: int) -> types.Address:
  """Where an evaluated episode stands: only seed and question are drawn from.

  Args:
    question_id: its hash is the question's number, whatever else is asked.
    seed: of the evaluation.
    variant: of the episodes that are under way, no two have the same.
  """
  return types.Address(
    seed, zlib.crc32(question_id.encode()), sample=0, variant=variant
  )


async def each(
  jobs: Iterable[_Job],
  work: Callable[[_Job], Awaitable[None]],
  *,
  at_once: int,
) -> None:
  """Does every job, so many at a time; a job is not made before its turn."""
  jobs = iter(jobs)

  async def worker() -> None:
    for job in jobs:
      await work(job)

  async with asyncio.TaskGroup() as tasks:
    for _ in range(at_once):
      tasks.create_task(worker())


def savings(engine: Any, retriever: Any) -> dict[str, Any]:
  """What engine and retriever counted, and the shares that it comes to.

  Returns:
    `engine` and `search`, the counters of those that count, and `shares` in
    [0, 1], where they are defined: `prompts` of the context tokens that needed
    no prefill; `searches` that needed no query; `lanes` that sampled.
  """
  e = dict(getattr(engine, "counters", {}))
  s = dict(getattr(retriever, "counters", {}))

  def share(parts: float, whole: float) -> float | None:
    return parts / whole if whole else None

  shared = e.get("shared_tokens", 0)
  saved = s.get("cache_hits", 0) + s.get("deduplicated", 0)
  return {
    "engine": e,
    "search": s,
    "shares": {
      "prompts": share(shared, shared + e.get("prefilled_tokens", 0)),
      "searches": share(saved, s.get("searches", 0)),
      "lanes": share(e.get("lanes_used", 0), e.get("lanes_offered", 0)),
    },
  }


def cells(episodes: Iterable[journal.Row]) -> list[dict[str, Any]]:
  """Sums over the episodes of each dataset and budget.

  Returns:
    For each, `n` episodes that count, `failed` ones that do not, and sums over
    those that do; those of the official scores where every episode has them.
  """
  table: dict[tuple[str, int], dict[str, Any]] = {}
  for row in episodes:
    names = (
      *_SUMS,
      *(n for n in official_scoring.NAMES if row.get(n) is not None),
    )
    key = row["dataset"], row["budget"]
    sums = table.setdefault(
      key, {"n": 0, "failed": 0, **dict.fromkeys(names, 0)}
    )
    if row["failed"]:
      sums["failed"] += 1
      continue
    sums["n"] += 1
    for name in names:
      sums[name] += row[name]
  return [
    {"dataset": dataset, "budget": budget, **sums}
    for (dataset, budget), sums in sorted(table.items())
  ]


class _Grid:
  """The episodes of an evaluation, by their places in its file.

  Raises:
    ValueError: nothing to play, or something twice.
  """

  def __init__(
    self,
    config: config_lib.EvaluationConfig,
    questions: Sequence[types.Question],
  ):
    self._questions = questions
    self._seeds, self._budgets = config.seeds, config.budgets
    ids = [question.id for question in questions]
    for name, values in (
      ("evaluation.seeds", self._seeds),
      ("evaluation.budgets", self._budgets),
      ("questions", ids),
    ):
      if not values or len(set(values)) < len(values):
        raise ValueError(
          f"{name}: found {len(values)} with {len(set(values))} different "
          "values; expected at least one, and each once."
        )
    for name, values in (("seeds", self._seeds), ("budgets", self._budgets)):
      if min(values) < 0 or max(values) >= 2**32:
        raise ValueError(
          f"evaluation.{name}: found {values}, expected numbers from 0 to "
          "2^32 - 1."
        )
    self._places = {
      axis: {value: i for i, value in enumerate(values)}
      for axis, values in (
        ("seed", self._seeds),
        ("budget", self._budgets),
        ("question_id", ids),
      )
    }

  def __len__(self) -> int:
    return len(self._seeds) * len(self._budgets) * len(self._questions)

  def cell(self, place: int) -> tuple[int, int, types.Question]:
    """Seed, budget and question of an episode."""
    rest, question = divmod(place, len(self._questions))
    seed, budget = divmod(rest, len(self._budgets))
    return self._seeds[seed], self._budgets[budget], self._questions[question]

  def place(self, row: journal.Row) -> int:
    """Of a row. Raises KeyError for one of another evaluation."""
    return self._place(
      *(places[row[axis]] for axis, places in self._places.items())
    )

  def order(self) -> Iterator[int]:
    """All places as they are best played: a question's are together.

    Seeds of a budget first, for they have all of their prompt in common.
    """
    for question in range(len(self._questions)):
      for budget in range(len(self._budgets)):
        for seed in range(len(self._seeds)):
          yield self._place(seed, budget, question)

  def _place(self, seed: int, budget: int, question: int) -> int:
    cell = seed * len(self._budgets) + budget
    return cell * len(self._questions) + question
