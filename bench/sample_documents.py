"""Makes documents of every kind, with words that a reader should keep.

Each feature of a kind, such as the footnotes of a DOCX, has words of its own.
The packages that make them are those of the extra [test].
"""

from __future__ import annotations

import email.message
import email.policy
import json
import pathlib
import re
import zipfile
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

_NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight")
_FEATURE = re.compile("<<([a-z]+)>>")
_W = (
  'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main" '
  'xmlns:m="http://schemas.openxmlformats.org/officeDocument/2006/math" '
  'xmlns:v="urn:schemas-microsoft-com:vml"'
)
_ODF = " ".join(
  f'xmlns:{name}="urn:oasis:names:tc:opendocument:xmlns:{space}:1.0"'
  for name, space in (
    ("office", "office"),
    ("text", "text"),
    ("table", "table"),
    ("draw", "drawing"),
    ("presentation", "presentation"),
    ("style", "style"),
  )
)


class Sample(NamedTuple):
  """A document.

  Attributes:
    name: name of its file.
    words: the words that it has.
    make: writes it to a path.
  """

  name: str
  words: str
  make: Callable[[pathlib.Path], None]


def words(feature: str) -> str:
  """Returns the words of a feature of a document."""
  return " ".join(feature + number for number in _NUMBERS)


def _filled(template: str) -> str:
  """Returns a text with the words of features in place of `<<feature>>`."""
  return _FEATURE.sub(lambda match: words(match[1]), template)


def _words_of(template: str) -> str:
  return " ".join(map(words, dict.fromkeys(_FEATURE.findall(template))))


def _text(name: str, template: str, encoding: str = "utf-8") -> Sample:
  """Returns a sample of text."""

  def make(path: pathlib.Path) -> None:
    path.write_bytes(_filled(template).encode(encoding))

  return Sample(name, _words_of(template), make)


def _encoded(name: str, text: str, encoding: str) -> Sample:
  """Returns a sample whose words are those of the text."""
  return Sample(name, text, lambda path: _write(path, text.encode(encoding)))


def _write(path: pathlib.Path, data: bytes) -> None:
  path.write_bytes(data)


