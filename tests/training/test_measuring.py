"""Tests measures that a server gives: concurrency, deadlines, failures."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import numpy as np
import pytest
import scripted_runs as runs
import small_run

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.methods import systems
from anysearch_jax.training import learner, rewards_and_advantages

MODEL = types.Author.MODEL
QUESTION = types.Question("q", "where?", ("tol",))


def trajectory(q, g, answer="tol"):
  authors = np.array([types.Author.PROMPT, MODEL], np.int8)
  return types.Trajectory(
    types.Address(0, q, g),
    QUESTION,
    budget=1,
    scaffold=False,
    token_ids=np.arange(2, dtype=np.int32),
    authors=authors,
    logps=np.float32([0, -1]),
    versions=np.int32([-1, 0]),
    spans=(types.Span(MODEL, f"<answer>{answer}</answer>"),),
    searches=0,
    queries=(),
    violation=False,
    outcome=types.Outcome.ANSWERED,
  )


def trained(measure, deadline=5.0):
  made = systems.trained(
    config_lib.ExperimentConfig(method=config_lib.MethodConfig("otc"))
  )
  return dataclasses.replace(
    made,
    measure=measure,
    measures=("kind",),
    measure_deadline=deadline,
    reward=lambda o: {"total": o.em + o.measures["kind"]},
  )


def score(method, run=asyncio.run):
  groups = [
    types.Group(
      QUESTION,
      1,
      False,
      tuple(trajectory(q, g, "x" * g or "tol") for g in (0, 1)),
    )
    for q in (0, 1)
  ]
  return rewards_and_advantages.score(
    groups,
    np.array([1, 1], np.int32),
    samples=2,
    method=method,
    objective=config_lib.ObjectiveConfig(),
    run=run,
  )


def test_trajectories_are_measured_at_the_same_time():
  waiting = []
  everyone = asyncio.Event()

  async def measure(t):
    waiting.append(t.address)
    if len(waiting) == 4:
      everyone.set()
    await everyone.wait()
    return {"kind": 10 * t.address.question + t.address.sample}

  scored = score(trained(measure))
  assert len(waiting) == 4 and not scored.unmeasured
  # em is 1 for the first sample of each group.
  np.testing.assert_array_equal(scored.rewards["total"], [[1, 1], [11, 11]])


def test_a_trajectory_that_cannot_be_measured_has_failed():
  async def measure(t):
    match t.address.question, t.address.sample:
      case 0, 1:
        raise types.EngineError("The judge is down.")
      case 1, 0:
        await asyncio.sleep(60)
    return {"kind": 2}

  scored = score(trained(measure, deadline=0.05))
  np.testing.assert_array_equal(scored.valid, [[True, False], [False, True]])
  np.testing.assert_array_equal(scored.advantages, np.zeros((2, 2)))
  down, late = scored.unmeasured
  assert down == "It was not measured: The judge is down."
  assert "within 0.05 seconds (method.measure_deadline)" in late
  assert len(rewards_and_advantages.examples(scored)) == 2
  records = rewards_and_advantages.records(scored)
  assert [t["failed"] for row in records for t in row["trajectories"]] == [
    *(False, True),
    *(True, False),
  ]


def test_wrong_names_and_bugs_are_raised():
  async def misnamed(t):
    return {"sort": 1.0}

  async def broken(t):
    return 1 / 0

  with pytest.raises(ExceptionGroup) as error:
    score(trained(misnamed))
  assert "found sort, expected kind" in str(error.value.exceptions[0])
  with pytest.raises(ExceptionGroup) as error:
    score(trained(broken))
  assert isinstance(error.value.exceptions[0], ZeroDivisionError)


def test_plain_measures_need_no_event_loop():
  def never(coroutine):
    raise AssertionError(coroutine)

  scored = score(trained(lambda t: {"kind": 3}), run=never)
  assert scored.rewards["total"].tolist() == [[4, 3], [4, 3]]


def test_only_the_first_process_asks(monkeypatch):
  """Another process gets its results, and does not call `measure`."""

  async def measure(t):
    raise AssertionError("another process asked")

  told = [[{"kind": 1.0}, ""], [{}, "The judge is down."]]
  monkeypatch.setattr(
    rewards_and_advantages.processes, "on_main", lambda make: told
  )
  places = {(0, 0): trajectory(0, 0), (0, 1): trajectory(0, 1)}
  found = rewards_and_advantages.measure(trained(measure), places)
  assert found.values == {(0, 0): {"kind": 1.0}}
  assert found.reasons == {(0, 1): "The judge is down."}


def test_unmeasured_trajectories_count_as_failed_but_are_stored_as_played(
  tmp_path, monkeypatch
):
  """A judge that is down for one question of each rollout."""

  async def measure(t):
    if t.address.question == 1:
      raise types.RetrievalError("The judge is down.")
    return {"kind": t.address.sample}

  monkeypatch.setattr(learner, "Learner", runs.Learner)
  shared = systems.trained
  monkeypatch.setattr(
    systems,
    "trained",
    lambda config: dataclasses.replace(
      shared(config),
      measure=measure,
      measures=("kind",),
      reward=lambda o: {"total": o.em + o.measures["kind"]},
    ),
  )
  config = runs.at_level(1, watch=config_lib.WatchConfig(max_failed=1.0))
  parts = small_run.parts()
  whole, killed = tmp_path / "whole", tmp_path / "killed"
  runs.run(whole, parts, config)
  runs.run(killed, parts, config, kill=3)
  runs.run(killed, parts, config)
  assert runs.left(killed) == runs.left(whole)
  lines = (killed / "metrics.jsonl").read_text().splitlines()
  counts = [json.loads(line) for line in lines]
  # Both samples of one of four questions, and the totals of the run.
  assert [c["rollout/failed"] for c in counts] == [2] * runs.ROLLOUTS
  assert [c["run/failed"] for c in counts] == [
    2 * n for n in range(1, runs.ROLLOUTS + 1)
  ]
