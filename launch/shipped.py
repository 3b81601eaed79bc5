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
  """Returns `name`, or the shipped file of that name if there is none here.

  A file in the current folder comes first, so your own may have the same name.
  A name that exists nowhere is returned unchanged; its reader reports it.
  """
  path = pathlib.Path(name)
  if not path.parts or path.parts[0] not in _FOLDERS or path.exists():
    return name
  return str(ROOT / path) if (ROOT / path).exists() else name


def is_shipped(name: str) -> bool:
  """Whether `name` is a path that `find` took from the installation."""
  path = pathlib.Path(name)
  return path.is_absolute() and path.is_relative_to(ROOT / "configs")
