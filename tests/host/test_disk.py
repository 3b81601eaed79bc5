"""Tests that full disks, read-only folders and cut files lose no data."""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import struct
import subprocess
import sys

import commands
import disks
import pytest
import scripted_runs as runs
import small_run
from tensorboardX.proto import event_pb2

from anysearch_jax.evaluation import journal
from anysearch_jax.policy import hf
from anysearch_jax.training import learner, metrics
from launch import evaluate, train


@pytest.fixture
def disk(tmp_path):
  with disks.mounted(tmp_path / "disk") as folder:
    yield folder


@pytest.fixture(scope="module")
def parts():
  return small_run.parts()


@pytest.fixture(scope="module")
def finished(parts, tmp_path_factory):
  return runs.finished(parts, tmp_path_factory)


def _says_that_it_is_full(error: BaseException) -> bool:
  """Returns whether the error or one of its causes names the full disk."""
  seen = []
  while error is not None and error not in seen:
    seen.append(error)
    error = error.__cause__ or error.__context__
  return any("No space left on device" in str(each) for each in seen)


@pytest.mark.parametrize(
  "share",
  [
    0.25,
    *(
      pytest.param(share, marks=pytest.mark.slow)
      for share in (0.02, 0.1, 0.4, 0.55, 0.7, 0.85)
    ),
  ],
)
def test_a_run_stops_on_a_full_disk_and_resumes_when_there_is_space(
  share, finished, parts, disk, monkeypatch
):
  whole, _, _ = finished(0)
  monkeypatch.setattr(learner, "Learner", runs.Learner)
  needs = disks.needs(whole, disk)
  with disks.room(disk, int(share * needs)), pytest.raises(Exception) as caught:
    runs.run(disk / "run", parts, runs.at_level(0))
  assert _says_that_it_is_full(caught.value)
  runs.run(disk / "run", parts, runs.at_level(0))
  assert runs.left(disk / "run") == runs.left(whole)


def test_an_export_on_a_full_disk_leaves_the_earlier_one(disk, parts):
  policy = parts["policy"]
  hf.save(disk / "policy", policy)
  before = {f.name: f.read_bytes() for f in (disk / "policy").iterdir()}
  size = sum(map(len, before.values()))
  with disks.room(disk, size // 2), pytest.raises(Exception) as caught:
    hf.save(disk / "policy", policy)
  assert _says_that_it_is_full(caught.value)
  after = {f.name: f.read_bytes() for f in (disk / "policy").iterdir()}
  assert after == before
  assert [path.name for path in disk.iterdir()] == ["policy"]


def _row(place):
  return {"place": place, "text": "x" * 50}


def _journal(folder):
  return journal.Journal(folder / "rows.jsonl", 30, lambda row: row["place"])


@pytest.mark.parametrize("size", [300, 333])
def test_an_evaluation_on_a_full_disk_resumes_where_it_stopped(tmp_path, size):
  with pytest.raises(OSError), disks.files_of_at_most(size):
    with _journal(tmp_path) as rows:
      for place in range(30):
        rows.add(_row(place))
  with _journal(tmp_path) as rows:
    # Every complete line is kept.
    assert len(rows) == sum(
      size >= end
      for end in itertools.accumulate(
        len(json.dumps(_row(place))) + 1 for place in range(30)
      )
    )
    for place in range(30):
      if place not in rows:
        rows.add(_row(place))
    rows.finish()
  found = list(journal.read(tmp_path / "rows.jsonl"))
  assert found == [_row(place) for place in range(30)]


def test_incomplete_records_of_a_rollout_are_dropped(tmp_path):
  def record(writer, rollout):
    writer.write(
      2 * rollout + 2,
      {"rollout": rollout, "step": 2 * rollout + 2, "x": 0.5},
      [{"y": 1.0}, {"y": 2.0}],
    )

  with metrics.Writer(tmp_path) as writer:
    record(writer, 0)
    record(writer, 1)
  whole = [
    (tmp_path / name).read_bytes() for name in ("metrics.jsonl", "steps.jsonl")
  ]
  for name in ("metrics.jsonl", "steps.jsonl"):
    path = tmp_path / name
    path.write_bytes(path.read_bytes()[:-7])
  with metrics.Writer(tmp_path) as writer:
    writer.keep_before(1)
    record(writer, 1)
  assert whole == [
    (tmp_path / name).read_bytes() for name in ("metrics.jsonl", "steps.jsonl")
  ]


def _events(folder: pathlib.Path):
  """Yields the records of TensorBoard's event files."""
  for path in sorted(folder.iterdir()):
    content = path.read_bytes()
    while content:
      (size,) = struct.unpack("<Q", content[:8])
      yield event_pb2.Event.FromString(content[12 : 12 + size])
      content = content[16 + size :]


def test_tensorboard_gets_metrics_while_the_run_continues(tmp_path):
  with metrics.Writer(tmp_path) as writer:
    writer.write(2, {"rollout": 0, "reward/em": 0.25, "x": float("nan")}, [])
    # The record can be read before the writer is closed.
    first, found = _events(tmp_path / "tensorboard")
  assert first.file_version == "brain.Event:2"
  values = {v.tag: v.simple_value for v in found.summary.value}
  assert (found.step, values) == (2, {"rollout": 0.0, "reward/em": 0.25})


# Read-only folders: not even root can create a folder in /proc.


def test_an_unusable_compilation_cache_gives_a_warning(tmp_path):
  (tmp_path / "file").touch()
  code = (
    "import jax, sys; from launch import jax_setup\n"
    "for cache in sys.argv[1:]: jax_setup.configure(threads=0, cache=cache)\n"
    "print(jax.config.jax_compilation_cache_dir)\n"
  )
  environment = dict(os.environ)
  environment.pop("JAX_COMPILATION_CACHE_DIR", None)
  done = subprocess.run(
    [sys.executable, "-c", code, "/proc/nowhere", str(tmp_path / "file")],
    env=environment,
    capture_output=True,
    text=True,
    timeout=300,
    check=False,
  )
  assert (done.returncode, done.stdout) == (0, "None\n"), done.stderr
  assert done.stderr.count("found no place for compiled programs at") == 2
  assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
  ("command", "arguments"), [(train, []), (evaluate, ["--scripted=expert"])]
)
def test_a_read_only_folder_is_refused_with_a_sentence(command, arguments):
  refused = commands.run(
    command,
    *("--cache=", "--config=configs/quickstart.py", *arguments),
    "--output=/proc/nowhere/run",
  )
  assert refused.startswith(f"{command.__name__}: ")
  assert "/proc/nowhere" in refused
