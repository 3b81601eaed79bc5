"""Keeps an index over files and folders of documents up to date.

    current.json        names the folder of the newest finished build
    build-1f0e2d3c4b/   an index, see `index.building`; corpus/passages.jsonl
                        has rows of id, title, text, path, page, heading
      files.json        the settings, and each file with its number of rows
    next/               the build that is being made

A build is made aside and then named in `current.json`, so an update that is
stopped changes nothing. The build before stays until the next update, for
programs that are opening it.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import os
import pathlib
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, NamedTuple

import numpy as np

from anysearch_jax.host import disk, json_files
from anysearch_jax.retrieval import passages
from anysearch_jax.retrieval.documents import finding, reading, splitting
from anysearch_jax.retrieval.index import building, opening, search

_NEXT, _FILES, _ROWS = "next", "files.json", f"corpus/{passages.LINES}"
# Changes with what the readers make of a file, and with `_File`.
_VERSION = 5
# Tokens of an encoder's text that a title and headings may take, and the least
# that remain for a passage.
_TITLE, _LEAST = 48, 16


@dataclasses.dataclass(frozen=True)
class Settings:
  """Settings of an index of documents.

  Attributes:
    tokens: the most tokens of a passage: of the encoder, or four bytes each.
      The three passages that a search shows then leave room for ten searches
      in a context of 8,192 tokens.
    overlap: the most tokens that a passage repeats of the one before it.
    language: see `building.Settings`; without an encoder.
  """

  tokens: int = 200
  overlap: int = 30
  language: str = "english"

  def __post_init__(self):
    if not (self.tokens >= _LEAST and 0 <= self.overlap <= self.tokens // 2):
      raise ValueError(
        f"Found passages of {self.tokens} tokens and an overlap of "
        f"{self.overlap}, expected at least {_LEAST}, and half of them or less."
      )


class Summary(NamedTuple):
  """What an update did.

  files, passages: of the index.
  added, changed, unchanged, removed: how many files are new, have other bytes
    than before, have the same, and are gone; of those with passages.
  skipped: path and reason of files and folders that cannot be read.
  ignored: how many files have an unknown ending, by ending, or are `hidden`.
  """

  files: int
  passages: int
  added: int
  changed: int
  unchanged: int
  removed: int
  skipped: tuple[tuple[str, str], ...]
  ignored: Mapping[str, int]


def update(
  paths: str | os.PathLike | Sequence[str],
  folder: str | os.PathLike,
  settings: Settings = Settings(),
  *,
  encoder: search.Encoder | None = None,
  afresh: bool = False,
  on_file: Callable[[int, int], None] = lambda done, of: None,
  on_rows: Callable[[int, int], None] = lambda done, of: None,
) -> Summary:
  """Makes the index in a folder that of the documents as they are now.

  Files with the size and time of before are not parsed again, and passages of
  before keep their vectors.

  Args:
    paths: files, folders and globs, or one of them, see `finding.find`.
    folder: folder of the index; created if missing.
    settings: settings of the index.
    encoder: makes the vectors of passages; None: the index is one of words.
    afresh: whether to read files that did not change too.
    on_file: called with the number of files done, and of all.
    on_rows: called with the number of passages encoded, and of all.

  Raises:
    ValueError: a path is missing, no file has a passage, or the folder has an
      index of something else.
  """
  if isinstance(paths, str | os.PathLike):
    paths = [os.fspath(paths)]
  folder = pathlib.Path(folder)
  if (folder / building.BUILT).is_file():
    raise building.OtherIndexError(
      f"{folder}: found the index of a corpus, expected one of documents; name "
      "another folder."
    )
  folder.mkdir(parents=True, exist_ok=True)
  with disk.translate_errors(folder), building.alone(folder):
    found = finding.find(paths, reading.READERS, without=str(folder))
    made_by, splitter = _made_by(settings, encoder)
    newest = building.newest(folder)
    before = {} if afresh else _read(newest, made_by)
    if before.keys() == {*found.files}:
      if all(file.stamp == _stamp(file.path) for file in before.values()):
        return _summary(found, before, before)
    beside = folder / _NEXT
    shutil.rmtree(beside, ignore_errors=True)
    (beside / "corpus").mkdir(parents=True)
    files: dict[finding.File, _File] = {}
    with (beside / _ROWS).open("wb") as out:
      for done, file in enumerate(found.files, start=1):
        files[file] = _write(file, before.get(file), newest, splitter, out)
        on_file(done, len(found.files))
    summary = _summary(found, files, before)
    if not summary.passages:
      raise ValueError(
        f"documents: found no text in {[*map(str, paths)]} (unreadable: "
        f"{list(summary.skipped[:3])}; of other kinds: {dict(found.ignored)}), "
        f"expected files that end in {', '.join(reading.READERS)}."
      )
    kind = "bm25"
    if encoder is not None:
      kind = "flat"
      if before:
        encoder = _Remembering(encoder, newest)
    building.build(
      beside / _ROWS,
      beside,
      building.Settings(kind, language=settings.language),
      encoder=encoder,
      on_rows=on_rows,
    )
    json_files.write(
      beside / _FILES, {"made_by": made_by, "files": [*files.values()]}
    )
    name = f"build-{uuid.uuid4().hex[:10]}"
    beside.rename(folder / name)
    json_files.write(folder / building.CURRENT, {"build": name})
    for other in folder.glob("build-*"):
      if other.name not in (name, newest.name):
        shutil.rmtree(other, ignore_errors=True)
    return summary


class _File(NamedTuple):
  """A file of a build.

  path, name: see `finding.File`.
  stamp: see `_stamp`.
  rows: number of its passages.
  start, end: of their lines, in bytes.
  reason: why it has no rows.
  """

  path: str
  name: str
  stamp: list[int]
  rows: int
  start: int
  end: int
  reason: str


def _stamp(path: str) -> list[int]:
  """Returns size and time of a file's last change, of its rights too."""
  try:
    now = os.stat(path)
  except OSError:
    return []
  return [now.st_size, now.st_ctime_ns]


