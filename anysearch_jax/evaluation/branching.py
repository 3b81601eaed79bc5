"""Measures the value of one more search by replaying stored episodes.

Two counterfactuals are sampled. Each starts at a turn of a stored episode and
keeps all tokens before that turn:

* `continue`: the episode answered with budget left. What if it had searched?
  Its last turn is sampled again until it asks for a search, at most `tries`
  times; the episode then continues normally.
* `stop`: the episode searched. What if that search had been denied? For each
  search, its turn is sampled again with the budget used up.

`continue` uses rejection sampling and does not append `<search>` to the stored
thoughts. Every token, including the thoughts that lead to the search, is then
sampled by the policy, and the estimate is the policy's own mean over the turns
that search. The drawback: a policy that almost surely stops never searches;
`reached` counts the ends with a search. `stop` needs no rejection: the usual
rule for a used-up budget applies, and a turn that still searches gets the
environment's over-budget line. The prompt keeps the original budget in both.

The value of a search, `worth` in the files, is paired: exact match with the
search minus exact match without it, where one of the two is the stored episode.
It includes everything that follows the search. Every end has a random address,
so it can be drawn again exactly.
"""

from __future__ import annotations

import asyncio
import dataclasses
import heapq
import itertools
import pathlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.environment import spec
from anysearch_jax.evaluation import (
  branch_points,
  harness,
  inference,
  intervals,
  journal,
  linear,
)
from anysearch_jax.methods import systems
from anysearch_jax.rollout import driver, episode, episode_state, searching

KINDS = ("continue", "stop")
BRANCHES = "branches.jsonl"


@dataclasses.dataclass(frozen=True)
class Plan:
  """The ends to play.

  Attributes:
    episodes: number of episodes of each kind, chosen by hash; 0 takes all.
    samples: number of ends for each branch point.
    tries: maximum number of samples of a turn until it searches.
  """

  episodes: int
  samples: int
  tries: int


class _End(NamedTuple):
  """An end to play.

  Attributes:
    stored: the episode.
    point: where it branches.
    sample: number of the end at this point.
    place: index of the end among all ends.
  """

  stored: journal.Row
  point: branch_points.BranchPoint
  sample: int
  place: int


