"""Files of every kind become texts with titles and places, or a sentence."""

from __future__ import annotations

import os
import pathlib
import time
import zipfile

import docx
import pyarrow
import pypdf
import pytest
from pyarrow import parquet
from pypdf import generic

from anysearch_jax.retrieval.documents import (
  finding,
  folder,
  reading,
  splitting,
)


def pdf(path, *pages, title="", password=None):
  """Writes a PDF with a line a page; "" is a page without text."""
  writer = pypdf.PdfWriter()
  name = generic.NameObject
  said = {"/Type": "/Font", "/Subtype": "/Type1", "/BaseFont": "/Helvetica"}
  said = {name(key): name(value) for key, value in said.items()}
  font = generic.DictionaryObject(said)
  for text in pages:
    page = writer.add_blank_page(300, 300)
    fonts = generic.DictionaryObject({name("/F1"): font})
    page[name("/Resources")] = generic.DictionaryObject({name("/Font"): fonts})
    stream = generic.DecodedStreamObject()
    stream.set_data(f"BT /F1 12 Tf 20 200 Td ({text}) Tj ET".encode())
    page[name("/Contents")] = writer._add_object(stream)
  if title:
    writer.add_metadata({"/Title": title})
  if password is not None:
    writer.encrypt(password, "owner", algorithm="AES-256")
  writer.write(path)


def word(path):
  """Writes a DOCX with a title, headings and a table."""
  document = docx.Document()
  document.add_heading("Contract", 0)
  document.add_heading("Terms", 1)
  document.add_paragraph("Pay monthly.")
  row = document.add_table(1, 2).rows[0]
  row.cells[0].text, row.cells[1].text = "Rent", "900"
  document.add_heading("Notice", 2)
  document.add_paragraph("Three months.")
  document.save(path)


HTML = """<?xml version="1.0" encoding="UTF-8"?>
<html><head><title>Lease page</title></head><body><nav>Menu</nav>
<h1>Lease</h1><p>Intro.</p><h2>End</h2><p>On 31 March.</p><script>x</script>
</body></html>"""
GERMAN = "Die Größe der Straße überrascht fröhliche Mädchen. Schöne Häuser."
JAPANESE = "これは日本語の文章です。契約は三月三十一日に終わります。"
P = reading.Part
TABLE = [P("price: 3", "Tea", heading="row 1"), P("price: 4", heading="row 2")]
# Windows ends lines so.
WINDOWS = (
  "---\r\ntitle: Our lease\r\n---\r\nIt ends.\r\n\r\nKeys\r\n----\r\nTwo."
)
RUSSIAN = '<meta charset="windows-1251"><title>Договор</title><p>Аренда</p>'
KINDS = {
  "a.md": (
    "---\ntitle: 'Our lease'\n---\n# Lease\n\nIt ends.",
    [P("---\ntitle: 'Our lease'\n---\n# Lease\n\nIt ends.", "Our lease")],
  ),
  "b.md": (WINDOWS, [P(WINDOWS.replace("\r", ""), "Our lease")]),
  "f.txt": (GERMAN.encode() * 2 + b"\xff", [P(GERMAN * 2 + "\ufffd")]),
  "b.html": (RUSSIAN.encode("cp1251"), [P("Аренда", "Договор")]),
  "a.JSONL": ('{"a": 1}', [P("a: 1", heading="row 1")]),
  "a.txt": ("\ufeffOne\x01line.", [P("One line.")]),
  "b.txt": (GERMAN.encode("cp1252"), [P(GERMAN)]),
  "e.txt": ("naïve café owners".encode("cp1252"), [P("naïve café owners")]),
  "c.txt": (GERMAN.encode("utf-16"), [P(GERMAN)]),
  "d.txt": (JAPANESE.encode("shift_jis"), [P(JAPANESE)]),
  "a.html": (
    HTML,
    [P("# Lease\n\nIntro.\n\n## End\n\nOn 31 March.", "Lease page")],
  ),
  "a.csv": ("\ufeffname;price\nTea;3\n;4\n", TABLE),
  "a.tsv": ("name\tprice\nTea\t3\n\t4\n", TABLE),
  "a.json": ('[{"name": "Tea", "price": 3}, {"price": 4}]', TABLE),
  "b.json": ('{"data": [{"name": "Tea", "price": 3}, {"price": 4}]}', TABLE),
  "c.json": (
    '{"a": {"b": 1}, "c": "d"}',
    [P('a: {"b": 1}\nc: d', heading="row 1")],
  ),
  "a.jsonl": (
    '{"id": 7, "text": "Long.", "title": "T"}\n\n{"a": 1}\n',
    [P("id: 7\nLong.", "T", heading="row 1"), P("a: 1", heading="row 3")],
  ),
  "a.parquet": (
    lambda path: parquet.write_table(
      pyarrow.table({"name": ["Tea", None], "price": [3, 4]}), path
    ),
    TABLE,
  ),
  "a.pdf": (
    lambda path: pdf(path, "Cats.", "", "Dogs.", title="Animals"),
    [
      P("Cats.", "Animals", 1),
      P("Dogs.", "Animals", 3),
      P("", lost="has page 2 without text: blank"),
    ],
  ),
  # Printing may need a password, reading none.
  "b.pdf": (lambda path: pdf(path, "Open.", password=""), [P("Open.", "", 1)]),
  "a.docx": (
    word,
    [
      P(
        "# Contract\n\n# Terms\n\nPay monthly.\n\n| Rent | 900 |\n| --- | --- |"
        "\n\n## Notice\n\nThree months.",
        "Contract",
      )
    ],
  ),
}


