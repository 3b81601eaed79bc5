"""Tests resuming runs that are killed while sampled rollouts are pending."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter

import numpy as np
import pytest
import scripted_runs as runs
import small_run
from hypothesis import given, settings
from hypothesis import strategies as st

from anysearch_jax import types
from anysearch_jax.environment import protocol
from anysearch_jax.training import collection, learner


@pytest.fixture(scope="module")
def parts():
  return small_run.parts()


@pytest.fixture
def scripted(monkeypatch):
  """Replaces the trainer's learner by `scripted_runs.Learner`."""
  monkeypatch.setattr(learner, "Learner", runs.Learner)
  monkeypatch.setattr(runs.Learner, "on_step", lambda rollout, step: None)


@pytest.fixture(scope="module")
def finished(parts, tmp_path_factory):
  return runs.finished(parts, tmp_path_factory)


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize(
  "kill",
  [
    kill if kill in (0, 3) else pytest.param(kill, marks=pytest.mark.slow)
    for kill in range(runs.ROLLOUTS - 1)
  ],
)
def test_a_run_resumes_exactly_at_every_level_from_every_rollout(
  level, kill, finished, parts, tmp_path, scripted
):
  runs.run(tmp_path, parts, runs.at_level(level), kill=kill)
  runs.run(tmp_path, parts, runs.at_level(level))
  assert runs.left(tmp_path) == runs.left(finished(level)[0])


STAGED = """
import numpy as np

def reward(outcomes, config):
  done = outcomes.progress
  assert done.share == done.step / done.total
  assert done.step == done.rollout * config.curriculum.steps_per_rollout
  assert done.total in (1, config.curriculum.total_steps)  # 1: the trial.
  shape = outcomes.em.shape
  return {"total": outcomes.em * (1 + done.share),
          "rollout": np.full(shape, done.rollout)}
"""


def test_a_reward_in_stages_sees_the_same_progress_after_a_resume(
  parts, tmp_path, scripted
):
  file = tmp_path / "staged.py"
  file.write_text(STAGED)
  config = runs.at_level(
    1,
    reward=dataclasses.replace(runs.SCRIPTED.reward, function=f"{file}:reward"),
  )
  whole, killed = tmp_path / "whole", tmp_path / "killed"
  runs.run(whole, parts, config)
  runs.run(killed, parts, config, kill=3)
  runs.run(killed, parts, config)
  assert runs.left(killed) == runs.left(whole)
  lines = (killed / "metrics.jsonl").read_text().splitlines()
  seen = [json.loads(line)["reward/rollout"] for line in lines]
  assert sorted({*seen}) == list(range(runs.ROLLOUTS))


def test_a_rollout_of_an_earlier_version_gets_its_observations(parts):
  """It has documents instead, and the texts in its spans."""
  question = parts["questions"][3]
  ids = np.arange(4, dtype=np.int32)
  shown = types.Passage("p", "kelmar", "mayor tol once")
  made = types.Trajectory(
    types.Address(7, 3, 0),
    question,
    budget=2,
    scaffold=False,
    token_ids=ids,
    authors=np.asarray([0, 1, 2, 1], np.int8),
    logps=np.zeros(4, np.float32),
    versions=np.asarray([-1, 5, -1, 5], np.int32),
    spans=(
      types.Span(types.Author.MODEL, "<search>kelmar mayor</search>"),
      types.Span(types.Author.ENVIRONMENT, protocol.observation((shown,))),
      types.Span(types.Author.MODEL, "<answer>tol</answer>"),
    ),
    searches=1,
    queries=("kelmar mayor",),
    violation=False,
    outcome=types.Outcome.ANSWERED,
    observations=(types.Observation("search", "kelmar mayor", 0, (shown,), 3),),
    search_ends=(1,),
  )
  packed = collection.pack_groups([types.Group(question, 2, False, (made,))])
  for (values,) in packed.values:
    del values["observations"]
    values["documents"] = [o.documents for o in made.observations]
  (group,) = collection.unpack_groups(
    packed._replace(values=json.loads(json.dumps(packed.values))),
    lambda rollout, index: question,
  )
  (found,) = group.trajectories
  # How many tokens a call has is not known of it.
  assert found.observations == (made.observations[0]._replace(tokens=0),)


