"""Kills and stops the processes of a run and its servers.

Whatever dies is restarted by the same command, as a supervisor does. A real
server samples where tests/launch/test_node.py finds SGLang.
"""

from __future__ import annotations

import collections
import functools
import json
import os
import pathlib
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zlib

import fake_sglang
import jax
import numpy as np
import pytest
import roles
import sglang_engines
import small_run
import waits

from anysearch_jax.policy import hf
from anysearch_jax.rollout.servers import delta, sglang

pytestmark = pytest.mark.slow

SGLANG = os.environ.get("ANYSEARCH_SGLANG_COMMAND", "")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
  return roles.prepare(tmp_path_factory.mktemp("roles"))


def started(root, name, *given, steps=16, trainers=2, samplers=2, seconds=0.02):
  """Returns the processes of a run, and the addresses of its samplers."""
  ports = [waits.free_port() for _ in range(samplers)]
  urls = [f"http://127.0.0.1:{port}" for port in ports]
  command = (sys.executable, "-m", "seeded_sglang", str(root / "policy"))
  servers = {f"server-{p}": [*command, str(p), str(seconds)] for p in ports}
  if samplers:
    given += "engine.kind=sglang", f"servers.urls={','.join(urls)}"
    given += "watch.gap_rollouts=1000", f"servers.weights={root / name}-ram"
  given += f"curriculum.total_steps={steps}", f"servers.wait={roles.DEADLINE}"
  flags = [f"--config.{each}" for each in given]
  made = {"trainers": trainers, "servers": servers}
  return roles.Roles(root, root / name, *flags, **made), urls


@functools.cache
def played(root, steps, *, trainers, samplers, kills=0):
  """Runs to the end, with kills; returns the run folder."""
  name = f"{steps}-{trainers}-{samplers}-{kills}"
  draws, rollouts = random.Random(name), steps // 2
  sizes = {"steps": steps, "trainers": trainers, "samplers": samplers}
  with started(root, name, **sizes)[0] as run:
    names = [*map(str, range(trainers)), *run.servers]
    for i in range(kills):
      trained = i * (rollouts - 1) // kills
      run.wait_for_lines(trained)
      # At a random moment, but not so late that the run ends before.
      run.wait_for_lines(trained + 1, seconds=draws.uniform(0, 15))
      run.kill(draws.choice([x for x in names if x in run.running]))
    run.wait()
    assert run.kills == kills
    assert {*run.ended.values()} == {0}
  assert run.lines() == rollouts
  return run.output


@pytest.mark.parametrize(("kills", "steps"), [(3, 8), (20, 16)])
def test_random_kills_end_on_the_same_weights(root, kills, steps):
  """To the bit, of three processes over two servers."""
  sizes = {"trainers": 3, "samplers": 2}
  broken = played(root, steps, kills=kills, **sizes)
  assert_same(broken, played(root, steps, **sizes))


def test_one_process_and_three_sample_with_the_same_weights(root):
  """Of rollouts 0 and 1 with version 0, whose weights have the same bits."""
  one, three = (played(root, 8, trainers=n, samplers=2) for n in (1, 3))
  for name in ("policy/staleness_mean", "policy/staleness_max"):
    ages = [[x[name] for x in small_run.records(run)] for run in (one, three)]
    assert ages == [[0, 1, 1, 1]] * 2
  for rollout in (0, 1):
    episodes = [without_servers(run, rollout) for run in (one, three)]
    assert episodes[0] == episodes[1]
  losses = [
    [x["loss/total"] for x in small_run.records(run, "steps.jsonl")[:2]]
    for run in (one, three)
  ]
  np.testing.assert_allclose(*losses, rtol=1e-4, atol=1e-6)


def without_servers(output, rollout):
  """Returns the groups of a rollout, but for who sampled them."""
  path = output / "trajectories" / f"rollout-{rollout:05d}.jsonl"
  groups = [json.loads(line) for line in path.read_text().splitlines()]
  for group in groups:
    for trajectory in group["trajectories"]:
      trajectory.pop("servers", None)
  return groups


@pytest.mark.parametrize("rank", [0, 2])
def test_servers_get_the_weights_that_two_processes_gathered(root, rank):
  """Servers of the tests take adapters merged into whole weights."""
  given = f"lora.rank={rank}", "lora.targets=q,down"
  run, urls = started(root, f"rank-{rank}", *given, steps=6, samplers=1)
  with run:
    run.wait()
  for record in small_run.records(run.output):
    assert record[f"engine/server/{urls[0][7:]}/fingerprint"] < 1e-4
  assert "adapters merged into them" in run.log("0").read_text() or not rank
  first, last = (hf.load(x / "policy").params for x in (root, run.output))
  assert not np.array_equal(first["layers"]["q"], last["layers"]["q"])


