"""Tests the simulation of clusters on cases that are worked out by hand."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import selectors
import time
import types as python_types

import commands
import numpy as np
import planned
import pytest
import scripted

from anysearch_jax import config as config_lib
from anysearch_jax.launch import plan as command
from anysearch_jax.planning import clusters, simulation, targets, whole_step
from anysearch_jax.rollout import driver
from anysearch_jax.training import pipeline, timeline

CONFIG = "--config=configs/quickstart.py"
Turn = simulation.Turn
# 1 ms a prefilled token; a step takes 20 ms and 5 ms more for each row.
SERVER = simulation.Server(0.001, 0.02, 0.005, rows=4, slots=8)


def alone(**changes):
  """Returns a server whose steps take a second, whatever the rows."""
  return SERVER._replace(prefill=0.0, step=1.0, row=0.0, **changes)


def test_one_episode_takes_the_sum_of_its_parts():
  episode = [Turn(100, 10, search=0.5), Turn(5, 4)]
  played = simulation.play([episode], 1, SERVER)
  # The second prefill has fewer tokens than a step takes.
  turns = 0.1 + 10 * 0.025, 0.02 + 4 * 0.025
  assert played.seconds == pytest.approx(turns[0] + 0.5 + turns[1])
  assert played.busy == pytest.approx(sum(turns) / played.seconds)
  assert played.turns == pytest.approx(sum(turns) / 2)
  np.testing.assert_allclose(played.searches, [turns[0]])


def test_rows_advance_together_and_the_last_one_is_faster():
  played = simulation.play([[Turn(0, 10)], [Turn(0, 30)]], 1, SERVER)
  assert played.seconds == pytest.approx(10 * 0.03 + 20 * 0.025)


def test_prefill_stops_the_rows():
  # The search returns after .1 s, in the middle of the other's 10 tokens.
  waits = [Turn(0, 0, search=0.1), Turn(200, 1)]
  played = simulation.play([[Turn(0, 10)], waits], 1, SERVER)
  # 4 tokens alone, .2 of prefill, 1 token of both, 5 alone.
  assert played.seconds == pytest.approx(0.1 + 0.2 + 0.03 + 5 * 0.025)


def test_turns_wait_for_a_row_and_episodes_for_a_slot():
  episodes = [[Turn(0, 3)]] * 4
  assert simulation.play(episodes, 1, alone(rows=2)).seconds == 6
  # With one slot, an episode keeps it while it searches.
  searching = [[Turn(0, 1, search=5.0), Turn(0, 1)]] * 2
  assert simulation.play(searching, 1, alone(slots=1)).seconds == 14
  assert simulation.play(searching, 1, alone(slots=2)).seconds == 7


def test_servers_divide_the_episodes_and_neighbours_stay_together():
  episodes = [[Turn(0, 8)], [Turn(0, 8)], [Turn(0, 1)], [Turn(0, 1)]]
  played = simulation.play(episodes, 2, alone(rows=1))
  assert played.seconds == 16
  assert played.busy == pytest.approx((16 + 2) / 2 / 16)


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_turns_that_arrive_at_random_wait_as_in_an_m_d_1_queue(load):
  rng = np.random.default_rng(1)
  arrivals = np.cumsum(rng.exponential(1 / load, 20_000))
  # A turn of no tokens, whose search lasts until the arrival.
  episodes = [[Turn(0, 0, search=at), Turn(0, 1)] for at in arrivals.tolist()]
  one = alone(rows=1, slots=len(episodes))
  played = simulation.play(episodes, 1, one)
  # The mean is over both turns of an episode.
  wait = 2 * played.turns - 1
  assert wait == pytest.approx(load / (2 * (1 - load)), rel=0.08)


class Paced:
  """An engine and a retriever that take the time of turns, and of searches."""

  def __init__(self, turns, rows):
    self._turns, self._rows = turns, asyncio.Semaphore(rows)

  async def generate(self, request):
    at = request.address
    turns = self._turns[at.question, at.sample]
    async with self._rows:
      await asyncio.sleep(0.002 * turns[request.turn].sampled)
    last = request.turn + 1 == len(turns)
    text = f"{at.question} {at.sample} {request.turn}"
    said = scripted.answer(text) if last else scripted.search(text)
    return scripted.turn(request, said)

  async def search(self, request):
    question, sample, turn = map(int, request.query.split())
    await asyncio.sleep(self._turns[question, sample][turn].search)
    return []

  def release(self, address):
    pass


class Hasty(selectors.DefaultSelector):
  """Makes an event loop's clock, `now`, jump to what is due next."""

  now = 0.0

  def select(self, timeout=None):
    found = super().select(timeout and 0)
    self.now += 0 if found else timeout or 0
    return found


