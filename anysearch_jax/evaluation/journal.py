"""Rows of an evaluation as they come in, which survive a kill.

While it goes on, rows stand in `<name>.partial.jsonl` in the order in which
they were finished. When all are there they are written in their own order to
`<name>.jsonl`, so that the file does not tell how it came about.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from anysearch_jax.host import json_files

Row = Mapping[str, Any]


class Journal:
  """The rows of one file; use as a context manager.

  Only their places in the file are held in memory. One process at a time may
  write: commands hold the `run_lock` of the folder.

  Args:
    path: of the finished file, `<name>.jsonl`; its folder exists.
    rows: how many there will be.
    place: of a row among them.
    again: whether a row that an earlier start left is to be written again.

  Raises:
    ValueError: a line is not a row.
  """

  def __init__(
    self,
    path: pathlib.Path,
    rows: int,
    place: Callable[[Row], int],
    *,
    again: Callable[[Row], bool] = lambda row: False,
  ):
    self._path = path
    self._partial = path.with_suffix(".partial" + path.suffix)
    self._place = place
    self._again = again
    self._starts = np.full(rows, -1, np.int64)
    self._file = self._partial.open("a+b")
    try:
      self._read()
    except BaseException:
      self._file.close()
      raise

  def __enter__(self) -> Journal:
    return self

  def __exit__(self, *unused) -> None:
    self._file.close()

  def __len__(self) -> int:
    """Rows that are there."""
    return int(np.sum(self._starts >= 0))

  def __contains__(self, place: int) -> bool:
    return bool(self._starts[place] >= 0)

  def add(self, row: Row) -> None:
    """Appends a row; a kill right after takes nothing of it away."""
    start = self._file.tell()
    self._file.write(json.dumps(row).encode() + b"\n")
    self._file.flush()
    self._starts[self._place(row)] = start

  def finish(self) -> None:
    """Writes the rows in order of their places, and forgets the partial file.

    Raises:
      ValueError: some are not there.
    """
    if missing := len(self._starts) - len(self):
      raise ValueError(
        f"{self._partial} lacks {missing} of {len(self._starts)} rows."
      )
    beside = self._path.with_name(self._path.name + ".writing")
    with beside.open("wb") as out:
      for start in self._starts.tolist():
        self._file.seek(start)
        out.write(self._file.readline())
    beside.rename(self._path)
    self._partial.unlink()

  def _read(self) -> None:
    """Takes up what an earlier start has left."""
    self._file.seek(0)
    start = 0
    for number, line in enumerate(self._file, start=1):
      if not line.endswith(b"\n"):
        # A kill came while it was written.
        self._file.truncate(start)
        break
      try:
        row = json.loads(line)
        # Looked up, so that no other value is taken for a place.
        place = range(len(self._starts)).index(self._place(row))
        self._starts[place] = -1 if self._again(row) else start
      except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ValueError(
          f"{self._partial}, line {number}: found no row of this evaluation "
          f"({type(error).__name__}: {error}); remove the folder to start over."
        ) from error
      start += len(line)
    self._file.seek(0, 2)


def read(path: pathlib.Path) -> Iterator[dict[str, Any]]:
  """The rows of a finished file, one after the other.

  Raises:
    ValueError: there is none, or a line is not a JSON object.
  """
  if not path.is_file():
    raise ValueError(
      f"{path}: no such file; expected that of a finished evaluation."
    )
  with path.open("rb") as file:
    for number, line in enumerate(file, start=1):
      try:
        row = json.loads(line)
      except (ValueError, RecursionError) as error:
        raise ValueError(
          f"{path}, line {number}: found text that is not JSON ({error})."
        ) from error
      if not isinstance(row, dict):
        raise ValueError(
          f"{path}, line {number}: found {type(row).__name__}, expected a row."
        )
      yield row


def claim(folder: pathlib.Path, files: Mapping[str, Mapping[str, Any]]) -> None:
  """Makes a folder of rows, or sees that it is of the same kind.

  Args:
    folder: made where it is not there.
    files: JSON values by file name, which say what the rows are of.

  Raises:
    ValueError: the folder is of other values; the first that differs.
  """
  folder.mkdir(parents=True, exist_ok=True)
  for name, values in files.items():
    path = folder / name
    text = json.dumps(values, indent=2) + "\n"
    if not path.is_file():
      beside = path.with_name(path.name + ".writing")
      beside.write_text(text)
      beside.rename(path)
    elif path.read_text() != text:
      found, expected = json_files.read(path), json.loads(text)
      raise ValueError(
        f"{path}: {_difference(found, expected)}; what stands in {folder} is "
        "of something else. Name another folder, or remove it."
      )


def _difference(found: Any, expected: Any, path: str = "") -> str:
  """The first value that differs, in words."""
  if isinstance(found, dict) and isinstance(expected, dict):
    for key in [*expected, *found]:
      if found.get(key) != expected.get(key):
        inner = f"{path}.{key}" if path else key
        return _difference(found.get(key), expected.get(key), inner)
  return f"{path or 'it'} is {found!r} there and {expected!r} now"
