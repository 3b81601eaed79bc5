"""What a controller and its trainers tell each other, as values.

The values are those of `host/processes`: JSON with NumPy arrays, never pickled.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from anysearch_jax import types
from anysearch_jax.algorithms import curriculum as curriculum_lib
from anysearch_jax.environment import scoring
from anysearch_jax.training import collection, rewards_and_advantages, sampler
from anysearch_jax.training import timeline as timeline_lib

# In the run folder: the published weights by version, and the session.
WEIGHTS, SESSION = "weights", "session"
_TRACKS = (timeline_lib.SAMPLER, timeline_lib.TURNS, timeline_lib.SEARCHES)


class RefusedError(types.EngineError):
  """The controller is of another run, or the request is wrong."""


class AwayError(types.EngineError):
  """The other side was away for longer than this one waits."""


def published(folder: pathlib.Path, version: int, session: str) -> pathlib.Path:
  """Returns where trainers of a session publish a version of the weights."""
  return folder / f"{version}-{session}"


def state_values(state: sampler.SamplerState) -> dict[str, Any]:
  """Returns the state of sampling as values; `state_of` restores it."""
  curriculum = jax.device_get(state.curriculum)
  return {
    "curriculum": {k: np.asarray(x) for k, x in curriculum._asdict().items()},
    "counters": {group: dict(c) for group, c in state.counters.items()},
  }


def state_of(values: Mapping[str, Any]) -> sampler.SamplerState:
  """Restores what `state_values` returned."""
  return sampler.SamplerState(
    curriculum_lib.CurriculumState(**values["curriculum"]),
    {group: Counter(c) for group, c in values["counters"].items()},
  )


def rollout_values(
  sampled: sampler.ScoredRollout, timeline: timeline_lib.Timeline
) -> dict[str, Any]:
  """Returns a rollout as values, with its spans, which the timeline forgets.

  `rollout_of` restores it.
  """
  scored, collected = sampled.scored, sampled.collected
  failed = [
    [q, g, t.reason]
    for q, (group, played) in enumerate(zip(scored.groups, collected.groups))
    if group and played
    for g, t in enumerate(group.trajectories)
    if t.failed and not played.trajectories[g].failed
  ]
  # Keys of JSON are strings, so places are the beginnings of lists.
  by_place = {
    name: [[*place, x] for place, x in getattr(scored, name).items()]
    for name in ("steps", "turns")
  }
  by_place["verdicts"] = [
    [*place, dataclasses.astuple(x)] for place, x in scored.verdicts.items()
  ]
  return {
    **sampled._asdict(),
    "collected": collection.pack([collected])._asdict(),
    "state": state_values(sampled.state),
    "scored": {**scored._asdict(), "groups": failed, **by_place},
    "clock": timeline.clock(),
    "spans": [
      [*span[:4], dict(span.detail)]
      for span in timeline.take(sampled.rollout)
      if span.track in _TRACKS
    ],
  }


def rollout_of(
  values: Mapping[str, Any],
  stream: collection.QuestionStream,
  timeline: timeline_lib.Timeline,
) -> sampler.ScoredRollout:
  """Restores a rollout; its spans join the timeline, on this clock."""
  (collected,) = collection.unpack(
    collection.StoredRollouts(**values["collected"]), stream.question
  )
  scored = values["scored"]
  failed, verdicts, steps, turns = (
    {(q, g): x for q, g, x in scored[name]}
    for name in ("groups", "verdicts", "steps", "turns")
  )
  restored = {
    "groups": rewards_and_advantages.with_failed(collected.groups, failed),
    "verdicts": {k: scoring.Verdict(*x) for k, x in verdicts.items()},
    "steps": steps,
    "turns": turns,
    "unmeasured": tuple(scored["unmeasured"]),
  }
  later = timeline.clock() - values["clock"]
  for track, name, start, end, detail in values["spans"]:
    span = track, name, start + later, end + later
    timeline.add(values["rollout"], *span, **detail)
  plain = {name: values[name] for name in sampler.ScoredRollout._fields}
  return sampler.ScoredRollout(
    **plain
    | {
      "collected": collected,
      "scored": rewards_and_advantages.Experience(**scored | restored),
      "state": state_of(values["state"]),
    }
  )


def difference(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
  """Returns the first value that differs, in words; "" if none does."""
  for name in {**mine, **theirs}:
    if mine.get(name) != theirs.get(name):
      return f"{name} {theirs.get(name)!r}, not {mine.get(name)!r}"
  return ""