def _archive(name: str, templates: Mapping[str, str]) -> Sample:
  """Returns a sample that is a zip archive of texts."""

  def make(path: pathlib.Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
      for member, template in templates.items():
        archive.writestr(member, _filled(template))

  return Sample(name, _words_of("".join(templates.values())), make)


def _opendocument(name: str, kind: str, body: str) -> Sample:
  namespace = f"application/vnd.oasis.opendocument.{kind}"
  return _archive(
    name,
    {
      "mimetype": namespace,
      "META-INF/manifest.xml": "<manifest/>",
      "content.xml": (
        f"<office:document-content {_ODF}><office:body>"
        + re.sub(r">\n<", "><", body)
        + "</office:body></office:document-content>"
      ),
      "styles.xml": (
        f"<office:document-styles {_ODF}><style:footer><text:p>"
        "<<footer>></text:p></style:footer></office:document-styles>"
      ),
    },
  )


_ODT = """<office:text>
<text:tracked-changes><text:p>deleted</text:p></text:tracked-changes>
<text:h text:outline-level="2"><<heading>></text:h>
<text:p><text:span><<span>></text:span> <text:note><text:note-citation>1
</text:note-citation><text:note-body><text:p><<footnote>></text:p>
</text:note-body></text:note></text:p>
<text:list><text:list-item><text:p><<item>></text:p>
</text:list-item></text:list>
<table:table><table:table-row><table:table-cell><text:p><<cell>></text:p>
<table:table><table:table-row><table:table-cell><text:p><<inner>></text:p>
</table:table-cell></table:table-row></table:table></table:table-cell>
</table:table-row></table:table>
<text:p><draw:frame><draw:text-box><text:p><<box>></text:p></draw:text-box>
</draw:frame><office:annotation><text:p><<comment>></text:p></office:annotation>
</text:p></office:text>"""
_ODP = """<office:presentation><draw:page>
<draw:frame presentation:class="title">
<draw:text-box><text:p><<title>></text:p></draw:text-box></draw:frame>
<presentation:notes><draw:frame><draw:text-box><text:p><<notes>></text:p>
</draw:text-box></draw:frame></presentation:notes></draw:page>
<draw:page><draw:frame><draw:text-box><text:list><text:list-item>
<text:p><<second>></text:p></text:list-item></text:list></draw:text-box>
</draw:frame></draw:page></office:presentation>"""
_ODS = """<office:spreadsheet><table:table table:name="First"><table:table-row>
<table:table-cell office:value-type="string"><text:p><<header>></text:p>
</table:table-cell><table:table-cell office:value-type="string">
<text:p><<second>></text:p></table:table-cell></table:table-row>
<table:table-row><table:table-cell office:value-type="string">
<text:p><<cell>></text:p></table:table-cell></table:table-row></table:table>
<table:table table:name="Last"><table:table-row><table:table-cell
office:value-type="string"><text:p><<sheet>></text:p></table:table-cell>
</table:table-row></table:table></office:spreadsheet>"""
_WORD_BLOCKS = """
<w:p><w:ins w:id="1" w:author="a"><w:r><w:t><<insertion>></w:t></w:r></w:ins>
<w:del w:id="2" w:author="a"><w:r><w:delText>deleted</w:delText></w:r></w:del>
</w:p><w:sdt><w:sdtContent><w:p><w:r><w:t><<control>></w:t></w:r></w:p>
</w:sdtContent></w:sdt><w:p><w:sdt><w:sdtContent><w:r><w:t><<inline>></w:t>
</w:r></w:sdtContent></w:sdt></w:p><w:p><w:fldSimple w:instr="TITLE"><w:r>
<w:t><<field>></w:t></w:r></w:fldSimple></w:p>
<w:p><w:smartTag><w:r><w:t><<smart>></w:t></w:r></w:smartTag></w:p>
<w:p><m:oMath><m:r><m:t><<equation>></m:t></m:r></m:oMath></w:p>
<w:p><w:hyperlink><w:r><w:t><<link>></w:t></w:r></w:hyperlink></w:p>
<w:p><w:r><w:pict><v:shape><v:textbox><w:txbxContent><w:p><w:r>
<w:t><<box>></w:t></w:r></w:p></w:txbxContent></v:textbox></v:shape></w:pict>
</w:r></w:p>
"""
_WORD_FOOTNOTES = f"""<w:footnotes {_W}><w:footnote w:id="2"><w:p><w:r>
<w:t><<footnote>></w:t></w:r></w:p></w:footnote></w:footnotes>"""
_HTML = """<html><head><title>A lease</title><style>b {}</style></head><body>
<nav>Menu</nav><header><<header>></header><h1><<heading>></h1>
<p><<paragraph>> <a href="x"><<link>></a><br><b><<bold>></b></p>
<table><caption><<caption>></caption><tr><th><<column>></th></tr>
<tr><td><ul><li><<item>></li></ul></td></tr></table>
<table><tr><td><h2><<laid>></h2><p><<out>></p><table><tr><td><<inner>></td>
</tr></table></td></tr></table><form><label><<label>></label></form>
<dl><dt><<term>></dt><dd><<definition>></dd></dl>
<pre><<code>></pre><img alt="<<picture>>"><script>x</script></body></html>"""
_EPUB = {
  "mimetype": "application/epub+zip",
  "META-INF/container.xml": (
    "<container><rootfiles><rootfile full-path='b/c.opf'/></rootfiles>"
    "</container>"
  ),
  "b/c.opf": (
    "<package xmlns:dc='http://purl.org/dc/elements/1.1/'><metadata><dc:title>"
    "<<title>></dc:title></metadata><manifest><item id='a' href='1.xhtml'/>"
    "<item id='b' href='text/2%20b.xhtml'/></manifest><spine><itemref "
    "idref='b'/><itemref idref='a'/></spine></package>"
  ),
  "b/1.xhtml": (
    "<?xml version='1.0' encoding='utf-8'?><html><body><h1><<heading>></h1>"
    "<p><<first>></p></body></html>"
  ),
  "b/text/2 b.xhtml": "<html><body><p><<second>></p></body></html>",
}
_NOTEBOOK = json.dumps(
  {
    "nbformat": 4,
    "cells": [
      {"cell_type": "markdown", "source": ["# <<heading>>\n", "<<text>>"]},
      {
        "cell_type": "code",
        "source": "<<code>>",
        "outputs": [
          {"output_type": "stream", "text": ["<<printed>>"]},
          {"data": {"text/plain": "<<value>>", "image/png": "iVBOR"}},
        ],
      },
    ],
  }
)
_RST = """.. _start:

<<title>>
{line}

<<paragraph>>

<<heading>>
{dashes}

- <<item>>

.. note:: <<note>>
""".format(line="=" * 200, dashes="-" * 200)
_CZECH = "Příliš žluťoučký kůň úpěl ďábelské ódy, nájem končí v červnu."
_POLISH = (
  "Umowa najmu kończy się trzydziestego czerwca. Zażółć gęślą jaźń, "
  "wynajmujący zwróci kaucję w ciągu czternastu dni."
)
_TURKISH = (
  "Kira sözleşmesi haziranda sona eriyor. Şişli'de oturan kiracı depozitoyu "
  "geri alır; ığdır çiçeği değil."
)
_RUSSIAN = "Договор аренды заканчивается тридцатого июня."
_JAPANESE = "これは日本語の文章です。契約は三月三十一日に終わります。"


def _docx(path: pathlib.Path) -> None:
  import docx
  from docx.opc import packuri, part
  from docx.oxml import parse_xml

  document = docx.Document()
  document.add_heading(words("heading"), 1)
  paragraph = document.add_paragraph(words("paragraph"))
  document.add_comment(paragraph.runs, words("comment"), "A", "A")
  blocks = parse_xml(f"<w:body {_W}>{_filled(_WORD_BLOCKS)}</w:body>")
  for block in list(blocks):
    document.element.body.insert(-1, block)
  section = document.sections[0]
  section.header.paragraphs[0].text = words("header")
  section.footer.paragraphs[0].text = words("footer")
  table = document.add_table(2, 2)
  table.cell(0, 0).merge(table.cell(0, 1)).text = words("merged")
  table.cell(1, 0).text = words("cell")
  inner = table.cell(1, 1).add_table(1, 1)
  inner.cell(0, 0).text = words("inner")
  footnotes = part.Part(
    packuri.PackURI("/word/footnotes.xml"),
    "application/vnd.openxmlformats-officedocument.wordprocessingml."
    "footnotes+xml",
    _filled(_WORD_FOOTNOTES).encode(),
    document.part.package,
  )
  document.part.relate_to(
    footnotes,
    "http://schemas.openxmlformats.org/officeDocument/2006/relationships/"
    "footnotes",
  )
  document.save(str(path))


def _pptx(path: pathlib.Path) -> None:
  import pptx
  from pptx import util

  show = pptx.Presentation()
  layout = show.slide_layouts[1]
  slide = show.slides.add_slide(layout)
  slide.shapes.title.text = words("title")
  slide.placeholders[1].text = words("bullet")
  slide.notes_slide.notes_text_frame.text = words("notes")
  slide = show.slides.add_slide(layout)
  size = util.Inches(1)
  shape = slide.shapes.add_table(1, 1, size, size, size, size)
  shape.table.cell(0, 0).text = words("cell")
  group = slide.shapes.add_group_shape()
  group.shapes.add_textbox(size, size, size, size).text = words("group")
  show.save(str(path))


def _xlsx(path: pathlib.Path) -> None:
  import datetime

  import openpyxl

  book = openpyxl.Workbook()
  sheet = book.active
  sheet.title = "Rents"
  sheet.append([words("top")])
  sheet.append(["Flat", words("header")])
  sheet.append([words("cell"), datetime.date(2027, 3, 31)])
  book.create_sheet("Last").append([words("sheet")])
  book.save(path)


def _pdf(path: pathlib.Path) -> None:
  from reportlab.pdfgen import canvas

  page = canvas.Canvas(str(path))
  page.setTitle("A lease")
  page.drawString(50, 800, words("plain"))
  for number, word in enumerate(words("divided").split()):
    page.drawString(50, 750 - 40 * number, f"{word[:-2]}-")
    page.drawString(50, 735 - 40 * number, word[-2:])
  page.showPage()
  page.acroForm.textfield(value=words("field"), x=50, y=700, width=500)
  page.acroForm.choice(
    value=words("choice"), options=[words("choice")], x=50, y=600, width=500
  )
  page.showPage()
  page.save()


def _japanese_pdf(path: pathlib.Path) -> None:
  """Writes text in a font that only names its predefined CMap."""
  from reportlab.pdfbase import cidfonts, pdfmetrics
  from reportlab.pdfgen import canvas

  pdfmetrics.registerFont(cidfonts.UnicodeCIDFont("HeiseiMin-W3"))
  page = canvas.Canvas(str(path))
  page.setFont("HeiseiMin-W3", 12)
  page.drawString(50, 700, _JAPANESE)
  page.save()


def _parquet(path: pathlib.Path) -> None:
  import pyarrow
  from pyarrow import parquet

  row: dict[str, Any] = {
    "text": [words("text")],
    "nested": [{"inner": [words("inner")]}],
    "picture": [bytes(range(256))],
  }
  parquet.write_table(pyarrow.table(row), path)


def _letter() -> bytes:
  message = email.message.EmailMessage(policy=email.policy.default)
  message["Subject"] = words("subject")
  message["From"] = "a@example.com"
  message.set_content(words("body"))
  message.add_alternative(f"<p>{words('body')}</p>", subtype="html")
  message.add_attachment(words("attached"), filename="notes.txt")
  inner = email.message.EmailMessage(policy=email.policy.default)
  inner["Subject"] = words("forwarded")
  inner.set_content(f"<b>{words('html')}</b>", subtype="html")
  message.add_attachment(inner)
  return message.as_bytes()


def _all(*features: str) -> str:
  return " ".join(map(words, features))


_LETTER_WORDS = _all("subject", "body", "attached", "forwarded", "html")
SAMPLES = (
  Sample(
    "whole.docx",
    _all(
      "heading",
      "paragraph",
      "comment",
      "header",
      "footer",
      "merged",
      "cell",
      "inner",
      "footnote",
      *_FEATURE.findall(_WORD_BLOCKS),
    ),
    _docx,
  ),
  Sample(
    "whole.pptx", _all("title", "bullet", "notes", "cell", "group"), _pptx
  ),
  Sample("whole.xlsx", _all("top", "header", "cell", "sheet"), _xlsx),
  _opendocument("whole.odt", "text", _ODT),
  _opendocument("whole.odp", "presentation", _ODP),
  _opendocument("whole.ods", "spreadsheet", _ODS)._replace(
    words=_words_of(_ODS)
  ),
  _archive("whole.epub", _EPUB),
  Sample("whole.pdf", _all("plain", "divided", "field", "choice"), _pdf),
  Sample("japanese.pdf", _JAPANESE, _japanese_pdf),
  Sample("whole.eml", _LETTER_WORDS, lambda path: _write(path, _letter())),
  Sample(
    "whole.mbox",
    f"{_LETTER_WORDS} {_LETTER_WORDS}",
    lambda path: _write(
      path, 2 * (b"From a@example.com Mon Jan  1 10:00:00 2026\n" + _letter())
    ),
  ),
  Sample("whole.parquet", _all("text", "inner"), _parquet),
  _text("whole.html", _HTML),
  _text("whole.md", "# <<heading>>\n\n<<text>>\n\n```\n# <<code>>\n```\n"),
  _text("whole.ipynb", _NOTEBOOK),
  _text("whole.rst", _RST),
  _text(
    "whole.org", "#+TITLE: <<title>>\n* <<heading>>\n<<text>>\n| <<cell>> |\n"
  ),
  _text(
    "whole.tex",
    "\\documentclass{article}\\title{<<title>>}\\begin{document}"
    "\\section{<<heading>>}<<text>> $<<formula>>$\\footnote{<<footnote>>}"
    "\\end{document}",
  ),
  _text(
    "whole.rtf",
    "{\\rtf1\\ansi {\\b <<bold>>}\\par <<text>>{\\footnote <<footnote>>}\\par}",
  ),
  _text("whole.xml", "<a b='<<attribute>>'><c><<text>></c> <<tail>></a>"),
  _text("whole.yaml", "lease:\n  <<key>>: <<value>>\n"),
  _text("whole.log", "12:00 INFO <<text>>\n"),
  _text("whole.py", "def x():\n  # <<comment>>\n"),
  _text("whole.csv", "<<title>>\n\nname;<<header>>\n<<first>>, A;<<second>>\n"),
  _text("separated.csv", "sep=;\n<<header>>;b\n<<cell>>;<<other>>\n"),
  _text("bare.csv", "<<first>>,3\n<<second>>,4\n"),
  _text("whole.tsv", "<<header>>\tb\n<<cell>>\t<<other>>\n"),
  _text(
    "whole.json",
    '{"title": "<<title>>", "notes": "<<notes>>", "data": {"id": "<<deep>>"}}',
  ),
  _text("strings.json", '["<<first>>", {"a": "<<second>>"}]'),
  _text(
    "rows.json", '{"notes": "<<notes>>", "data": [{"a": "<<row>>"}]}', "utf-16"
  ),
  _text("whole.jsonl", '{"a": "<<first>>"}\n{cut\n["<<list>>"]\n"<<bare>>"'),
  _encoded("polish.txt", _POLISH, "cp1250"),
  _encoded("polish2.txt", _POLISH, "iso8859-2"),
  _encoded("czech.txt", _CZECH, "cp1250"),
  _encoded("turkish.txt", _TURKISH, "cp1254"),
  _encoded("koi8.txt", _RUSSIAN, "koi8-r"),
  _encoded("russian.txt", _RUSSIAN, "cp1251"),
  _encoded("jis.txt", _JAPANESE, "iso2022_jp"),
  _encoded("late.txt", "The lease. " * 7000 + _JAPANESE, "shift_jis"),
  _encoded("utf32.txt", _POLISH, "utf-32"),
  _encoded("utf16.txt", _POLISH, "utf-16-le"),
)
