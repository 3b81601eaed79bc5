"""Compares two `jax.distributed` processes with one of as many devices."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import types

import jax
import numpy as np
import pytest
import small_run
import waits
from absl import app, flags

from anysearch_jax.launch import distributed, stopping
from anysearch_jax.policy import decoder, hf
from anysearch_jax.training import checkpoint

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Processes busy-wait for each other, which is slow on a loaded machine.
DEADLINE = 420
CONFIG = """
from anysearch_jax import config as c

def get_config():
  return c.ExperimentConfig(
    policy={policy!r},
    compute_dtype="float32",
    questions=4,
    group=2,
    save_every=1,
    curriculum=c.CurriculumConfig(
      max_budget=2, phase1_steps=0, total_steps=4, steps_per_rollout=2, window=4
    ),
    objective=c.ObjectiveConfig(old_logp="trainer"),
    optimizer=c.OptimizerConfig(learning_rate=1e-3),
    episode=c.EpisodeConfig(
      prompts="world", max_generated=24, max_context=110
    ),
    engine=c.EngineConfig(
      slots=8, max_context=112, page=8, lanes=(8,), prefill_lanes=4,
      prefill_chunk=16, decode_steps=8
    ),
    batch=c.BatchConfig(
      row_lengths=(128,), micro_batch_tokens=512, max_micro_batches=4
    ),
    mesh=c.MeshConfig(data=2, fsdp=2),
    checkpoint=c.CheckpointConfig(export_dtype="float32"),
  )