def assert_same(ours, whole):
  """Asserts equal steps, and equal bits; counters of servers may differ."""
  small_run.assert_same_bits(ours, whole, ["steps.jsonl"])
  assert all(x["rollout/failed"] == 0 for x in small_run.records(ours))
  first, last = (hf.load(x / "policy").params for x in (ours.parent, ours))
  assert not np.array_equal(first["embed"], last["embed"])


def test_stopped_processes_lose_nothing(root):
  """By SIGSTOP, so that they neither end nor close their connections."""
  run, _ = started(root, "stopped", trainers=3)

  def stopped(name, until):
    """Stops a process until something holds; returns the seconds."""
    process, began = run.running[name], time.monotonic()
    process.send_signal(signal.SIGSTOP)
    run.wait(until)
    process.send_signal(signal.SIGCONT)
    return time.monotonic() - began

  def says(name, text):
    before = len(run.log(name).read_text())
    return lambda: text in run.log(name).read_text()[before:]

  with run:
    run.wait_for_lines(1)
    began, end = dict(run.running), time.monotonic() + 5
    stopped("1", lambda: time.monotonic() > end)
    server = next(iter(run.servers))
    assert stopped(server, says("0", "is down")) < 90
    run.wait_for_lines(run.lines() + 1)
    assert run.running == began
    # Longer than the heartbeat: the other leaves, and it too once it goes on.
    assert stopped("1", lambda: run.running.get("0") != began["0"]) < 60
    assert run.ended["0"] in roles.LOST and began["1"].wait(60) in roles.LOST
    run.wait()
  assert_same(run.output, played(root, 16, trainers=3, samplers=2))


def test_a_signal_to_one_process_stops_all_with_a_checkpoint(root):
  """Also while the first one samples ahead; the same command resumes."""
  run, _ = started(root, "signalled", steps=8, trainers=3)
  with run:
    run.wait_for_lines(1)
    run.running["2"].terminate()
    for name in "012":
      assert run.running[name].wait(120) == 75
      assert "saved checkpoint" in run.log(name).read_text()
    assert 1 <= run.lines() < 4
    run.wait()
  assert_same(run.output, played(root, 8, trainers=3, samplers=2))


def test_processes_that_lose_one_of_them_leave_soon(root):
  """One is killed; the others leave, at the latest after `--heartbeat`."""
  run, _ = started(root, "lost", steps=4000, trainers=3)
  with run:
    run.wait_for_lines(2)
    run.running["1"].kill()
    began = time.monotonic()
    codes = {name: run.running[name].wait(60) for name in "02"}
    assert time.monotonic() - began < 45
  for name, code in codes.items():
    assert code in roles.LOST
    said = run.log(name).read_text()
    assert "Traceback" not in said
    assert ("The same command resumes" in said) == (code == 75)


@pytest.mark.skipif(not SGLANG, reason="no SGLang; test_node.py says how")
def test_a_real_server_has_the_adapters_of_processes_that_were_killed(tmp_path):
  """On a CPU, with torch_native as --lora-backend, and no pinned memory."""
  root, port, targets = roles.prepare(tmp_path), waits.free_port(), "qkvo"
  command = shlex.split(SGLANG.format(model=root / "policy", port=port))
  command += sglang.adapter_flags(2, targets)
  given = f"engine.kind=sglang lora.rank=2 lora.targets={','.join(targets)} "
  given += f"servers.urls=http://127.0.0.1:{port} servers.wait={roles.DEADLINE}"
  flags = [f"--config.{each}" for each in given.split()]
  output, servers = root / "run", {"server": command}
  with roles.Roles(root, output, *flags, trainers=1, servers=servers) as run:
    for trained in (1, 2):
      run.wait_for_lines(trained)
      run.kill("0")
    run.wait()
    said = run.log("server").read_text()
  name = f"engine/server/127.0.0.1:{port}/fingerprint"
  assert said.count('"POST /update_weights_from_disk') == 2  # By controller.
  assert said.count('"POST /load_lora_adapter') > 3
  for line in small_run.records(output):
    assert line["rollout/failed"] == 0 and line[name] < 1e-3


def _server(turns):
  """Returns a server whose turns, counted, follow from all of its weights."""

  def script(context):
    leaves = map(np.asarray, jax.tree.leaves(server.policy.params))
    turn = zlib.crc32(b"".join(x.tobytes() for x in leaves)), tuple(context)
    turns[turn] += 1
    draws = random.Random(f"{turn} {turns[turn]}")
    said = draws.choices("abc", k=draws.randint(1, 9))
    return fake_sglang.ids(*said, "</answer>")

  server = fake_sglang.Server(script)
  return server


