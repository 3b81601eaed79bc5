"""Keeps an index over files and folders of documents up to date.

    current.json        names the folder of the newest finished build
    build-1f0e2d3c4b/   an index, see `index.building`; corpus/passages.jsonl
                        has rows of id, title, text, path, page, heading
      files.json        the settings, and each file with its number of rows
    next/               the build that is being made

A build is made in `next/` and then named in `current.json`, so an update that
is stopped changes nothing. The previous build stays until the next update, for
programs that are opening it.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import pathlib
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, NamedTuple

from anysearch_jax.host import disk, json_files
from anysearch_jax.retrieval import analysis, passages
from anysearch_jax.retrieval.documents import (
  finding,
  kept_vectors,
  ocr,
  reader_process,
  reading,
)
from anysearch_jax.retrieval.index import building, opening, search

_PRIVATE = 0o700  # For the user alone.
_NEXT = "next"
_FILES = "files.json"
_ROWS = f"corpus/{passages.LINES}"
# Raised whenever a reader yields other parts of a file, `File` changes, or
# `analysis.DocumentAnalyzer` makes other terms.
_VERSION = 9
# Tokens of an encoder's input that are left for the title and the headings.
_TITLE_TOKENS = 48
# Passages by whose beginnings the languages of an index are detected.
_SAMPLE = 2000
_SAMPLE_CHARACTERS = 600
# The fewest tokens that a passage may be limited to.
_LEAST_TOKENS = 16


@dataclasses.dataclass(frozen=True)
class Settings:
  """Settings of an index of documents.

  Attributes:
    tokens: the most tokens of a passage, counted by the encoder's tokenizer if
      it has one (`search.Tokenized`), otherwise as four bytes each. At 200, the
      three passages that a search shows leave room for ten searches in a
      context of 8,192 tokens.
    overlap: the most tokens that a passage repeats of the one before it.
    language: one of `analysis.LANGUAGES`. "" stands for those that the
      passages are in.
    ocr: command that reads pictures of pages, see `ocr.Command`; "" for none.
    follow_links, ignored_files: see `finding.find_files`.
    kind: `bm25`, `flat` or `hybrid`; "": `hybrid` with an encoder, otherwise
      `bm25`.
  """

  tokens: int = 200
  overlap: int = 30
  language: str = ""
  ocr: str = ""
  follow_links: bool = False
  ignored_files: bool = False
  kind: str = ""

  def __post_init__(self):
    if not (
      self.tokens >= _LEAST_TOKENS and 0 <= self.overlap <= self.tokens // 2
    ):
      raise ValueError(
        f"Found passages of {self.tokens} tokens and an overlap of "
        f"{self.overlap}, expected at least "
        f"{_LEAST_TOKENS}, and half of them or less."
      )


class Summary(NamedTuple):
  """What an update did; files without passages are not counted.

  Attributes:
    files: number of files in the index.
    passages: number of passages in the index.
    added: number of new files.
    changed: number of files that changed since the previous build.
    unchanged: number of files that did not.
    removed: number of files that are gone.
    skipped: path and reason of files and folders that cannot be read.
    partly_read: path of files in the index, and what was lost of them.
    ignored: numbers of what is not read, see `finding.FoundFiles`.
    is_remade: whether there was an index whose passages could not be kept.
  """

  files: int
  passages: int
  added: int
  changed: int
  unchanged: int
  removed: int
  skipped: tuple[tuple[str, str], ...]
  partly_read: tuple[tuple[str, str], ...]
  ignored: Mapping[str, int]
  is_remade: bool = False


def update(
  paths: str | os.PathLike | Sequence[str],
  folder: str | os.PathLike,
  settings: Settings = Settings(),
  *,
  encoder: search.Encoder | None = None,
  afresh: bool = False,
  on_file: Callable[[int, int], None] = lambda done, total: None,
  on_rows: Callable[[int, int], None] = lambda done, total: None,
) -> Summary:
  """Brings the index in a folder up to date with the documents.

  Files whose size and time did not change are not parsed again, and passages
  that were in the previous build keep their vectors.

  Args:
    paths: files, folders and globs, or one of them; see `finding.find_files`.
    folder: folder of the index; created if missing.
    settings: settings of the index.
    encoder: makes the vectors of passages; None builds an index of words, which
      keeps the vectors of the previous build for a later one.
    afresh: whether to parse unchanged files again too.
    on_file: called with the number of files done, and of all files.
    on_rows: called with the number of passages encoded, and of all new ones.

  Returns:
    The numbers of files and passages, and the files that were not read.

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
  if settings.ocr:
    ocr.Command(settings.ocr)  # Refuses a program that is missing.
  folder.mkdir(parents=True, exist_ok=True)
  # The index holds the texts of private documents.
  folder.chmod(_PRIVATE)
  with disk.translate_errors(folder), building.locked(folder):
    documents = _find(paths, folder, settings)
    recipe, reader_settings = _recipe(settings, encoder)
    search_recipe = _search_recipe(settings, encoder)
    newest = building.newest_build(folder)
    stored = {} if afresh else _read_intact(newest)
    files_before = _files(stored) if stored.get("made_by") == recipe else {}
    places_before = {(file.path, file.name) for file in files_before.values()}
    is_same = places_before == {*documents.files}
    if files_before and is_same and _serves(stored, search_recipe):
      if all(file.stamp == stamp(file.path) for file in files_before.values()):
        return _summary(documents, files_before, files_before)
    next_build = folder / _NEXT
    shutil.rmtree(next_build, ignore_errors=True)
    (next_build / "corpus").mkdir(parents=True)
    files: dict[str, File] = {}
    file_stamps = {file.name: stamp(file.path) for file in documents.files}
    unchanged = {
      name
      for name, file_before in files_before.items()
      if file_stamps.get(name) == file_before.stamp
    }
    with (
      reader_process.Readers(reader_settings) as readers,
      (next_build / _ROWS).open("wb") as lines,
    ):
      texts = readers.read_all(
        file.path for file in documents.files if file.name not in unchanged
      )
      for done, file in enumerate(documents.files, start=1):
        name = file.name
        if name in unchanged:
          files[name] = _copy_rows(files_before[name], newest, file.path, lines)
        else:
          files[name] = _write_rows(file, file_stamps[name], next(texts), lines)
        on_file(done, len(documents.files))
    had_files = not afresh and (newest / _FILES).is_file()
    summary = _summary(documents, files, files_before)._replace(
      is_remade=had_files and not files_before
    )
    if not summary.passages:
      raise ValueError(
        f"documents: found no text in {[*map(str, paths)]} (unreadable: "
        f"{list(summary.skipped[:3])}; left out: "
        f"{dict(documents.ignored)}), expected files with text, such as .pdf, "
        ".docx, .xlsx, .html, .md or .txt."
      )
    corpus = passages.prepare(next_build / _ROWS, next_build / "corpus")
    contents = [*corpus.contents(0, len(corpus))]
    kept_encoder = None
    if encoder is None:
      kept_vectors.keep(folder, newest, contents)
    else:
      kept_encoder = kept_vectors.KeptEncoder(encoder, folder, newest)
      kept_encoder.complete(contents, on_rows)
    building.build(
      next_build / _ROWS,
      next_build,
      building.Settings(
        search_recipe["kind"],
        language=_analysis(settings.language, next_build / _ROWS),
      ),
      encoder=kept_encoder,
    )
    json_files.write(
      next_build / _FILES,
      {
        "made_by": recipe,
        "searched_by": search_recipe,
        "files": [*files.values()],
      },
    )
    name = f"build-{uuid.uuid4().hex[:10]}"
    next_build.rename(folder / name)
    json_files.write(folder / building.CURRENT, {"build": name})
    if encoder is not None:
      kept_vectors.forget(folder)
    for build in folder.glob("build-*"):
      if build.name not in (name, newest.name):
        shutil.rmtree(build, ignore_errors=True)
    return summary


