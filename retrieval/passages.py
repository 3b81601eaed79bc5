"""A corpus of passages in a file, read by line offsets and not kept in memory.

A corpus is JSON lines, plain or gzip, in Search-R1's layout or as rows whose
title may be missing; the keys of BEIR's rows are `_id`, `title` and `text`,
those of Tevatron's `docid` and `text`. Parquet files have the same columns.

    {"id": "7", "contents": "\\"Title\\"\\nText of the passage."}
    {"id": "7", "title": "Title", "text": "Text of the passage."}

Row i is the i-th line that is kept; without an id, its id is i. A prepared
corpus is a folder:

    corpus.json     path of the lines, their number, bytes and SHA-256
    offsets.npy     int64 [N + 1], the start of each row, and the end
    passages.jsonl  the lines, unless they are all those of a plain source
"""

from __future__ import annotations

import array
import contextlib
import gzip
import hashlib
import io
import itertools
import json
import mmap
import os
import pathlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from anysearch_jax import types
from anysearch_jax.data import formats
from anysearch_jax.host import disk, git_lfs, json_files

# Bytes, more than any passage has: a file without line ends is not read whole.
_LONGEST_LINE = 1 << 24
_INFO = "corpus.json"
_OFFSETS = "offsets.npy"
# Present only if the rows are not the lines of the source itself.
LINES = "passages.jsonl"
_OTHER_FILES = (
  "A corpus is JSON lines; folders and files of other kinds are read by "
  "anysearch build_index --documents=PATH."
)


class CorpusError(ValueError):
  """A corpus is missing, malformed, or not the expected one."""


class Corpus:
  """The passages of a prepared folder; thread-safe.

  Args:
    folder: a folder that `prepare` made.

  Attributes:
    info: the values of corpus.json.
    path: the file with the lines.
    sha256: hash of the lines.

  Raises:
    CorpusError: the corpus is missing, or its file has another size than when
      it was prepared (`verify` compares the hash).
  """

  def __init__(self, folder: str | os.PathLike):
    folder = pathlib.Path(folder)
    try:
      self.info: dict[str, Any] = json.loads((folder / _INFO).read_bytes())
      self._offsets = np.load(folder / _OFFSETS, mmap_mode="r")
      lines = self.info["lines"]
      if lines != LINES and not os.path.isabs(lines):
        raise ValueError(f"lines at {lines!r}, expected {LINES!r} or a path")
      self.path = folder / lines
      size = self.path.stat().st_size
      dtype = self._offsets.dtype
      shape = self._offsets.shape
      expected_size = self.info["bytes"]
      expected_shape = (self.info["passages"] + 1,)
      self.sha256: str = self.info["sha256"]
    # A damaged header can make NumPy raise almost any exception.
    except Exception as error:
      for name in (_INFO, _OFFSETS):
        if (folder / name).is_file():
          git_lfs.refuse_pointer(folder / name, CorpusError)
      raise CorpusError(
        f"{folder}: found no prepared corpus ({error}); build it with "
        "anysearch build_index."
      ) from error
    is_same = size == expected_size and shape == expected_shape
    if not is_same or dtype != np.int64:
      raise CorpusError(
        f"{self.path}: found {size} bytes and offsets of {dtype} {shape}, "
        f"expected {expected_size} and int64 {expected_shape}; the corpus "
        "is not the one that was indexed. Restore it, or build the index again."
      )
    with self.path.open("rb") as file:
      self._map = (
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
      )

  def __len__(self) -> int:
    return len(self._offsets) - 1

  def __getitem__(self, row: int) -> types.Passage:
    """Returns the passage of a row in [0, len).

    Raises:
      IndexError: the row is outside this range; negative rows are too.
    """
    if not 0 <= row < len(self):
      raise IndexError(f"Found row {row}, expected one in [0, {len(self)}).")
    start, end = self._offsets[row : row + 2].tolist()
    return _parse(self._map[start:end], row)

  def fields(self, row: int, names: Sequence[str]) -> dict[str, Any]:
    """Returns the fields that a row in [0, len) has, of these names."""
    start, end = self._offsets[row : row + 2].tolist()
    values = json.loads(self._map[start:end])
    return {name: values[name] for name in names if name in values}

  def contents(self, start: int, stop: int) -> Iterator[str]:
    """Yields the texts that are searched of rows `start` to `stop` (exclusive).

    A text has the lines of title, heading and passage, as far as there are any.
    """
    for row in range(start, stop):
      passage = self[row]
      title = passage.title if passage.title.strip('"') else ""
      lines = (title, passage.source.heading, passage.text)
      text = "\n".join(filter(None, lines))
      yield text if title else text.strip()

  def verify(self) -> None:
    """Reads all lines and compares their hash.

    Raises:
      CorpusError: the lines are not those that were prepared.
    """
    sha256 = disk.fingerprint(self.path)["sha256"]
    if sha256 != self.sha256:
      raise CorpusError(
        f"{self.path}: found SHA-256 {sha256}, expected {self.sha256}; restore "
        "the corpus, or build the index again."
      )


