"""The doctor: its findings for valid and invalid installations and runs."""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
import subprocess
import sys
import threading

import doctored
import jax
import optax
import pytest

from anysearch_jax.host import platforms, run_lock
from anysearch_jax.policy import hf
from launch import doctor, run_checks


def examine(config, tmp_path, **settings):
  return list(doctor.examine(config, output=str(tmp_path / "run"), **settings))


def test_doctor_finds_no_problem_in_a_valid_configuration(tmp_path, capsys):
  found = examine(doctored.CONFIG, tmp_path)
  assert doctored.levels(found) == {doctor.OK}, found
  names = {line.split()[1] for line in capsys.readouterr().out.splitlines()}
  assert names >= {
    *("python", "packages", "devices", "config", "policy", "texts", "mesh"),
    *("memory", "disk", "output", "data", "retriever"),
  }
  assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_doctor_exits_with_1_if_there_is_a_problem(tmp_path):
  def command(*arguments):
    return subprocess.run(
      [sys.executable, "-m", "launch.doctor", *arguments],
      capture_output=True,
      text=True,
      timeout=300,
      check=False,
    )

  done = command()
  assert (done.returncode, done.stdout.splitlines()[-1]) == (
    0,
    "0 problems, 0 warnings",
  ), done.stdout + done.stderr
  done = command(
    "--config=configs/quickstart.py",
    "--config.policy=nowhere",
    "--config.mesh.fsdp=3",
    f"--output={tmp_path}",
  )
  assert done.returncode == 1, done.stdout + done.stderr
  assert "problem  policy      nowhere: no config.json;" in done.stdout
  # Checks that need the policy do not report a second problem.
  assert "1 problems, 0 warnings" in done.stdout


@pytest.mark.parametrize(
  ("groups", "sentence"),
  [
    ({"engine": {"max_context": 100}}, "exceeds engine.max_context 100"),
    ({"mesh": {"fsdp": 16}}, "needs 16 devices; found 8"),
    ({"data": {"source": "prepared", "path": "nowhere"}}, "nowhere: found no"),
    ({"retrieval": {"kind": "index", "index": "nowhere"}}, "nowhere: found no"),
    (
      {"retrieval": {"kind": "web", "web": "brave", "key_variable": "NO_KEY"}},
      "NO_KEY is not set",
    ),
  ],
)
def test_invalid_configuration_is_a_problem(
  tmp_path, monkeypatch, groups, sentence
):
  monkeypatch.delenv("NO_KEY", raising=False)
  found = examine(doctored.with_(**groups), tmp_path)
  problems = doctored.said(found, doctor.PROBLEM)
  assert any(sentence in problem for problem in problems), problems


# How checks run.


def test_a_check_that_breaks_or_hangs_is_a_problem():
  def breaks():
    raise KeyError("x")

  def refuses():
    raise ValueError("found 1, expected 2.")

  def exits():
    sys.exit(3)

  def half():
    yield doctor.ok("first")
    raise RuntimeError("then")

  for look, sentence in (
    (breaks, "found KeyError: 'x'"),
    (refuses, "found 1, expected 2."),
    (exits, "found SystemExit: 3"),
    (half, "found RuntimeError: then"),
  ):
    (finding,) = doctor.run(doctor.Check("c", look), deadline=10)
    assert (finding.level, finding.found) == (doctor.PROBLEM, sentence)
  held = threading.Event()
  (finding,) = doctor.run(doctor.Check("c", held.wait), deadline=0.1)
  assert finding.found == "found no answer within 0.1 seconds"
  held.set()


def test_every_finding_is_one_line():
  finding = doctor.warning("a\nb", "c")
  assert list(doctor.lines("name", [finding])) == [
    "warning  name        a b",
    " " * 21 + "c",
  ]
  assert doctor.size(999) == "999 B"
  assert doctor.size(1500) == "1.5 KB"
  assert doctor.size(12.34e9) == "12.3 GB"
  assert doctor.size(1234e9) == "1,234.0 GB"


# The machine.


def test_missing_or_old_package_is_named(tmp_path):
  path = tmp_path / "requirements.txt"
  path.write_text("# said\njax>=0.1\nno-such-thing>=2  # why\nnumpy>=999\n")
  found = list(doctor.packages(path))
  assert doctored.said(found, doctor.PROBLEM) == [
    "no-such-thing: found none, expected >=2 pip install 'no-such-thing>=2'",
    f"numpy: found {__import__('numpy').__version__}, expected >=999 "
    "pip install 'numpy>=999'",
  ]
  assert doctored.said(found, doctor.OK) == [
    "1 of 3 are as required and import "
  ]