def branch(
  playing: harness.Playing,
  plan: Plan,
  *,
  evaluation: pathlib.Path,
  player: harness.Player,
  retriever: types.Retriever,
  folder: pathlib.Path,
  on_done: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
  """Plays counterfactual ends and writes `branches.jsonl`, one end a line.

  If an earlier call was interrupted, its finished ends are kept and only its
  failed ones are played again.

  Args:
    playing: how the episodes of the evaluation were played.
    plan: the ends to play.
    evaluation: folder of the episodes.
    player: the policy that played them.
    retriever: answers the searches.
    folder: an existing folder to write to.
    on_done: called with (ends done, ends in total).

  Returns:
    The `summary` of the ends.

  Raises:
    ValueError: the episodes have no tokens, are of another tokenizer, or have
      no branch point; or the environment verifies answers.
  """
  path = evaluation / harness.EPISODES
  env = systems.environment(playing.episode.prompts)
  places = _places(path, env, plan)
  if not places:
    raise ValueError(
      f"{path}: no episode answered with budget left and none searched; "
      "expected one of either kind, because ends branch there."
    )
  total = len(places) * plan.samples

  def place(row: journal.Row) -> int:
    return places[_key(row, row["kind"], row["cut"])] + row["sample"]

  with journal.Journal(
    folder / BRANCHES,
    total,
    place,
    again=lambda row: row["outcome"] == "failed",
  ) as rows:
    finished = itertools.count(len(rows) + 1)

    async def play(end: _End) -> None:
      tries, trajectory = await _play(
        end, playing.episode, player=player, retriever=retriever, plan=plan
      )
      rows.add(_row(end, tries, trajectory, playing.episode))
      on_done(next(finished), total)

    ends = (
      end for end in _ends(path, env, places, plan) if end.place not in rows
    )
    searching.attach(retriever, player.engine, player.codec)
    asyncio.run(harness.each(ends, play, at_once=playing.slots))
    rows.finish()
  return summary(journal.read(folder / BRANCHES))


def _ends(
  path: pathlib.Path,
  env: spec.Environment,
  places: Mapping[tuple[Any, ...], int],
  plan: Plan,
) -> Iterator[_End]:
  """Yields the planned ends in the order of the stored episodes."""
  for stored in journal.read(path):
    for point in branch_points.of(stored, env):
      first = places.get(_key(stored, point.kind, point.searches))
      if first is not None:
        for sample in range(plan.samples):
          yield _End(stored, point, sample, first + sample)


def summary(rows: Iterator[journal.Row]) -> dict[str, Any]:
  """Summarises the value of one more search, by kind.

  Intervals come from resampling whole questions.

  Args:
    rows: rows of `branches.jsonl`.

  Returns:
    For each kind that occurs: the number of `ends`, of `failed` ones and of
    `reached` ones (those with a result that did not fail); `tries`, the mean
    number of tries of a reached end; `gained` and `lost`, the number of ends
    right only with the search and only without it; `questions`, the number of
    questions of the reached ends; `worth`, the mean value with its interval.
    `by_hops`, `by_budget_left` and `by_searches_before` hold the same for
    subsets: the last two by the budget left before the search and the number
    of searches before it.
  """
  light = [
    {
      "kind": row["kind"],
      "question": row["question_id"],
      "failed": row["outcome"] == "failed",
      "reached": row["reached"],
      "tries": row["tries"],
      "worth": row["worth"],
      "hops": row["hops"],
      "budget_left": row["budget_left"],
      "searches_before": row["cut"],
    }
    for row in rows
  ]
  found = {}
  for kind in KINDS:
    own = [row for row in light if row["kind"] == kind]
    if own:
      found[kind] = _measured(own) | {
        f"by_{axis}": {
          str(value): _measured([row for row in own if row[axis] == value])
          for value in sorted({r[axis] for r in own if r[axis] is not None})
        }
        for axis in ("hops", "budget_left", "searches_before")
      }
  return found


def _measured(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  counted = [row for row in rows if row["reached"] and not row["failed"]]
  values = np.array([row["worth"] for row in counted], float)
  out = {
    "ends": len(rows),
    "failed": sum(row["failed"] for row in rows),
    "reached": len(counted),
    "tries": sum(r["tries"] for r in counted) / len(counted)
    if counted
    else None,
    "gained": int(np.sum(values > 0)),
    "lost": int(np.sum(values < 0)),
    "questions": len({row["question"] for row in counted}),
    "worth": intervals.Estimate(None, None, None)._asdict(),
  }
  if counted:
    names, cluster = np.unique(
      [row["question"] for row in counted], return_inverse=True
    )
    sums = intervals.cluster_sums(
      cluster, [values, np.ones_like(values)], clusters=len(names)
    )
    (worth,) = inference.effects(
      linear.ratios(sums[None, :, :1], sums[None, :, 1:])
    )
    out["worth"] = worth.estimate._asdict()
  return out


async def _play(
  end: _End,
  config: config_lib.EpisodeConfig,
  *,
  player: harness.Player,
  retriever: types.Retriever,
  plan: Plan,
) -> tuple[int, types.Trajectory | None]:
  """Plays one end.

  Returns:
    The number of tries, and the trajectory; None if no try searched.
  """
  stored, point, sample, place = end
  engine = player.engine
  address = harness.address(
    stored["question_id"], seed=stored["seed"], variant=place
  )._replace(sample=sample + 1)
  state = branch_points.restore(
    stored, point, config=config, codec=player.codec
  )
  must_search = point.kind == "continue"
  most = plan.tries if must_search else 1
  for attempt in range(most):
    here = address._replace(attempt=attempt)
    try:
      at, request = episode.resume_turn(
        dataclasses.replace(state, address=here)
      )
      if must_search and isinstance(request, types.GenerateRequest):
        event = await driver.answer(
          request, engine=engine, retriever=retriever, config=config
        )
        at, request = episode.step(at, event)
        failed = isinstance(event, episode_state.Failure)
        if not failed and not isinstance(request, types.SearchRequest):
          continue
      trajectory = await driver.play(
        at, request, engine=engine, retriever=retriever
      )
      return attempt + 1, trajectory
    finally:
      engine.release(here)
  return most, None


def _row(
  end: _End,
  tries: int,
  trajectory: types.Trajectory | None,
  config: config_lib.EpisodeConfig,
) -> dict[str, Any]:
  """Returns one end as plain values."""
  stored, point, sample, _ = end
  row = {
    **{name: stored[name] for name in ("question_id", "budget", "seed")},
    "kind": point.kind,
    "cut": point.searches,
    "sample": sample,
    "dataset": stored["dataset"],
    "hops": stored["metadata"].get("hops"),
    "budget_left": stored["budget"] - point.searches,
    "tries": tries,
    "reached": trajectory is not None,
    "stored_em": stored["em"],
    "stored_answer": stored["answer"],
    "stored_searches": stored["searches"],
    "em": None,
    "answer": None,
    "searches": None,
    "outcome": None,
    "worth": None,
    "spans": [],
  }
  if trajectory is None:
    return row
  verdict = systems.environment(config.prompts).judge(trajectory)
  gain = verdict.em - stored["em"]
  return row | {
    "em": verdict.em,
    "answer": verdict.answer,
    "searches": trajectory.searches,
    "outcome": trajectory.outcome.value,
    "worth": gain if point.kind == "continue" else -gain,
    "spans": [
      {"author": span.author.name.lower(), "text": span.text}
      for span in trajectory.spans
    ],
  }


def _places(
  path: pathlib.Path, env: spec.Environment, plan: Plan
) -> dict[tuple[Any, ...], int]:
  """Chooses episodes; returns the place of each branch point's first end."""
  found: dict[str, list[tuple[int, tuple[Any, ...]]]] = {k: [] for k in KINDS}
  for row in journal.read(path):
    by_kind: dict[str, list[tuple[Any, ...]]] = {}
    for point in branch_points.of(row, env):
      key = _key(row, point.kind, point.searches)
      by_kind.setdefault(point.kind, []).append(key)
    for kind, keys in by_kind.items():
      name = f"{row['question_id']}/{row['budget']}/{row['seed']}"
      found[kind].append((zlib.crc32(name.encode()), tuple(keys)))
  keys = [
    key
    for chosen in found.values()
    for _, keys in (
      heapq.nsmallest(plan.episodes, chosen)
      if plan.episodes
      else sorted(chosen)
    )
    for key in keys
  ]
  return {key: i * plan.samples for i, key in enumerate(keys)}


def _key(row: journal.Row, kind: str, searches: int) -> tuple[Any, ...]:
  """Identifies a branch point by its episode, kind and searches before it."""
  return row["question_id"], row["budget"], row["seed"], kind, searches
