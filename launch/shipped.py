"""Finds the files that come with the project from any folder.

`configs/quickstart.py`, `configs/quickstart_policy` and
`launch/serve_sglang.sh` are named relative to the root of the repository. An
installed package keeps the same tree, so the names also work where there is no
checkout.
"""

from __future__ import annotations

import pathlib

ROOT = pathlib.Path(__file__).resolve().parent.parent
_FOLDERS = ("configs", "launch")


def find(name: str) -> str:
  """Returns the path of `name`: in the current folder, else a shipped one.

  A file of the current folder comes first, so that a configuration of yours may
  be called `configs/mine.py`. A name that exists nowhere is returned unchanged;
  its reader says what it lacks.
  """
  path = pathlib.Path(name)
  if (
    path.exists()
    or path.is_absolute()
    or path.parts[:1] not in ((folder,) for folder in _FOLDERS)
  ):
    return name
  return str(ROOT / path) if (ROOT / path).exists() else name


def is_shipped(name: str) -> bool:
  """Whether `name` is a path that `find` took from the installation."""
  path = pathlib.Path(name)
  return path.is_absolute() and path.is_relative_to(ROOT / "configs")