class File(NamedTuple):
  """A file of a build; `files.json` lists the values in this order.

  Attributes:
    path, name: see `finding.File`.
    stamp: see `folder.stamp`.
    rows: number of its passages.
    start, end: byte offsets of its lines in the corpus.
    reason: why it has no rows, or what was lost of it; "" if all was read.
  """

  path: str
  name: str
  stamp: list[int]
  rows: int
  start: int
  end: int
  reason: str


def stamp(path: str | int) -> list[int]:
  """Returns the size of a file and the time of its last change, or [].

  A change of its permissions counts too.

  Args:
    path: the file, which may be missing, or a descriptor of it.
  """
  try:
    status = os.stat(path)
  except OSError:
    return []
  return [status.st_size, status.st_ctime_ns]


def files(build: pathlib.Path) -> list[File]:
  """Returns the files of a build; one of a corpus has none.

  Args:
    build: folder of the build.
  """
  stored = json_files.read(build / _FILES, missing={"files": []})
  return [File(*values) for values in stored["files"]]


def stamps(build: pathlib.Path) -> dict[str, list[int]]:
  """Returns the stamp that each file of a build had, by its path.

  Args:
    build: folder of the build.
  """
  return {file.path: file.stamp for file in files(build)}


def is_current(
  paths: Sequence[str], folder: str | os.PathLike, settings: Settings
) -> bool:
  """Returns whether no document changed since the newest build of an index.

  It reads no document.

  Args:
    paths, folder, settings: those of `update`.

  Raises:
    ValueError: a path is missing.
    OSError: the folder has no index.
  """
  documents = _find(paths, pathlib.Path(folder), settings)
  stamps_now = {file.path: stamp(file.path) for file in documents.files}
  return stamps_now == stamps(building.newest_build(folder))


