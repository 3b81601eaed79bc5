"""Measures the share of the words of documents that their readers keep.

    python -m bench.words_kept            # made documents, of every kind
    python -m bench.words_kept FOLDER     # your PDFs, beside pymupdf

prints a line for each kind: files, the share of their words that was kept, how
many files keep 95 %, and seconds. Words are compared as counted sets, without
case. With a folder, the oracle is pymupdf, which `pip install pymupdf` brings
(AGPL: it is no dependency); other kinds have no oracle there.
"""

from __future__ import annotations

import collections
import importlib.util
import pathlib
import re
import sys
import tempfile
import unicodedata
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from anysearch_jax.retrieval.documents import reading
from bench import harness, sample_documents

# The share of its words that a file should keep.
FLOOR = 0.95
_DIVIDED = re.compile(r"(?<=\w)[-\u00ad]\s*\n\s*(?=\w)")


class Kept(NamedTuple):
  """What is left of a document.

  Attributes:
    name: name of the file.
    words: number of its words.
    kept: number of them that were read.
    seconds: how long that took.
    reason: what was lost, in words.
  """

  name: str
  words: int
  kept: int
  seconds: float
  reason: str

  @property
  def share(self) -> float:
    return self.kept / max(self.words, 1)


def count_words(text: str) -> collections.Counter[str]:
  """Returns how often each word occurs, without case; divided words whole."""
  normal = unicodedata.normalize("NFKC", _DIVIDED.sub("", text))
  return collections.Counter(re.findall(r"\w+", normal.casefold()))


def measure(path: pathlib.Path, words: str) -> Kept:
  """Reads a document and counts the words that it should have.

  Args:
    path: the document.
    words: its words.
  """
  texts: list[str] = []
  losses: list[str] = []

  def read() -> None:
    try:
      for part in reading.read(str(path)):
        texts.extend((part.title, part.heading, part.text))
        losses.append(part.lost)
    except reading.ReadError as error:
      losses.append(str(error))

  seconds = harness.seconds(read)
  expected = count_words(words)
  common = expected & count_words("\n".join(texts))
  reason = "; ".join(filter(None, losses))
  return Kept(path.name, expected.total(), common.total(), seconds, reason)


def measure_samples() -> Iterator[Kept]:
  """Yields what is kept of each of the made documents."""
  with tempfile.TemporaryDirectory() as folder:
    for sample in sample_documents.SAMPLES:
      path = pathlib.Path(folder) / sample.name
      sample.make(path)
      yield measure(path, sample.words)


def measure_folder(folder: pathlib.Path) -> Iterator[Kept]:
  """Yields what is kept of the PDFs below a folder, by pymupdf's words."""
  import pymupdf

  pymupdf.TOOLS.mupdf_display_errors(False)
  for path in sorted(folder.rglob("*.pdf")):
    try:
      with pymupdf.open(path) as document:
        words = "\n".join(page.get_text() for page in document)
    except Exception:  # The oracle cannot read it.
      continue
    if words.strip():
      yield measure(path, words)


def main(arguments: Sequence[str]) -> None:
  """Prints the table.

  Args:
    arguments: those of the command line.
  """
  if arguments:
    folder = pathlib.Path(arguments[0])
    if not folder.is_dir():
      sys.exit(f"words_kept: found no folder {folder}, expected one with PDFs.")
    if not importlib.util.find_spec("pymupdf"):
      sys.exit(
        "words_kept: found no package pymupdf, whose words those of PDFs are "
        "compared with; pip install pymupdf."
      )
    rows = list(measure_folder(folder))
  else:
    rows = list(measure_samples())
  by_kind: dict[str, list[Kept]] = {}
  for row in rows:
    ending = pathlib.Path(row.name).suffix.lower()
    by_kind.setdefault(ending, []).append(row)
  print("kind      files    words    kept   >= 95 %   seconds")
  for kind, files in sorted(by_kind.items()):
    words = sum(file.words for file in files)
    kept_words = sum(file.kept for file in files)
    good_files = sum(file.share >= FLOOR for file in files)
    seconds = sum(file.seconds for file in files)
    print(
      f"{kind:8} {len(files):6} {words:8} {kept_words / max(words, 1):7.4f} "
      f"{good_files:9} {seconds:9.2f}"
    )
  for row in rows:
    if row.share < FLOOR:
      print(f"below: {row.name} {row.share:.2f} of {row.words} {row.reason}")


if __name__ == "__main__":
  main(sys.argv[1:])
