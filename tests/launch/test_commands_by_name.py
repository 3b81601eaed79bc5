"""`anysearch`, the entry point over the modules of `launch/`."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

from anysearch_jax import config as config_lib
from anysearch_jax.config import settings

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


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",), ("help",)])
def test_every_command_is_listed_with_its_line(arguments):
  done = anysearch(*arguments)
  assert done.returncode == 0 and not done.stderr
  listed = {
    line.split()[0]: line.split(maxsplit=1)[1]
    for line in done.stdout.splitlines()
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


@pytest.mark.parametrize(
  ("asked", "hint"), [("trian", "'train'"), ("build-indx", ""), ("x", "")]
)
def test_unknown_command_is_refused_with_the_nearest_name(asked, hint):
  done = anysearch(asked, "--config=x.py")
  assert done.returncode == 2 and not done.stdout
  (said,) = done.stderr.splitlines()
  assert repr(asked) in said and "--help" in said
  assert hint in said


def test_command_gets_its_arguments_and_keeps_its_name_in_errors():
  done = anysearch("build-index", "--corpus=x", "--korpus=y")
  assert done.returncode == 2 and not done.stdout
  assert done.stderr.startswith("launch.build_index: ")
  assert "'korpus'" in done.stderr
  by_module = subprocess.run(
    [sys.executable, "-m", "launch.build_index", "--corpus=x", "--korpus=y"],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=False,
  )
  assert by_module.stderr == done.stderr


def test_version_is_the_packages():
  import anysearch_jax

  done = anysearch("--version")
  assert done.stdout.split() == ["anysearch", anysearch_jax.__version__]


def test_list_names_systems_environments_and_every_setting():
  listing = anysearch("list").stdout
  for name in ("search_r1", "bats_plan", "build_index", "file.py:NAME"):
    assert name in listing
  page = anysearch("list", "--markdown").stdout
  paths = dict(settings.leaves(settings.to_dict(config_lib.ExperimentConfig())))
  assert page.count("\n| `") == len(paths)
  assert (
    "| `alpha` | `0.5` | at least 0 | learning | Weight of accuracy." in page
  )
