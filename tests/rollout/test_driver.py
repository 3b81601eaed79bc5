"""The asyncio driver: order, failures, deadlines, release, bounds."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import itertools
import threading

import pytest
import scripted
from scripted import CODEC, answer, search

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.rollout import driver

CONFIG = config_lib.EpisodeConfig(prompts="world", max_generated=500)
HITS = {f"q{i}": [types.Passage(str(i), f"T{i}", "text")] for i in range(9)}


def assignments(count=3):
  return [
    driver.Assignment(
      10 + i, types.Question(f"id{i}", f"Question {i}?", ("a",)), i, i % 2 == 0
    )
    for i in range(count)
  ]


def script(request):
  """Sample n searches n times, then gives an answer that names its address."""
  address = request.address
  if request.turn < address.sample:
    return search(f"q{address.question - 10}")
  return answer(f"{address.question} {address.sample} {address.attempt}")


def run_groups(given, engine, retriever=None, **kwargs):
  parts = driver.EpisodeParts(
    engine, retriever or scripted.Retriever(HITS), CONFIG, CODEC
  )
  kwargs = {"group": 3, "rollout": 4} | kwargs
  return asyncio.run(driver.run_groups(given, parts, **kwargs))


def run_episode(engine, retriever=None, **limits):
  return asyncio.run(
    driver.run_episode(
      types.Question("id", "Question?", ("a",)),
      driver.EpisodeParts(
        engine=engine,
        retriever=retriever or scripted.Retriever(HITS),
        config=dataclasses.replace(CONFIG, **limits),
        codec=CODEC,
      ),
      budget=1,
      scaffold=False,
      address=types.Address(0, 1, 2),
    )
  )


def values(rollout):
  return [
    [scripted.as_value(each) for each in group.trajectories]
    for group in rollout.groups
  ]


def test_episode_asks_the_engine_and_the_retriever():
  engine = scripted.Engine([search("q1"), answer("yes")])
  retriever = scripted.Retriever(HITS)
  trajectory = run_episode(engine, retriever)
  assert trajectory.outcome is types.Outcome.ANSWERED
  assert retriever.requests == [types.SearchRequest("q1", k=3)]
  assert "Doc 1(Title: T1) text" in trajectory.spans[1].text
  assert engine.released == [types.Address(0, 1, 2)]
  scripted.check_alignment(trajectory)


def test_groups_and_samples_come_in_order():
  given = assignments()
  rollout = run_groups(given, scripted.Engine(script))
  assert rollout[1:4] == (0, 0, 0)
  assert len(rollout.groups) == 3
  for assignment, group in zip(given, rollout.groups, strict=True):
    assert group.question is assignment.question
    assert group.budget == assignment.budget
    assert group.scaffold == assignment.scaffold
    for sample, trajectory in enumerate(group.trajectories):
      assert trajectory.address == types.Address(4, assignment.index, sample)
      assert trajectory.question is assignment.question
      assert trajectory.budget == assignment.budget
      assert trajectory.scaffold == assignment.scaffold


def test_result_does_not_depend_on_finishing_order():
  expected = values(run_groups(assignments(), scripted.Engine(script)))
  for seed in range(3):
    engine = scripted.Engine(script, seconds=scripted.shuffled_seconds(seed))
    assert values(run_groups(assignments(), engine)) == expected
    order = [(a.question, a.sample) for a in engine.released]
    assert len(order) == 9 and order != sorted(order)


def failing(*addresses):
  """Returns a script that fails at each `(question, sample, attempt)`."""

  def engine_script(request):
    address = request.address
    if (address.question, address.sample, address.attempt) in addresses:
      raise types.EngineError("The server answered 503 three times.")
    return script(request)

  return engine_script


def test_one_failed_sample_leaves_its_group_and_others_intact():
  rollout = run_groups(assignments(), scripted.Engine(failing((11, 1, 0))))
  assert rollout[1:4] == (0, 0, 1)
  outcomes = [t.outcome for t in rollout.groups[1].trajectories]
  assert outcomes == ["answered", "failed", "answered"]
  assert rollout.groups[1].trajectories[1].reason == (
    "Turn 0 failed: The server answered 503 three times."
  )


def test_group_with_fewer_than_two_valid_samples_is_resampled_once():
  engine = scripted.Engine(failing((11, 0, 0), (11, 2, 0)))
  rollout = run_groups(assignments(), engine)
  assert rollout[1:4] == (0, 1, 2)
  attempts = [
    [trajectory.address.attempt for trajectory in group.trajectories]
    for group in rollout.groups
  ]
  assert attempts == [[0, 0, 0], [1, 1, 1], [0, 0, 0]]
  assert not any(t.failed for t in rollout.groups[1].trajectories)


def test_group_that_fails_twice_is_dropped_and_counted():
  lost = [(11, sample, attempt) for sample in (0, 2) for attempt in (0, 1)]
  engine = scripted.Engine(failing(*lost))
  rollout = run_groups(assignments(), engine)
  assert rollout[1:4] == (1, 1, 4)
  assert rollout.reason.startswith("Turn 0 failed: ")
  assert [group.question.id for group in rollout.groups] == ["id0", "id2"]


def test_group_of_one_is_kept_even_if_failed():
  engine = scripted.Engine(failing((11, 0, 0)))
  rollout = run_groups(assignments(), engine, group=1)
  assert rollout[1:4] == (0, 0, 1)
  outcomes = [group.trajectories[0].outcome for group in rollout.groups]
  assert outcomes == ["answered", "failed", "answered"]


@pytest.mark.parametrize("error", [types.RetrievalError, types.EngineError])
def test_failing_retriever(error):
  retriever = scripted.Retriever(error=error("The index is gone."))
  trajectory = run_episode(scripted.Engine([search("q1")]), retriever)
  assert trajectory.outcome is types.Outcome.FAILED
  assert trajectory.reason == "The search for 'q1' failed: The index is gone."
  assert trajectory.searches == 0


def test_engine_deadline_fails_the_episode():
  engine = scripted.Engine([answer("a")], seconds=lambda: 60.0)
  trajectory = run_episode(engine, turn_deadline=0.01)
  assert trajectory.outcome is types.Outcome.FAILED
  assert trajectory.reason == "Turn 0 failed: no answer within 0.01 seconds."
  assert engine.running == 0
  assert engine.released == [types.Address(0, 1, 2)]


def test_retriever_deadline_fails_the_episode():
  trajectory = run_episode(
    scripted.Engine([search("q1")]),
    scripted.Retriever(seconds=60.0),
    search_deadline=0.01,
  )
  assert trajectory.outcome is types.Outcome.FAILED
  assert trajectory.reason == (
    "The search for 'q1' failed: no answer within 0.01 seconds."
  )


def test_every_address_is_released_once():
  engine = scripted.Engine(failing((11, 0, 0), (11, 2, 0)))
  run_groups(assignments(), engine)
  asked = {request.address for request in engine.requests}
  assert len(asked) == 12
  assert collections.Counter(engine.released) == dict.fromkeys(asked, 1)


@pytest.mark.parametrize("bound, most", [(1, 1), (2, 2), (None, 9)])
def test_concurrency_is_bounded(bound, most):
  engine = scripted.Engine(script, seconds=lambda: 0.001)
  rollout = run_groups(assignments(), engine, max_concurrency=bound)
  assert len(rollout.groups) == 3
  assert engine.most == most


def test_a_bug_propagates_and_cancels_the_rest():
  waiting = types.Address(4, 10, 0)

  def buggy(request):
    if request.address.question == 12:
      raise KeyError("a bug")
    return script(request)

  delays = itertools.chain([60.0], itertools.repeat(0.0))
  engine = scripted.Engine(buggy, seconds=lambda: next(delays))
  with pytest.raises(ExceptionGroup) as raised:
    run_groups(assignments(), engine)
  assert raised.value.subgroup(KeyError) is not None
  assert engine.running == 0
  assert engine.requests[0].address == waiting
  assert waiting in engine.released


def test_surplus_groups_are_cancelled():
  engine = scripted.Engine(script, seconds=lambda: next(delays))
  # Every sample of questions 10 and 13 takes a minute.
  delays = iter([60.0] * 3 + [0.0] * 6 + [60.0] * 3 + [0.0] * 99)
  rollout = run_groups(assignments(5), engine, keep=3)
  assert [g.trajectories[0].address.question for g in rollout.groups] == [
    11,
    12,
    14,
  ]
  assert [len(g.trajectories) for g in rollout.groups] == [3, 3, 3]
  assert rollout[1:4] == (0, 0, 0)
  assert engine.running == 0
  asked = {request.address for request in engine.requests}
  assert len(asked) == 15
  assert collections.Counter(engine.released) == dict.fromkeys(asked, 1)


def test_queued_surplus_group_is_cancelled_too():
  engine = scripted.Engine(script)
  rollout = run_groups(assignments(5), engine, keep=2, max_concurrency=3)
  assert len(rollout.groups) == 2
  asked = {request.address for request in engine.requests}
  assert len(asked) < 15
  assert collections.Counter(engine.released) == dict.fromkeys(asked, 1)


def test_cancelled_episodes_are_not_in_flight():
  said, now = [], [0.0]
  inflight = driver.InFlight(60, warn=said.append, clock=lambda: now[0])
  engine = scripted.Engine(script, seconds=lambda: next(delays))
  delays = iter([3600.0] * 2 + [0.0] * 99)
  run_groups(
    assignments(5), engine, keep=2, max_concurrency=4, inflight=inflight
  )
  now[0] = 100.0
  inflight.look()
  assert not said


def test_dropped_group_does_not_count_towards_keep():
  gone = [(11, sample, attempt) for sample in (0, 1) for attempt in (0, 1)]
  engine = scripted.Engine(failing(*gone))
  rollout = run_groups(assignments(3), engine, keep=2)
  assert [g.trajectories[0].address.question for g in rollout.groups] == [
    10,
    12,
  ]


def test_all_groups_finish_if_fewer_than_keep():
  engine = scripted.Engine(script, seconds=scripted.shuffled_seconds(0))
  expected = values(run_groups(assignments(), scripted.Engine(script)))
  assert values(run_groups(assignments(), engine, keep=4)) == expected


@pytest.mark.parametrize(
  "kwargs, match",
  [
    ({"group": 0}, "Found group=0"),
    ({"max_concurrency": 0}, "Found max_concurrency=0"),
    ({"keep": 0}, "Found keep=0"),
  ],
)
def test_numbers_below_one_are_refused(kwargs, match):
  with pytest.raises(ValueError, match=match):
    run_groups(assignments(), scripted.Engine(script), **kwargs)


def test_shared_index_is_refused():
  with pytest.raises(ValueError, match="2 assignments with 1 indices"):
    run_groups(assignments(1) * 2, scripted.Engine(script))


def test_no_assignments_give_no_groups():
  assert run_groups([], scripted.Engine(script)) == ([], 0, 0, 0, "")


class Slow(scripted.Codec):
  """A codec that encodes a long text only after the event loop has run."""

  def __init__(self):
    self.turned = threading.Event()

  def encode(self, text):
    assert len(text) < 20_000 or self.turned.wait(30), "The loop stood still."
    return super().encode(text)


@pytest.mark.parametrize("room", [10**6, 600])
def test_event_loop_runs_while_a_long_observation_is_encoded(room):
  codec = Slow()
  config = dataclasses.replace(CONFIG, max_context=room)
  hits = {"q": [types.Passage("1", "T", "x" * 30_000)]}
  engine = scripted.Engine([search("q"), answer("a")])

  async def play():
    async def turn():
      while not engine.requests:
        await asyncio.sleep(0)
      await asyncio.sleep(0.05)
      codec.turned.set()

    turning = asyncio.create_task(turn())
    found = await driver.run_episode(
      types.Question("id", "Question?", ("a",)),
      driver.EpisodeParts(
        engine=engine,
        retriever=scripted.Retriever(hits),
        config=config,
        codec=codec,
      ),
      budget=1,
      scaffold=False,
      address=types.Address(0, 1, 2),
    )
    await turning
    return found

  found = asyncio.run(play())
  assert found.searches == 1
  ends = {10**6: types.Outcome.ANSWERED, 600: types.Outcome.TRUNCATED}
  assert found.outcome is ends[room]
