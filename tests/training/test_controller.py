"""A controller (here a thread) and trainers compute what one process does."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import pathlib
import socket
import time
from unittest import mock

import controlled
import fake_sglang
import pytest
import scripted
import sglang_engines
import small_run

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.rollout.servers import server as server_lib
from anysearch_jax.training import (
  checkpoint,
  collection,
  controller,
  learner,
  messages,
  remote,
  sampler,
  timeline,
)


def _config(level, **settings):
  return dataclasses.replace(
    small_run.CONFIG,
    save_every=1,
    pipeline=config_lib.PipelineConfig(async_level=level),
    **settings,
  )


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
  """Runs in one process, by their level."""
  made = {}

  def run(level):
    if level not in made:
      made[level] = tmp_path_factory.mktemp(f"level-{level}") / "run"
      small_run.train(made[level], small_run.parts(), _config(level))
    return made[level]

  return run


def same(folder, expected):
  """Asserts equal metrics, but for the number of devices that sample too."""
  path = expected / "metrics.jsonl"
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  for line in lines:
    line.pop("device/count", None)
  path.write_text("".join(json.dumps(line) + "\n" for line in lines))
  small_run.assert_same_bits(folder, expected)


@pytest.mark.parametrize("level", [0, 1])
def test_a_run_with_a_controller_ends_on_the_bits_of_one_process(
  level, alone, tmp_path
):
  folder, config = tmp_path / "run", _config(level)
  with controlled.Controlled(folder, config) as made:
    assert controlled.train(folder, config, made)
    assert made.made.wait() is True
  same(folder, alone(level))
  assert not (folder / messages.WEIGHTS).exists()


def test_adapters_alone_travel_and_give_the_same_bits(tmp_path):
  """In bfloat16, where a merged or an uncast weight would differ."""
  lora = config_lib.LoraConfig(rank=2, targets=("q", "down"))
  config = _config(1, lora=lora, compute_dtype="bfloat16")
  small_run.train(tmp_path / "alone", small_run.parts(), config)
  folder, published = tmp_path / "run", []
  with controlled.Controlled(folder, config) as made:

    def look(trainer, done):
      for path in (folder / messages.WEIGHTS).glob("[0-9]*"):
        published.append(sum(x.stat().st_size for x in path.iterdir()))

    assert controlled.train(folder, config, made, on_event=look)
  same(folder, tmp_path / "alone")
  whole = sum(x.stat().st_size for x in (tmp_path / "policy").iterdir())
  assert published and max(published) < whole / 10


def _served(server, folder):
  """Returns parts and configuration of a run over a server."""
  parts = {
    "policy": sglang_engines.policy(),
    "questions": [types.Question(str(i), "c", ("b",)) for i in range(16)],
    "retriever": scripted.Retriever({"b": [types.Passage("1", "a", "b")]}),
  }
  return parts, config_lib.changed(
    _config(1),
    episode={"max_generated": 20, "max_context": 150},
    engine={"kind": "sglang", "max_context": 150},
    batch={"row_lengths": (160,), "micro_batch_tokens": 320},
    sglang={"urls": (server.url,), "weights": str(folder / "other")},
    watch={"gap_rollouts": 1000},
  )


def test_servers_load_what_trainers_published(tmp_path, monkeypatch):
  """Each version as a folder in the run's, in the dtype that servers have."""
  monkeypatch.setattr(server_lib, "_FIRST_PAUSE", 0.001)
  monkeypatch.setattr(fake_sglang, "CONTEXT", 200)
  answer = fake_sglang.ids("<", "answer", ">", "b", "</answer>")
  with fake_sglang.Server(answer) as server:
    parts, config = _served(server, tmp_path)
    folder = tmp_path / "run"
    with controlled.Controlled(folder, config, parts=parts) as made:
      assert controlled.train(folder, config, made)
    loaded = [
      body["model_path"] for body in server.bodies("/update_weights_from_disk")
    ]
  weights = folder / messages.WEIGHTS
  names = [str(weights / version) for version in "012"]
  assert [path.rpartition("-")[0] for path in loaded] == names
  ages = [x["policy/staleness_max"] for x in small_run.records(folder)]
  assert ages == [0, 1, 1, 1]
  name = f"engine/server/{server.url.partition('://')[2]}/fingerprint"
  assert all(0 < x[name] < 0.1 for x in small_run.records(folder))


