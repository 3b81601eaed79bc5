"""Runs that are logged to trackers, read back with the trackers' own code."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sqlite3
import struct
import sys
import time

import pytest
import scripted_runs as runs

from anysearch_jax.config import settings
from anysearch_jax.training import trackers


def wandb_records(folder):
  """Yields the records of offline runs: LevelDB's log format, 7 bytes in."""
  internal = pytest.importorskip("wandb.proto.wandb_internal_pb2")
  for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
    data, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
      if (left := 2**15 - at % 2**15) < 7:
        at += left
        continue
      _, size, kind = struct.unpack_from("<IHB", data, at)
      record += data[at + 7 : at + 7 + size]
      at += 7 + size
      if kind in (1, 4):  # A whole record, or the last part of one.
        yield internal.Record.FromString(record)
        record = b""


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
  """An empty database; its tables take seconds to make."""
  mlflow = pytest.importorskip("mlflow")
  path = tmp_path_factory.mktemp("mlflow") / "empty.db"
  mlflow.MlflowClient(f"sqlite:///{path}").search_experiments()
  return path


@pytest.fixture
def database(empty, tmp_path, monkeypatch):
  path = tmp_path / "mlflow.db"
  shutil.copy(empty, path)
  monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{path}")
  return path


def track(names, folder, parts, *, kill=None, code=None):
  """Trains with trackers; with `code` the command exits with it."""
  config = runs.at_level(0)
  values = settings.to_dict(config)
  with trackers.open_senders(names, folder=folder, config=values) as sinks:
    runs.run(folder, parts, config, kill=kill, sinks=sinks)
    if code is not None:
      sys.exit(code)


def written(folder, name):
  """Returns (step, value) of each rollout in metrics.jsonl."""
  lines = (folder / "metrics.jsonl").read_text().splitlines()
  return [(r["step"], r[name]) for r in map(json.loads, lines)]


def test_a_stopped_run_goes_on_in_mlflow(parts, tmp_path, scripted, database):
  from mlflow import MlflowClient

  client, folder = MlflowClient(), tmp_path / "mine-42"
  folder.mkdir()

  def found():
    (run,) = client.search_runs(
      [client.get_experiment_by_name("anysearch").experiment_id]
    )
    return run

  with pytest.raises(SystemExit):
    track(["mlflow"], folder, parts, kill=1, code=os.EX_TEMPFAIL)
  assert (found().info.status, found().info.run_name) == ("KILLED", "mine-42")
  assert found().data.params["curriculum.total_steps"] == "12"
  track(["mlflow"], folder, parts)
  assert found().info.status == "FINISHED"
  history = client.get_metric_history(found().info.run_id, "reward/em")
  assert [(m.step, m.value) for m in history] == written(folder, "reward/em")


def test_a_stopped_run_goes_on_in_wandb(parts, tmp_path, scripted, monkeypatch):
  pytest.importorskip("wandb")
  monkeypatch.setenv("WANDB_MODE", "offline")
  folder = tmp_path / "mine-42"
  folder.mkdir()
  with pytest.raises(SystemExit):
    track(["wandb"], folder, parts, kill=1, code=os.EX_TEMPFAIL)
  time.sleep(1.1)  # An offline run's folder is named after the second.
  track(["wandb"], folder, parts)
  deadline = time.monotonic() + 60
  records = []  # The process of W&B writes the last ones after `finish`.
  while sum(r.HasField("exit") for r in records) < 2:
    assert time.monotonic() < deadline
    records = list(wandb_records(folder))
  started = [r.run for r in records if r.HasField("run")]
  number = json.loads((folder / "trackers.json").read_text())["wandb"]
  assert {(r.run_id, r.display_name) for r in started} == {(number, "mine-42")}
  config = {u.key: u.value_json for u in started[0].config.update}
  assert json.loads(config["curriculum"])["total_steps"] == 12
  assert sum(r.HasField("preempting") for r in records) == 1
  assert [r.exit.exit_code for r in records if r.HasField("exit")] == [1, 0]
  rows = [
    {item.nested_key[0]: json.loads(item.value_json) for item in r.history.item}
    for r in records
    if r.HasField("history")
  ]
  shown = [(row["_step"], row["reward/em"]) for row in rows]
  assert shown == written(folder, "reward/em")


def test_a_tracker_that_breaks_loses_records_and_no_training(
  parts, tmp_path, scripted, database, caplog
):
  folder = tmp_path / "run"
  folder.mkdir()
  config = runs.at_level(0)
  with (
    caplog.at_level(logging.WARNING),
    trackers.open_senders(["mlflow"], folder=folder, config={}) as sinks,
  ):
    with sqlite3.connect(database) as broken:
      broken.execute("DROP TABLE metrics")
    runs.run(folder, parts, config, sinks=sinks)
  assert len(written(folder, "reward/em")) == runs.ROLLOUTS
  assert (folder / "policy" / "config.json").is_file()
  first, last = [r.getMessage() for r in caplog.records if r.name == "absl"]
  assert "--mlflow: " in first and "no such table: metrics" in first
  assert last == (
    "--mlflow: 6 of 6 records were not sent; metrics.jsonl has all."
  )


def test_a_missing_package_is_refused_with_its_command(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "mlflow", None)
  with (
    pytest.raises(ValueError, match=r"--mlflow: .*pip install .*\[mlflow\]'"),
    trackers.open_senders(["mlflow"], folder=tmp_path, config={}),
  ):
    pass


def test_a_tracker_that_cannot_open_is_refused(tmp_path, database, monkeypatch):
  (tmp_path / "trackers.json").write_text('{"mlflow": "0123"}')
  with (
    pytest.raises(ValueError, match=r"--mlflow: .*0123.*trackers.json, a new"),
    trackers.open_senders(["mlflow"], folder=tmp_path, config={}),
  ):
    pass
