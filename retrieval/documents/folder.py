"""Keeps an index over files and folders of documents up to date.

    current.json        name of the folder of the finished build
    build-1f0e2d3c4b/   an index, see `index.building`, and beside it
      documents.jsonl   the passages: id, title, text, path, page, heading
      files.json        the settings, and each file with its rows in that order
    next/               the build that is being made

A build is made aside and then named in `current.json`, so an update that is
stopped changes nothing, and an index that is open stays whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, NamedTuple

from anysearch_jax.host import disk, json_files
from retrieval import passages
from retrieval.documents import finding, reading, splitting
from retrieval.index import building, search, vectors

_NEXT, _FILES, _ROWS = "next", "files.json", passages.DOCUMENTS
# Tokens of an encoder's text that a title and headings may take, and the least
# that remain for a passage.
_TITLE, _LEAST = 48, 16
# Vectors between two safe points.
_SHARD = 4096
# Changes with what the readers make of a file.
_VERSION = 1
# A file that was changed within these nanoseconds may change again at the same
# time stamp.
_RECENT = 2_000_000_000


@dataclasses.dataclass(frozen=True)
class Settings:
  """Settings of an index of documents.

  Attributes:
    tokens: the most tokens of a passage: of the encoder, or four bytes each.
      Three passages, which a search shows by default, then leave room for many
      searches in a context of 8,192 tokens.
    overlap: the most tokens that a passage repeats of the one before it.
    language: see `building.Settings`; without an encoder.
    dtype: of the encoder's vectors, see `building.Settings`.
  """

  tokens: int = 200
  overlap: int = 30
  language: str = "english"
  dtype: str = "float32"

  def __post_init__(self):
    if not (self.tokens >= 8 and 0 <= self.overlap <= self.tokens // 2):
      raise ValueError(
        f"Found passages of {self.tokens} tokens with an overlap of "
        f"{self.overlap}, expected at least 8, and at most half of them to "
        "overlap."
      )


@dataclasses.dataclass(frozen=True)
class Summary:
  """What an update did.

  Attributes:
    files: files with passages.
    passages: passages of the index.
    added, changed, unchanged: how many of the files are new, were read again,
      or are as they were.
    removed: files that had passages and are there no more.
    skipped: path and reason of files and folders that cannot be read.
    ignored: how many files have an ending that no reader knows, by ending, and
      how many are `hidden`.
    is_new: whether the index was built; otherwise the one before is current.
  """

  files: int
  passages: int
  added: int
  changed: int
  unchanged: int
  removed: int
  skipped: tuple[tuple[str, str], ...]
  ignored: Mapping[str, int]
  is_new: bool


def update(
  paths: Sequence[str],
  folder: str | os.PathLike,
  settings: Settings = Settings(),
  *,
  encoder: search.Encoder | None = None,
  on_file: Callable[[int, int], None] = lambda done, of: None,
  on_rows: Callable[[int, int], None] = lambda done, of: None,
) -> Summary:
  """Makes the index in a folder one of the documents as they are now.

  Files that did not change since the last update are not read again.

  Args:
    paths: files, folders and globs, see `finding.find`.
    folder: folder of the index; created if missing.
    settings: settings of the index.
    encoder: makes the vectors of passages; None: the index is one of words.
    on_file: called with the number of files done, and of all.
    on_rows: called with the number of passages encoded, and of all.

  Raises:
    ValueError: a path is missing, or no file has a passage.
  """
  folder = pathlib.Path(folder)
  if (folder / building.BUILT).is_file():
    raise building.OtherIndexError(
      f"{folder}: found the index of a corpus, expected one of documents; name "
      "another folder."
    )
  with disk.translate_errors(folder):
    folder.mkdir(parents=True, exist_ok=True)
    with building.alone(folder):
      return _update(paths, folder, settings, encoder, on_file, on_rows)


class _File(NamedTuple):
  """A file of a build, as `files.json` has it.

  path, name: see `finding.File`.
  place: the absolute path.
  size, time: of the file in bytes and nanoseconds; time 0: it may have changed
    since.
  sha256: of the file; "": it could not be opened.
  rows: its passages, in the order of the files.
  end: bytes of all rows up to its last one.
  reason: why it has no rows.
  """

  path: str
  name: str
  place: str
  size: int
  time: int
  sha256: str
  rows: int
  end: int
  reason: str


class _Build:
  """The files of the current build, or none.

  Args:
    folder: folder of the index.
    made_by: what rows and index depend on besides the files.
  """

  def __init__(self, folder: pathlib.Path, made_by: dict[str, Any]):
    self.folder = building.newest(folder)
    self.files: dict[str, _File] = {}
    self._starts: dict[str, int] = {}
    found: dict[str, Any] = {}
    if self.folder != folder:
      found = json_files.read(self.folder / _FILES)
    self._is_usable = found.get("rows") == made_by["rows"]
    self.is_same = self._is_usable and found["index"] == made_by["index"]
    start = 0
    for file in itertools.starmap(_File, found.get("files", ())):
      self.files[file.place], self._starts[file.place] = file, start
      start = file.end

  def usable(self, place: str) -> _File | None:
    """Returns the file at a place, if its rows may be used again."""
    return self.files.get(place) if self._is_usable else None

  def write_rows(self, old: _File, file: finding.File, out: IO[bytes]) -> None:
    """Writes the rows of a file again, with its present path and name."""
    with (self.folder / _ROWS).open("rb") as lines:
      lines.seek(self._starts[old.place])
      for number in range(1, old.rows + 1):
        line = lines.readline()
        if (old.path, old.name) != file:
          named = {"id": f"{file.name}#{number}", "path": file.path}
          line = _line(json.loads(line) | named)
        out.write(line)


def _update(
  paths: Sequence[str],
  folder: pathlib.Path,
  settings: Settings,
  encoder: search.Encoder | None,
  on_file: Callable[[int, int], None],
  on_rows: Callable[[int, int], None],
) -> Summary:
  """Updates the index whose lock is held."""
  made_by = _made_by(settings, encoder)
  before = _Build(folder, made_by)
  found = finding.find(paths, reading.READERS, without=str(folder))
  files = [_known(file, before) for file in found.files]
  is_new = False
  if not before.is_same or files != [*before.files.values()]:
    beside = folder / _NEXT
    beside.mkdir(exist_ok=True)
    splitter = _splitter(settings, encoder)
    files = []
    with (beside / _ROWS).open("wb") as out:
      for done, file in enumerate(found.files, start=1):
        files.append(_write(file, before, splitter, out))
        on_file(done, len(found.files))
    is_new = not before.is_same or (
      vectors.digest(beside / _ROWS) != vectors.digest(before.folder / _ROWS)
    )
    if not any(file.rows for file in files):
      raise ValueError(_nothing(found, files))
    values = made_by | {"files": files}
    if is_new:
      _build(beside, settings, encoder, before, on_rows)
      json_files.write(beside / _FILES, values)
      _replace(folder, beside)
    else:
      json_files.write(before.folder / _FILES, values)
  return _summary(found, files, before, is_new=is_new)


def _known(file: finding.File, before: _Build) -> _File | None:
  """Returns what is known of a file that has the same size and time."""
  old = before.usable(os.path.abspath(file.path))
  with contextlib.suppress(OSError):
    now = os.stat(file.path)
    if old and (old.size, old.time) == (now.st_size, now.st_mtime_ns):
      return old._replace(path=file.path, name=file.name)
  return None


def _write(
  file: finding.File,
  before: _Build,
  splitter: splitting.Splitter,
  out: IO[bytes],
) -> _File:
  """Writes the rows of a file; those of a file that cannot be read are none."""
  place = os.path.abspath(file.path)
  start, rows, size, time_, sha256, reason = out.tell(), 0, 0, 0, "", ""
  try:
    old = _known(file, before)
    if old:
      size, time_, sha256 = old.size, old.time, old.sha256
    else:
      size, time_, sha256 = _stamp(file.path)
      old = before.usable(place)
    if old and old.sha256 == sha256:
      before.write_rows(old, file, out)
      rows, reason = old.rows, old.reason
    else:
      for row in _rows(file, splitter):
        out.write(_line(row))
        rows += 1
  except reading.ReadError as error:
    out.seek(start)
    out.truncate()
    rows, reason = 0, str(error)
  end = out.tell()
  return _File(*file, place, size, time_, sha256, rows, end, reason)


def _stamp(path: str) -> tuple[int, int, str]:
  """Returns size, time and SHA-256 of a file.

  Raises:
    reading.ReadError: it is not a file, or cannot be opened.
  """
  try:
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
      raise reading.ReadError("is not a regular file")
    at = found.st_mtime_ns
    is_old = at < time.time_ns() - _RECENT
    return found.st_size, at if is_old else 0, vectors.digest(path)
  except OSError as error:
    raise reading.ReadError(f"cannot be opened: {error.strerror}") from error


def _rows(
  file: finding.File, splitter: splitting.Splitter
) -> Iterator[dict[str, Any]]:
  """Yields the passages of a file as rows of the corpus."""
  name = os.path.basename(file.path)
  number = 0
  for part in reading.read(file.path):
    pieces = splitter(part.text, is_markdown=part.is_markdown)
    for piece in pieces:
      number += 1
      yield {
        "id": f"{file.name}#{number}",
        "title": part.title or name,
        "text": piece.text,
        "path": file.path,
        "page": part.page,
        "heading": piece.heading or part.heading,
      }
  if not number:
    raise reading.ReadError("has no text below its headings")


def _line(row: Mapping[str, Any]) -> bytes:
  return json.dumps(row, ensure_ascii=False).encode() + b"\n"


def _made_by(
  settings: Settings, encoder: search.Encoder | None
) -> dict[str, Any]:
  """Returns what rows and index depend on besides the files, as JSON values."""
  index: dict[str, Any] = {"language": settings.language}
  if encoder is not None:
    made = {"dim": encoder.dim} | encoder.identity()
    index = {"dtype": settings.dtype, "encoder": made}
  counted = ""
  if isinstance(encoder, search.Tokenized):
    counted = json_files.sha256([encoder.tokenizer().to_str(), encoder.room])
  rows = [_VERSION, settings.tokens, settings.overlap, counted]
  return {"rows": rows, "index": building.without_paths(index)}


def _splitter(
  settings: Settings, encoder: search.Encoder | None
) -> splitting.Splitter:
  if not isinstance(encoder, search.Tokenized):
    return splitting.Splitter(settings.tokens, settings.overlap)
  tokens = min(settings.tokens, max(encoder.room - _TITLE, _LEAST))
  overlap = min(settings.overlap, tokens // 2)
  return splitting.Splitter(tokens, overlap, encoder.tokenizer())


def _build(
  beside: pathlib.Path,
  settings: Settings,
  encoder: search.Encoder | None,
  before: _Build,
  on_rows: Callable[[int, int], None],
) -> None:
  """Builds the index of the rows in a folder."""
  made = building.Settings(
    kind="bm25" if encoder is None else "flat",
    dtype=settings.dtype,
    language=settings.language,
    shard=_SHARD,
  )

  def build() -> None:
    building.build(
      beside / _ROWS,
      beside,
      made,
      encoder=encoder,
      before=before.folder if before.files else None,
      on_rows=on_rows,
    )

  try:
    build()
  except building.OtherIndexError:  # A stopped update was of other documents.
    for left in beside.iterdir():
      if left.is_dir():
        shutil.rmtree(left)
      elif left.name != _ROWS:
        left.unlink()
    build()


def _replace(folder: pathlib.Path, beside: pathlib.Path) -> None:
  """Makes a finished build the current one and removes the others."""
  name = f"build-{uuid.uuid4().hex[:10]}"
  beside.rename(folder / name)
  json_files.write(folder / building.CURRENT, {"build": name})
  for other in folder.glob("build-*"):
    if other.name != name:
      shutil.rmtree(other, ignore_errors=True)


def _summary(
  found: finding.Found,
  files: Sequence[_File],
  before: _Build,
  *,
  is_new: bool,
) -> Summary:
  there = {file.place: file for file in files if file.rows}
  old = {file.place: file for file in before.files.values() if file.rows}
  both = there.keys() & old.keys()
  changed = sum(there[at].sha256 != old[at].sha256 for at in both)
  skipped = [(file.path, file.reason) for file in files if file.reason]
  return Summary(
    files=len(there),
    passages=sum(file.rows for file in there.values()),
    added=len(there) - len(both),
    changed=changed,
    unchanged=len(both) - changed,
    removed=len(old) - len(both),
    skipped=(*found.refused, *skipped),
    ignored=found.ignored,
    is_new=is_new,
  )


def _nothing(found: finding.Found, files: Sequence[_File]) -> str:
  """Returns the sentence for documents without any passage."""
  skipped = [*found.refused, *((f.path, f.reason) for f in files)]
  said = [f"{path} {reason}" for path, reason in skipped[:3]]
  if found.ignored:
    others = (f"{count} {kind}" for kind, count in found.ignored.items())
    said.append(f"ignored: {', '.join(others)}")
  return (
    f"documents: found no text ({'; '.join(said) or 'no file'}), expected "
    f"files that end in {', '.join(reading.READERS)}."
  )
