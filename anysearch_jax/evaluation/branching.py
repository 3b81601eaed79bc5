"""What one more search was worth: other ends for episodes that were played.

Two questions are put to an evaluation, each at a turn of a stored episode, with
all tokens before that turn as they are:

* `continue`: it answered with budget left. What if it had searched? Its last
  turn is sampled again until it asks for a search, at most so many times, and
  the episode then goes on as any other.
* `stop`: it searched. What if it had not been given that search? The turn is
  sampled again with a budget that is used up, for each search of the episode.

A search is forced by rejection and not by writing `<search>` behind the stored
thoughts: every token remains one that the policy samples, thoughts that lead to
a search included, so what is estimated is the policy's own mean over the turns
that search. The price is that a policy which is sure to stop is not reached;
`reached` says how often it was. An end without a search needs no such luck: it
is the episode's own rule for a budget that is used up, under which a turn that
still searches is told in the environment's words that none is left. Nothing
else changes: the prompt names the budget that the episode began with.

Worth is paired: exact match with the search less exact match without it, one
of the two as it was played; what came after a search counts as its worth. Every
end is addressed, so it is drawn again alike.
"""

from __future__ import annotations

import asyncio
import dataclasses
import heapq
import itertools
import pathlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.environment import environment as environment_lib
from anysearch_jax.evaluation import branch_points, harness, intervals, journal
from anysearch_jax.generative_retrieval import text_model
from anysearch_jax.methods import systems
from anysearch_jax.rollout import driver, episode, episode_state

KINDS = ("continue", "stop")
BRANCHES = "branches.jsonl"