def _read(
  build: pathlib.Path, made_by: Mapping[str, Any]
) -> dict[finding.File, _File]:
  """Returns the files of a build that is whole and was made the same way."""
  try:
    opening.read(build)
    passages.Corpus(build / "corpus").verify()
    stored = json_files.read(build / _FILES)
    files = [_File(*values) for values in stored["files"]]
    is_same = stored["made_by"] == made_by
  except (OSError, ValueError, LookupError, TypeError):  # Missing or damaged.
    return {}
  if not is_same:
    return {}
  return {finding.File(file.path, file.name): file for file in files}


def _write(
  file: finding.File,
  old: _File | None,
  build: pathlib.Path,
  splitter: splitting.Splitter,
  out: IO[bytes],
) -> _File:
  """Writes the rows of a file, those that a build has of it if it is the same.

  A file that cannot be read has no rows.
  """
  start, count, reason = out.tell(), 0, ""
  stamp = _stamp(file.path)
  if old and old.stamp == stamp:
    with (build / _ROWS).open("rb") as lines:
      lines.seek(old.start)
      out.write(lines.read(old.end - old.start))
    count, reason = old.rows, old.reason
  else:
    try:
      for part in reading.read(file.path):
        for heading, text in splitter(part.text, is_markdown=part.is_markdown):
          count += 1
          row = {
            "id": f"{file.name}#{count}",
            "title": part.title or os.path.basename(file.path),
            "text": text,
            "path": file.path,
            "page": part.page,
            "heading": heading or part.heading,
          }
          line = json.dumps(row, ensure_ascii=False) + "\n"
          # A file's name may have bytes that are not UTF-8.
          out.write(line.encode(errors="backslashreplace"))
      reason = "" if count else "has no text below its headings"
    except reading.ReadError as error:
      out.seek(start)
      out.truncate()
      count, reason = 0, str(error)
  return _File(*file, stamp, count, start, out.tell(), reason)


def _made_by(
  settings: Settings, encoder: search.Encoder | None
) -> tuple[dict[str, Any], splitting.Splitter]:
  """Returns what an index depends on, as JSON values, and the splitter."""
  made_by: dict[str, Any] = {"version": _VERSION}
  tokens, tokenizer = settings.tokens, None
  if encoder is None:
    made_by["language"] = settings.language
  else:
    made_by["encoder"] = encoder.identity()
  if isinstance(encoder, search.Tokenized):
    tokenizer, most = encoder.tokenizer()
    tokens = min(tokens, max(most - _TITLE, _LEAST))
  overlap = min(settings.overlap, tokens // 2)
  made_by |= {"tokens": tokens, "overlap": overlap}
  splitter = splitting.Splitter(tokens, overlap, tokenizer)
  return building.without_paths(made_by), splitter


class _Remembering:
  """An encoder that takes the vectors of known passages from an index.

  Args:
    encoder: made the vectors of the index, and makes those of other passages.
    build: folder of the index.
  """

  def __init__(self, encoder: search.Encoder, build: pathlib.Path):
    self._encoder, self.dim = encoder, encoder.dim
    self.queries, self.identity = encoder.queries, encoder.identity
    shards = building.shards_of(build, json_files.read(build / building.BUILT))
    self._vectors: dict[str, np.ndarray] = {}
    if all(map(shards.finished, range(len(shards)))):
      texts = passages.Corpus(build / "corpus").contents(0, shards.count)
      rows = map(shards.rows, range(len(shards)))
      vectors = itertools.chain.from_iterable(rows)
      self._vectors = dict(zip(texts, vectors, strict=True))

  def passages(self, texts: Sequence[str]) -> np.ndarray:
    """Returns vectors; see `search.Encoder`."""
    new = [text for text in texts if text not in self._vectors]
    vectors = collections.ChainMap(self._vectors)
    if new:
      encoded = self._encoder.passages(new)
      vectors = vectors.new_child(dict(zip(new, encoded, strict=True)))
    return np.array([vectors[text] for text in texts], np.float32)


def _summary(
  found: finding.Found,
  files: Mapping[finding.File, _File],
  before: Mapping[finding.File, _File],
) -> Summary:
  """Returns what an update made of the files of another build."""
  now = {key: tuple(file.stamp) for key, file in files.items() if file.rows}
  old = {key: tuple(file.stamp) for key, file in before.items() if file.rows}
  both, unchanged = len(now.keys() & old), len(now.items() & old.items())
  return Summary(
    files=len(now),
    passages=sum(each.rows for each in files.values()),
    added=len(now) - both,
    changed=both - unchanged,
    unchanged=unchanged,
    removed=len(old) - both,
    skipped=(
      *found.refused,
      *((each.path, each.reason) for each in files.values() if each.reason),
    ),
    ignored=found.ignored,
  )
