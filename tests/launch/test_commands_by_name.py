"""`anysearch`, the entry point over the modules of `launch/`."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import commands
import pytest

import anysearch_jax
from anysearch_jax import config as config_lib
from anysearch_jax.config import settings
from launch import __main__ as by_name
from launch import list as launch_list

ROOT = pathlib.Path(__file__).resolve().parents[2]


def anysearch(*arguments: str) -> subprocess.CompletedProcess[str]:
  return subprocess.run(
    [sys.executable, "-m", "launch", *arguments],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=120,
    check=False,
  )


def test_every_command_is_listed_with_its_line(capsys, monkeypatch):
  monkeypatch.setattr(sys, "argv", ["anysearch"])
  by_name.main()
  listed = {
    line.split()[0]: line.split(maxsplit=1)[1]
    for line in capsys.readouterr().out.splitlines()
    if line.startswith("  ")
  }
  runs_flags = {
    path.stem
    for path in (ROOT / "launch").glob("[!_]*.py")
    if "launch_flags.run(" in path.read_text()
  }
  assert set(listed) == runs_flags >= {"train", "evaluate", "report"}
  assert all(line.endswith(".") for line in listed.values())


def test_listing_imports_no_jax():
  done = subprocess.run(
    [
      *(sys.executable, "-c"),
      "import sys\nfrom launch import __main__ as by_name\n"
      "by_name.usage()\nassert 'jax' not in sys.modules",
    ],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr


def test_unknown_command_is_refused_with_the_nearest_name(capsys, monkeypatch):
  monkeypatch.setattr(sys, "argv", ["anysearch", "trian", "--config=x.py"])
  with pytest.raises(SystemExit) as refused:
    by_name.main()
  (said,) = capsys.readouterr().err.splitlines()
  assert refused.value.code == 2
  assert "'trian'" in said and "'train'" in said and "--help" in said


def test_command_gets_its_arguments_and_keeps_its_name_in_errors():
  done = anysearch("build-index", "--corpus=x", "--korpus=y")
  assert done.returncode == 2 and not done.stdout
  assert done.stderr.startswith("launch.build_index: ")
  assert "'korpus'" in done.stderr


def test_version_is_the_packages(capsys, monkeypatch):
  monkeypatch.setattr(sys, "argv", ["anysearch", "--version"])
  by_name.main()
  said = capsys.readouterr().out.split()
  assert said == ["anysearch", anysearch_jax.__version__]


def test_list_names_systems_environments_and_every_setting():
  _, listing = commands.printed(launch_list)
  for name in ("search_r1", "bats_plan", "build_index", "file.py:NAME"):
    assert name in listing
  _, page = commands.printed(launch_list, "--markdown")
  paths = dict(settings.leaves(settings.to_dict(config_lib.ExperimentConfig())))
  assert page.count("\n| `") == len(paths)
  assert (
    "| `alpha` | `0.5` | at least 0 | learning | Weight of accuracy." in page
  )
