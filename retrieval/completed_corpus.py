"""Completes a corpus with the gold documents of questions that it lacks.

A gold document is a passage in `supporting` of a question's metadata. A corpus
has it if passages of its title hold `_SHARE` of its runs of four words. An
equal title is not enough, because a corpus has an article in pieces. An equal
text is not needed: a paragraph may be cut in two, or differ by some words
because the corpus is of another date.
"""

from __future__ import annotations

import dataclasses
import functools
import gzip
import hashlib
import html
import json
import os
import pathlib
import re
import shutil
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from anysearch_jax.data import formats, preparing
from anysearch_jax.host import disk
from anysearch_jax.retrieval import passages

# Ids of added passages begin with this; the hash of the document follows.
_PREFIX = "gold-"
_RUN_WORDS = 4
# In pairs of Wikipedia's texts of one title, those that share more differ in
# words; among those that share less, one lacks a statement of the other.
_SHARE = 0.8
_WORD = re.compile(r"\w+")


@dataclasses.dataclass
class _Document:
  """A gold document, and where it is.

  Attributes:
    id: id of the passage that adds it, unless the corpus has that id.
    title, text: as the first question has them.
    has_title: whether a passage of the corpus has its title.
    is_there: whether the corpus has it.
    held: of each passage of its title, the id and the runs that it shares; bit
      i is run i.
    ids: the passages that hold it in the completed corpus; () if none does.
  """

  id: str
  title: str
  text: str
  has_title: bool = False
  is_there: bool = False
  held: list[tuple[str, int]] = dataclasses.field(default_factory=list)
  ids: tuple[str, ...] = ()

  def compare(self, id_: str, text: str) -> None:
    """Notes the runs that it shares with a passage of its title."""
    bits = _bits_of_runs(self.text)
    words = min(map(len, bits), default=_RUN_WORDS)
    shared = sum(bits.get(run, 0) for run in _runs(text, words))
    if shared:
      self.held.append((id_, shared))

  def find(self) -> bool:
    """Returns whether the passages hold it, and sets `ids` to the fewest."""
    expected = _SHARE * len(_bits_of_runs(self.text))
    ids: list[str] = []
    covered = 0
    while covered.bit_count() < expected:
      unions = [(covered | shared).bit_count() for _, shared in self.held]
      if max(unions, default=0) <= covered.bit_count():
        return False
      id_, shared = self.held[unions.index(max(unions))]
      ids.append(id_)
      covered |= shared
    self.ids = tuple(ids)
    return True


@dataclasses.dataclass(frozen=True)
class CompletedCorpus:
  """A completed corpus that is not yet written.

  Attributes:
    parts: the questions, whose `gold_doc_ids` name passages of that corpus.
    counts: for each part with gold documents, how many questions name them, how
      many distinct ones they name, and how many of these are in the corpus,
      added (also counted: to another text of their title) or lack a title or a
      text and are left out.
    source: the corpus.
    added: number of passages that are added.
    lines: the lines of these passages, UTF-8.
  """

  parts: preparing.Parts
  counts: dict[str, dict[str, int]]
  source: pathlib.Path
  added: int
  lines: bytes

  @property
  def name(self) -> str:
    """Returns the name of the file that `write` writes."""
    compressed = passages.is_compressed(self.source)
    return "corpus.jsonl.gz" if compressed else "corpus.jsonl"

  def manifest(self) -> dict[str, Any]:
    """Returns what the manifest of the questions says of the corpus."""
    return {
      "source": {"path": str(self.source), **disk.fingerprint(self.source)},
      "name": self.name,
      "added": self.added,
      "added_sha256": hashlib.sha256(self.lines).hexdigest(),
      "sets": self.counts,
    }

  def write(self, folder: pathlib.Path) -> None:
    """Writes the corpus and, after its last line, the added passages.

    Raises:
      disk.DiskError: the disk is full.
    """
    path = folder / self.name
    lines = self.lines
    if passages.is_compressed(self.source):
      # A gzip file may have several members: the source's bytes stay.
      lines = gzip.compress(lines, mtime=0)
    with (
      disk.translate_errors(path),
      self.source.open("rb") as source,
      path.open("wb") as copy,
    ):
      shutil.copyfileobj(source, copy)
      copy.write(lines)