@pytest.mark.parametrize("apart", [False, True])
def test_an_episode_under_way_goes_on_with_new_weights(
  apart, tmp_path, monkeypatch
):
  """A turn of rollout 1 waits for weights that training on rollout 0 makes."""
  monkeypatch.setattr(server_lib, "_FIRST_PAUSE", 0.001)
  monkeypatch.setattr(fake_sglang, "CONTEXT", 200)
  sample, versions = sampler.Sampler.sample, collections.defaultdict(set)

  def held(self, rollout):
    if rollout == 1:
      server.hold_at = 3
    found = sample(self, rollout)
    for group in found.collected.groups:
      versions[rollout] |= {frozenset(t.versions) for t in group.trajectories}
    return found

  monkeypatch.setattr(sampler.Sampler, "sample", held)
  answer = fake_sglang.ids("<", "answer", ">", "b", "</answer>")
  folder = tmp_path / "run"
  with fake_sglang.Server(answer) as server:
    parts, config = _served(server, tmp_path)
    config = config_lib.changed(config, pipeline={"partial": True})
    if not apart:
      small_run.train(folder, parts, config)
    else:
      with controlled.Controlled(folder, config, parts=parts) as made:
        assert controlled.train(folder, config, made)
        assert made.made.wait() is True
  # Tokens of the driver have no version.
  assert any({0, 1} <= {*each} for each in versions[1])
  assert versions[0] == {frozenset((-1, 0))}
  staleness = [x["policy/staleness_mean"] for x in small_run.records(folder)]
  assert len(staleness) == 4 and 0 < staleness[1] < 1


def test_servers_load_the_adapters_that_trainers_published(
  tmp_path, monkeypatch
):
  """Over the policy's own folder."""
  monkeypatch.setattr(server_lib, "_FIRST_PAUSE", 0.001)
  monkeypatch.setattr(fake_sglang, "CONTEXT", 200)
  answer = fake_sglang.ids("<", "answer", ">", "b", "</answer>")
  with fake_sglang.Server(answer) as server:
    server.lora = {
      "enable_lora": True,
      "max_lora_rank": 2,
      "lora_target_modules": ["all"],
    }
    parts, config = _served(server, tmp_path)
    lora = config_lib.LoraConfig(rank=2)
    config = dataclasses.replace(config, lora=lora, policy="base")
    folder, kept = tmp_path / "run", []

    def look(trainer, done):
      loads = [b["lora_path"] for b in server.bodies("/load_lora_adapter")]
      kept.append([pathlib.Path(path).is_dir() for path in loads[-2:]])

    with controlled.Controlled(folder, config, parts=parts) as made:
      assert controlled.train(folder, config, made, on_event=look, adapts=True)
    whole = [
      b["model_path"] for b in server.bodies("/update_weights_from_disk")
    ]
    loads = [b["lora_path"] for b in server.bodies("/load_lora_adapter")]
    turns = [b for b in server.bodies("/generate") if b["logprob_start_len"]]
  assert whole == [str(tmp_path / "policy")]
  weights = folder / messages.WEIGHTS
  names = [str(weights / version) for version in "012"]
  assert [path.rpartition("-")[0] for path in loads] == names
  assert turns and all(body["lora_path"] for body in turns)
  assert kept[:-1] and all(map(all, kept[:-1]))
  name = f"engine/server/{server.url.partition('://')[2]}/fingerprint"
  assert all(0 < x[name] < 0.1 for x in small_run.records(folder))


def _spans(folder, name):
  events = json.loads((folder / "timeline.json").read_text())
  return {
    event["args"]["rollout"]: (event["ts"] / 1e6, event["dur"] / 1e6)
    for event in events
    if event["name"] == name and event["ph"] == "X"
  }


def test_the_controller_samples_while_trainers_train(tmp_path, monkeypatch):
  """Both sides sleep, as if each had a machine of its own."""
  collect, steps = collection.Collector.collect, learner.Learner.steps

  def slowly(of):
    def call(*args):
      time.sleep(1.5)
      return of(*args)

    return call

  monkeypatch.setattr(collection.Collector, "collect", slowly(collect))
  monkeypatch.setattr(learner.Learner, "steps", slowly(steps))
  for level in (0, 1):
    folder, config = tmp_path / f"{level}", _config(level)
    with controlled.Controlled(folder, config) as made:
      controlled.train(folder, config, made, trace=True)
    played, trained = (_spans(folder, x) for x in ("collect", "train"))
    overlap = [
      trained[k][0] < sum(played[k + 1]) and played[k + 1][0] < sum(trained[k])
      for k in range(3)
    ]
    # Rollout 1 of level 1 may be sampled before the training on rollout 0.
    assert any(overlap) is all(overlap[1:]) is bool(level)


@pytest.mark.parametrize("error", [ZeroDivisionError, types.EngineError])
def test_a_bug_of_the_sampler_is_raised_between_steps_and_an_outage_later(
  error, tmp_path, monkeypatch
):
  class Sampler:
    def set_params(self, *unused):
      raise error

    def stop(self):
      pass

  monkeypatch.setattr(remote.Pipeline, "_handed", lambda *args: args[-1])
  ahead = remote.Pipeline(
    Sampler(),
    (),
    config=_config(0),
    policy=None,
    folder=tmp_path,
    first=0,
    rollouts=1,
    level=0,
    timeline=timeline.Timeline(time.monotonic),
  )
  bug = error is ZeroDivisionError
  with ahead:
    ahead.fill(0, lambda: "weights")
    ahead._thread.join(30)
    with pytest.raises(error) if bug else contextlib.nullcontext():
      ahead.check()
    with pytest.raises(error):
      ahead.take()


