"""Errors that newcomers meet first: wrong Python, folder or output."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import commands

from launch import flags, shipped, train

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_another_python_is_told_what_to_do(tmp_path):
  """`-S` hides the installed packages, as in another Python."""
  done = subprocess.run(
    [sys.executable, "-S", "-m", "launch.train", "--config=x.py"],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 1
  (said,) = done.stderr.splitlines()
  assert "lacks the packages of requirements.txt" in said
  assert "make setup" in said


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


def test_commands_do_not_mention_that_torch_is_missing():
  """transformers warns on import, once in each process of a quickstart."""
  done = subprocess.run(
    [
      *(sys.executable, "-c"),
      "import sys, launch; sys.modules['torch'] = None; import transformers",
    ],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
  )
  assert "PyTorch" not in done.stdout + done.stderr
