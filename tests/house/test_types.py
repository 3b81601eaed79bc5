"""mypy finds no error in the six trees of the source."""

from __future__ import annotations

import subprocess
import sys


def test_no_type_error():
  done = subprocess.run(
    [sys.executable, "-m", "mypy"],
    capture_output=True,
    text=True,
    timeout=600,
  )
  assert done.returncode == 0, done.stdout + done.stderr
