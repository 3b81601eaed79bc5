"""The asyncio driver: order, failures, deadlines, release, bounds, stalls."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import itertools
import threading

import fake_retriever
import pytest
import scripted
from scripted import CODEC, answer, search

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.methods import systems
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
    engine,
    retriever or scripted.Retriever(HITS),
    CONFIG,
    CODEC,
    systems.of_episode(CONFIG),
  )
  kwargs = {"group": 3, "rollout": 4} | kwargs
  return asyncio.run(driver.run_groups(given, parts, **kwargs))


def test_a_run_says_why_its_episodes_failed(caplog):
  class Down:
    async def search(self, request):
      raise types.RetrievalError(f"HTTP 503 after {request.query[1:]} s.")

  rollout = run_groups(assignments(), scripted.Engine(script), Down())
  assert rollout.failed == 8
  (said,) = [each.getMessage() for each in caplog.records]
  assert said == (
    "Rollout 4: 8 of 15 episodes failed and train nothing: 8 times: The search "
    "for 'q1' failed: HTTP 503 after 1 s."
  )


def run_episode(engine, retriever=None, **limits):
  return scripted.play(
    engine,
    retriever or scripted.Retriever(HITS),
    dataclasses.replace(CONFIG, **limits),
    budget=1,
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
  assert engine.released == [types.Address(0, 0, 0)]
  scripted.check_alignment(trajectory)


def test_groups_come_in_order_whatever_the_finishing_order():
  given = assignments()
  rollout = run_groups(given, scripted.Engine(script))
  assert rollout[1:4] == (0, 0, 0)
  for assignment, group in zip(given, rollout.groups, strict=True):
    for sample, trajectory in enumerate(group.trajectories):
      assert trajectory.address == types.Address(4, assignment.index, sample)
      for each in group, trajectory:
        assert each.question is assignment.question
        assert each.budget == assignment.budget
        assert each.scaffold == assignment.scaffold
  expected = values(rollout)
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


def test_the_last_samples_of_a_group_get_no_search():
  rollout = run_groups(
    assignments(), scripted.Engine(script), group=4, searchless=2
  )
  for budget, group in enumerate(rollout.groups):
    assert group.budget == budget
    given = [t.budget for t in group.trajectories]
    assert given == [budget, budget, 0, 0]
    assert [t.searches for t in group.trajectories][2:] == [0, 0]


def test_group_with_fewer_than_two_valid_samples_is_resampled_once():
  engine = scripted.Engine(failing((10, 1, 0), (11, 0, 0), (11, 2, 0)))
  rollout = run_groups(assignments(), engine)
  assert rollout[1:4] == (0, 1, 3)
  attempts = [
    [trajectory.address.attempt for trajectory in group.trajectories]
    for group in rollout.groups
  ]
  assert attempts == [[0, 0, 0], [1, 1, 1], [0, 0, 0]]
  outcomes = [t.outcome for t in rollout.groups[0].trajectories]
  assert outcomes == ["answered", "failed", "answered"]
  assert rollout.groups[0].trajectories[1].reason == (
    "Turn 0 failed: The server answered 503 three times."
  )
  assert not any(t.failed for t in rollout.groups[1].trajectories)


def test_group_that_fails_twice_is_dropped_and_counted():
  lost = [(11, sample, attempt) for sample in (0, 2) for attempt in (0, 1)]
  engine = scripted.Engine(failing(*lost))
  rollout = run_groups(assignments(), engine)
  assert rollout[1:4] == (1, 1, 4)
  assert rollout.reason.startswith("Turn 0 failed: ")
  assert [group.question.id for group in rollout.groups] == ["id0", "id2"]


@pytest.mark.parametrize(
  ("engine", "retriever", "limits", "reason"),
  [
    (
      {"script": [search("q1")]},
      {"error": types.RetrievalError("The index is gone.")},
      {},
      "The search for 'q1' failed: The index is gone.",
    ),
    (  # A generative retriever asks an engine.
      {"script": [search("q1")]},
      {"error": types.EngineError("The index is gone.")},
      {},
      "The search for 'q1' failed: The index is gone.",
    ),
    (
      {"script": [answer("a")], "seconds": lambda: 60.0},
      {},
      {"turn_deadline": 0.01},
      "Turn 0 failed: no answer within 0.01 seconds.",
    ),
    (
      {"script": [search("q1")]},
      {"seconds": 60.0},
      {"search_deadline": 0.01},
      "The search for 'q1' failed: no answer within 0.01 seconds.",
    ),
  ],
)
def test_outage_fails_the_episode(engine, retriever, limits, reason):
  engine = scripted.Engine(**engine)
  trajectory = run_episode(engine, scripted.Retriever(**retriever), **limits)
  assert trajectory.outcome is types.Outcome.FAILED
  assert (trajectory.reason, trajectory.searches) == (reason, 0)
  assert engine.running == 0
  assert engine.released == [types.Address(0, 0, 0)]


def test_every_address_is_released_once_and_one_sample_makes_a_group():
  engine = scripted.Engine(failing((11, 0, 0)))
  rollout = run_groups(assignments(), engine, group=1)
  assert rollout[1:4] == (0, 0, 1)
  outcomes = [group.trajectories[0].outcome for group in rollout.groups]
  assert outcomes == ["answered", "failed", "answered"]
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


@pytest.mark.parametrize(
  ("given", "kwargs", "sentence"),
  [
    (1, {"group": 0}, "Found group=0"),
    (1, {"max_concurrency": 0}, "Found max_concurrency=0"),
    (1, {"keep": 0}, "Found keep=0"),
    (2, {}, "2 assignments with 1 indices"),
  ],
)
def test_arguments_that_cannot_work_are_refused(given, kwargs, sentence):
  with pytest.raises(ValueError, match=sentence):
    run_groups(assignments(1) * given, scripted.Engine(script), **kwargs)


class Slow(scripted.Codec):
  """A codec that encodes a long text only after the event loop has run."""

  def __init__(self):
    self.turned = threading.Event()

  def encode(self, text):
    assert len(text) < 20_000 or self.turned.wait(30), "The loop stood still."
    return super().encode(text)


@pytest.mark.parametrize("room", [10**6, 600])
async def test_event_loop_runs_while_a_long_observation_is_encoded(room):
  codec = Slow()
  config = dataclasses.replace(CONFIG, max_context=room)
  hits = {"q": [types.Passage("1", "T", "x" * 30_000)]}
  engine = scripted.Engine([search("q"), answer("a")])

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
      environment=systems.of_episode(config),
    ),
    budget=1,
    scaffold=False,
    address=types.Address(0, 1, 2),
  )
  await turning
  assert found.searches == 1
  ends = {10**6: types.Outcome.ANSWERED, 600: types.Outcome.TRUNCATED}
  assert found.outcome is ends[room]


def turn(sample, number=0):
  address = types.Address(3, 5, sample)
  return types.GenerateRequest(address, number, (1,), 9, ())


@pytest.fixture
def waits():
  """Returns a function that begins a wait and returns one that ends it.

  Its attributes are what is in flight, a clock, and the warnings.
  """
  clock, said = fake_retriever.Clock(), []
  inflight = driver.InFlight(60.0, warn=said.append, clock=clock)
  with contextlib.ExitStack() as all_of_them:

    def begin(request):
      wait = all_of_them.enter_context(contextlib.ExitStack())
      wait.enter_context(inflight.waiting(request))
      return wait.close

    begin.inflight, begin.clock, begin.said = inflight, clock, said
    yield begin


def test_requests_in_flight_are_counted_by_kind(waits):
  waits(types.Address(3, 9, 0))
  waits(types.Address(3, 9, 1))
  waits.clock.now += 6
  waits(types.SearchRequest("\x1b" + 99 * "x", 3))
  ended = waits(turn(0))
  waits.clock.now += 5
  waits(turn(2, number=1))
  waits(turn(3))
  ended()
  waits.clock.now += 60
  waits.inflight.check_progress()
  assert waits.said == [
    "Nothing moved for 60 s; in flight: 2 waiting for a place, 1 waiting for a "
    "search, 2 waiting for a turn. The oldest, since 65 s: the search for "
    "'\\x1b" + 79 * "x" + "'."
  ]


def test_every_end_is_progress_and_warnings_come_at_doubling_intervals(waits):
  waits(turn(1))
  for kind in turn(0), types.SearchRequest("q", 3), types.Address(0, 0, 0):
    end = waits(kind)
    waits.clock.now += 59
    assert waits.inflight.check_progress() == 1.0
    end()
    # The next warning is due 60 seconds from here.
    assert waits.inflight.check_progress() == 60.0
  assert not waits.said
  start, told = waits.clock.now, []
  for _ in range(1200):
    waits.clock.now += 1
    before = len(waits.said)
    waits.inflight.check_progress()
    told += [waits.clock.now - start] * (len(waits.said) - before)
  assert told == [60, 120, 240, 480, 960]


def test_hanging_rollout_is_told_of_and_goes_on():
  free, said = asyncio.Event(), []

  def warn(sentence):
    said.append(sentence)
    free.set()

  class Stuck(scripted.Engine):
    async def generate(self, request):
      await free.wait()
      return await super().generate(request)

  rollout = run_groups(
    assignments(),
    Stuck(script),
    max_concurrency=2,
    inflight=driver.InFlight(0.01, warn=warn),
  )
  assert "2 waiting for a turn" in said[0]
  assert "7 waiting for a place" in said[0]
  assert len(rollout.groups) == 3 and rollout.failed == 0
