"""Tests that a full disk ends a command with an error, and that it resumes.

A limit on the size of files simulates a small disk, which only root may mount.
"""

from __future__ import annotations

import errno
import functools
import io
import os
import pathlib
import struct
import sys

import commands
import disks
import pytest
import scripted_runs as runs
from absl import logging
from tensorboardX.proto import event_pb2

from anysearch_jax.host import disk
from anysearch_jax.launch import evaluate, train
from anysearch_jax.policy import hf
from anysearch_jax.training import checkpoint, learner, loop, metrics

CONFIG = """
import scripted_runs

def get_config():
  return scripted_runs.at_level(0, policy={policy!r})
"""


@pytest.fixture(scope="module")
def file(parts, tmp_path_factory):
  """The path of a configuration file."""
  root = tmp_path_factory.mktemp("policy")
  hf.save(root / "policy", parts["policy"])
  (root / "config.py").write_text(CONFIG.format(policy=str(root / "policy")))
  return root / "config.py"


@pytest.fixture(scope="module")
def training(parts, file):
  """`launch.train` with the scripted engine and learner, in seconds."""

  def train_in(folder, *changes):
    trainer = functools.partial(loop.Trainer, engine=runs.Engine(parts))
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(learner, "Learner", runs.Learner)
      patch.setattr(loop, "Trainer", trainer)
      return commands.run(
        train, f"--config={file}", f"--output={folder}", "--cache=", *changes
      )

  return train_in


@pytest.fixture
def small_disk(tmp_path):
  with disks.mounted(tmp_path / "disk") as folder:
    yield folder


@pytest.fixture(scope="module")
def whole(training, tmp_path_factory):
  folder = tmp_path_factory.mktemp("whole") / "run"
  assert training(folder) == ""
  return folder


def left(folder):
  """Returns what two equal runs have in common; batches of searches differ."""
  metrics, *others = runs.left(folder)
  plain = [
    {name: x for name, x in each.items() if not name.startswith("search/")}
    for each in metrics
  ]
  return plain, *others


@pytest.fixture
def printed(monkeypatch):
  """Text that logs and threads print in a command."""
  stream = io.StringIO()
  handler = logging.get_absl_handler()
  monkeypatch.setattr(handler, "filters", [])
  monkeypatch.setattr(
    handler.python_handler,
    "emit",
    lambda record: print(handler.python_handler.format(record), file=stream),
  )
  monkeypatch.setattr(
    sys, "unraisablehook", lambda raised: print(raised.exc_value, file=stream)
  )
  disk.hide_tracebacks()
  logging.get_absl_logger().addHandler(handler)
  yield stream
  logging.get_absl_logger().removeHandler(handler)


@pytest.mark.parametrize(
  "share",
  [
    0.5,
    *(
      pytest.param(share, marks=pytest.mark.slow) for share in (0.02, 0.8, 0.97)
    ),
  ],
)
def test_training_names_the_unwritten_file_and_resumes(
  share, training, whole, small_disk, printed
):
  needs = disks.needs(whole, small_disk)
  run = small_disk / "run"
  with disks.room(small_disk, int(share * needs)):
    said = training(run)
  assert said.startswith(f"anysearch train: {run}")
  assert "Traceback" not in printed.getvalue()
  assert "Event loop" not in printed.getvalue()
  assert " could not be written: No space left on device, " in said
  assert "Free some space, and start the same command again. The " in said
  saved = checkpoint.rollouts(run / "checkpoints")
  assert said.endswith(
    f"The same command resumes from checkpoint {saved[-1]}."
    if saved
    else "The same command begins anew: no rollout was saved yet."
  )
  for rollout in saved:
    assert checkpoint.sound(run / "checkpoints", rollout) == rollout
  assert training(run) == ""
  assert left(run) == left(whole)


def test_an_evaluation_reports_a_full_disk_and_resumes(tmp_path):
  def play(folder):
    return commands.run(
      evaluate,
      "--config=configs/quickstart.py",
      "--config.evaluation.questions=20",
      "--scripted=unknown_only",
      "--budgets=0,1",
      "--seeds=1",
      "--cache=",
      f"--output={folder}",
    )

  assert play(tmp_path / "whole") == ""
  with disks.files_of_at_most(9000):
    said = play(tmp_path / "cut")
  folder = tmp_path / "cut"
  assert said.startswith(f"anysearch evaluate: {folder} could not be wr")
  assert "File too large, " in said
  assert "(ulimit -f), and start the same command again." in said
  left = (tmp_path / "cut" / "episodes.partial.jsonl").read_text()
  assert 1 <= left.count("\n") < 40
  assert play(tmp_path / "cut") == ""
  name = "episodes.jsonl"
  cut, undisturbed = tmp_path / "cut" / name, tmp_path / "whole" / name
  assert cut.read_text() == undisturbed.read_text()


def _led_to(error, cause):
  error.__context__ = cause
  return error


@pytest.mark.parametrize(
  ("error", "help_"),
  [
    (OSError(errno.ENOSPC, "x"), "Free some space,"),
    (OSError(errno.EDQUOT, "x"), "Free some space, or have the quota raised,"),
    (OSError(errno.EROFS, "x"), "Have it mounted to be written to,"),
    (ValueError(f"x: {os.strerror(errno.ENOSPC)} [28]"), "Free some space,"),
    (_led_to(KeyError("x"), OSError(errno.ENOSPC, "x")), "Free some space,"),
    (ExceptionGroup("x", [OSError(errno.EIO, "x")]), "See to the disk,"),
  ],
)
def test_disk_errors_are_recognised_in_every_form(error, help_, tmp_path):
  path = tmp_path / "no" / "file"
  # Nested contexts keep the error of the inner one.
  with (
    pytest.raises(disk.DiskError) as caught,
    disk.translate_errors(tmp_path),
    disk.translate_errors(path),
  ):
    raise error
  assert str(caught.value).startswith(f"{path} could not be written: ")
  assert f"{help_} and start the same command again." in str(caught.value)
  assert caught.value.__cause__ is error


@pytest.mark.parametrize(
  "error", [KeyError("a"), FileNotFoundError(errno.ENOENT, "x"), OSError("x")]
)
def test_other_errors_are_not_translated(error, tmp_path):
  with pytest.raises(type(error)) as caught, disk.translate_errors(tmp_path):
    raise error
  assert caught.value is error


def test_a_file_is_replaced_atomically(tmp_path):
  path = tmp_path / "a.txt"
  disk.write_whole(path, "old")
  with pytest.raises(disk.DiskError), disks.files_of_at_most(100):
    disk.write_whole(path, "new" * 100)
  assert path.read_text() == "old"
  disk.write_whole(path, "new" * 100)
  assert path.read_text() == "new" * 100
  assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_an_export_on_a_full_disk_leaves_the_earlier_one(small_disk, parts):
  policy = parts["policy"]
  hf.save(small_disk / "policy", policy)
  before = {f.name: f.read_bytes() for f in (small_disk / "policy").iterdir()}
  size = sum(map(len, before.values()))
  with (
    disks.room(small_disk, size // 2),
    pytest.raises(Exception, match="No space left"),
  ):
    hf.save(small_disk / "policy", policy)
  after = {f.name: f.read_bytes() for f in (small_disk / "policy").iterdir()}
  assert after == before
  assert [path.name for path in small_disk.iterdir()] == ["policy"]


# What a run writes beside its checkpoints.


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
