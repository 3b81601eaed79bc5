"""Damaged, disguised and encrypted documents, and odd tables."""

from __future__ import annotations

import io
import json
import os
import pathlib
import stat
import sys
import time
import zipfile
import zlib

import docx
import openpyxl
import pptx
import pyarrow
import pytest
from pyarrow import parquet

from anysearch_jax.retrieval.documents import folder, ocr, reading

OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(504)


def read(path, content, recognizer=None):
  """Returns the parts of a file with this content."""
  if callable(content):
    content(path)
  else:
    path.write_bytes(
      content if isinstance(content, bytes) else content.encode()
    )
  return list(reading.read(str(path), recognizer))


def texts(parts):
  return [part.text for part in parts if part.text]


def losses(parts):
  return [part.lost for part in parts if part.lost]


def fields(parts):
  return [(part.title, part.text, part.heading) for part in parts]


def pdf(*pages, catalog=b"", objects=()):
  """Returns a PDF whose pages are the entries of dictionaries, or streams."""
  bodies = [b"", b""]
  kids = []
  for page in pages:
    if isinstance(page, bytes):
      stream = zlib.compress(page)
      bodies.append(
        b"<</Filter/FlateDecode/Length %d>>stream\n%s\nendstream"
        % (len(stream), stream)
      )
      page_entries = b"/Contents %d 0 R" % len(bodies)
    else:
      (page_entries,) = page
    bodies.append(
      b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 300 300]%s/Resources<</Font<</F "
      b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>>>>>>>" % page_entries
    )
    kids.append(b"%d 0 R" % len(bodies))
  bodies += objects
  bodies[0] = b"<</Type/Catalog/Pages 2 0 R%s>>" % catalog
  bodies[1] = b"<</Type/Pages/Kids[%s]/Count %d>>" % (
    b" ".join(kids),
    len(kids),
  )
  out = b"%PDF-1.7\n"
  offsets = []
  for number, body in enumerate(bodies, start=1):
    offsets.append(len(out))
    out += b"%d 0 obj\n%s\nendobj\n" % (number, body)
  rows = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
  return out + (
    b"xref\n0 %d\n0000000000 65535 f \n%strailer<</Size %d/Root 1 0 R>>\n"
    b"startxref\n%d\n%%%%EOF"
    % (len(bodies) + 1, rows, len(bodies) + 1, len(out))
  )


def shown(text):
  return b"BT /F 12 Tf 20 200 Td (%s) Tj ET" % text.encode("latin-1")


PICTURE = b"q 100 0 0 100 50 50 cm 0 0 1 1 re f Q"


def test_pages_without_text_are_named_by_kind(tmp_path):
  content = pdf(
    shown("One."), PICTURE, PICTURE, shown("Four."), b"", PICTURE, shown("S.")
  )
  parts = read(tmp_path / "a.pdf", content)
  assert [(part.text, part.page) for part in parts if part.text] == [
    ("One.", 1),
    ("Four.", 4),
    ("S.", 7),
  ]
  (loss,) = losses(parts)
  assert loss == (
    "has pages 2-3, 6 without text: pictures, which --ocr=tesseract reads; "
    "has page 5 without text: blank"
  )


def test_a_damaged_page_costs_that_page_only(tmp_path):
  content = pdf(shown("One."), shown("Two."), shown("Three."))
  # The second page's dictionary becomes a number.
  start = content.index(b"6 0 obj")
  end = content.index(b"endobj", start)
  damaged = content[:start] + b"6 0 obj\n7".ljust(end - start) + content[end:]
  parts = read(tmp_path / "a.pdf", damaged)
  assert texts(parts) == ["One.", "Three."]
  assert "page 2" in losses(parts)[0]


def test_a_value_without_an_appearance_is_read(tmp_path):
  """Programs that fill forms often leave the appearance to the viewer."""
  field = (
    b"<</Type/Annot/Subtype/Widget/FT/Tx/T(a)/V(Filled in)/Rect[20 20 200 40]"
    b"/DA(/Helv 12 Tf 0 g)>>"
  )
  content = pdf(
    (b"/Annots[4 0 R]",),
    catalog=b"/AcroForm<</Fields[4 0 R]/NeedAppearances true/DA(/Helv 12 Tf)"
    b"/DR<</Font<</Helv<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>>>>>>>",
    objects=[field],
  )
  assert texts(read(tmp_path / "a.pdf", content)) == ["Filled in"]


def test_a_page_of_unknown_letters_is_named(tmp_path):
  content = pdf(shown("\x01\x04\x0fAB\x11C"), shown("Two."))
  parts = read(tmp_path / "a.pdf", content)
  assert parts[-2].text == "Two."
  assert losses(parts) == [
    "has page 1 whose fonts do not name their letters: --ocr=tesseract reads "
    "them"
  ]


