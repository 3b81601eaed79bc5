"""Warnings about episodes that make no progress."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging

import fake_retriever
import played_evaluation
import pytest
import scripted
import small_run

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.algorithms import curriculum
from anysearch_jax.evaluation import harness
from anysearch_jax.host import loop
from anysearch_jax.rollout import driver
from anysearch_jax.training import collection, timeline

CONFIG = config_lib.EpisodeConfig(prompts="world", max_generated=500)
QUESTION = types.Question("id", "Question?", ("a",))


def turn(sample, number=0):
  address = types.Address(3, 5, sample)
  return types.GenerateRequest(address, number, (1,), 9, ())


def search(query):
  return types.SearchRequest(query, 3)


@pytest.fixture
def clock():
  return fake_retriever.Clock()


@pytest.fixture
def said():
  return []


@pytest.fixture
def inflight(clock, said):
  return driver.InFlight(60.0, warn=said.append, clock=clock)


@pytest.fixture
def waits(inflight):
  """Returns a function that begins a wait and returns one that ends it."""
  with contextlib.ExitStack() as all_of_them:

    def begin(request):
      wait = all_of_them.enter_context(contextlib.ExitStack())
      wait.enter_context(inflight.waiting(request))
      return wait.close

    yield begin


def test_requests_in_flight_are_counted_by_kind(inflight, waits, clock, said):
  waits(types.Address(3, 9, 0))
  waits(types.Address(3, 9, 1))
  clock.now += 6
  waits(search("who wrote it"))
  ended = waits(turn(0))
  clock.now += 5
  waits(turn(2, number=1))
  waits(turn(3))
  ended()
  clock.now += 60
  inflight.look()
  assert said == [
    "Nothing moved for 60 s; in flight: 2 waiting for a turn (longest 60 s), "
    "1 waiting for a search (longest 65 s), 2 waiting for a place (longest "
    "71 s). The oldest: the search for 'who wrote it'."
  ]


def test_the_oldest_turn_is_named_by_its_address(inflight, waits, clock, said):
  waits(types.Address(3, 9, 0))
  waits(turn(2, number=1))
  clock.now += 60.04
  inflight.look()
  assert said[0].endswith(
    "The oldest: turn 1 of Address(rollout=3, question=5, sample=2, attempt=0, "
    "variant=0)."
  )


def test_query_is_shown_on_one_line_and_cut(inflight, waits, clock, said):
  waits(search("\n\x1b[2J\ud83d" + 10**6 * "x"))
  clock.now += 60
  inflight.look()
  (sentence,) = said
  assert sentence.isprintable() and len(sentence) < 300
  assert sentence.endswith(r"'\n\x1b[2J\ud83d" + 74 * "x" + "'....")


@pytest.mark.parametrize("kind", [turn(0), search("q"), types.Address(0, 0, 0)])
def test_every_end_counts_as_progress(kind, inflight, waits, clock, said):
  waits(turn(1))
  for _ in range(5):
    end = waits(kind)
    clock.now += 59
    assert inflight.look() == 1.0
    end()
    # The next warning is due 60 seconds from here.
    assert inflight.look() == 60.0
  assert not said


def test_warning_repeats_with_doubling_intervals(inflight, waits, clock, said):
  end = waits(turn(0))
  start, told = clock.now, []
  for _ in range(1200):
    clock.now += 1
    before = len(said)
    inflight.look()
    told += [clock.now - start] * (len(said) - before)
  assert told == [60, 120, 240, 480, 960]
  end()
  waits(search("q"))
  clock.now += 60
  inflight.look()
  assert said[-1].startswith("Nothing moved for 60 s; in flight: 1 waiting for")


def test_blocked_event_loop_warns_once(inflight, waits, clock, said):
  waits(turn(0))
  clock.now += 1000
  assert inflight.look() == 1000.0
  assert inflight.look() == 1000.0
  assert len(said) == 1


def test_no_warning_if_nothing_is_in_flight(inflight, waits, clock, said):
  waits(turn(0))()
  clock.now += 1000
  inflight.look()
  assert not said


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_warning_can_be_switched_off(seconds, clock, said):
  inflight = driver.InFlight(seconds, warn=said.append, clock=clock)

  async def main():
    with inflight.watched(), inflight.waiting(turn(0)):
      clock.now += 1e6
      await asyncio.sleep(0.01)

  asyncio.run(main())
  assert not said


class Stuck:
  """Blocks searches and the turns of sample 1 until a warning is logged.

  on_wait: called with the number of blocked requests.
  """

  def __init__(self, on_wait=lambda count: None):
    self._engine = scripted.Engine(searches_first)
    self._on_wait, self._waiting = on_wait, 0
    self._free = asyncio.Event()
    self.said = []

  def warn(self, sentence):
    self.said.append(sentence)
    self._free.set()

  async def wait(self):
    self._waiting += 1
    self._on_wait(self._waiting)
    await self._free.wait()

  async def generate(self, request):
    if request.address.sample == 1:
      await self.wait()
    return await self._engine.generate(request)

  async def search(self, request):
    await self.wait()
    return ()

  def release(self, address):
    self._engine.release(address)


def searches_first(request):
  return scripted.answer("a") if request.turn else scripted.search("q")


def test_hanging_rollout_reports_what_it_waits_for(clock):
  def pass_time(waiting):
    clock.now += 60 * (waiting == 3)

  stuck = Stuck(pass_time)
  played = asyncio.run(
    driver.run_groups(
      [driver.Assignment(5, QUESTION, 1, False)],
      driver.EpisodeParts(
        engine=stuck,
        retriever=stuck,
        config=CONFIG,
        codec=scripted.CODEC,
      ),
      group=4,
      rollout=3,
      max_concurrency=3,
      inflight=driver.InFlight(0.01, warn=stuck.warn, clock=clock),
    )
  )
  # Two episodes search and one has its turn; the last starts a minute later.
  assert stuck.said[0] == (
    "Nothing moved for 60 s; in flight: 1 waiting for a turn (longest 60 s), "
    "2 waiting for a search (longest 60 s), 1 waiting for a place (longest "
    "0 s). The oldest: the search for 'q'."
  )
  (group,) = played.groups
  assert [t.outcome for t in group.trajectories] == ["answered"] * 4


def test_no_timer_outlives_its_rollout(said):
  inflight = driver.InFlight(0.01, warn=said.append)

  async def main():
    with inflight.watched():
      await asyncio.sleep(0)
    with inflight.waiting(turn(0)):
      await asyncio.sleep(0.1)

  asyncio.run(main())
  assert not said


class Warned(logging.Handler):
  """Unblocks the stuck requests when the warning is logged."""

  def __init__(self, stuck):
    super().__init__()
    self._stuck = stuck

  def emit(self, record):
    self._stuck.warn(record.getMessage())


@pytest.fixture
def stuck():
  stuck = Stuck()
  logger, handler = logging.getLogger(driver.__name__), Warned(stuck)
  logger.addHandler(handler)
  yield stuck
  logger.removeHandler(handler)


WATCHED = dataclasses.replace(
  small_run.CONFIG,
  questions=1,
  episode=dataclasses.replace(CONFIG, turn_deadline=60.0),
  watch=config_lib.WatchConfig(quiet_seconds=0.05),
)


def test_training_warns_when_nothing_moves(stuck):
  collector = collection.Collector(
    collection.QuestionStream([QUESTION], groups=1, samples=WATCHED.group),
    engine=stuck,
    retriever=stuck,
    codec=scripted.CODEC,
    config=WATCHED.episode,
    slots=WATCHED.engine.slots,
    quiet_seconds=WATCHED.watch.quiet_seconds,
    timeline=timeline.Timeline(lambda: 0.0),
  )
  collected = collector.collect(
    3, curriculum.Assignment([1], False), loop.Scope(RuntimeError)
  )
  assert collected.failed == 0
  assert stuck.said[0].startswith("Nothing moved for ")


def test_evaluation_warns_when_nothing_moves(stuck, tmp_path):
  config = dataclasses.replace(
    WATCHED, evaluation=config_lib.EvaluationConfig(budgets=(1,), seeds=(7,))
  )
  summary = harness.evaluate(
    config.evaluation,
    played_evaluation.playing(config),
    player=harness.Player(stuck, scripted.CODEC),
    questions=[QUESTION],
    retriever=stuck,
    folder=tmp_path,
  )
  assert summary["played"] == 1
  assert summary["cells"][0]["failed"] == 0
  assert stuck.said[0].startswith("Nothing moved for ")
