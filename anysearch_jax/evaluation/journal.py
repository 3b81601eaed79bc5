"""A file of rows that survives a kill while it is written.

Finished rows are appended to `<name>.partial.jsonl` in the order in which they
finish. When all rows are present, they are written to `<name>.jsonl` in the
order of their places, so that the file does not depend on timing.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import orjson

from anysearch_jax.config import settings
from anysearch_jax.host import disk, json_files

Row = Mapping[str, Any]


class Journal(contextlib.AbstractContextManager["Journal"]):
  """The rows of one file; use as a context manager.

  Memory holds only the byte offset of each row. One process at a time may
  write: commands hold the `run_lock` of the folder.

  Args:
    path: path of the finished file, `<name>.jsonl`; its folder exists.
    rows: total number of rows.
    place: returns a row's index among them.
    again: returns whether a row of an earlier start is dropped, to be written
      again.

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
    self._partial = _partial(path)
    self._place = place
    self._again = again
    self._starts = np.full(rows, -1, np.int64)
    self._file = self._partial.open("a+b")
    try:
      self._read()
    except BaseException:
      self._file.close()
      raise

  def __exit__(self, *unused) -> None:
    self._file.close()

  def __len__(self) -> int:
    """Returns the number of rows that are present."""
    return int(np.sum(self._starts >= 0))

  def __contains__(self, place: int) -> bool:
    return bool(self._starts[place] >= 0)

  def add(self, row: Row) -> None:
    """Appends a row and flushes it, so that it survives a kill."""
    start = self._file.tell()
    self._file.write(json.dumps(row).encode() + b"\n")
    self._file.flush()
    self._starts[self._place(row)] = start

  def finish(self) -> None:
    """Writes the rows in order of their places and removes the partial file.

    Raises ValueError if some rows are missing.
    """
    if missing := len(self._starts) - len(self):
      raise ValueError(
        f"{self._partial} lacks {missing} of {len(self._starts)} rows; "
        "expected all before the file is finished."
      )
    with disk.replacing(self._path) as temporary, temporary.open("wb") as out:
      for start in self._starts.tolist():
        self._file.seek(start)
        out.write(self._file.readline())
    self._partial.unlink()

  def _read(self) -> None:
    """Reads the rows that an earlier start left."""
    self._file.seek(0)
    start = 0
    for number, line in enumerate(self._file, start=1):
      if not line.endswith(b"\n"):
        # A kill interrupted this write; drop the incomplete line.
        self._file.truncate(start)
        break
      try:
        row = json.loads(line)
        # `index` raises ValueError for negative places, which would otherwise
        # count from the end of the array.
        place = range(len(self._starts)).index(self._place(row))
        self._starts[place] = -1 if self._again(row) else start
      except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ValueError(
          f"{self._partial}, line {number}: found a line that is not a "
          f"row of this evaluation ({type(error).__name__}: {error}); remove "
          "this file to start over."
        ) from error
      start += len(line)
    self._file.seek(0, 2)


def reopen(path: pathlib.Path) -> None:
  """Makes a finished file a partial one, whose rows may be written again."""
  path.replace(_partial(path))


def read(path: pathlib.Path) -> Iterator[dict[str, Any]]:
  """Yields the rows of a finished file.

  Raises ValueError if the file is missing, or a line is not a JSON object.
  """
  if not path.is_file():
    raise ValueError(
      f"{path}: found no such file; expected the rows of a finished "
      "evaluation. Run the evaluation first, or correct the path."
    )
  with path.open("rb") as file:
    for _, row in parse(file, source=str(path)):
      yield row


def parse(
  lines: Iterable[str | bytes],
  *,
  source: str,
  row_kind: str = "episode",
  advice: str = "Evaluate this row again.",
) -> Iterator[tuple[str, dict[str, Any]]]:
  """Yields each line's location, for messages, and its JSON object.

  Blank lines are skipped.

  Args:
    lines: the lines of a file.
    source: names the file in messages.
    row_kind: names the content of a line in messages.
    advice: the last sentence of messages.

  Raises:
    ValueError: a line is not a JSON object.
  """
  for number, line in enumerate(lines, start=1):
    if not line.strip():
      continue
    where = f"{source}, line {number}"
    try:
      row = _decoded(line)
    except (ValueError, RecursionError) as error:
      raise ValueError(
        f"{where}: found text that is not JSON ({error}); "
        f"expected one {row_kind} a line. {advice}"
      ) from error
    if not isinstance(row, dict):
      raise ValueError(
        f"{where}: found {type(row).__name__}, expected a JSON object. {advice}"
      )
    yield where, row


def _partial(path: pathlib.Path) -> pathlib.Path:
  return path.with_suffix(".partial" + path.suffix)


def _decoded(line: str | bytes) -> Any:
  try:
    return orjson.loads(line)
  except orjson.JSONDecodeError:
    # orjson rejects an unpaired surrogate, which a model may emit; json does
    # not.
    return json.loads(line)


def claim_folder(
  folder: pathlib.Path, files: Mapping[str, Mapping[str, Any]]
) -> None:
  """Writes files that identify a folder's rows, or compares them.

  The folder is made if it is missing.

  Args:
    folder: the folder of the rows.
    files: by file name, the JSON values that identify the rows.

  Raises:
    ValueError: a file of the folder holds other values; the message has the
      first difference.
  """
  folder.mkdir(parents=True, exist_ok=True)
  for name, values in files.items():
    path = folder / name
    text = json_files.text(values)
    if not path.is_file():
      disk.write_whole(path, text)
    elif path.read_text() != text:
      stored = dict(settings.leaves(json_files.read(path)))
      current = dict(settings.leaves(json.loads(text)))
      for key in current | stored:
        if stored.get(key) != current.get(key):
          raise ValueError(
            f"{path}: {key} is {stored.get(key)!r} there and "
            f"{current.get(key)!r} now; {folder} holds the results of other "
            "settings. Name another folder, or remove it."
          )