def test_words_of_a_pdf_are_whole(tmp_path):
  lines = (
    b"BT /F 12 Tf 14 TL 20 200 Td (The land-) Tj T* (lord of 2024-) Tj T* "
  )
  lines += b"(2027 is well-known.) Tj ET"
  (part,) = read(tmp_path / "a.pdf", pdf(lines))
  words = part.text.split()
  assert "landlord" in words and "well-known." in words
  assert "2024-" in part.text


def test_nested_streams_are_bounded(tmp_path):
  """A file of 2 kB whose page unpacks to 1 GB."""
  stream = zlib.compress(shown("Hello.") + bytes(1 << 28), 9)
  stream = zlib.compress(stream, 9)
  body = (
    b"<</Filter[/FlateDecode/FlateDecode]/Length %d>>stream\n%s\nendstream"
    % (len(stream), stream)
  )
  content = pdf((b"/Contents 4 0 R",), objects=[body])
  assert len(content) < 5000
  began = time.monotonic()
  read(tmp_path / "a.pdf", content)
  assert time.monotonic() - began < 30


RECOGNIZER = f"""#!{sys.executable}
import pathlib, struct, sys
data = pathlib.Path(sys.argv[1]).read_bytes()
assert data == sys.stdin.buffer.read()
width, height = struct.unpack(">II", data[16:24])
print("recognized", width, height)
"""


def test_pictures_are_recognized_by_a_command(tmp_path):
  program = tmp_path / "recognizer"
  program.write_text(RECOGNIZER)
  program.chmod(program.stat().st_mode | stat.S_IXUSR)
  content = pdf(shown("One."), PICTURE)
  recognizer = ocr.Command(str(program))
  parts = read(tmp_path / "a.pdf", content, recognizer)
  assert [(part.text, part.page) for part in parts] == [
    ("One.", 1),
    ("recognized 1250 1250", 2),
  ]
  index = tmp_path / "index"
  plain = folder.update([str(tmp_path / "a.pdf")], index)
  assert plain.passages == 1 and "page 2" in plain.partly_read[0][1]
  settings = folder.Settings(ocr=f"{program} {{}}")
  summary = folder.update([str(tmp_path / "a.pdf")], index, settings)
  assert summary.passages == 2 and not summary.partly_read
  (tmp_path / "scan.PNG").write_bytes(b"\x89PNG" + bytes(20))
  scan = str(tmp_path / "scan.PNG")
  assert texts(reading.read(scan, recognizer)) == ["recognized 0 0"]
  found = folder.update([str(tmp_path / "a.pdf"), scan], index, settings)
  assert found.passages == 3 and not found.ignored
  with pytest.raises(ValueError, match="left out: {'.png': 1}"):
    folder.update([scan], tmp_path / "plain")


def test_a_recognizer_that_fails_or_is_missing_is_named(tmp_path):
  with pytest.raises(ValueError, match="--ocr: found no program 'nothing'"):
    ocr.Command("nothing")
  with pytest.raises(
    reading.ReadError,
    match="page 1 that --ocr did not read: false ended with code 1",
  ):
    read(tmp_path / "a.pdf", pdf(PICTURE), ocr.Command("false"))


def word(*members):
  """Returns a DOCX whose picture is damaged in the ways of the arguments."""
  document = docx.Document()
  document.add_paragraph("Kept.")
  file = io.BytesIO()
  document.save(file)
  with zipfile.ZipFile(file, "a") as archive:
    for name, content in members:
      archive.writestr(name, content)
  return file.getvalue()


def zipped(**members):
  file = io.BytesIO()
  with zipfile.ZipFile(file, "w") as archive:
    for name, content in members.items():
      archive.writestr(name, content)
  return file.getvalue()


def stream(name):
  return OLE + name.encode("utf-16-le")


def workbook():
  book = openpyxl.Workbook()
  book.active.append(["only"])
  file = io.BytesIO()
  book.save(file)
  return file.getvalue()


