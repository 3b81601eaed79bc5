"""Reads and writes JSON files, with errors that name the file."""

from __future__ import annotations

import collections
import hashlib
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from anysearch_jax.host import disk, git_lfs


class RepeatedNameError(ValueError):
  """Values of one name are there twice, of which a dict would keep the last."""


def distinct(names: Sequence[str]) -> None:
  """Checks that no name occurs twice.

  Raises:
    RepeatedNameError: one does; the message is the name, "twice".
  """
  if len(set(names)) < len(names):
    ((repeated, _),) = collections.Counter(names).most_common(1)
    raise RepeatedNameError(f"{repeated!r:.60} twice")


def _distinct_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  values = dict(pairs)
  if len(values) < len(pairs):
    distinct([name for name, _ in pairs])
  return values


def parse(text: str | bytes, **options: Any) -> Any:
  """Returns the values of JSON text that somebody else wrote.

  Args:
    text: the text.
    options: of `json.loads`.

  Raises:
    RepeatedNameError: an object has a key twice.
    ValueError, RecursionError: the text is not JSON.
  """
  return json.loads(text, object_pairs_hook=_distinct_pairs, **options)


def read(path: pathlib.Path, kind: type = dict, missing: Any = None) -> Any:
  """Returns the JSON object, or the list, in a file.

  Args:
    path: path of the file.
    kind: type of the value: `dict` or `list`.
    missing: returned if the file does not exist; None: that is an error.

  Raises:
    ValueError: the file contains something else; the message names it.
    OSError: the file cannot be read.
  """
  if missing is not None and not path.is_file():
    return missing
  try:
    values = parse(path.read_bytes())
  except RepeatedNameError as error:
    raise ValueError(
      f"{path}: found the key {error}, expected it once; remove one."
    ) from error
  except (ValueError, RecursionError) as error:
    git_lfs.refuse_pointer(path)
    raise ValueError(
      f"{path}: not a whole JSON file ({error}); copy it again."
    ) from error
  if not isinstance(values, kind):
    expected = "object" if kind is dict else "list"
    raise ValueError(
      f"{path}: found {type(values).__name__}, expected a JSON {expected}."
    )
  return values


def sha256(values: Any) -> str:
  """Returns the SHA-256 of JSON values, whatever the order of their keys."""
  return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def text(values: Mapping[str, Any]) -> str:
  """Returns the text that `write` writes for these values."""
  return json.dumps(values, indent=2) + "\n"


def write(path: pathlib.Path, values: Mapping[str, Any]) -> None:
  """Writes a JSON object atomically; raises as `disk.replacing`."""
  disk.write_whole(path, text(values))
