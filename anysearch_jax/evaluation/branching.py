"""Measures the value of one more search by replaying stored episodes.

A *cut* is a turn of a stored episode; every token before it is kept. At a cut
the policy asks for a search, and the episode ends in two ways: the search is
*granted*, or it is *refused* by the environment's line for a used-up budget.
Both ways have the same tokens up to and including the question asked, so both
are conditioned on asking, and their difference is what the search itself is
worth there: exact match if granted minus exact match if refused.

* `stop`: the cuts are the stored searches. The stored episode is the granted
  end; the refused one is sampled.
* `continue`: the cuts are the turns in which episodes answered with budget
  left. The turn is sampled again until it asks, at most `tries` times, and
  both ends are sampled. Their granted end minus the stored answer is also
  reported: the gain of searching instead of answering.

Rejection keeps every token the policy's own: no `<search>` is appended to
thoughts that led to an answer. Its draws, given that they ask, have the same
distribution whatever `tries` is; but which cuts are reached depends on it.
`branch_values` therefore weighs cuts by how often the policy asks there, and
bounds the mean over all cuts.

The ends after a cut have a random address, so they can be drawn again exactly;
both ends of a sample share their random numbers.
"""

from __future__ import annotations

import asyncio
import dataclasses
import heapq
import itertools
import pathlib
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.environment import spec
from anysearch_jax.evaluation import (
  branch_points,
  branch_values,
  harness,
  journal,
)
from anysearch_jax.methods import systems
from anysearch_jax.rollout import (
  answering,
  control,
  driver,
  episode,
  episode_state,
  searching,
  steering,
)

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
    The `branch_values.summary` of the ends.

  Raises:
    ValueError: the episodes have no tokens, are of another tokenizer, or have
      no branch point; or the environment verifies answers.
  """
  path = evaluation / harness.EPISODES
  env = systems.of_episode(playing.episode)
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
      played = await _play(
        end, playing.episode, player=player, retriever=retriever, plan=plan
      )
      rows.add(_row(end, played, playing.episode))
      on_done(next(finished), total)

    ends = (
      end for end in _ends(path, env, places, plan) if end.place not in rows
    )
    searching.attach(retriever, player.engine, player.codec)
    asyncio.run(harness.each(ends, play, at_once=playing.slots))
    rows.finish()
  return branch_values.summary(journal.read(folder / BRANCHES))


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


class _Played(NamedTuple):
  """An end: the number of tries, and how it ended; None if not sampled.

  seen: what a rule sees of the stored turn; None if it had no room.
  discarded: tokens of the tries that did not ask.
  """

  tries: int
  seen: control.Seen | None
  granted: types.Trajectory | None = None
  refused: types.Trajectory | None = None
  discarded: int = 0


async def _play(
  end: _End,
  config: config_lib.EpisodeConfig,
  *,
  player: harness.Player,
  retriever: types.Retriever,
  plan: Plan,
) -> _Played:
  """Plays one end: refused, and granted too if no episode stores that."""
  stored, point, sample, place = end
  address = harness.address(
    stored["question_id"], seed=stored["seed"], variant=place
  )._replace(sample=sample + 1)
  state = branch_points.restore(
    stored, point, config=config, codec=player.codec
  )

  async def to_the_end(
    at: episode_state.Episode, request: episode_state.Request
  ) -> types.Trajectory:
    try:
      return await driver.play(
        at, request, engine=player.engine, retriever=retriever
      )
    finally:
      player.engine.release(at.address)

  at, request = episode.resume_turn(dataclasses.replace(state, address=address))
  turn = branch_points.stored_turn(stored, point, codec=player.codec)
  seen = None
  if isinstance(request, types.GenerateRequest):
    seen = control.seen(episode.step(at, turn)[0])
  if point.kind == "stop":
    refused = await to_the_end(*steering.refuse(at, turn))
    return _Played(1, seen, refused=refused)
  discarded = 0
  for attempt in range(plan.tries):
    here = address._replace(attempt=attempt)
    at, request = episode.resume_turn(dataclasses.replace(state, address=here))
    if not isinstance(request, types.GenerateRequest):
      return _Played(attempt + 1, seen, discarded=discarded)
    try:
      event = await answering.answer(
        request, engine=player.engine, retriever=retriever, config=config
      )
    except BaseException:
      player.engine.release(here)
      raise
    after, request = episode.step(at, event)
    if not isinstance(event, types.Generation):
      granted = await to_the_end(after, request)
      return _Played(attempt + 1, seen, granted, discarded=discarded)
    if isinstance(request, types.SearchRequest):
      granted = await to_the_end(after, request)
      refused = await to_the_end(*steering.refuse(at, event))
      return _Played(attempt + 1, seen, granted, refused, discarded)
    discarded += len(event.token_ids)
    player.engine.release(here)
  return _Played(plan.tries, seen, discarded=discarded)


def _row(
  end: _End, played: _Played, config: config_lib.EpisodeConfig
) -> dict[str, Any]:
  """Returns one end as plain values."""
  stored, point, sample, _ = end
  env = systems.of_episode(config)
  sampled: dict[str, dict[str, Any]] = {
    name: {
      "em": env.judge(trajectory).em,
      "answer": env.judge(trajectory).answer,
      "searches": trajectory.searches,
      "tokens": trajectory.written_tokens,
      "outcome": trajectory.outcome.value,
      "spans": [
        {"author": span.author.name.lower(), "text": span.text}
        for span in trajectory.spans
      ],
    }
    for name, trajectory in played._asdict().items()
    if isinstance(trajectory, types.Trajectory)
  }
  outcomes = [one["outcome"] for one in sampled.values()]
  refused = sampled["refused"]["em"] if "refused" in sampled else None
  granted = sampled["granted"]["em"] if "granted" in sampled else None
  if point.kind == "stop":
    granted = stored["em"]
  return {
    **{name: stored[name] for name in ("question_id", "budget", "seed")},
    "kind": point.kind,
    "cut": point.searches,
    "sample": sample,
    "dataset": stored["dataset"],
    "hops": stored["metadata"].get("hops"),
    "budget_left": stored["budget"] - point.searches,
    "tries": played.tries,
    "reached": bool(sampled),
    **{f"stored_{name}": stored[name] for name in ("em", "answer", "searches")},
    "stored_tokens": stored["generated_tokens"],
    "seen": None if played.seen is None else played.seen._asdict(),
    "discarded": played.discarded,
    "granted_em": granted,
    "refused_em": refused,
    "worth": None if granted is None or refused is None else granted - refused,
    "gain": None
    if point.kind == "stop" or granted is None
    else granted - stored["em"],
    "outcome": "failed" if "failed" in outcomes else (outcomes or [None])[0],
    "sampled": sampled,
  }


def _places(
  path: pathlib.Path, env: spec.Environment, plan: Plan
) -> dict[tuple[Any, ...], int]:
  """Chooses episodes; returns the place of each branch point's first end."""
  found: dict[str, list[tuple[int, tuple[Any, ...]]]] = {
    k: [] for k in branch_values.KINDS
  }
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