HTML = "<!DOCTYPE html><html><body><p>Shown.</p></body></html>"
DISGUISED = {
  "page.pdf": (HTML, ["Shown."]),
  "page.xls": (HTML, ["Shown."]),
  "rich.doc": (r"{\rtf1 Rich.}", ["Rich."]),
  "word.doc": (word(), ["Kept."]),
  "word.csv": (word(), ["Kept."]),
  "word.pdf": (word(), ["Kept."]),
  "sheet.xls": (workbook(), ["only"]),
  "table.xls": ("a\tb\n1x\t2x\n", ["a: 1x\nb: 2x"]),
  "printed.docx": (pdf(shown("Printed.")), ["Printed."]),
}
REFUSED = {
  "secret.docx": (stream("EncryptedPackage"), "protected by a password"),
  "secret.xlsx": (stream("EncryptedPackage"), "protected by a password"),
  "old.doc": (stream("WordDocument"), "is an old Word document; save it as .d"),
  "old.ppt": (stream("PowerPoint Document"), "is an old PowerPoint file"),
  "letter.msg": (stream("__substg1.0"), "save it as .eml"),
  "word.docx": (stream("WordDocument"), "is an old Word document"),
  "archive.csv": (zipped(a="x"), "is a zip archive; unpack it"),
  "words.docx": ("only words", "is no docx file"),
  "empty.pdf": (b"", "is empty"),
  "cut.docx": (word()[:2000], "cut or damaged"),
  "half.xlsx": (zipped(**{"xl/a": ""}), "is no whole workbook"),
  "bare.docx": (zipped(**{"word/a": ""}), "is no document of Office"),
}


@pytest.mark.parametrize("name", DISGUISED)
def test_a_disguised_file_is_read_as_what_it_is(tmp_path, name):
  content, expected = DISGUISED[name]
  assert texts(read(tmp_path / name, content)) == expected


@pytest.mark.parametrize("name", REFUSED)
def test_the_reason_of_a_refusal_is_the_right_one(tmp_path, name):
  content, reason = REFUSED[name]
  with pytest.raises(reading.ReadError, match=reason):
    read(tmp_path / name, content)


def test_an_encrypted_archive_is_refused(tmp_path):
  data = bytearray(word())
  with zipfile.ZipFile(io.BytesIO(data)) as archive:
    offset = archive.start_dir
  data[offset + 8] |= 1  # The flag of encryption of the first member.
  with pytest.raises(reading.ReadError, match="protected by a password"):
    read(tmp_path / "a.docx", bytes(data))


def test_slides_are_pages_in_their_order(tmp_path):
  show = pptx.Presentation()
  for title in ("First", "Second", "Third"):
    slide = show.slides.add_slide(show.slide_layouts[1])
    slide.shapes.title.text = title
    slide.placeholders[1].text = f"Words of {title}."
  slides = show.slides._sldIdLst
  slides.insert(0, slides[2])
  show.save(str(tmp_path / "a.pptx"))
  parts = list(reading.read(str(tmp_path / "a.pptx")))
  assert [(part.page, part.text) for part in parts] == [
    (1, "# Third\n\nWords of Third."),
    (2, "# First\n\nWords of First."),
    (3, "# Second\n\nWords of Second."),
  ]


def test_headings_of_own_styles_are_headings(tmp_path):
  document = docx.Document()
  styles = document.styles
  style = styles.add_style("Clause", 1)
  style.base_style = styles["Heading 2"]
  document.add_paragraph("Rent", style="Clause")
  document.add_paragraph("It is 900.")
  document.save(str(tmp_path / "a.docx"))
  (part,) = reading.read(str(tmp_path / "a.docx"))
  assert part.text == "## Rent\n\nIt is 900."


TABLES = {
  "sep=;\na;b\n1,5;x, y\n": [("", "a: 1,5\nb: x, y", "row 1")],
  "Name, first;Place, land;Rent\nTom, B.;Rome;3\nAnn;Oslo, N;4\n": [
    ("", "Name, first: Tom, B.\nPlace, land: Rome\nRent: 3", "row 1"),
    ("", "Name, first: Ann\nPlace, land: Oslo, N\nRent: 4", "row 2"),
  ],
  "Rents of 2026\n\nflat,rent\n2B,900\n3C,800\n": [
    ("", "Rents of 2026", "above the table"),
    ("", "flat: 2B\nrent: 900", "row 1"),
    ("", "flat: 3C\nrent: 800", "row 2"),
  ],
  "Tea,3\nMilk,4\n": [
    ("", "column 1: Tea\ncolumn 2: 3", "row 1"),
    ("", "column 1: Milk\ncolumn 2: 4", "row 2"),
  ],
  "land,2020,2021\nItaly,3,4\n": [
    ("", "land: Italy\n2020: 3\n2021: 4", "row 1")
  ],
}


@pytest.mark.parametrize("table", TABLES)
def test_odd_tables(tmp_path, table):
  assert fields(read(tmp_path / "a.csv", table)) == TABLES[table]


def test_sheets_name_their_rows_as_the_program_does(tmp_path):
  book = openpyxl.Workbook()
  sheet = book.active
  sheet.title = "Rents"
  for row in (["Rents of 2026"], [], ["flat", "rent"], ["2B", 900.0]):
    sheet.append(row)
  book.create_sheet("Notes").append(["Call the plumber."])
  book.save(tmp_path / "a.xlsx")
  assert fields(reading.read(str(tmp_path / "a.xlsx"))) == [
    ("", "Rents of 2026", "Rents > above the table"),
    ("", "flat: 2B\nrent: 900", "Rents > row 4"),
    ("", "Call the plumber.", "Notes > row 1"),
  ]


