"""What a newcomer meets first: the wrong Python, folder or output."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

from launch import flags

ROOT = pathlib.Path(__file__).resolve().parent.parent


def test_another_python_is_told_what_to_do(tmp_path):
  """`-S` leaves the installed packages out, as another Python would."""
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


def test_another_folder_is_told_where_configurations_are(tmp_path):
  done = subprocess.run(
    [sys.executable, "-m", "launch.train", "--config=configs/quickstart.py"],
    cwd=tmp_path,
    env=os.environ | {"PYTHONPATH": str(ROOT)},
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 2
  assert f"no such file in {tmp_path}" in done.stderr
  assert str(ROOT) in done.stderr


def test_a_training_by_hand_keeps_out_of_the_quickstarts_folder():
  config = flags.load_config(str(ROOT / "configs" / "quickstart.py"))
  folder = flags.run_folder(config, None)
  assert folder == pathlib.Path(f"runs/quickstart-{config.seed}")
  assert flags.run_folder(config, "runs/x") == pathlib.Path("runs/x")


def test_commands_do_not_mention_that_torch_is_missing():
  """transformers warns at import; eight processes of a quickstart would."""
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