@pytest.mark.parametrize(("slots", "rows"), [(6, 32), (32, 3)])
def test_the_driver_of_a_run_takes_as_long(slots, rows):
  rng = np.random.default_rng(0)
  turns = {
    at: [
      Turn(0, *each)
      for each in rng.lognormal((4.5, -1.3), 0.5, (1 + rng.poisson(2), 2))
    ]
    for at in itertools.product(range(8), range(4))
  }
  server = simulation.Server(0.0, 0.002, 0.0, rows, slots)
  expected = simulation.play(list(turns.values()), 1, server).seconds
  paced = Paced(turns, rows)
  config = config_lib.EpisodeConfig(max_context=10**6, max_generated=10**5)
  parts = driver.EpisodeParts(paced, paced, config, scripted.CODEC)
  asked = [driver.Assignment(i, scripted.QUESTION, 20, False) for i in range(8)]
  clock = Hasty()
  loop = asyncio.SelectorEventLoop(clock)
  loop.time = lambda: clock.now
  limits = {"group": 4, "rollout": 0, "max_concurrency": slots}
  with asyncio.Runner(loop_factory=lambda: loop) as runner:
    runner.run(driver.run_groups(asked, parts, **limits))
  assert clock.now == pytest.approx(expected, rel=1e-6)


def test_searches_a_second():
  times = np.asarray([0.0, 0.1, 0.9, 3.0])
  played = simulation.Played(8.0, 1.0, 0.0, times)
  assert played.queries() == (0.5, 3.0)
  assert simulation.play([[Turn(0, 1)]], 1, SERVER).queries() == (0.0, 0.0)


def test_levels_add_or_overlap():
  def seconds(level, hand_over=0.0, sampling=(3.0,) * 20):
    return simulation.schedule(
      sampling, [2.0] * len(sampling), level=level, hand_over=hand_over
    )

  assert seconds(0, 0.5).seconds == pytest.approx(3 + 0.5 + 2)
  assert seconds(1, 0.5).seconds == pytest.approx(3 + 0.5)
  assert seconds(1).training == pytest.approx(2 / 3)
  assert seconds(1).sampling == pytest.approx(1.0)
  # Sampling takes 1 and 3 in turns: a second level hides the difference.
  uneven = (1.0, 3.0) * 12
  assert seconds(1, sampling=uneven).seconds == pytest.approx(2.5, rel=0.05)
  assert seconds(2, sampling=uneven).seconds == pytest.approx(2.0, rel=0.05)


class TimedSampler:
  """Samples at once, by its own clock; weights and rollouts tell the time."""

  def __init__(self, seconds):
    self._seconds, self._now = seconds, 0.0

  def set_params(self, rollout, params, version):
    self._now = max(self._now, params) + 0.05

  def sample(self, rollout):
    self._now += self._seconds[rollout]
    return python_types.SimpleNamespace(rollout=rollout, now=self._now)

  def stop(self):
    pass


@pytest.mark.parametrize("level", [0, 1, 2])
def test_the_pipeline_of_a_run_keeps_this_schedule(level):
  sampling, training = [0.1, 0.3] * 5, 0.15
  now, ends, count = 0.0, [], len(sampling)
  with pipeline.Pipeline(
    TimedSampler(sampling),
    first=0,
    rollouts=count,
    level=level,
    timeline=timeline.Timeline(time.monotonic),
  ) as ahead:
    for rollout in range(count):
      ahead.fill(rollout, lambda now=now: now)
      assert ahead.wait()
      taken = ahead.take()
      assert taken.rollout == rollout
      now = max(now, taken.now) + training
      ends.append(now)
  expected = simulation.schedule(
    sampling, [training] * count, level=level, hand_over=0.05
  )
  took = (ends[-1] - ends[level + 1]) / (count - level - 2)
  assert took == pytest.approx(expected.seconds)