def make(folder_, name, content):
  path = folder_ / name
  if callable(content):
    content(path)
  else:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
  return str(path)


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_of_file_has_its_text_title_and_places(tmp_path, name):
  content, expected = KINDS[name]
  found = list(reading.read(make(tmp_path, name, content)))
  marked = name.endswith((".md", ".html", ".docx"))
  assert found == [part._replace(is_markdown=marked) for part in expected]


def bomb(path):
  """Writes a DOCX of 200 kB that unpacks to 200 MB."""
  with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
    with file.open("word/document.xml", "w") as part:
      for _ in range(200):
        part.write(bytes(1 << 20))


UNREADABLE = {
  "empty.md": ("", "has no text"),
  "binary.txt": (b"a\0\1\2", "is binary"),
  "secret.pdf": (lambda path: pdf(path, "x", password="u"), "is encrypted"),
  "scan.pdf": (
    lambda path: pdf(path, "", ""),
    "has pages 1-2 without text: blank",
  ),
  "cut.pdf": (b"%PDF-1.7\n1 0 obj\n", "is cut or damaged"),
  "bomb.docx": (bomb, "unpacks to 200 MB"),
  "no.docx": (b"PK", "is no docx file"),
  "deep.json": ("[" * 100_000, "not JSON"),
  "bad.jsonl": ("nope\nno", "has 2 lines that are not JSON: 1-2"),
  "no.parquet": (b"PAR1", "cannot be read"),
  "large.txt": (lambda path: os.truncate(path, 1 << 27), "has 128 MB"),
}


def test_files_that_cannot_be_read_are_listed_and_leave_the_others(tmp_path):
  docs = tmp_path / "docs"
  docs.mkdir()
  (docs / "good.md").write_text("# Good\n\nText.")
  for name, (content, _) in UNREADABLE.items():
    (docs / name).touch()
    make(docs, name, content)
  made = folder.update([str(docs)], tmp_path / "index")
  assert (made.files, made.passages) == (1, 1)
  said = {pathlib.Path(path).name: why for path, why in made.skipped}
  assert said.keys() == UNREADABLE.keys()
  for name, (_, sentence) in UNREADABLE.items():
    assert sentence in said[name].replace("(", "."), name
    assert "\n" not in said[name]