def prepare(
  source: str | os.PathLike,
  folder: str | os.PathLike,
  *,
  skip_malformed: bool = False,
  on_bytes: Callable[[int], None] = lambda done: None,
) -> Corpus:
  """Finds the rows of a corpus, using 24 bytes of memory for each passage.

  Plain files stay where they are. A folder that was prepared from the same file
  (the same path, size and time) with the same flag is used again.

  Args:
    source: JSON lines; gzip if the name ends in `.gz`; or a folder with Parquet
      files, which are read in the order of their names.
    folder: folder of the prepared corpus; created if missing.
    skip_malformed: whether to skip and count lines that are not a passage.
    on_bytes: called with the number of bytes of `source` read so far.

  Returns:
    The prepared corpus.

  Raises:
    CorpusError: a line is not a passage (the message has its number), or there
      is no passage.
  """
  source = pathlib.Path(source).absolute()
  folder = pathlib.Path(folder)
  files = _files(source)
  stats = [path.stat() for path in files]
  made_of = {
    "source": str(source),
    "source_bytes": sum(stat.st_size for stat in stats),
    "source_time": max(stat.st_mtime_ns for stat in stats),
    "skip_malformed": skip_malformed,
  }
  # A missing or damaged corpus is prepared again.
  with contextlib.suppress(CorpusError):
    prepared = Corpus(folder)
    if made_of.items() <= prepared.info.items():
      return prepared
  folder.mkdir(parents=True, exist_ok=True)
  is_copied = skip_malformed or is_compressed(source) or files != [source]
  # A source that is already in the folder moves with it.
  is_in_folder = source == folder.absolute() / LINES
  partial_copy = folder / f"{LINES}.tmp"
  digest = hashlib.sha256()
  offsets = array.array("q", [0])
  id_hashes = array.array("q")
  skipped = 0
  with partial_copy.open("wb") if is_copied else open(os.devnull, "wb") as copy:
    for line, passage in read(
      source, skip_malformed=skip_malformed, on_bytes=on_bytes
    ):
      if passage is None:
        skipped += 1
        continue
      if is_copied and not line.endswith(b"\n"):
        line += b"\n"
      copy.write(line)
      digest.update(line)
      offsets.append(offsets[-1] + len(line))
      id_hashes.append(hash(passage.id))
  if is_copied:
    partial_copy.replace(folder / LINES)
  np.save(folder / _OFFSETS, np.frombuffer(offsets, np.int64))
  info = made_of | {
    "lines": LINES if is_copied or is_in_folder else str(source),
    "passages": len(offsets) - 1,
    "skipped": skipped,
    "repeated_ids": len(id_hashes) - len(np.unique(id_hashes)),
    "bytes": offsets[-1],
    "sha256": digest.hexdigest(),
  }
  json_files.write(folder / _INFO, info)
  return Corpus(folder)


def read(
  source: str | os.PathLike,
  *,
  skip_malformed: bool = False,
  on_bytes: Callable[[int], None] = lambda done: None,
) -> Iterator[tuple[bytes, types.Passage | None]]:
  """Yields the lines of a corpus with their passages, None for a skipped line.

  Args:
    source: the corpus, see `prepare`.
    skip_malformed: whether lines that are not a passage are skipped.
    on_bytes: called with the number of bytes of `source` read so far.

  Raises:
    CorpusError: see `prepare`.
  """
  source = pathlib.Path(source)
  files = _files(source)
  is_table = files != [source]
  count = 0
  with (
    files[0].open("rb") as raw,
    gzip.open(raw) if is_compressed(source) else raw as lines,
  ):
    rows = _table_rows(files) if is_table else _lines(lines, source)
    for number, line in enumerate(_without_last_blanks(rows), start=1):
      try:
        passage = _parse(line, count)
      except CorpusError as error:
        if not skip_malformed:
          raise CorpusError(
            f"{source}, line {number}: {error} Correct it, or skip malformed "
            f"lines with --skip_malformed. {'' if number > 1 else _OTHER_FILES}"
          ) from None
        yield line, None
        continue
      count += 1
      yield line, passage
      if number % 4096 == 0:
        on_bytes(raw.tell())
  on_bytes(sum(path.stat().st_size for path in files))
  if not count:
    raise CorpusError(
      f"{source}: found no passage, expected one a line. {_OTHER_FILES}"
    )