def branch(
  config: config_lib.ExperimentConfig,
  *,
  evaluation: pathlib.Path,
  player: harness.Player,
  retriever: types.Retriever,
  folder: pathlib.Path,
  episodes: int,
  samples: int,
  tries: int,
  on_done: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
  """Plays other ends and writes `branches.jsonl`, one end a line.

  What an earlier call has left there is not played again, but for ends that
  failed.

  Args:
    config: of the evaluation.
    evaluation: folder of its episodes.
    player: the policy that played them.
    retriever: answers the searches.
    folder: that exists.
    episodes: of each kind, picked by hash; 0 takes all.
    samples: ends of each cut.
    tries: turns that are sampled at most until one searches.
    on_done: called with (ends done, ends in all).

  Returns:
    `summary` of the ends.

  Raises:
    ValueError: episodes without their tokens, or of another tokenizer, or none
      to take up; an environment that verifies answers.
  """
  path = evaluation / harness.EPISODES
  env = systems.environment(config.episode.prompts)
  places = _places(path, env, episodes, samples)
  if not places:
    raise ValueError(
      f"{path}: no episode answered with budget left and none searched; "
      "expected some to take up."
    )
  total = len(places) * samples

  def place(row: journal.Row) -> int:
    return places[_key(row, row["kind"], row["cut"])] + row["sample"]

  with journal.Journal(
    folder / BRANCHES,
    total,
    place,
    again=lambda row: row["outcome"] == "failed",
  ) as rows:
    finished = itertools.count(len(rows) + 1)

    def jobs() -> Iterator[tuple[journal.Row, branch_points.Cut, int, int]]:
      for stored in journal.read(path):
        for cut in branch_points.of(stored, env):
          first = places.get(_key(stored, cut.kind, cut.searches))
          if first is not None:
            for sample in range(samples):
              if first + sample not in rows:
                yield stored, cut, sample, first + sample

    async def play(
      job: tuple[journal.Row, branch_points.Cut, int, int],
    ) -> None:
      stored, cut, sample, variant = job
      tried, trajectory = await _end(
        branch_points.take_up(
          stored, cut, config=config.episode, codec=player.codec
        ),
        cut,
        address=harness.address(
          stored["question_id"], seed=stored["seed"], variant=variant
        )._replace(sample=sample + 1),
        player=player,
        retriever=retriever,
        tries=tries,
      )
      rows.add(_row(stored, cut, sample, tried, trajectory, config.episode))
      on_done(next(finished), total)

    text_model.attach(retriever, player.engine, player.codec)
    asyncio.run(harness.each(jobs(), play, at_once=config.engine.slots))
    rows.finish()
  return summary(journal.read(folder / BRANCHES))


def summary(rows: Iterator[journal.Row]) -> dict[str, Any]:
  """What one more search was worth, by kind.

  Intervals come from resampling whole questions.

  Args:
    rows: of `branches.jsonl`.

  Returns:
    For each kind that occurs: `ends`, `failed` and `reached` ones, `tries` a
    reached one took, `gained` and `lost` (exact matches with the search that
    there were not without it, and the reverse), `worth`, and the same by hops,
    by budget left before the search, and by searches made before it.
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
  worths = np.array([row["worth"] for row in counted], float)
  out = {
    "ends": len(rows),
    "failed": sum(row["failed"] for row in rows),
    "reached": len(counted),
    "tries": sum(r["tries"] for r in counted) / len(counted)
    if counted
    else None,
    "gained": int(np.sum(worths > 0)),
    "lost": int(np.sum(worths < 0)),
    "questions": len({row["question"] for row in counted}),
    "worth": intervals.Estimate(None, None, None)._asdict(),
  }
  if counted:
    names, cluster = np.unique(
      [row["question"] for row in counted], return_inverse=True
    )
    sums = intervals.cluster_sums(
      cluster, [worths, np.ones_like(worths)], clusters=len(names)
    )
    (worth,) = intervals.bootstrap(
      sums, lambda totals: intervals.ratio(totals[:, :1], totals[:, 1:])
    )
    out["worth"] = worth._asdict()
  return out


async def _end(
  state: episode_state.Episode,
  cut: branch_points.Cut,
  *,
  address: types.Address,
  player: harness.Player,
  retriever: types.Retriever,
  tries: int,
) -> tuple[int, types.Trajectory | None]:
  """Turns that were sampled, and the end; None where none of them searched."""
  most = tries if cut.kind == "continue" else 1
  parts = {"engine": player.engine, "retriever": retriever}
  for attempt in range(most):
    here = address._replace(attempt=attempt)
    try:
      at, request = episode.go_on(dataclasses.replace(state, address=here))
      if cut.kind == "continue" and isinstance(request, types.GenerateRequest):
        event = await driver.answer(request, **parts, config=state.config)
        at, request = episode.step(at, event)
        failed = isinstance(event, episode_state.Failure)
        if not failed and not isinstance(request, types.SearchRequest):
          continue
      return attempt + 1, await driver.play(at, request, **parts)
    finally:
      player.engine.release(here)
  return most, None


def _row(
  stored: journal.Row,
  cut: branch_points.Cut,
  sample: int,
  tries: int,
  end: types.Trajectory | None,
  config: config_lib.EpisodeConfig,
) -> dict[str, Any]:
  """One end as plain values."""
  row = {
    **{name: stored[name] for name in ("question_id", "budget", "seed")},
    "kind": cut.kind,
    "cut": cut.searches,
    "sample": sample,
    "dataset": stored["dataset"],
    "hops": stored["metadata"].get("hops"),
    "budget_left": stored["budget"] - cut.searches,
    "tries": tries,
    "reached": end is not None,
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
  if end is None:
    return row
  verdict = systems.environment(config.prompts).judge(end)
  gain = verdict.em - stored["em"]
  return row | {
    "em": verdict.em,
    "answer": verdict.answer,
    "searches": end.searches,
    "outcome": end.outcome.value,
    "worth": gain if cut.kind == "continue" else -gain,
    "spans": [
      {"author": span.author.name.lower(), "text": span.text}
      for span in end.spans
    ],
  }


def _places(
  path: pathlib.Path,
  env: environment_lib.Environment,
  episodes: int,
  samples: int,
) -> dict[tuple[Any, ...], int]:
  """The place of the first end of each cut that is taken up."""
  found: dict[str, list[tuple[int, tuple[Any, ...]]]] = {k: [] for k in KINDS}
  for row in journal.read(path):
    by_kind: dict[str, list[tuple[Any, ...]]] = {}
    for cut in branch_points.of(row, env):
      key = _key(row, cut.kind, cut.searches)
      by_kind.setdefault(cut.kind, []).append(key)
    for kind, keys in by_kind.items():
      name = f"{row['question_id']}/{row['budget']}/{row['seed']}"
      found[kind].append((zlib.crc32(name.encode()), tuple(keys)))
  keys = [
    key
    for chosen in found.values()
    for _, keys in (
      heapq.nsmallest(episodes, chosen) if episodes else sorted(chosen)
    )
    for key in keys
  ]
  return {key: i * samples for i, key in enumerate(keys)}


def _key(row: journal.Row, kind: str, cut: int) -> tuple[Any, ...]:
  return row["question_id"], row["budget"], row["seed"], kind, cut
