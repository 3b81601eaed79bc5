"""The files of the source, for tests that read it or run Python on it."""

from __future__ import annotations

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGES = ("anysearch_jax", "retrieval", "launch")


def files(*packages: str) -> list[pathlib.Path]:
  """Returns every module of the packages, by default of all."""
  return [
    path
    for package in packages or PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
  ]


def python(*arguments, **how) -> subprocess.CompletedProcess[str]:
  """Runs Python with arguments; `how` is as for `subprocess.run`."""
  settings = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 300}
  command = [sys.executable, *map(str, arguments)]
  return subprocess.run(command, **settings | how)


def started(*arguments, **how) -> subprocess.Popen[str]:
  """Starts Python with arguments; `how` is as for `subprocess.Popen`."""
  settings = {"cwd": ROOT, "stdout": subprocess.PIPE, "text": True}
  return subprocess.Popen(
    [sys.executable, *map(str, arguments)], **settings | how
  )