def workload(level=1):
  def draw(rng):
    return [[Turn(0, n)] for n in rng.integers(1, 40, 64).tolist()]

  return simulation.Workload(
    draw,
    alone(rows=2),
    train=lambda copies: 900 / copies,
    hand_over=lambda copies, servers: 1.0,
    level=level,
    steps=5,
    server_devices=2,
    trainer_devices=3,
  )


@pytest.mark.parametrize("level", [0, 1])
def test_the_best_split_is_that_of_a_search_through_all(level):
  work = workload(level)
  best = simulation.best_split(work, 40, seed=3)
  every = [
    simulation.run(work, n, (40 - 3 * n) // 2, rollouts=2, seed=3)
    for n in range(1, 13)
  ]
  assert best.seconds <= 1.05 * min(each.seconds for each in every)
  assert best.training + best.sampling <= 40
  # Five steps a rollout: 0 to 4 of them older, and 5 more at level 1.
  assert best.staleness == 5 * level + 2
  assert simulation.best_split(work, 4, seed=3) is None
  assert simulation.best_split(work, 40, seed=3) == best


@pytest.fixture
def run_folder(tmp_path):
  """Files of a run: two turns, and one, of 20 tokens; training takes 3 s."""
  line = timeline.Timeline(lambda: 0.0, tmp_path / "timeline.json")
  with line:
    for rollout in range(6):
      now = 10.0 * rollout
      add = line.add
      for question, start in ((0, 0.0), (0, 3.0), (1, 0.0)):
        at = now + start
        add(rollout, "turns", "turn", at, at + 2, question=question, sample=0)
      add(rollout, "sampler", "collect", now, now + 5)
      add(rollout, "sampler", "score", now + 5, now + 5.5)
      add(rollout, "trainer", "idle", now, now + 5.5)
      add(rollout, "trainer", "train", now + 5.5, now + 8.5)
      add(rollout, "trainer", "sync", now + 8.5, now + 9)
  (tmp_path / "trajectories").mkdir()
  model = {"author": "model", "text": "abcd"}
  found = {"author": "environment", "text": "ab"}
  two = {
    "spans": [model, found, model],
    "generated_tokens": 40,
    "retrieved_tokens": 7,
  }
  (tmp_path / "trajectories/rollout-00002.jsonl").write_text(
    json.dumps({"trajectories": [two]}) + "\n"
  )
  return tmp_path


def test_a_run_is_measured_from_its_files(run_folder):
  (line,) = run_folder.glob("trajectories/*")
  (two,) = json.loads(line.read_text())["trajectories"]
  assert clusters._turns(two) == [Turn(0, 20), Turn(7, 20)]
  config = config_lib.ExperimentConfig()
  work, rate = clusters.measured(run_folder, config, seed=0)
  assert rate == pytest.approx(3600 / 9)
  (one, *_), count = work.draw(np.random.default_rng(0)), 2
  assert one == [Turn(0, 20, search=1.0), Turn(7, 20, search=1.0)]
  played = simulation.play([one] * count, 1, work.server)
  assert played.seconds == pytest.approx(5.0, rel=1e-6)
  # A second of search, and two prefills, which take at least a step.
  assert work.server.step == pytest.approx(4 / 42, rel=1e-6)
  result = simulation.run(work, 1, 1, seed=0)
  assert result.rollouts_an_hour == pytest.approx(rate, rel=1e-6)
  # At level 1, rollout 2 was sampled before the time that is measured.
  path = run_folder / "timeline.json"
  events = json.loads(path.read_text())
  for event in events:
    if event["name"] == "collect" and event["args"]["rollout"] == 2:
      event["dur"] *= 9
  path.write_text(json.dumps(events))
  level = '{"pipeline": {"async_level": 1}}'
  (run_folder / "config.json").write_text(level)
  again, _ = clusters.measured(run_folder, config, seed=0)
  assert again.server == work.server
  with pytest.raises(ValueError, match="train longer, with --timeline"):
    clusters.measured(run_folder / "trajectories", config, seed=0)


def test_the_command_prints_and_writes_the_clusters_of_a_run(run_folder):
  file = run_folder / "plan.json"
  args = f"--run={run_folder}", "--devices=1,2,6,400,800", f"--json={file}"
  ended, said = commands.printed(command, CONFIG, *args)
  assert ended == 0
  first, _, heading, *lines = said.splitlines()
  assert first.endswith(
    "400.0 rollouts an hour; simulated with this configuration: 400.0."
  )
  assert heading.split()[:3] == ["devices", "training", "sampling"]
  assert [line.split()[0] for line in lines] == ["1", "2", "6", "400", "800"]
  assert lines[0].split() == ["1"]  # Too few.
  assert lines[1].split()[1:3] == ["1", "1"]
  # A rollout lasts as long as its longest episode, whatever there is.
  assert lines[4].split()[1:] == lines[3].split()[1:]
  found = json.loads(file.read_text())["cluster"]
  assert found["1"] is None
  assert found["2"]["rollouts_an_hour"] == pytest.approx(400, rel=1e-6)
  assert found["6"]["seconds"] < found["2"]["seconds"]


@pytest.mark.parametrize(
  ("args", "sentence"),
  [
    ([], "expected either --target"),
    (["--run=x", "--target=h100:1"], "expected either --target"),
    (["--run=nowhere"], "--run: found 0 rollouts on the timeline of nowhere"),
    (["--run=x", "--devices=8,x"], "found 'x', expected numbers above 0"),
  ],
)
def test_the_command_says_what_it_needs(args, sentence):
  assert sentence in commands.run(command, CONFIG, *args)


def test_a_plan_becomes_a_workload_with_its_seconds():
  config = config_lib.changed(
    planned.CONFIG,
    questions=32,
    group=4,
    engine={"lanes": (16,), "slots": 20, "kv_tokens": 0},
    batch={"row_lengths": (4096,), "micro_batch_tokens": 16384},
    pipeline={"async_level": 1},
    curriculum={"steps_per_rollout": 4, "total_steps": 400},
  )
  expected = whole_step.Episodes(2000, 400, 32)
  names = ("old log-probabilities", "train step", "prefill", "decode")
  sizes = {"engine weights": 1.0, "KV cache": 1.0}
  parts = [planned.part(x, total=4, kinds=dict(sizes)) for x in names]
  target = targets.Target(planned.CPU, (4,))
  made = planned.made(*parts, config=config, target=target)
  step = whole_step.predict(
    [*parts, planned.part("hand-over", kinds=dict(sizes))],
    config=config,
    a=planned.A,
    expected=expected,
    target=target,
  )
  made = dataclasses.replace(made, step=step)
  work = clusters.planned(made, planned.A, expected, search_seconds=0.25)
  phases = {phase.name: phase.predicted for phase in step.phases}
  # What all episodes prefill and sample takes as long as the plan says.
  tokens = 32 * (1600 - 230 * 3 / 4)
  assert work.server.prefill * tokens == pytest.approx(phases["prefill"])
  rows = 16 * whole_step.OCCUPANCY
  full = work.server.step + work.server.row * rows
  assert 32 * 400 / rows * full == pytest.approx(phases["decode"], rel=0.15)
  training = phases["old log-probabilities"] + phases["train step"]
  assert work.train(1) == pytest.approx(4 * training)
  # Two copies halve the micro-batches and sum float32 gradients.
  summed = 8 * 8e9 / 4 / 2 / (0.8 * 1e9)
  micro = expected.micro_batches(config.batch, 2)
  half = -(-micro // 2) / micro
  assert work.train(2) == pytest.approx(4 * (half * training + summed))
  # 16 GB to every server, which has four devices of .8 GB/s.
  assert work.hand_over(1, 1) == pytest.approx(16 / 4 / 0.8)
  assert work.hand_over(1, 8) == pytest.approx(16 * 8 / 4 / 0.8)
  # Deltas of adapters with an 80th of the parameters.
  deltas = config_lib.changed(config, sglang={"deltas": True})
  light = dataclasses.replace(made, trained=10**8, config=deltas)
  light = clusters.planned(light, planned.A, expected, search_seconds=0.25)
  assert light.hand_over(1, 1) == pytest.approx(0.05 * 0.2 / 4 / 0.8)
  episodes = work.draw(np.random.default_rng(0))
  assert len(episodes) == 128
  assert [e[0].given for e in episodes[:5]] == [230, 0, 0, 0, 230]
  sampled = np.mean([sum(t.sampled for t in e) for e in episodes])
  assert sampled == pytest.approx(400, rel=0.1)
  searches = [t.search for e in episodes for t in e]
  assert np.mean(searches) == pytest.approx(0.25, rel=0.1)
