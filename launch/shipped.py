"""Finds the project's own files and commands from any working folder.

`configs/quickstart.py`, `configs/graded_world_policy` and
`launch/serve_sglang.sh` are named relative to the root of the repository. An
installed package keeps the same tree, so the names also work where there is no
checkout.
"""

from __future__ import annotations

import pathlib
import sys

from anysearch_jax.launch import stopping
from anysearch_jax.policy import converted

ROOT = pathlib.Path(__file__).resolve().parent.parent
_FOLDERS = ("configs", "launch", ".venv-sglang", ".venv-vllm")


def python() -> list[str]:
  """Returns the words that start `-m launch.X` in any folder.

  With `-P` a package `launch` of the current folder is not taken for ours; in
  the root of a checkout, which need not be installed, it is ours.
  """
  at_root = pathlib.Path.cwd().samefile(ROOT)
  return [sys.executable, *([] if at_root else ["-P"])]


def find(name: str) -> str:
  """Returns `name`, or the shipped file if the current folder has none.

  A file in the current folder comes first, so it may override a shipped one.
  A name that exists in neither place is returned unchanged; its reader reports
  it as missing.
  """
  path = pathlib.Path(name)
  if not path.parts or path.parts[0] not in _FOLDERS or path.exists():
    return name
  return str(ROOT / path) if (ROOT / path).exists() else name


def find_policy(name: str) -> str:
  """Returns the folder of a policy, which may be shipped or a GGUF file.

  A GGUF file, or the short name of one in a package, is converted once, into
  the user's cache.

  Raises:
    ValueError: the file cannot be converted.
  """
  return converted.folder(find(name), stopping.say)
