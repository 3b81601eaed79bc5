"""The command of the warm start: its gates decide where the policy goes.

It resumes after a stop or a kill with the same policy.
"""

from __future__ import annotations

import os
import subprocess
import sys

import commands
import jax
import numpy as np
import pytest
import source_tree

from anysearch_jax.policy import hf
from launch import warm_start

POLICY = "configs/graded_world_policy"


def run(output, *options):
  return commands.run(
    warm_start,
    "--config=configs/quickstart.py",
    f"--start={POLICY}",
    "--config.warm_start.steps=1",
    "--config.warm_start.demonstrations=40",
    *options,
    f"--output={output}",
    "--cache=",
  )


@pytest.mark.slow
def test_the_shipped_policy_is_accepted_again(tmp_path, monkeypatch, capsys):
  """One step at rate 0 changes nothing, so these are its own gates."""
  monkeypatch.chdir(source_tree.ROOT)
  run(tmp_path / "policy", "--config.warm_start.learning_rate=0.0")
  before, after = hf.load(POLICY), hf.load(tmp_path / "policy")
  jax.tree.map(np.testing.assert_array_equal, before.params, after.params)


@pytest.mark.slow
def test_a_policy_that_lost_its_decisions_is_rejected(tmp_path, monkeypatch):
  monkeypatch.chdir(source_tree.ROOT)
  said = run(tmp_path / "policy", "--config.warm_start.learning_rate=0.1")
  assert "The warm start is too weak: " in said
  assert (tmp_path / "policy.rejected" / "model.safetensors").is_file()
  assert not (tmp_path / "policy").exists()


# The command, which gets a signal during an optimizer step.
SIGNALLED = r"""
import os, sys
from anysearch_jax.training import train_step
from launch import flags, warm_start

number, at = map(int, sys.argv.pop(1).split("@"))
make, taken = train_step.make, []

def signalled(*args):
  step = make(*args)

  def run(*args):
    taken.append(1)
    if len(taken) == at:
      os.kill(os.getpid(), number)
    return step(*args)

  return run

train_step.make = signalled
warm_start.define_flags()
flags.run(warm_start.main, resumes=True)
"""


def made(output, signal="0@0", *options):
  """Makes a policy of a few steps, which its gates reject."""
  return subprocess.run(
    [
      sys.executable,
      "-c",
      SIGNALLED,
      signal,
      "--config=configs/quickstart.py",
      "--config.warm_start.demonstrations=60",
      "--config.warm_start.steps=10",
      "--config.warm_start.layers=1",
      "--config.warm_start.hidden=16",
      "--config.warm_start.batch_tokens=500",
      "--save_every=4",
      f"--output={output}",
      *options,
    ],
    cwd=source_tree.ROOT,
    capture_output=True,
    text=True,
    env=os.environ | {"JAX_PLATFORMS": "cpu"},
  )


@pytest.mark.slow
def test_killed_and_stopped_commands_end_with_the_same_policy(tmp_path):
  whole, often = tmp_path / "whole", tmp_path / "often"
  assert "too weak" in made(whole).stderr
  killed = made(often, "9@6")  # Two steps after a save.
  assert killed.returncode == -9
  assert [f.name for f in tmp_path.glob("often*")] == ["often.partial"]
  other = made(often, "0@0", "--config.seed=7")
  assert "seed is 42 there and 7 now" in other.stderr
  stopped = made(often, "15@3")
  assert stopped.returncode == 75
  assert stopped.stderr.splitlines()[-2:] == [
    "stopping on SIGTERM; it may take up to 120 s",
    f"saved in {often}.partial; the same command resumes from it",
  ]
  rest = made(often)
  assert "too weak" in rest.stderr and "step 10/10" in rest.stdout
  name = "model.safetensors"
  expected = (tmp_path / "whole.rejected" / name).read_bytes()
  assert (tmp_path / "often.rejected" / name).read_bytes() == expected
  assert not list(tmp_path.glob("*.partial"))