def is_compressed(source: pathlib.Path) -> bool:
  """Returns whether a corpus is compressed by gzip, which its name says."""
  return source.suffix.lower() == ".gz"


def _files(source: pathlib.Path) -> list[pathlib.Path]:
  """Returns the files of a corpus: itself, or the Parquet files of a folder."""
  tables = sorted(source.glob("*.parquet"))
  if not (source.is_file() or tables):
    kind = "a folder" if source.is_dir() else "no file"
    raise CorpusError(
      f"{source}: found {kind}, expected a corpus. {_OTHER_FILES}"
    )
  files = tables or [source]
  for path in files:
    git_lfs.refuse_pointer(path, CorpusError)
  return files


def _table_rows(tables: Sequence[pathlib.Path]) -> Iterator[bytes]:
  """Yields the rows of Parquet files as JSON lines."""
  from anysearch_jax.data import files

  for _, row in itertools.chain.from_iterable(map(files.rows, tables)):
    yield json.dumps(row, default=str).encode() + b"\n"


def _lines(file: io.BufferedIOBase, source: pathlib.Path) -> Iterator[bytes]:
  """Yields lines with their ends; blank ones too, which count as malformed."""
  number = 0
  try:
    while line := file.readline(_LONGEST_LINE):
      number += 1
      if len(line) == _LONGEST_LINE and not line.endswith(b"\n"):
        raise CorpusError(
          f"{source}, line {number}: found more than {_LONGEST_LINE} bytes, "
          "expected one passage a line."
        )
      yield line
  except (OSError, EOFError, zlib.error) as error:
    raise CorpusError(
      f"{source}, after line {number}: the file is incomplete or damaged "
      f"({error}); copy it again."
    ) from error


def _without_last_blanks(lines: Iterator[bytes]) -> Iterator[bytes]:
  """Yields lines; blank ones at the end become a part of the line before."""
  line = next(lines, b"")
  blank_lines: list[bytes] = []
  for following in lines:
    if following.strip():
      yield line
      yield from blank_lines
      blank_lines.clear()
      line = following
    else:
      blank_lines.append(following)
  if line:
    yield line + b"".join(blank_lines)


def _parse(line: bytes, row: int) -> types.Passage:
  """Parses the passage of a row, with a quoted title, or raises CorpusError."""
  try:
    values = json_files.parse(line)
  except (ValueError, RecursionError) as error:
    raise CorpusError(
      f"Found {line[:60]!r} ({error}), expected a JSON object."
    ) from error
  if not isinstance(values, dict):
    raise CorpusError(f"Found {line[:60]!r}, expected a JSON object.")
  name = values.get("id", values.get("_id", values.get("docid")))
  name = row if name is None else name
  if not isinstance(name, str | int) or isinstance(name, bool):
    raise CorpusError(f"Found id {name!r:.60}, expected text or a number.")
  contents = values.get("contents")
  if contents is None and "text" in values:
    title = values.get("title") or ""
    text = values["text"]
    if not isinstance(title, str) or not isinstance(text, str):
      raise CorpusError(
        f"Found title {title!r:.60} and text {text!r:.60}, expected texts."
      )
    if not text.strip():
      raise CorpusError(f"Found text {text!r:.60}, expected words.")
    # A title is one line: what follows a line end is the text.
    title = " ".join(title.split())
    if title[:1] == title[-1:] == '"' and '"' not in title[1:-1]:
      title = title[1:-1]
    contents = f'"{title}"\n{text}'
  elif not isinstance(contents, str):
    raise CorpusError(
      f'Found contents {contents!r:.60}, expected text ("\\"Title\\"\\ntext").'
    )
  else:
    title, end, text = contents.partition("\n")
    if not end or not title.strip().strip('"') or not text.strip():
      raise CorpusError(
        f"Found contents {contents[:60]!r}, expected a title, a line end and "
        'the text; a passage without a title has its words in "text".'
      )
  title, _, text = formats.without_surrogates(contents).partition("\n")
  name = formats.without_surrogates(str(name))
  source = document_source(values)
  return types.Passage(name, title, text, source=source)


def document_source(values: Mapping[str, Any]) -> types.Source:
  """Returns the place of a row in a document; an empty one for other rows."""
  path = values.get("path")
  page = values.get("page")
  heading = values.get("heading")
  # A boolean is no page.
  if isinstance(path, str) and type(page) is int and isinstance(heading, str):
    return types.Source(formats.without_surrogates(path), page, heading)
  return types.Source()