@pytest.mark.slow
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
  before=st.integers(0, 3),
  after=st.integers(0, 3),
  kill=st.integers(0, runs.ROLLOUTS - 2),
)
def test_the_bound_holds_whatever_level_a_run_resumes_at(
  before, after, kill, parts, tmp_path_factory
):
  folder = tmp_path_factory.mktemp("resumed")
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(learner, "Learner", runs.Learner)
    runs.run(folder, parts, runs.at_level(before, save_every=1), kill=kill)
    runs.run(folder, parts, runs.at_level(after, save_every=1))
  # The versions that sampled the rollouts in the checkpoint.
  first = kill + 1
  held = [max(0, k - before) for k in range(first, first + before)]
  held = [v for k, v in enumerate(held, start=first) if k < runs.ROLLOUTS]
  kept = 0
  while kept < len(held) and first + kept - held[kept] <= after:
    kept += 1
  expected = [
    held[k - first] if k < first + kept else max(first, k - after)
    for k in range(first, runs.ROLLOUTS)
  ]
  trained = [version for _, version in runs.Learner.made.trained]
  assert trained == expected
  assert [k for k, _ in runs.Learner.made.trained] == list(
    range(first, runs.ROLLOUTS)
  )
  records = runs.metrics(folder)
  assert [r["rollout"] for r in records] == list(range(runs.ROLLOUTS))
  assert records[-1]["run/stale_rollouts"] == len(held) - kept
  # Every rollout is counted exactly once.
  assert [r["run/trajectories"] for r in records] == [8, 16, 24, 32, 40, 48]
  for number, groups in enumerate(runs.played(folder)):
    asked = [parts["questions"][4 * number + i].id for i in range(4)]
    assert [g["question_id"] for g in groups] == asked


def test_a_flipped_bit_in_pending_rollouts_is_found(
  finished, parts, tmp_path, scripted, caplog
):
  folder = tmp_path / "run"
  runs.run(folder, parts, runs.at_level(1), kill=4)
  tokens = folder / "checkpoints" / "4" / "tokens"
  files = (path for path in tokens.rglob("*") if path.is_file())
  file = max(files, key=lambda path: path.stat().st_size)
  content = bytearray(file.read_bytes())
  content[len(content) // 2] ^= 1
  file.write_bytes(content)
  runs.run(folder, parts, runs.at_level(1))
  assert str(file) in caplog.text
  assert runs.left(folder) == runs.left(finished(1)[0])


def test_pending_rollouts_survive_a_round_trip(parts):
  """Through JSON, with a dropped group and a failed trajectory."""
  question = parts["questions"][3]
  ids = np.arange(5, dtype=np.int32)
  whole = types.Trajectory(
    types.Address(7, 3, 0, 1),
    question,
    budget=2,
    scaffold=True,
    token_ids=ids,
    authors=np.asarray([0, 1, 1, 2, 1], np.int8),
    logps=np.asarray([0, -1e-42, -np.float32(1 / 3), 0, -0.0], np.float32),
    versions=np.asarray([-1, 5, 6, -1, 6], np.int32),
    spans=(
      types.Span(types.Author.MODEL, "<search> é\n</search>"),
      types.Span(types.Author.ENVIRONMENT, "found"),
    ),
    searches=1,
    queries=("é",),
    violation=True,
    outcome=types.Outcome.TRUNCATED,
    reason="max_context",
  )
  failed = dataclasses.replace(
    whole,
    address=types.Address(7, 3, 1, 1),
    spans=(),
    queries=(),
    outcome=types.Outcome.FAILED,
    **{
      name: getattr(whole, name)[:0]
      for name in ("token_ids", "authors", "logps", "versions")
    },
  )
  rollout = collection.RolloutBatch(
    groups=[None, types.Group(question, 2, True, (whole, failed))],
    places=np.asarray([1, 3]),
    dropped=1,
    resampled=2,
    failed=3,
    stragglers=4,
    engine=Counter(sampled_tokens=3),
    search=Counter(call_seconds=0.1),
  )
  packed = collection.pack([rollout, rollout])
  packed = packed._replace(values=json.loads(json.dumps(packed.values)))
  for back in collection.unpack(
    packed, lambda r, place: {(7, 3): question}[r, place]
  ):
    none, group = back.groups
    assert none is None
    for mine, theirs in zip(group.trajectories, (whole, failed), strict=True):
      for name, value in vars(theirs).items():
        if isinstance(value, np.ndarray):
          found = getattr(mine, name)
          assert (found.dtype, found.tobytes()) == (
            value.dtype,
            value.tobytes(),
          )
        else:
          assert getattr(mine, name) == value
    assert back.places.tolist() == [1, 3]
    assert back[2:] == rollout[2:]