def complete(
  parts: preparing.Parts,
  corpus: str | os.PathLike,
  *,
  skip_malformed: bool = False,
  on_bytes: Callable[[int], None] = lambda done: None,
) -> CompletedCorpus:
  """Finds the gold documents of questions in a corpus, which is read once.

  Memory holds the documents, not the corpus. A question with `gold_doc_ids` of
  the corpus keeps these and gets the ids of its added passages; another gets
  the ids of all passages that hold its documents.

  Args:
    parts: the questions by `<dataset>_<split>`.
    corpus: JSON lines, also `.gz`, see `retrieval/passages`.
    skip_malformed: whether lines of the corpus that are not a passage are
      ignored; the copy keeps them.
    on_bytes: called with the number of bytes read so far.

  Raises:
    formats.DataError: no question names a gold document.
    passages.CorpusError: the corpus cannot be read, is not one file, has no
      titles, or ends with blank lines.
  """
  source = pathlib.Path(corpus)
  documents: dict[str, _Document] = {}
  # Ids that questions name, and whether the corpus has them.
  has_id: dict[str, bool] = {}
  for part in parts.values():
    for entry in part.entries:
      metadata = json.loads(entry.metadata)
      has_id.update(dict.fromkeys(metadata.get("gold_doc_ids", ()), False))
      for document in _gold(metadata):
        documents.setdefault(document.id, document)
  if not documents and not has_id:
    raise formats.DataError(
      "Found no question with gold documents, expected rows with supporting "
      "facts and their context (HotpotQA, 2WikiMultihopQA), supporting "
      "paragraphs (MuSiQue) or gold_doc_ids; leave --complete_corpus out."
    )
  if source.is_dir():
    raise passages.CorpusError(
      f"{source}: found a folder, expected a corpus of JSON lines (also .gz) "
      "to complete."
    )
  by_title: dict[str, list[_Document]] = {}
  for document in documents.values():
    by_title.setdefault(_title_key(document.title), []).append(document)
  taken_ids = set()
  columns: Sequence[str] = ()
  has_titles = False
  last_line = b""
  for line, passage in passages.read(
    source, skip_malformed=skip_malformed, on_bytes=on_bytes
  ):
    last_line = line
    if passage is None:
      continue
    columns = columns or list(json.loads(line))
    key = _title_key(passage.title)
    has_titles = has_titles or key != ""
    for document in by_title.get(key, ()):
      document.has_title = True
      document.compare(passage.id, passage.text)
    if passage.id in has_id:
      has_id[passage.id] = True
    if passage.id.startswith(_PREFIX):
      taken_ids.add(passage.id)
  if not has_titles:
    raise passages.CorpusError(
      f"{source}: found no passage with a title, expected titles, by which "
      "gold documents are found."
    )
  if last_line.count(b"\n") > 1 and not skip_malformed:
    raise passages.CorpusError(
      f"{source}: found blank lines at the end, expected none, because "
      "passages follow there; remove them."
    )
  added = _add_missing(by_title.values(), taken_ids)
  lines = b"".join(_line(document, columns) for document in added)
  if lines and not last_line.endswith(b"\n"):
    lines = b"\n" + lines
  completed = {}
  counts = {}
  for name, part in parts.items():
    entries, part_counts = _filled(part.entries, documents, has_id)
    completed[name] = dataclasses.replace(part, entries=entries)
    if part_counts["named"]:
      counts[name] = part_counts
  return CompletedCorpus(
    completed, counts, source, added=len(added), lines=lines
  )


def _add_missing(
  groups: Iterable[Sequence[_Document]], taken_ids: set[str]
) -> list[_Document]:
  """Returns the documents that the corpus lacks, title by title.

  Of two versions of one text the first is added, if it holds the other.

  Args:
    groups: the documents of each title.
    taken_ids: ids of the corpus that begin with `_PREFIX`.
  """
  added = []
  for group in groups:
    added_to_title: list[_Document] = []
    for document in group:
      has_runs = bool(_bits_of_runs(document.text))
      document.is_there = document.find() if has_runs else document.has_title
      if document.is_there or not has_runs or not document.title.strip(' "'):
        continue
      for other in added_to_title:
        document.compare(other.ids[0], other.text)
      if not document.find():
        id_ = document.id
        while id_ in taken_ids:
          id_ += "+"
        document.ids = (id_,)
        added_to_title.append(document)
    added += added_to_title
  return added