def test_files_of_folders_and_globs_are_found_once(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  for name in ("n/a.md", "n/deep/b.TXT", "n/c.png", "n/.d/e.md", "n/.f.md"):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("text")
  os.symlink(tmp_path / "n", tmp_path / "n/deep/loop")
  os.symlink(tmp_path / "n/a.md", tmp_path / "n/same.md")
  os.symlink(tmp_path / "gone.md", tmp_path / "n/gone.md")
  os.mkfifo(tmp_path / "n/pipe.txt")

  def names(*paths):
    found = finding.find_files(
      paths, reading.READERS, excluded_folder="n/index"
    )
    return [file.name for file in found.files]

  found = finding.find_files(["n"], reading.READERS, excluded_folder="n/index")
  assert found.files == (("n/a.md", "a.md"), ("n/deep/b.TXT", "deep/b.TXT"))
  others = {".png": 1, "hidden": 2, "linked folder": 1, "no regular file": 2}
  assert found.ignored == others
  assert names("n/a.md") == ["a.md"]
  assert names("n/**/*.md", "n/a.md") == ["a.md"]
  assert names("n/deep", "n/a.md") == ["a.md", "deep/b.TXT"]
  assert names("n/*") == ["a.md", "deep/b.TXT"]
  (tmp_path / "n/index").mkdir()
  (tmp_path / "n/index/x.jsonl").write_text("{}")
  assert names("n") == ["a.md", "deep/b.TXT"]
  with pytest.raises(ValueError, match="found nothing at n/[*].rst"):
    names("n/*.rst")


MARKDOWN = f"""# One

{"Some words of it. " * 20}

```sh
# not a heading
```

Two
---

{"Other words here. " * 20}

### Deep

{"Last words of all. " * 20}

# Three
"""


def test_passages_end_at_headings_and_sentences():
  found = list(splitting.Splitter(60, 12)(MARKDOWN, is_markdown=True))
  headings = {heading for heading, _ in found}
  assert headings == {"One", "One > Two", "One > Two > Deep"}
  assert all(len(text) <= 240 for _, text in found)
  ends = (".", "```", "# Three")
  assert all(text.rstrip().endswith(ends) for _, text in found)
  (_, first), (_, second) = found[:2]
  assert second.startswith(first[-17:])  # A sentence is in both.
  assert len(first) + len(second) > 360
  assert "Last words of all." in found[-1][1]


TABLE = "| month | rent |\n|---|---|\n" + "".join(
  f"| month {month:02d} | {900 + month} euros |\n" for month in range(20)
)
CODE = (
  "```python\ndef rent(month):\n\n  total = 0\n\n"
  + "".join(f"  total += {part}  # a comment\n\n" for part in range(18))
  + "  return total\n```\n"
)


@pytest.mark.parametrize("sentences", [0, 3, 6, 12, 17])
@pytest.mark.parametrize("block", [TABLE, CODE])
def test_tables_and_code_that_fit_are_whole(block, sentences):
  before = "This is a sentence of some words about rent. " * sentences
  after = "After it comes more text about the rent. " * 12
  text = f"# One\n\n{before}\n\n{block}\n\n{after}"
  found = list(splitting.Splitter(200, 30)(text, is_markdown=True))
  assert any(block.strip() in passage for _, passage in found)
  assert all(len(passage) <= 800 for _, passage in found)


def test_a_heading_is_with_its_text():
  sections = [f"## Part {n}\n\n" + f"Words of {n}. " * 40 for n in range(8)]
  found = list(
    splitting.Splitter(200, 30)("\n\n".join(sections), is_markdown=True)
  )
  for number in range(8):
    heading = f"## Part {number}\n"
    (passage,) = [text for _, text in found if heading in text]
    assert f"Words of {number}." in passage.partition(heading)[2]


def test_a_fence_without_code_is_no_passage():
  code = "".join(f"def f{n}():\n  return {n}\n\n" for n in range(90))
  text = f"# One\n\n```python\n{code}```\n"
  found = list(splitting.Splitter(200, 30)(text, is_markdown=True))
  assert all("return" in passage for _, passage in found)
  assert "f89" in found[-1][1]


def test_headings_without_text_are_kept():
  text = "# One\n\n## Two\n\n## Three\n\nWords.\n\n# Four\n\n## Five\n"
  found = list(splitting.Splitter(16, 4)(text, is_markdown=True))
  words = " ".join(words for passage in found for words in passage)
  for heading in ("One", "Two", "Three", "Four", "Five"):
    assert heading in words
  (passage,) = splitting.Splitter(200, 30)("# Only a title", is_markdown=True)
  assert passage == ("Only a title", "# Only a title")


def _texts(path, data):
  path.write_bytes(data)
  return [part.text for part in reading.read(str(path))]


@pytest.mark.parametrize(
  "table, last",
  [
    ("name,text\nO,'tis the season\nP,'twas not'\n", "P: 'twas not'"),
    ("q,a\n" + '"w, x",y\n' * 9000 + '"""a"", b",z\n', 'q: "a", b\na: z'),
    ('"a, b";c\n"1,5, 2";3\n', "a, b: 1,5, 2\nc: 3"),
    ('a, b\n"1", "2, 3"\n', "a: 1\nb: 2, 3"),
  ],
)
def test_commas_and_quotes_are_read_by_the_first_line(tmp_path, table, last):
  (part,) = list(reading.read(make(tmp_path, "t.csv", table)))[-1:]
  assert (f"{part.title}: " if part.title else "") + part.text == last


def test_a_table_loses_no_value(tmp_path):
  rows = b"\n\na,a,b\n1,2,3\n\n4,5,6,7\n8\n"
  assert _texts(tmp_path / "t.csv", rows) == [
    "a: 1\na 2: 2\nb: 3",
    "a: 4\na 2: 5\nb: 6\ncolumn 4: 7",
    "a: 8",
  ]


def test_scripts_of_a_page_without_text_are_no_text(tmp_path):
  page = b"<html><head><script>var x</script><style>b{}</style></head></html>"
  with pytest.raises(reading.ReadError, match="has no text"):
    _texts(tmp_path / "t.html", page)


def test_tables_in_tables_are_read_and_merged_cells_once(tmp_path):
  document = docx.Document()
  table = document.add_table(2, 2)
  table.cell(0, 0).merge(table.cell(0, 1)).text = "Rent"
  table.cell(1, 0).add_table(1, 1).cell(0, 0).text = "900"
  document.save(tmp_path / "t.docx")
  (part,) = reading.read(str(tmp_path / "t.docx"))
  assert part.text.count("Rent") == part.text.count("900") == 1


@pytest.mark.parametrize("line", ["# a{}b", "---\ntitle: a{}b\n---\n"])
def test_a_line_of_blanks_takes_no_time(line):
  text = line.format(" " * 20_000)  # Took hours.
  split = splitting.Splitter(200, 30)(text, is_markdown=True)
  assert splitting.title(text) and len(list(split)) < 9


def test_a_word_without_end_takes_no_time():
  found = list(splitting.Splitter(200, 30)("a" * 500_000, is_markdown=False))
  assert len(found) < 1500


@pytest.mark.parametrize(
  "line", ["words of one line ", "| a | b |\n", "A. \n\n"]
)
def test_time_grows_with_the_length_of_a_text(line):
  splitter = splitting.Splitter(200, 30)

  def seconds(length):
    text = line * (length // len(line))
    began = time.process_time()
    passages = [text for _, text in splitter(text, is_markdown=True)]
    assert len(passages) > length // 800
    return time.process_time() - began

  seconds(1 << 16)
  assert seconds(1 << 20) < 8 * seconds(1 << 18)  # Squares are 16 times.