def test_a_package_that_does_not_import_is_a_problem(tmp_path, monkeypatch):
  """Right versions, broken modules: one raises, one ends the process."""
  for name, code in (
    ("raises-it", "raise OSError('libx.so.1: not found')"),
    ("ends-it", "import os; os._exit(7)"),
    ("works-well", ""),
  ):
    (tmp_path / f"{name.replace('-', '_')}.py").write_text(code)
    info = tmp_path / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
      f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
    )
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.setenv("PYTHONPATH", str(tmp_path))
  path = tmp_path / "requirements.txt"
  path.write_text("raises-it>=1\nends-it>=1\nworks-well>=1\n")
  found = list(doctor.packages(path))
  problems = doctored.said(found, doctor.PROBLEM)
  assert len(problems) == 2
  assert "raises-it: found that it cannot be imported (OSError" in problems[0]
  assert "libx.so.1: not found" in problems[0]
  assert "ends-it: found that it cannot be imported" in problems[1]
  assert "ended with 7" in problems[1]
  assert doctored.said(found, doctor.OK) == [
    "1 of 3 are as required and import "
  ]


@pytest.mark.parametrize("folder", ["/dev/null/x", "/dev/null"])
def test_a_run_cannot_be_written_below_a_file(tmp_path, folder):
  found = list(doctor.examine(doctored.CONFIG, output=folder))
  problems = doctored.said(found, doctor.PROBLEM)
  assert any("/dev/null is not a folder" in problem for problem in problems)


def test_a_missing_policy_names_its_download(tmp_path):
  config = dataclasses.replace(
    doctored.CONFIG, policy="models/Qwen2.5-7B-Instruct"
  )
  problems = doctored.said(examine(config, tmp_path), doctor.PROBLEM)
  assert any(
    "hf download Qwen/Qwen2.5-7B-Instruct" in problem for problem in problems
  ), problems


def test_checked_requirements_are_the_projects():
  assert doctor.REQUIREMENTS.is_file()
  assert "orbax-checkpoint" in doctor.REQUIREMENTS.read_text()


# Room.


def test_a_checkpoint_holds_the_weights_and_both_moments():
  policy = hf.load(doctored.CONFIG.policy)
  held = jax.eval_shape(
    lambda params: (params, optax.adamw(1e-3).init(params)), policy.params
  )
  arrays = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(held))
  takes = run_checks.footprint(policy.architecture, doctored.CONFIG)
  assert takes.checkpoint == pytest.approx(arrays, abs=100)
  assert takes.checkpoints == 3 * takes.checkpoint


def test_footprint_follows_from_the_sizes():
  a, _ = hf.describe(doctored.CONFIG.policy)
  plain = run_checks.footprint(a, doctored.CONFIG)
  policy = pathlib.Path(doctored.CONFIG.policy)
  weights = sum(f.stat().st_size for f in policy.glob("*.safetensors"))
  # The shipped policy is float16.
  assert plain.export == pytest.approx(2 * weights, rel=0.05)
  half = run_checks.footprint(
    a, doctored.with_(checkpoint={"export_dtype": "bfloat16"})
  )
  assert half.export == plain.export / 2
  adapters = run_checks.footprint(a, doctored.with_(lora={"rank": 4}))
  assert adapters.checkpoint < plain.checkpoint / 4
  assert adapters.export > plain.export
  cut = run_checks.footprint(a, doctored.with_(mesh={"fsdp": 2, "tensor": 2}))
  assert cut.trained == plain.trained // 4
  bare = run_checks.footprint(
    a, doctored.with_(objective={"kl_coefficient": 0.0})
  )
  assert plain.trained - bare.trained == plain.export
  e = doctored.CONFIG.engine
  cache = 2 * a.layers * a.kv_heads * a.head_dim * e.slots * e.max_context * 4
  assert plain.sampled == cache
  assert (
    run_checks.footprint(a, doctored.with_(engine={"kind": "sglang"})).sampled
    == 0
  )