RECORDS = {
  '{"title":"Lease","notes":"ends 2027","data":{"id":1}}': [
    ("Lease", 'notes: ends 2027\ndata: {"id": 1}', "row 1")
  ],
  '{"notes":"both","data":[{"id":1},{"id":2}]}': [
    ("", "notes: both", "fields"),
    ("", "id: 1", "row 1"),
    ("", "id: 2", "row 2"),
  ],
  '["one","two"]': [("", "one", "row 1"), ("", "two", "row 2")],
  '{"a":1}\n{"a":2}': [("", "a: 1", "row 1"), ("", "a: 2", "row 2")],
  '"words"': [("", "words", "row 1")],
}


@pytest.mark.parametrize("text", RECORDS)
@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_json_of_every_shape(tmp_path, text, encoding):
  parts = read(tmp_path / "a.json", text.encode(encoding))
  assert fields(parts) == RECORDS[text]


def test_a_broken_line_costs_that_line_only(tmp_path):
  lines = ['{"a": "straße"}', "{nope", '{"a": 2}', '{"a": ']
  parts = read(tmp_path / "a.jsonl", "\n".join(lines).encode("cp1252"))
  assert texts(parts) == ["a: straße", "a: 2"]
  assert losses(parts) == ["has 2 lines that are not JSON: 2, 4"]


def test_bytes_of_a_table_are_no_text(tmp_path):
  row = {
    "name": ["Tea"],
    "picture": [{"bytes": os.urandom(3000), "path": "tea.png"}],
    "note": [b"text as bytes"],
  }
  parquet.write_table(pyarrow.table(row), tmp_path / "a.parquet")
  parts = list(reading.read(str(tmp_path / "a.parquet")))
  (text,) = texts(parts)
  assert "tea.png" in text and "note: text as bytes" in text
  assert len(text) < 200
  assert losses(parts) == ["has 3,000 bytes that are no text"]


def test_attachments_are_counted(tmp_path):
  letter = (
    "Subject: =?utf-8?q?M=C3=BCller?=\nContent-Type: multipart/mixed; "
    "boundary=b\n\n--b\n\nWords.\n--b\nContent-Type: image/png\n"
    "Content-Disposition: attachment; filename=a.png\n\nxx\n--b--\n"
  )
  parts = read(tmp_path / "a.eml", letter)
  assert parts[0].title == "Müller" and "Words." in parts[0].text
  assert losses(parts) == ["has attachments that are not read: a.png"]


def test_a_letter_in_two_forms_is_read_once(tmp_path):
  forms = (
    "Content-Type: multipart/alternative; boundary=b\n\n--b\n\n{}\n--b\n"
    "Content-Type: text/html\n\n<p>Words of the lease, in full.</p>\n--b--\n"
  )
  (part,) = read(tmp_path / "a.eml", forms.format("Words of the lease."))
  assert part.text.count("Words") == 1
  (part,) = read(tmp_path / "a.eml", forms.format("See HTML."))
  assert "in full" in part.text and "See" not in part.text


def test_headings_of_plain_markup(tmp_path):
  rst = (
    "=====\nLease\n=====\n\nA.\n\nTerm\n----\n\nB.\n\nEnd\n----\n\n::\n\n  -\n"
  )
  (part,) = read(tmp_path / "a.rst", rst)
  assert part.title == "Lease"
  assert [x for x in part.text.split("\n") if x.startswith("#")] == [
    "# Lease",
    "## Term",
    "## End",
  ]
  (part,) = read(tmp_path / "a.org", "#+TITLE: Lease\n* Term\n** End\nB.\n")
  assert part.title == "Lease" and "# Term\n## End" in part.text
  tex = "\\title{Lease}\\section{Term}A\n\\subsection*{The {End}} 5\\% % no\n"
  (part,) = read(tmp_path / "a.tex", tex)
  assert part.title == "Lease"
  assert "# Term\nA" in part.text and "## The {End}\n 5\\%" in part.text


def test_many_files_that_cannot_be_read_make_a_short_list(tmp_path):
  docs = tmp_path / "docs"
  docs.mkdir()
  (docs / "a.jsonl").write_text(json.dumps({"a": 1}) + "\n{cut")
  (docs / "b.txt").write_text("words")
  summary = folder.update([str(docs)], tmp_path / "index")
  assert summary.files == 2 and not summary.skipped
  ((path, loss),) = summary.partly_read
  assert pathlib.Path(path).name == "a.jsonl"
  assert loss == "has 1 line that is not JSON: 2"
  again = folder.update([str(docs)], tmp_path / "index")
  assert again.partly_read == summary.partly_read and again.unchanged == 2