def _loaded(root, deltas):
  """Returns what two servers were asked to load in a run, by folder.

  Before version 2 is loaded, their host loses its copy, and one server joins.
  """
  turns, hosts, copies = collections.Counter(), [], root / "copies"

  def host():
    """Starts what keeps a host's copies, without any."""
    shutil.rmtree(copies, ignore_errors=True)
    command = [sys.executable, delta.__file__, str(root / "shared")]
    hosts.append(subprocess.Popen([*command, str(copies)]))

  def load(server, right, body):
    path = pathlib.Path(body["model_path"])
    if path.parent == delta.COPIES:  # Those of other runs are not touched.
      path = copies / path.name
    version = path.name.rpartition("-")[2]
    asked[server].append(f"{path.parent.name[:7]} {version}")
    if version == "2" and not hosts[1:]:
      hosts[0].kill()
      hosts[0].wait()
      host()
      late.restart()
    if version == "3" and server is first:
      waits.wait_for(lambda: late.version != "default", roles.DEADLINE)
    return right(body | {"model_path": str(path)})

  with _server(turns) as first, _server(turns) as late:
    asked = {first: [], late: []}
    for server in asked:
      right = server._update_weights_from_disk
      server._update_weights_from_disk = functools.partial(load, server, right)
    host()
    late.kill()
    given = f"servers.urls={first.url},{late.url} engine.kind=sglang "
    given += "engine.max_context=200 engine.slots=1 episode.max_context=200 "
    given += "batch.row_lengths=(208,) batch.micro_batch_tokens=416 "
    given += "curriculum.total_steps=12 watch.gap_rollouts=1000 "
    given += f"servers.weights={root / 'shared'} servers.deltas={deltas}"
    flags = [f"--config.{each}" for each in given.split()]
    with roles.Roles(root, root / str(deltas), *flags, trainers=1) as run:
      run.wait()
  hosts[-1].kill()
  return list(asked.values())


def test_deltas_end_on_the_weights_of_whole_folders(tmp_path, monkeypatch):
  """To the bit; a server that has no copy gets the whole folder."""
  monkeypatch.setattr(fake_sglang, "CONTEXT", 250)
  root = roles.prepare(tmp_path)
  hf.save(root / "policy", sglang_engines.policy())
  assert _loaded(root, False)[0] == [f"anysear {i}" for i in range(5)]
  first, late = _loaded(root, True)
  assert "anysear 1" not in first and "anysear 2" in first + late
  assert first[0] == "anysear 0" and first[-1] == late[-1] == "copies 4"
  whole, ours = root / "False", root / "True"
  steps = [small_run.records(x, "steps.jsonl") for x in (whole, ours)]
  assert steps[0] == steps[1]
  start, *ends = (hf.load(x / "policy").params for x in (root, whole, ours))
  jax.tree.map(np.testing.assert_array_equal, *ends)
  assert not np.array_equal(start["embed"], ends[0]["embed"])


def test_two_servers_become_four_and_then_one(root):
  """Every episode is trained on once; a real server is the one that stays."""
  sizes = {"steps": 64, "trainers": 1, "samplers": 4, "seconds": 0.2}
  with fake_sglang.Server() as gateway:
    run, urls = started(
      root, "fleet", f"servers.gateway={gateway.url}", **sizes
    )
    first, said = next(iter(run.servers)), run.log("0")
    if SGLANG:
      command = SGLANG.format(model=root / "policy", port=first[7:])
      run.servers[first] = shlex.split(command)

    def lists(*here):
      gateway.workers = [{"base_url": url} for url in here]

    with run:
      if SGLANG:
        run.wait(lambda: "ready to roll" in run.log(first).read_text())
      lists(*urls[:2])
      run.wait_for_lines(3)
      lists(*urls)
      seen = run.output / "metrics.jsonl"
      run.wait(lambda: all(url[7:] in seen.read_text() for url in urls))
      lists(urls[0])
      run.wait(lambda: said.read_text().count(" left.") == 3)
      left = run.lines()
      run.wait()
  assert 3 < left < 30 and run.lines() == 32
  assert turns(run.output).keys() == {*urls}
  assert turns(run.output, slice(3)).keys() == {*urls[:2]}
  assert turns(run.output, slice(left + 2, None)).keys() == {urls[0]}


def turns(output, which=slice(None)):
  """Counts the turns of each server; no episode is missing or there twice."""
  count = collections.Counter()
  for path in sorted((output / "trajectories").glob("*.jsonl"))[which]:
    groups = list(map(json.loads, path.read_text().splitlines()))
    assert len({x["question_id"] for x in groups}) == 4
    for group in groups:
      assert len(group["trajectories"]) == 2
      for episode in group["trajectories"]:
        assert not episode["failed"]
        count.update(episode["servers"])
  return count