def _find(
  paths: Sequence[str], folder: pathlib.Path, settings: Settings
) -> finding.FoundFiles:
  """Finds the documents of an index."""
  pictures = reading.PICTURES if settings.ocr else ()
  return finding.find_files(
    paths,
    (*reading.READERS, *pictures),
    excluded_folder=str(folder),
    follow_links=settings.follow_links,
    ignored_files=settings.ignored_files,
  )


def _read_intact(build: pathlib.Path) -> dict[str, Any]:
  """Returns the contents of `files.json`; {} if the build is damaged."""
  try:
    opening.read(build)
    passages.Corpus(build / "corpus").verify()
    stored = json_files.read(build / _FILES)
    _files(stored)
  except (OSError, ValueError, LookupError, TypeError):  # Missing or damaged.
    return {}
  return stored


def _files(stored: Mapping[str, Any]) -> dict[str, File]:
  """Returns the files of a build by name."""
  files = [File(*values) for values in stored["files"]]
  return {file.name: file for file in files}


def _serves(stored: Mapping[str, Any], recipe: Mapping[str, Any]) -> bool:
  """Returns whether a build can be searched as an update asks for."""
  searched_by = dict(stored.get("searched_by", {}))
  if recipe["kind"] == "bm25" and searched_by.get("kind") == "hybrid":
    # It has an index of words too.
    searched_by["kind"] = "bm25"
    del searched_by["encoder"]
  return searched_by == recipe


def _copy_rows(
  file_before: File, build: pathlib.Path, path: str, out: IO[bytes]
) -> File:
  """Copies the rows of an unchanged file from a build, with its path now."""
  start = out.tell()
  with (build / _ROWS).open("rb") as lines:
    lines.seek(file_before.start)
    rows = lines.read(file_before.end - file_before.start)
  if path == file_before.path:
    out.write(rows)
  else:  # The same folder in another spelling.
    for row in rows.splitlines():
      _write_row(json.loads(row) | {"path": path}, out)
  return file_before._replace(path=path, start=start, end=out.tell())


def _write_row(row: Mapping[str, Any], out: IO[bytes]) -> None:
  line = json.dumps(row, ensure_ascii=False) + "\n"
  # The name of a file may have bytes that are not UTF-8.
  out.write(line.encode(errors="backslashreplace"))


