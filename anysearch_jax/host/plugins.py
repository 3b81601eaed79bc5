"""Values that a user wrote: `module:NAME`, or `path/to/file.py:NAME`.

Rewards, systems, retrievers, judges and sources of questions of one's own are
named in this form and found by `load`. The hash of the file enters the run's
provenance. A file may import the files beside it, which come after
the installed packages.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import os
import pathlib
import sys
import traceback
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple


class PluginError(ValueError):
  """A user's value cannot be loaded, or its code raised."""


class Loaded(NamedTuple):
  """A loaded value, the path of its file, and the SHA-256 of the file."""

  value: Any
  path: pathlib.Path
  sha256: str


def is_name(text: str) -> bool:
  """Returns whether `text` has the form of a user's value, not of a kind."""
  source, _, attribute = text.rpartition(":")
  return bool(source) and attribute.isidentifier()


def load(
  name: str,
  *,
  setting: str,
  expected: str,
  fits: Callable[[Any], bool] = callable,
) -> Loaded:
  """Imports a user's value.

  A file runs once in a process, so editing it does not change a run.

  Args:
    name: `module:NAME`, or `path/to/file.py:NAME`.
    setting: the setting that names the value, such as `reward.function`, for
      sentences.
    expected: noun phrase for valid values, such as `a function (outcomes,
      config)`, for sentences.
    fits: returns whether a value is valid.

  Raises:
    PluginError: the name is malformed, the file, module or value does not
      exist or does not fit, or importing it raises.
  """
  if not is_name(name):
    raise PluginError(
      f"{setting}: found {name!r}, expected module:NAME or "
      f"path/to/file.py:NAME, which names {expected}."
    )
  source, _, attribute = name.rpartition(":")
  if source.endswith(".py"):
    source = os.path.abspath(source)
    if not os.path.isfile(source):
      raise PluginError(
        f"{setting}: found no file {source}; expected path/to/file.py:NAME."
      )
  with as_sentence(f"{setting} {name!r}", source):
    module, path, sha256 = _module(source)
  if attribute not in vars(module):
    raise PluginError(
      f"{setting}: found no {attribute!r} in {path}; expected {expected}."
    )
  value = vars(module)[attribute]
  if not fits(value):
    raise PluginError(
      f"{setting}: found {attribute!r} in {path}, of type "
      f"{type(value).__name__}; expected {expected}."
    )
  return Loaded(value, path, sha256)


def require_named(
  name: str, plugins: Collection[str], *, setting: str, argument: str
) -> None:
  """Refuses code that a file names and the caller does not.

  Args:
    name: value of a setting that an opened file holds.
    plugins: names of the user's values that the caller allows.
    setting: the file and its setting, for sentences.
    argument: what allows the name, with a `{!r}` for it, for sentences.

  Raises:
    PluginError: the name is of a user's value, and not one of `plugins`.
  """
  if is_name(name) and name not in plugins:
    raise PluginError(
      f"{setting}: found {name!r}, code that would run with your rights; "
      "expected a name of the project's, or that you name the code yourself: "
      f"if you trust it, pass {argument.format(name)}."
    )


def import_from(folder: str | os.PathLike[str]) -> None:
  """Lets code that the user named import modules of a folder, as the last."""
  path = os.path.abspath(folder)
  if path not in sys.path:
    sys.path.append(path)


def run_file(path: str | os.PathLike[str]) -> types.ModuleType:
  """Runs a Python file as a module; its errors, and OSError, pass through."""
  path = os.path.abspath(path)
  return _run_source(path, pathlib.Path(path).read_bytes())


@contextlib.contextmanager
def as_sentence(
  name: str,
  path: str | os.PathLike[str] = "",
  *,
  reraised: tuple[type[Exception], ...] = (),
) -> Iterator[None]:
  """Converts errors of the user's code in the `with` block to PluginError.

  Args:
    name: begins the sentence: the setting and its value.
    path: the user's file; the sentence names its last line in the traceback.
    reraised: classes of errors that pass through unchanged.

  Raises:
    PluginError: the code raised.
  """
  try:
    yield
  except reraised:
    raise
  except Exception as error:  # User code may raise any error.
    line = next(
      (
        f", line {frame.lineno}"
        for frame in reversed(traceback.extract_tb(error.__traceback__))
        if frame.filename == os.path.abspath(path)
      ),
      "",
    )
    raise PluginError(
      f"{name}{line}: {type(error).__name__}: {error}"
    ) from error


@functools.cache
def _module(source: str) -> tuple[types.ModuleType, pathlib.Path, str]:
  """Returns a module with its file and the hash of the text that it ran."""
  import_from(os.getcwd())
  if source.endswith(".py"):
    path = pathlib.Path(source)
    text = path.read_bytes()
    return _run_source(source, text), path, hashlib.sha256(text).hexdigest()
  module = importlib.import_module(source)
  path = pathlib.Path(str(module.__file__))
  return module, path, hashlib.sha256(path.read_bytes()).hexdigest()


def _run_source(path: str, text: bytes) -> types.ModuleType:
  """Runs the text that was hashed, without Python's bytecode of earlier runs.

  That may be stale: it is reused if the source has the same size and, in
  seconds, the same modification time.
  """
  name = f"own_{hashlib.sha256(path.encode() + text).hexdigest()[:16]}"
  import_from(_import_root(pathlib.Path(path)))
  module = types.ModuleType(name)
  module.__file__ = path
  sys.modules[name] = module  # Dataclasses look their module up there.
  exec(compile(text, path, "exec"), vars(module))  # noqa: S102
  return module


def _import_root(path: pathlib.Path) -> pathlib.Path:
  """Returns the folder from which a file can import its neighbours.

  It is the file's own or, in a package, the one above the package.
  """
  folder = path.parent
  while (folder / "__init__.py").is_file():
    folder = folder.parent
  return folder