class _KilledError(Exception):
  pass


def _dies(rollout):
  """Ends a trainer as if killed, after a rollout."""

  def on_event(trainer, done):
    if done == rollout:
      raise _KilledError

  return on_event


@pytest.mark.parametrize("level", [0, 1])
def test_a_controller_that_is_killed_is_begun_again(level, alone, tmp_path):
  folder, config = tmp_path / "run", _config(level)
  with controlled.Controlled(folder, config) as made:

    def restart(trainer, done):
      if done in (0, 2):
        made.kill()
        made.start()

    assert controlled.train(folder, config, made, on_event=restart)
  same(folder, alone(level))


@pytest.mark.parametrize("level", [0, 1])
def test_trainers_that_are_killed_begin_the_controller_again(
  level, alone, tmp_path
):
  folder, config = tmp_path / "run", _config(level)
  with controlled.Controlled(folder, config) as made:
    for rollout in (0, 1):
      with pytest.raises(_KilledError):
        controlled.train(folder, config, made, on_event=_dies(rollout))
    assert controlled.train(folder, config, made)
  same(folder, alone(level))


def test_a_stop_of_the_controller_saves_and_ends_both(alone, tmp_path):
  folder, config = tmp_path / "run", _config(1)
  with controlled.Controlled(folder, config) as made:

    def stop(trainer, done):
      if done == 1:
        made.made.stop()
        assert trainer._stopping.wait(60)

    assert not controlled.train(folder, config, made, on_event=stop)
    assert made.made.wait() is False
  assert checkpoint.rollouts(folder / "checkpoints")[-1] == 2
  with controlled.Controlled(folder, config) as made:
    assert controlled.train(folder, config, made)
  same(folder, alone(1))


def test_a_controller_of_another_run_refuses(tmp_path, monkeypatch):
  folder, config = tmp_path / "run", _config(0)
  monkeypatch.setattr(controller, "_VISIBLE", 0.2)
  with controlled.Controlled(folder, config, secret="right") as made:
    said = "have config.seed 1, not 0 as the controller has; expected the same"
    wrong = {"key": "wrong"}, "found no key or another one; expected"
    other = {"key": "right", "identity": {"config.seed": 1}}, said
    for client, sentence in (wrong, other):
      with pytest.raises(messages.RefusedError, match=sentence):
        controlled.train(folder, config, made, **client)
    with pytest.raises(messages.RefusedError, match="--output that both see"):
      controlled.train(tmp_path / "elsewhere", config, made, key="right")


def test_waiting_for_a_controller_has_an_end(tmp_path):
  client = remote.Client(url="http://127.0.0.1:9", away=0.5)
  began = time.monotonic()
  with pytest.raises(messages.AwayError, match="no controller for 0 seconds"):
    while True:
      client.ask("about")
  assert time.monotonic() - began < 30
  assert "waits for the controller" in client.waits()


def test_a_controller_without_trainers_ends(tmp_path):
  with controlled.Controlled(tmp_path, _config(0), away=0.3) as made:
    assert made.made.said().startswith("waits for trainers")
    with pytest.raises(messages.AwayError, match="Heard nothing of trainers"):
      made.made.wait()


def test_weights_of_replaced_trainers_do_not_count(tmp_path, monkeypatch):
  monkeypatch.setattr(controller, "_visible", lambda there: True)
  with controlled.Controlled(tmp_path, _config(0)) as of:
    late, new, made = mock.Mock(), mock.Mock(), of.made
    late.set_params.side_effect = lambda *_: setattr(made, "_session", "b")
    asked = {"session": "", "rollout": 1, "version": 5, "delta": 0, "scores": 0}
    made._load(late, asked)
    made._load(late, asked)
    made._load(new, asked | {"session": "b", "version": 3})
    assert late.set_params.call_count == new.set_params.call_count == 1


@pytest.mark.parametrize("asked", ["GET /health", "POST /about"])
def test_a_client_that_goes_away_raises_nothing(asked):
  """An error would be a traceback in the controller's log."""
  ours, theirs = socket.socketpair()
  theirs.sendall(f"{asked} HTTP/1.1\r\n\r\n".encode())
  theirs.close()
  made = mock.Mock(**{"said.return_value": "samples"})
  settings = {"made": made, "secret": ""}
  with ours:
    type("_", (controlled.command._Handler,), settings)(ours, ("", 0), None)
  assert made.said.called is asked.startswith("GET")


def test_a_damaged_message_is_sent_again(tmp_path):
  with controlled.Controlled(tmp_path, _config(0), about={"a": 1}) as made:
    client = remote.Client(url=made.url)
    encode = remote.processes.encode
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(remote.processes, "encode", lambda x: encode(x)[:-1] + b"x")
      assert client.ask("about") is None
      assert "another SHA-256" in client.waits()
      patch.setattr(remote.processes, "encode", encode)
      assert (client.ask("about"), client.waits()) == ({"a": 1}, "")