def _write_rows(
  file: finding.File,
  file_stamp: list[int],
  text: reader_process.FileText,
  out: IO[bytes],
) -> File:
  """Writes the rows of a file; one that cannot be read has none."""
  start = out.tell()
  for number, passage in enumerate(text.passages, start=1):
    row = {
      "id": f"{file.name}#{number}",
      "title": passage.title,
      "text": passage.text,
      "path": file.path,
      "page": passage.page,
      "heading": passage.heading,
    }
    _write_row(row, out)
  return File(
    path=file.path,
    name=file.name,
    stamp=file_stamp,
    rows=len(text.passages),
    start=start,
    end=out.tell(),
    reason=text.reason,
  )


def _recipe(
  settings: Settings, encoder: search.Encoder | None
) -> tuple[dict[str, Any], reader_process.Settings]:
  """Returns what passages depend on as JSON values, and how files are read."""
  recipe: dict[str, Any] = {"version": _VERSION, "ocr": settings.ocr}
  tokens = settings.tokens
  tokenizer = None
  if isinstance(encoder, search.Tokenized):
    recipe["encoder"] = encoder.identity()
    tokenizer, max_tokens = encoder.tokenizer()
    tokens = min(tokens, max(max_tokens - _TITLE_TOKENS, _LEAST_TOKENS))
  overlap = min(settings.overlap, tokens // 2)
  recipe |= {"tokens": tokens, "overlap": overlap}
  reader_settings = reader_process.Settings(
    tokens=tokens,
    overlap=overlap,
    tokenizer=tokenizer.to_str() if tokenizer else "",
    ocr=settings.ocr,
    max_seconds=(
      reader_process.MAX_OCR_SECONDS
      if settings.ocr
      else reader_process.MAX_SECONDS
    ),
  )
  return building.without_paths(recipe), reader_settings


def _search_recipe(
  settings: Settings, encoder: search.Encoder | None
) -> dict[str, Any]:
  """Returns what the search of passages depends on, as JSON values."""
  kind = settings.kind
  if not kind:
    kind = "bm25" if encoder is None else "hybrid"
  recipe: dict[str, Any] = {"kind": kind, "language": settings.language}
  if encoder is not None:
    recipe["encoder"] = {"dim": encoder.dim} | encoder.identity()
  return building.without_paths(recipe)


def _analysis(language: str, rows: pathlib.Path) -> str:
  """Returns the name of the analysis of passages in some or one language."""
  if language:
    is_plain = language == "plain"
    return language if is_plain else analysis.documents_analysis([language])
  with rows.open("rb") as lines:
    count = sum(1 for _ in lines)
    lines.seek(0)
    sample = itertools.islice(lines, 0, None, count // _SAMPLE + 1)
    return analysis.documents_analysis(
      analysis.detect_language([json.loads(line)["text"][:_SAMPLE_CHARACTERS]])
      for line in sample
    )


def _summary(
  documents: finding.FoundFiles,
  files: Mapping[str, File],
  files_before: Mapping[str, File],
) -> Summary:
  """Compares the files of an update with those of the previous build."""
  stamps_now = _stamps(files)
  stamps_before = _stamps(files_before)
  common = len(stamps_now.keys() & stamps_before)
  unchanged = len(stamps_now.items() & stamps_before.items())
  return Summary(
    files=len(stamps_now),
    passages=sum(file.rows for file in files.values()),
    added=len(stamps_now) - common,
    changed=common - unchanged,
    unchanged=unchanged,
    removed=len(stamps_before) - common,
    skipped=(
      *documents.refused,
      *((file.path, file.reason) for file in files.values() if not file.rows),
    ),
    partly_read=tuple(
      (file.path, file.reason)
      for file in files.values()
      if file.rows and file.reason
    ),
    ignored=documents.ignored,
  )


def _stamps(
  files: Mapping[str, File],
) -> dict[str, tuple[int, ...]]:
  """Returns the stamps of the files that have passages."""
  return {key: tuple(file.stamp) for key, file in files.items() if file.rows}