"""
# Times differ between runs; batch occupancy depends on the split of episodes.
PASSING = (
  *("time/", "compile/", "train/tokens_per_second", "engine/prefill_calls"),
  *("engine/decode_calls", "engine/lanes_"),
)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
  """A policy, a configuration and a cache of compiled programs."""
  root = tmp_path_factory.mktemp("distributed")
  policy = small_run.parts()["policy"]
  a = dataclasses.replace(policy.architecture, heads=4, kv_heads=4, head_dim=4)
  hf.save(
    root / "policy",
    policy._replace(params=decoder.initialize(a, 0), architecture=a),
  )
  (root / "config.py").write_text(CONFIG.format(policy=str(root / "policy")))
  return root


def train(root, output, *, each=((),), meanwhile=lambda started: None):
  """Runs the command in each process; returns exit codes and output.

  `each` has the extra arguments of each process; `meanwhile` is called when
  all have started.
  """
  address = f"127.0.0.1:{waits.free_port()}"
  count = len(each)
  environment = os.environ | {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": os.environ["XLA_FLAGS"].replace("=8", f"={4 // count}"),
  }
  started, logs = [], [root / f"log-{i}" for i in range(count)]
  try:
    for i, (arguments, log) in enumerate(zip(each, logs)):
      together = (f"--coordinator={address}", f"--processes={count}")
      command = [
        *(sys.executable, "-m", "anysearch_jax.launch.train"),
        *(f"--config={root / 'config.py'}", f"--cache={root / 'cache'}"),
        *(f"--output={output}", *arguments),
        *((*together, f"--process={i}") if count > 1 else ()),
      ]
      with log.open("w") as out:
        started.append(
          subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=ROOT,
          )
        )
    meanwhile(started)
    end = time.monotonic() + DEADLINE
    codes = [p.wait(max(0.0, end - time.monotonic())) for p in started]
  finally:
    for process in started:
      process.kill()
      process.wait()
  return codes, [log.read_text() for log in logs]


def finish(root, output, *, count):
  codes, logs = train(root, output, each=[()] * count)
  assert codes == [0] * count, "\n".join(log[-3000:] for log in logs)
  return logs


@pytest.fixture(scope="module")
def two(root):
  logs = finish(root, root / "two", count=2)
  # The first process reports the progress.
  assert ["rollout 2/2" in log for log in logs] == [True, False]
  return root / "two"


def metrics(folder):
  lines = (folder / "metrics.jsonl").read_text().splitlines()
  return [
    {n: x for n, x in json.loads(line).items() if not n.startswith(PASSING)}
    for line in lines
  ]


def weights_of(folder):
  return hf.load(folder / "policy").params


def files(folder):
  """Returns the names that depend neither on time nor on who wrote a part."""
  return sorted(
    str(path.relative_to(folder))
    for path in folder.rglob("*")
    if path.is_file() and not {"checkpoints", "tensorboard"} & set(path.parts)
  )


@pytest.mark.slow
def test_two_processes_train_as_one(root, two):
  finish(root, one := root / "one", count=1)
  assert len(metrics(two)) == 2
  for mine, theirs in zip(metrics(two), metrics(one), strict=True):
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
      np.testing.assert_allclose(
        mine[name], value, rtol=1e-5, atol=1e-6, err_msg=name
      )
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-5),
    weights_of(two),
    weights_of(one),
  )
  for rollout in (0, 1):
    name = f"trajectories/rollout-{rollout:05d}.jsonl"
    lines = (two / name).read_text()
    assert len(lines.splitlines()) == 4
    assert lines == (one / name).read_text()
    assert checkpoint.sound(two / "checkpoints", rollout + 1) == rollout + 1
  assert files(two) == files(one)
  assert len(list((two / "tensorboard").iterdir())) == 1


@pytest.mark.slow
def test_two_processes_resume_to_the_same_bits(root, two):
  folder = shutil.copytree(two, root / "resumed")
  shutil.rmtree(folder / "checkpoints" / "2")
  shutil.rmtree(folder / "policy")
  finish(root, folder, count=2)
  assert metrics(folder) == metrics(two)
  jax.tree.map(
    np.testing.assert_array_equal, weights_of(folder), weights_of(two)
  )


def wait_for_a_rollout(output, started):
  written = output / "metrics.jsonl"

  def has_one():
    assert all(process.poll() is None for process in started)
    return written.is_file() and "\n" in written.read_text()

  waits.wait_for(has_one, DEADLINE)


@pytest.mark.slow
def test_all_processes_stop_when_one_of_them_gets_a_signal(root):
  output = root / "stopped"

  def stop(started):
    wait_for_a_rollout(output, started)
    started[1].terminate()

  long = ("--config.curriculum.total_steps=4000", "--config.save_every=1000")
  codes, logs = train(root, output, each=[long, long], meanwhile=stop)
  assert codes == [stopping.RESUME] * 2, "\n".join(log[-3000:] for log in logs)
  (saved,) = checkpoint.rollouts(output / "checkpoints")
  assert saved == len(metrics(output))
  for log in logs:
    assert f"saved checkpoint {saved}; the same command resumes" in log


@pytest.mark.slow
@pytest.mark.parametrize(
  ("number", "lost"),
  [("SIGKILL", 0), ("SIGKILL", 1), ("SIGSTOP", 0), ("SIGSTOP", 1)],
)
def test_a_process_that_loses_another_ends_and_can_resume(root, number, lost):
  output = root / f"{number}-{lost}"

  def lose(started):
    wait_for_a_rollout(output, started)
    waits.wait_for(lambda: checkpoint.rollouts(output / "checkpoints"), 300)
    started[lost].send_signal(signal.Signals[number])
    started[1 - lost].wait(60)
    started[lost].kill()

  each = [("--config.curriculum.total_steps=4000", "--heartbeat=20")] * 2
  codes, logs = train(root, output, each=each, meanwhile=lose)
  log = logs[1 - lost]
  assert "Traceback" not in log
  if codes[1 - lost] == -signal.SIGABRT:  # JAX noticed before a collective.
    assert "coordination" in log.lower()
  else:
    assert codes[1 - lost] == stopping.RESUME
    assert "launch: a collective failed (" in log
    assert "The same command resumes from checkpoint" in log
  assert checkpoint.sound(output / "checkpoints", 1) == 1


@pytest.mark.slow
def test_a_stop_during_a_compilation_ends_both_processes_soon(root):
  output = root / "compiling"

  def stop(started):
    waits.wait_for((output / "metrics.jsonl").is_file, DEADLINE)
    started[1].terminate()

  each = [("--grace=0", "--heartbeat=20", f"--cache={root / 'cold'}")] * 2
  codes, logs = train(root, output, each=each, meanwhile=stop)
  assert codes[1] == stopping.RESUME
  assert codes[0] in (stopping.RESUME, -signal.SIGABRT)
  assert (
    "no checkpoint within 0 s (--grace). The same command begins" in logs[1]
  )


@pytest.mark.slow
def test_processes_of_different_runs_all_stop_with_an_error(root):
  codes, logs = train(
    root, root / "different", each=[("--config.seed=1",), ("--config.seed=2",)]
  )
  assert codes == [1, 1]
  for log in logs:
    assert "Process 1 has config.seed 2, not 1 as process 0; start the" in log
  assert not (root / "different").exists()


@pytest.mark.parametrize(
  ("given", "sentence"),
  [
    ((None, 2, 0, False), "found None, 2, 0; expected host:port"),
    (("a:1", None, None, True), "None and --distributed; expected host:port"),
    (("a:1", 2, 0, True), "0 and --distributed; expected host:port"),
    (("a", 2, 0, False), "found a, 2, 0; expected host:port"),
    (("a:1", 2, 2, False), "found a:1, 2, 2; expected host:port"),
  ],
)
def test_flags_that_name_no_processes_are_refused(given, sentence, monkeypatch):
  names = "coordinator", "processes", "process", "distributed"
  values = types.SimpleNamespace(**dict(zip(names, given, strict=True)))
  monkeypatch.setattr(flags, "FLAGS", values)
  with pytest.raises(app.UsageError, match=sentence):
    distributed.is_named()


def test_a_process_that_waits_in_vain_for_others_reports_it(root):
  each = ("--coordinator=127.0.0.1:1", "--processes=2", "--process=1")
  codes, (log,) = train(
    root, root / "alone", each=[(*each, "--connect_timeout=1")]
  )
  assert codes == [1]
  assert "waited 1 seconds for 2 processes at 127.0.0.1:1, of which" in log