def _filled(
  entries: Sequence[preparing.Entry],
  documents: Mapping[str, _Document],
  has_id: Mapping[str, bool],
) -> tuple[list[preparing.Entry], dict[str, int]]:
  """Returns the questions of a part with `gold_doc_ids`, and its counts."""
  filled = []
  gold_of_part: dict[str, _Document] = {}
  ids_of_part: set[str] = set()
  questions = 0
  for entry in entries:
    metadata = json.loads(entry.metadata)
    own_ids = metadata.get("gold_doc_ids", [])
    gold = [documents[document.id] for document in _gold(metadata)]
    questions += bool(gold or own_ids)
    gold_of_part.update({document.id: document for document in gold})
    if not gold:
      ids_of_part.update(own_ids)
    ids = [id_ for id_ in own_ids if has_id[id_]]
    # A row that has ids of the corpus has those of all documents in it.
    lacking = [d for d in gold if not d.is_there] if ids else gold
    for document in lacking:
      ids += document.ids
    if gold and ids:
      metadata["gold_doc_ids"] = list(dict.fromkeys(ids))
      text = json.dumps(metadata, ensure_ascii=False, sort_keys=True)
      entry = entry._replace(metadata=text)
    filled.append(entry)
  added = [d for d in gold_of_part.values() if d.ids and not d.is_there]
  in_corpus = sum(document.is_there for document in gold_of_part.values())
  in_corpus += sum(has_id[id_] for id_ in ids_of_part)
  total = len(gold_of_part) + len(ids_of_part)
  return filled, {
    "questions": questions,
    "named": total,
    "in_corpus": in_corpus,
    "added": len(added),
    "added_to_title": sum(document.has_title for document in added),
    "left_out": total - in_corpus - len(added),
  }


def _gold(metadata: Mapping[str, Any]) -> list[_Document]:
  """Returns the gold documents of a question, which may have no text."""
  supporting = metadata.get("supporting", ())
  has_texts = any(passage.get("text") for passage in supporting)
  if metadata.get("gold_doc_ids") and not has_texts:
    return []
  gold = []
  for passage in supporting:
    title = passage["title"]
    text = passage.get("text", "").strip()
    words = f"{_title_key(title)}\n{' '.join(_words(text))}"
    digest = hashlib.sha256(words.encode()).hexdigest()
    gold.append(_Document(f"{_PREFIX}{digest[:16]}", title, text))
  return gold


def _line(document: _Document, columns: Sequence[str]) -> bytes:
  """Returns the line of an added passage, in the columns of the corpus."""
  names = [name for name in ("id", "_id", "docid") if name in columns]
  row = {(names or ["id"])[0]: document.ids[0]}
  title = " ".join(document.title.split())
  if "contents" in columns:
    row["contents"] = f'"{title}"\n{document.text}'
  else:
    row |= {"title": title, "text": document.text}
  return json.dumps(row, ensure_ascii=False).encode() + b"\n"


@functools.lru_cache(maxsize=1024)
def _title_key(title: str) -> str:
  """Returns a key that is equal for spellings of one title."""
  return formats.question_key(html.unescape(title))


def _words(text: str) -> list[str]:
  return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def _runs(text: str, length: int) -> dict[tuple[str, ...], None]:
  """Returns the distinct runs of `length` words, in order."""
  words = _words(text)
  starts = range(len(words) - length + 1)
  return dict.fromkeys(tuple(words[i : i + length]) for i in starts)


@functools.lru_cache(maxsize=1024)
def _bits_of_runs(text: str) -> dict[tuple[str, ...], int]:
  """Returns the runs of a text, each with its bit; a short text is one run."""
  length = min(_RUN_WORDS, len(_words(text)))
  runs = _runs(text, length) if length else ()
  return {run: 1 << i for i, run in enumerate(runs)}