def test_a_shared_device_holds_the_larger_of_its_phases():
  a, _ = hf.describe(doctored.CONFIG.policy)

  def of(pipeline=None, **engine):
    # A critical size: the cache is larger than gradients.
    return run_checks.footprint(
      a, doctored.with_(engine=engine, pipeline=pipeline or {})
    )

  takes = of()
  state = takes.checkpoint // 3
  assert takes.sampled > state  # Float32: the cache alone.
  # Sampling: masters, moments, the reference and the cache.
  assert takes.shared == takes.trained - state + takes.sampled
  kept = of(free_kv_while_training=False)
  assert kept.shared == takes.trained + takes.sampled
  ahead = of({"async_level": 1})
  assert ahead.shared == kept.shared
  for offload, copies in (("moments", 3), ("state", 4)):
    found = of({"offload": offload}).shared
    least = takes.trained - copies * state + takes.sampled
    assert found == max(least, takes.trained)


def test_a_full_disk_and_little_memory_are_problems(tmp_path, monkeypatch):
  a, _ = hf.describe(doctored.CONFIG.policy)
  needs = run_checks.footprint(a, doctored.CONFIG)
  usage = shutil.disk_usage(tmp_path)
  for free, level in ((needs.disk, doctor.OK), (needs.disk - 1, "problem")):
    full = usage._replace(free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda _, full=full: full)
    assert run_checks.disk(a, doctored.CONFIG, tmp_path / "run").level == level
  # What an earlier start has written needs no more room.
  (tmp_path / "run" / "checkpoints").mkdir(parents=True)
  (tmp_path / "run" / "checkpoints" / "x").write_bytes(b"x")
  assert (
    run_checks.disk(a, doctored.CONFIG, tmp_path / "run").level == doctor.OK
  )
  least = needs.shared
  for has, level in ((least, doctor.OK), (least - 1, doctor.PROBLEM)):
    monkeypatch.setattr(doctor, "device_memory", lambda has=has: has)
    monkeypatch.setattr(doctor, "available_memory", lambda: 10**12)
    (finding,) = run_checks.memory(a, doctored.CONFIG)
    assert finding.level == level
  sglang = doctored.with_(
    engine={"kind": "sglang"}, sglang={"weights": str(tmp_path)}
  )
  for free, level in ((10**9, doctor.OK), (1000, doctor.PROBLEM)):
    full = usage._replace(free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda _, full=full: full)
    finding = run_checks.handed_over(a, sglang)
    assert finding.level == level
    assert str(tmp_path) in finding.found
  # Weights for SGLang stay in RAM during the run, beside a checkpoint.
  in_ram = doctored.with_(engine={"kind": "sglang"})
  takes = run_checks.footprint(a, in_ram)
  both = takes.checkpoint + takes.handed
  monkeypatch.setattr(doctor, "device_memory", lambda: 10**12)
  for config, free, count in (
    (in_ram, both, 1),
    (in_ram, both - 1, 2),
    (sglang, both - 1, 1),
  ):
    monkeypatch.setattr(doctor, "available_memory", lambda x=free: x)
    found = list(run_checks.memory(a, config))
    assert len(found) == count
    assert count == 1 or "for SGLang, of which" in found[-1].found


def test_locked_or_read_only_folder_is_a_problem(tmp_path):
  assert run_checks.output(tmp_path / "run").level == doctor.OK
  with run_lock.hold(tmp_path / "run" / run_lock.NAME):
    finding = run_checks.output(tmp_path / "run")
    assert finding.level == doctor.PROBLEM
    assert "writes to it" in finding.found
  assert run_checks.output(pathlib.Path("/proc/run")).level == doctor.PROBLEM


def test_a_device_that_jax_does_not_use_is_reported_with_the_reason(
  monkeypatch,
):
  monkeypatch.setattr(platforms, "has_device", lambda name: name == "cuda")
  found = list(doctor.devices())
  assert [each.level for each in found] == [doctor.OK, doctor.WARNING]
  assert "has a CUDA device" in found[1].found
  assert ".[cuda13]" in found[1].todo


def test_a_plug_in_that_fails_says_why(monkeypatch):
  monkeypatch.setattr(platforms, "plugins", lambda name: [name])
  monkeypatch.setattr(doctor, "_START", "raise OSError('no libcuda')")
  doctor._refusal.cache_clear()
  assert doctor._refusal("cuda") == "OSError: no libcuda"
