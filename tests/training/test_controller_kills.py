"""Kills a controller and its trainers at random moments, as processes.

Whatever dies is restarted by the same command, as a supervisor does. A real
server samples where tests/launch/test_node.py finds SGLang.
"""

from __future__ import annotations

import os
import random
import shlex
import signal
import subprocess
import time

import pytest
import roles
import small_run
import waits

from anysearch_jax.rollout.sglang import adapters
from anysearch_jax.training import messages

pytestmark = pytest.mark.slow

SGLANG = os.environ.get("ANYSEARCH_SGLANG_COMMAND", "")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
  return roles.prepare(tmp_path_factory.mktemp("roles"))


def played(root, name, steps, *, trainers, kills=0):
  """Runs to the end, with kills; returns the run folder."""
  draws = random.Random(name)
  rollouts, output = steps // 2, root / name
  total = f"--config.curriculum.total_steps={steps}"
  with roles.Roles(root, output, total, trainers=trainers) as run:
    for i in range(kills):
      trained = i * (rollouts - 1) // kills
      run.wait_for_lines(trained)
      # At a random moment, but not so late that the run ends before.
      run.wait_for_lines(trained + 1, seconds=draws.uniform(0, 15))
      run.kill(draws.choice([roles.CONTROLLER, *map(str, range(trainers))]))
    run.wait()
    assert run.kills == kills
    assert {*run.ended.values()} == {0}
  assert run.lines() == rollouts
  assert not (output / messages.WEIGHTS).exists()
  return output


@pytest.mark.parametrize(
  ("trainers", "kills", "steps"),
  [(1, 3, 8), (1, 20, 16), (2, 3, 8), (2, 20, 16)],
)
def test_random_kills_end_on_the_same_weights(root, trainers, kills, steps):
  """To the bit."""
  names = f"whole-{trainers}-{steps}", f"killed-{trainers}-{kills}"
  whole = played(root, names[0], steps, trainers=trainers)
  broken = played(root, names[1], steps, trainers=trainers, kills=kills)
  small_run.assert_same_bits(broken, whole)


def test_trainers_that_lose_one_of_them_leave_soon(root):
  """One of them is killed; the other leaves, long before `--heartbeat`."""
  output = root / "lost"
  with roles.Roles(root, output, "--config.curriculum.total_steps=4000") as run:
    run.wait_for_lines(2)
    run.running["1"].kill()
    began = time.monotonic()
    assert run.running["0"].wait(60) == 75
    assert time.monotonic() - began < 30
  assert "no sign of life of process 1" in run.log("0").read_text()


@pytest.mark.skipif(not SGLANG, reason="no SGLang; test_node.py says how")
def test_a_real_server_has_the_adapters_of_processes_that_were_killed(tmp_path):
  """On a CPU, with torch_native as --lora-backend, and no pinned memory."""
  root, port, targets = roles.prepare(tmp_path), waits.free_port(), "qkvo"
  command = shlex.split(SGLANG.format(model=root / "policy", port=port))
  command += adapters.flags(2, targets, async_level=1)
  given = [
    *("--config.engine.kind=sglang", "--config.lora.rank=2"),
    f"--config.sglang.urls=http://127.0.0.1:{port}",
    f"--config.lora.targets={','.join(targets)}",
  ]
  log, output = root / "server.log", root / "run"
  with log.open("w") as out:
    server = subprocess.Popen(
      command, stdout=out, stderr=out, start_new_session=True
    )
  try:
    waits.wait_for(lambda: "ready to roll" in log.read_text(), roles.DEADLINE)
    with roles.Roles(root, output, *given, trainers=1) as run:
      for trained, name in ((1, roles.CONTROLLER), (2, "0")):
        run.wait_for_lines(trained)
        run.kill(name)
      run.wait()
  finally:
    os.killpg(server.pid, signal.SIGKILL)
    server.wait()
  said, name = log.read_text(), f"engine/server/127.0.0.1:{port}/fingerprint"
  assert said.count('"POST /update_weights_from_disk') == 2  # By controller.
  assert said.count('"POST /load_lora_adapter') > 3
  for line in small_run.records(output):
    assert line["rollout/failed"] == 0 and line[name] < 1e-3
