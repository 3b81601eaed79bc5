"""Outages of engines during training, in process and over HTTP.

As in `test_outages`, faults are scripted, here by address or prompt.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import threading
import time

import drills
import fake_sglang
import pytest
import scripted
import scripted_runs as runs
import sglang_engines

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.rollout.jax_engine import engine as engine_lib
from anysearch_jax.rollout.jax_engine import kv_device, kv_store
from anysearch_jax.rollout.sglang import server as sglang_server
from anysearch_jax.training import health

CONFIG, PATIENT = drills.CONFIG, drills.PATIENT


@pytest.fixture(scope="module")
def parts():
  return drills.parts()


@pytest.fixture(scope="module", autouse=True)
def undisturbed(parts, tmp_path_factory):
  """A run without faults; it also compiles programs before deadlines matter."""
  return drills.Drill(tmp_path_factory.mktemp("run"), CONFIG, **parts).run()


def faults(monkeypatch, of_turn):
  """Awaits `of_turn(request)` before every turn of the engine."""
  generate = engine_lib.JaxEngine.generate

  async def faulty(self, request):
    await of_turn(request)
    return await generate(self, request)

  monkeypatch.setattr(engine_lib.JaxEngine, "generate", faulty)


def test_groups_with_failed_turns_are_resampled_once_then_dropped(
  parts, tmp_path, monkeypatch
):
  async def of_turn(request):
    a = request.address
    if a.rollout == 0 and (a.question, a.sample, a.attempt) in {
      (0, 1, 0),  # One sample of a group.
      *((1, sample, 0) for sample in range(2)),  # Leaves fewer than two valid.
      *((3, sample, attempt) for sample in (0, 2) for attempt in range(2)),
    }:
      raise types.EngineError("The server answered 503 three times.")
    if (a.rollout, a.question, a.sample) == (1, 2, 2):
      await asyncio.sleep(3600)

  faults(monkeypatch, of_turn)
  config = drills.with_deadlines(CONFIG, turn_deadline=3.0)
  drill = drills.Drill(tmp_path, config, **parts).run()
  first, second, *others = drill.metrics()
  found = [
    [
      r[f"rollout/{n}"]
      for n in ("failed", "resampled_groups", "dropped_groups")
    ]
    for r in (first, second, *others)
  ]
  assert found == [[7, 2, 1], [1, 0, 0], [0, 0, 0], [0, 0, 0]]
  assert others[-1]["run/failed"] == 8
  assert {t.reason for t in drill.failed()} == {
    "Turn 0 failed: The server answered 503 three times.",
    "Turn 0 failed: no answer within 3 seconds.",
  }
  drill.check()
  drill.check_bits()


def test_optimizer_step_without_episodes_changes_no_weights(
  parts, tmp_path, monkeypatch
):
  """Both groups of the second step of rollout 1 are lost."""

  async def of_turn(request):
    if request.address.rollout == 1 and request.address.question >= 2:
      raise types.EngineError("Out of reach.")

  faults(monkeypatch, of_turn)
  drill = drills.Drill(tmp_path, PATIENT, **parts).run()
  drill.check()
  lengths = [
    [sum(int(rows.used) for rows in batch) > 0 for batch in packed]
    for _, packed in drill.learnt
  ]
  assert lengths == [[True, True], [True, False], [True, True], [True, True]]
  assert drill.moved == sum(lengths, [])


def test_a_device_that_hangs_stops_the_run(parts, tmp_path, monkeypatch):
  freed, decode = threading.Event(), kv_store.decode

  def hang(*args, **kwargs):
    assert freed.wait(60)
    return decode(*args, **kwargs)

  monkeypatch.setattr(kv_store, "decode", hang)
  # Shortens the wait for a running call whose result is no longer needed.
  monkeypatch.setattr(kv_device.KvDevice.drain, "__defaults__", (0.1,))
  drill = drills.Drill(
    tmp_path, drills.with_deadlines(CONFIG, turn_deadline=0.5), **parts
  )
  sentence = (
    "24 of 24 episodes failed.* Turn 0 failed: no answer within 0.5 sec"
  )
  with pytest.raises(health.FailedEpisodesError, match=sentence):
    drill.run()
  freed.set()
  assert not drill.moved


def test_device_error_is_a_bug_and_not_an_outage(
  parts, tmp_path, monkeypatch, undisturbed
):
  config = dataclasses.replace(CONFIG, save_every=1)

  def broken(*args, **kwargs):
    raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

  with monkeypatch.context() as patch:
    drill = drills.Drill(tmp_path, config, **parts)
    with pytest.raises(ExceptionGroup) as raised:
      drill.run(lambda event: patch.setattr(kv_store, "decode", broken))
  assert raised.group_contains(RuntimeError, match="RESOURCE_EXHAUSTED")
  assert not drill.failed()
  assert len(drill.moved) == 2
  drills.Drill(tmp_path, config, **parts).run().same(undisturbed)


SERVED = dataclasses.replace(
  CONFIG,
  group=2,
  episode=config_lib.EpisodeConfig(
    prompts="world", max_generated=20, max_context=150
  ),
  engine=config_lib.EngineConfig(kind="sglang", max_context=150),
  # The server's texts and log-probabilities are scripted.
  watch=dataclasses.replace(CONFIG.watch, gap_rollouts=1000),
)


@pytest.fixture
def server(monkeypatch):
  """A server that searches for "b" once, then answers "b" or "c" in turn."""
  answers = itertools.cycle("bc")

  def says(context):
    text = fake_sglang.tokenizer().decode(context)
    searched = "</search>" in text
    tag, what = ("answer", next(answers)) if searched else ("search", "b")
    return fake_sglang.ids("<", tag, ">", what, f"</{tag}>")

  # The server's default context is too short for an observation.
  monkeypatch.setattr(fake_sglang, "CONTEXT", 200)
  with fake_sglang.Server(says) as server:
    yield server


@pytest.fixture
def served(server, tmp_path, monkeypatch):
  """Returns a function that makes a run whose turns the server samples."""
  monkeypatch.setattr(sglang_server, "_FIRST_PAUSE", 0.001)

  def make(level=0, **settings):
    sglang = config_lib.SglangConfig(
      urls=(server.url,), weights=str(tmp_path / "ram"), **settings
    )
    return drills.Drill(
      tmp_path / "run",
      runs.at_level(level, SERVED, sglang=sglang, save_every=2),
      policy=sglang_engines.policy(),
      questions=[
        types.Question(str(i), "c" * (i + 1), ("b",)) for i in range(16)
      ],
      retriever=scripted.Retriever({"b": [types.Passage("1", "a", "b")]}),
    )

  return make


@pytest.mark.parametrize(
  "fault", ["broken", pytest.param("hangs", marks=pytest.mark.slow)]
)
def test_unanswered_turns_fail_their_episodes(fault, served, server):
  generate = server._generate

  def faulty(body):
    """Fails only for the third question, whose prompt ends with " ccc"."""
    text = fake_sglang.tokenizer().decode(body["input_ids"]).partition("<")[0]
    if not text.endswith(" ccc"):
      return generate(body)
    if fault == "hangs":
      server._released.wait(60)
    return 500, {"error": {"message": "The scheduler is gone."}}

  server._generate = faulty
  drill = served(deadline=2.0 if fault == "hangs" else 60.0).run()
  met = {
    "broken": "HTTP 500: The scheduler is gone.",
    "hangs": "no turn within 2 seconds",
  }
  assert len(drill.failed()) == 4
  for t in drill.failed():
    assert t.address.question == 2 and met[fault] in t.reason
  first, *others = drill.metrics()
  assert (first["rollout/failed"], first["rollout/dropped_groups"]) == (4, 1)
  assert [r["rollout/failed"] for r in others] == [0, 0, 0]
  # The rewards in other groups differ, so training changes the weights.
  assert first["policy/advantage_share"] > 0
  drill.check()
  drill.check_bits()


def test_a_server_that_stays_broken_stops_the_run(served, server):
  drill = served(retries=0)
  with pytest.raises(health.FailedEpisodesError) as raised:
    drill.run(lambda event: server.faults["/generate"].extend(99 * ["die"]))
  assert "Rollout 1: 16 of 16 episodes failed" in str(raised.value)
  assert "RemoteProtocolError" in str(raised.value)
  assert len(drill.moved) == 2


@pytest.mark.parametrize("level", [0, 1])
def test_a_run_resumes_when_its_server_is_back(level, served, server):
  """The server is down during rollout 2, which checkpoint 2 then contains."""
  generate = server._generate

  def down(body):
    text = fake_sglang.tokenizer().decode(body["input_ids"]).partition("<")[0]
    gone = len(text) - len(text.rstrip("c")) > 8  # Questions from 8 on.
    return (503, {"message": "Restarting."}) if gone else generate(body)

  server._generate = down
  with pytest.raises(health.FailedEpisodesError, match="Rollout 2: 16 of 16"):
    served(level, retries=0).run()
  server._generate = generate
  records = served(level, retries=0).run().metrics()
  assert [r["rollout"] for r in records] == [0, 1, 2, 3]
  assert [r["rollout/failed"] for r in records] == [0] * 4
  assert [r["policy/staleness_max"] for r in records] == [0, level, 0, level]
  assert records[-1]["run/failed_rollouts"] == level


def test_server_lost_between_rollouts_is_named_in_the_error(served, server):
  drill = served(retries=0, wait=0.1)
  with pytest.raises(types.EngineError, match="Is an SGLang server running"):
    drill.run(lambda event: server.__exit__())
  assert len(drill.moved) == 2


@pytest.mark.parametrize("level", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_server_that_is_killed_and_started_again_loses_nothing(
  level, served, server
):
  """The server dies in the middle of the second rollout."""
  generate, asked = server._generate, itertools.count()

  def restart():
    server.kill()
    time.sleep(0.3)  # Longer than the retries of a single request.
    server.restart()

  def dies(body):
    if next(asked) == 20:
      threading.Thread(target=restart, daemon=True).start()
      server._released.wait(60)
    return generate(body)

  server._generate = dies
  drill = served(retries=1, wait=60, level=level).run()
  assert not drill.failed()
  assert [r["rollout/failed"] for r in drill.metrics()] == [0] * 4
  assert [r["policy/staleness_max"] <= level for r in drill.metrics()] == (
    [True] * 4
  )
  drill.check()
  counted = runs.metrics(drill.folder)[-1]
  assert counted["engine/server_down"] == 1
  assert counted["engine/server_up"] == 1
  assert counted["engine/failovers"] > 0
