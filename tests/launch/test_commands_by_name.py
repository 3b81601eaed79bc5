"""`anysearch`, the entry point, and errors that newcomers meet first."""

from __future__ import annotations

import importlib.metadata
import pathlib
import platform
import re
import sys

import commands
import pytest
import source_tree

import anysearch_jax
from anysearch_jax import config as config_lib
from anysearch_jax.config import settings
from anysearch_jax.launch import __main__ as by_name
from anysearch_jax.launch import ask, build_index, flags, report, shipped, train
from anysearch_jax.launch import list as launch_list

ROOT = pathlib.Path(__file__).resolve().parents[2]


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
  assert (
    set(listed)
    == runs_flags | {"chat", "cluster"}
    > {"train", "evaluate", "report"}
  )
  assert all(line.endswith(".") for line in listed.values())


def test_listing_imports_no_jax():
  done = source_tree.python(
    "-c",
    "import sys\nfrom anysearch_jax.launch import __main__ as by_name\n"
    "by_name.usage()\nassert 'jax' not in sys.modules",
  )
  assert done.returncode == 0, done.stderr


def test_version_names_what_a_report_of_an_error_needs(monkeypatch):
  code = (
    "import sys\nfrom anysearch_jax.launch import __main__ as by_name\n"
    "print(by_name.version())\nassert 'jax' not in sys.modules"
  )
  done = source_tree.python("-c", code, check=True)
  assert done.stdout.splitlines() == [
    f"anysearch {anysearch_jax.__version__}",
    f"Python {platform.python_version()}",
    platform.platform(),
    f"JAX {importlib.metadata.version('jax')}",
  ]

  def not_installed(name):
    raise importlib.metadata.PackageNotFoundError(name)

  monkeypatch.setattr(importlib.metadata, "version", not_installed)
  assert "JAX" not in by_name.version()


def test_unknown_command_is_refused_with_the_nearest_name(capsys, monkeypatch):
  monkeypatch.setattr(sys, "argv", ["anysearch", "trian", "--config=x.py"])
  with pytest.raises(SystemExit) as refused:
    by_name.main()
  (said,) = capsys.readouterr().err.splitlines()
  assert refused.value.code == 2
  assert "'trian'" in said and "'train'" in said and "--help" in said


def test_command_gets_its_arguments_and_keeps_its_name_in_errors():
  done = source_tree.python(
    *("-m", "anysearch_jax.launch", "build-index", "--corpus=x", "--korpus=y")
  )
  assert done.returncode == 2 and not done.stdout
  assert done.stderr.startswith("anysearch build_index: ")
  assert "'korpus'" in done.stderr


def test_list_names_systems_environments_and_every_setting():
  _, listing = commands.printed(launch_list)
  for name in ("search_r1", "bats_numbers", "file.py:NAME"):
    assert name in listing
  _, page = commands.printed(launch_list, "settings")
  paths = dict(settings.leaves(settings.to_dict(config_lib.ExperimentConfig())))
  assert all(f"--config.{path}=" in page for path in paths)
  assert "--config.reward.alpha=0.5\n      Weight of accuracy." in page


# First contact.


def test_another_python_is_told_what_to_do(tmp_path):
  """`-S` hides the installed packages, as in another Python."""
  done = source_tree.python(
    "-S", "-m", "anysearch_jax.launch.train", "--config=x.py"
  )
  assert done.returncode == 1
  (said,) = done.stderr.splitlines()
  assert "lacks the packages of requirements.txt" in said
  assert "make setup" in said


WORLD = "--config=configs/quickstart.py"


@pytest.mark.parametrize(
  ("command", "arguments", "sentence"),
  [
    (train, [], "found no --config, expected --config=FILE of yours"),
    (train, [], "configs/{documents.py,llama3_1_8b.py,methods.py,one_gpu.py,"),
    (ask, ["x"], "or --documents=FOLDER of files to ask about."),
    (
      *(train, ["--config=configs/one_gpu.py"]),
      "found no preset, expected --config=configs/one_gpu.py:PRESET, one of",
    ),
    (
      *(train, ["--config=configs/methods.py"]),
      "expected a system, one of anysearch, search_r1, ",
    ),
    (
      *(train, [WORLD, "--config.steps", "3"]),
      "unknown key 'steps'.*Did you mean --config.curriculum.total_steps=3?",
    ),
    (
      *(train, [WORLD, "--lr=1e-4"]),
      "Did you mean --config.optimizer.learning_rate=1e-4?",
    ),
    (
      *(ask, [WORLD, "--index=nowhere", "x"]),
      "leave --config out and name --documents=FOLDER",
    ),
    (build_index, ["--corpus=.", "--output=x"], "--documents=PATH"),
    (report, ["nope"], "nope: found no such folder"),
  ],
)
def test_a_first_mistake_is_answered_with_what_to_type(
  command, arguments, sentence, tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  said = commands.run(command, *arguments)
  assert re.search(re.escape(sentence).replace(r"\.\*", ".*"), said), said
  assert "\n" not in said


def test_configuration_of_the_current_folder_comes_before_the_projects(
  tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  missing = commands.run(train, "--dry_run", "--config=configs/mine.py")
  assert f"no such file in {tmp_path}" in missing
  assert str(ROOT / "configs") in missing
  (tmp_path / "configs").mkdir()
  path = tmp_path / "configs" / "quickstart.py"
  text = (ROOT / "configs" / "quickstart.py").read_text()
  path.write_text(text.replace('name="quickstart"', 'name="mine"'))
  ended, printed = commands.printed(
    train, "--dry_run", "--config=configs/quickstart.py"
  )
  assert ended == 0 and '"name": "mine"' in printed
  # The policy beside it is still the shipped one.
  assert str(ROOT / "configs" / "graded_world_policy") in printed


def test_path_that_exists_nowhere_or_here_is_unchanged(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  for name in ("", "models/x", "configs/none", str(tmp_path), "../configs"):
    assert shipped.find(name) == name
  assert shipped.find("configs/paper.py") == str(ROOT / "configs/paper.py")
  monkeypatch.chdir(ROOT)
  assert shipped.find("configs/paper.py") == "configs/paper.py"


def test_a_training_by_hand_keeps_out_of_the_quickstarts_folder():
  config = flags.load_config(str(ROOT / "configs" / "quickstart.py"))
  folder = flags.run_folder(config, None)
  assert folder == pathlib.Path(f"runs/quickstart-{config.seed}")
  assert flags.run_folder(config, "runs/x") == pathlib.Path("runs/x")
