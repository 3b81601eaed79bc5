"""Reads office documents and e-books: archives of XML files.

Their elements are walked whole, so that text is kept wherever it is: in tracked
insertions, content controls, text boxes, equations and tables in tables.
"""

from __future__ import annotations

import html
import pathlib
import posixpath
import re
import urllib.parse
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

from anysearch_jax.retrieval.documents import markup, parts

# Elements of Office Open XML that are no text, or the same text once more.
_OOXML_SKIPPED = frozenset(("del", "moveFrom", "Fallback"))
_ODF_SKIPPED = frozenset(
  ("tracked-changes", "automatic-styles", "scripts", "note-citation")
)
# Elements of the formats and those of HTML.
_TAGS = {
  "p": "p",
  "tbl": "table",
  "tr": "tr",
  "tc": "td",
  "table": "table",
  "table-row": "tr",
  "table-cell": "td",
}
_BREAKS = frozenset(("br", "cr", "line-break"))
_SPACES = frozenset(("tab", "ptab", "s"))
# The files of a DOCX besides its body, by the headings of their texts.
_WORD_FILES = {
  "header": re.compile(r"word/header\d*\.xml"),
  "footer": re.compile(r"word/footer\d*\.xml"),
  "footnotes": re.compile(r"word/footnotes\.xml"),
  "endnotes": re.compile(r"word/endnotes\.xml"),
  "comments": re.compile(r"word/comments\.xml"),
  "diagrams": re.compile(r"word/(?:diagrams/data|charts/chart)\d*\.xml"),
}
# The formulas and charts of a document.
_ODF_OBJECT = re.compile(r"Object [^/]+/content\.xml")
# The kinds of relations of a slide whose targets have text of the slide.
_SLIDE_RELATIONS = ("notesSlide", "comments", "diagramData", "chart")
_SLIDE_TITLES = ("title", "ctrTitle")
_HIGHEST_LEVEL = 6

# Returns the HTML tag of an element, "" if it has none.
Tag = Callable[[Any], str]


def word(path: pathlib.Path) -> Iterator[parts.Part]:
  """Yields a DOCX: its body, then headers, footers, notes and comments."""
  with parts.open_archive(path) as archive:
    levels = _style_levels(archive)

    def tag(element: Any) -> str:
      level = _paragraph_level(element, levels)
      return f"h{level}" if level else _tag(element)

    title = _title(archive, "docProps/core.xml")
    body = _ooxml_part(archive, _main_file(archive), tag)
    title = title or body.title
    yield body._replace(title=title)
    names = sorted(archive.namelist())
    for heading, pattern in _WORD_FILES.items():
      files = filter(pattern.fullmatch, names)
      # Headers of several sections often have the same text.
      texts = dict.fromkeys(
        _ooxml_part(archive, name, _tag).text for name in files
      )
      text = "\n\n".join(filter(None, texts))
      yield parts.Part(text, title, heading=heading)


def slides(path: pathlib.Path) -> Iterator[parts.Part]:
  """Yields the slides of a PPTX as pages, each with its notes."""
  with parts.open_archive(path) as archive:
    title = _title(archive, "docProps/core.xml")
    show = _main_file(archive)
    root = _xml(archive, show)
    relations = _relations(archive, show)
    ids = [
      value
      for element in root.iter("{*}sldId")
      for name, value in element.attrib.items()
      if name.endswith("}id")
    ]
    for number, relation_id in enumerate(ids, start=1):
      _, slide = relations[relation_id]
      text = _slide_text(archive, slide)
      yield parts.Part(text, title, page=number, is_markdown=True)


def _slide_text(archive: zipfile.ZipFile, slide: str) -> str:
  root = _xml(archive, slide)
  titles = {
    paragraph
    for shape in root.iter("{*}sp")
    for placeholder in shape.iterfind("{*}nvSpPr/{*}nvPr/{*}ph")
    if placeholder.get("type") in _SLIDE_TITLES
    for paragraph in shape.iter("{*}p")
  }
  source = _to_html(
    root,
    lambda element: "h1" if element in titles else _tag(element),
    skipped=_OOXML_SKIPPED,
    text_names=("t",),
  )
  texts = [markup.to_markdown(source).text]
  for kind, target in _relations(archive, slide).values():
    if kind in _SLIDE_RELATIONS:
      texts.append(_ooxml_part(archive, target, _tag).text)
  return "\n\n".join(filter(None, texts))


def opendocument(path: pathlib.Path) -> Iterator[parts.Part]:
  """Yields an ODT, or the slides of an ODP as pages with their notes."""
  with parts.open_archive(path) as archive:
    _check_password(archive)
    title = _title(archive, "meta.xml")
    root = _xml(archive, "content.xml")
    pages = root.findall(".//{*}presentation/{*}page")
    for number, page in enumerate(pages, start=1):
      part = _opendocument_part(page)
      yield part._replace(title=title, page=number)
    if not pages:
      part = _opendocument_part(root)
      title = title or part.title
      yield part._replace(title=title)
    for name in filter(_ODF_OBJECT.fullmatch, archive.namelist()):
      part = _opendocument_part(_xml(archive, name))
      yield part._replace(title=title, heading="objects")
    for name in ("header", "footer"):
      texts = dict.fromkeys(
        _opendocument_part(element).text
        for element in _xml(archive, "styles.xml").iter(f"{{*}}{name}")
      )
      yield parts.Part("\n\n".join(filter(None, texts)), title, heading=name)


def _check_password(archive: zipfile.ZipFile) -> None:
  if b"encryption-data" in archive.read("META-INF/manifest.xml"):
    raise parts.ReadError("is protected by a password; save it without one")


def _opendocument_part(root: Any) -> parts.Part:
  def tag(element: Any) -> str:
    if _name(element) == "h":
      level = next(
        value
        for name, value in (*element.attrib.items(), ("outline-level", "1"))
        if name.endswith("outline-level")
      )
      return f"h{min(int(level), _HIGHEST_LEVEL)}"
    return _tag(element)

  return markup.to_markdown(_to_html(root, tag, skipped=_ODF_SKIPPED))


def book(path: pathlib.Path) -> Iterator[parts.Part]:
  """Yields the chapters of an EPUB in the order of reading."""
  with parts.open_archive(path) as archive:
    if "META-INF/encryption.xml" in archive.namelist():
      encryption = archive.read("META-INF/encryption.xml")
      if b"EncryptedKey" in encryption:
        raise parts.ReadError("is protected against copying")
    container = _xml(archive, "META-INF/container.xml")
    package_name = next(container.iter("{*}rootfile")).get("full-path")
    package = _xml(archive, package_name)
    title = package.findtext(".//{http://purl.org/dc/elements/1.1/}title") or ""
    items = {item.get("id"): item for item in package.iter("{*}item")}
    names = set(archive.namelist())
    missing = 0
    for reference in package.iter("{*}itemref"):
      item = items.get(reference.get("idref"))
      address = "" if item is None else item.get("href", "")
      name = posixpath.normpath(
        posixpath.join(
          posixpath.dirname(package_name), urllib.parse.unquote(address)
        )
      )
      if name not in names:
        missing += 1
        continue
      source = parts.decode(archive.read(name))
      chapter = markup.html_part(source.replace("<nav", "<div"))
      yield chapter._replace(title=title.strip())
    if missing:
      yield parts.Part("", lost=f"lacks {missing} of its chapters")


def _xml(archive: zipfile.ZipFile, name: str) -> Any:
  """Returns the root of a file of an archive.

  Raises:
    parts.ReadError: the file is missing, damaged or no XML.
  """
  try:
    root = markup.parse_xml(archive.read(name))
  except (KeyError, zipfile.BadZipFile, zlib.error) as error:
    raise parts.ReadError(f"lacks a whole {name}; copy it again") from error
  if root is None:
    raise parts.ReadError(f"has no XML in {name}; copy it again")
  return root


def _ooxml_part(archive: zipfile.ZipFile, name: str, tag: Tag) -> parts.Part:
  source = _to_html(
    _xml(archive, name),
    tag,
    skipped=_OOXML_SKIPPED,
    text_names=("t", "v"),
  )
  return markup.to_markdown(source)


def _name(element: Any) -> str:
  return element.tag.rpartition("}")[2]


def _tag(element: Any) -> str:
  return _TAGS.get(_name(element), "")


def _to_html(
  root: Any,
  tag: Tag,
  *,
  skipped: Collection[str],
  text_names: Collection[str] = (),
) -> str:
  """Returns the text below an element as HTML.

  Args:
    root: the element.
    tag: returns the tag that an element has in HTML.
    skipped: names of elements whose text is left out.
    text_names: names of the elements that have the text; empty if all have.
  """
  from lxml import etree

  out: list[str] = []
  walk = etree.iterwalk(root, events=("start", "end"))
  for event, element in walk:
    if not isinstance(element.tag, str):
      continue
    name = _name(element)
    is_skipped = name in skipped
    if event == "start":
      if is_skipped:
        walk.skip_subtree()
        continue
      if html_tag := tag(element):
        out.append(f"<{html_tag}>")
      elif name in _BREAKS:
        out.append("<br>")
      elif name in _SPACES:
        out.append(" ")
      elif name == "noBreakHyphen":
        out.append("-")
      if element.text and (name in text_names or not text_names):
        out.append(html.escape(element.text))
    else:
      if not is_skipped and (html_tag := tag(element)):
        out.append(f"</{html_tag}>")
      if element.tail and not text_names and element is not root:
        out.append(html.escape(element.tail))
  return "".join(out)


def _style_levels(archive: zipfile.ZipFile) -> dict[str, int]:
  """Returns the levels of the styles of a DOCX that are headings."""
  if "word/styles.xml" not in archive.namelist():
    return {}
  levels = {}
  bases = {}
  for style in _xml(archive, "word/styles.xml").iter("{*}style"):
    style_id = _value(style, "styleId")
    name = _child_value(style, "name").lower()
    heading = re.fullmatch(r"heading ([1-6])|title", name)
    outline = style.find("{*}pPr/{*}outlineLvl")
    if heading:
      levels[style_id] = int(heading[1] or 1)
    elif outline is not None:
      levels[style_id] = int(_value(outline, "val")) + 1
    else:
      bases[style_id] = _child_value(style, "basedOn")
  for style_id, base in bases.items():
    for _ in bases:  # A damaged file may have styles in a circle.
      if base not in bases:
        break
      base = bases[base]
    levels.setdefault(style_id, levels.get(base, 0))
  return levels


def _paragraph_level(element: Any, levels: dict[str, int]) -> int:
  """Returns the level of a paragraph's heading, 0 if it is none."""
  if _name(element) != "p":
    return 0
  properties = element.find("{*}pPr")
  if properties is None:
    return 0
  outline = _child_value(properties, "outlineLvl")
  level = int(outline) + 1 if outline else 0
  level = level or levels.get(_child_value(properties, "pStyle"), 0)
  return level if level <= _HIGHEST_LEVEL else 0


def _child_value(element: Any, name: str) -> str:
  child = element.find(f"{{*}}{name}")
  return "" if child is None else _value(child, "val")


def _value(element: Any, name: str) -> str:
  """Returns the value of an attribute in the namespace of its element."""
  namespace = element.tag.rpartition("}")[0]
  return element.get(f"{namespace}}}{name}", "")


def _title(archive: zipfile.ZipFile, name: str) -> str:
  """Returns the title in the metadata of a document, "" if it has none."""
  if name not in archive.namelist():
    return ""
  return next((e.text or "" for e in _xml(archive, name).iter("{*}title")), "")


def _main_file(archive: zipfile.ZipFile) -> str:
  """Returns the name of the file with the body of a document."""
  for kind, target in _relations(archive, "").values():
    if kind == "officeDocument":
      return target
  raise parts.ReadError("is no document of Office; copy it again")


def _relations(
  archive: zipfile.ZipFile, name: str
) -> dict[str, tuple[str, str]]:
  """Returns the kind and the target of each relation of a file, by its id."""
  folder, base = posixpath.split(name)
  file = posixpath.join(folder, "_rels", f"{base}.rels")
  if file not in archive.namelist():
    return {}
  relations = {}
  for element in _xml(archive, file):
    if element.get("TargetMode") == "External":
      continue
    target = posixpath.join("/", folder, element.get("Target", ""))
    kind = element.get("Type", "").rpartition("/")[2]
    relations[element.get("Id")] = (kind, posixpath.normpath(target)[1:])
  return relations


READERS: dict[str, Callable[[pathlib.Path], Iterator[parts.Part]]] = {
  **dict.fromkeys((".docx", ".docm", ".dotx"), word),
  **dict.fromkeys((".pptx", ".pptm", ".ppsx"), slides),
  **dict.fromkeys((".odt", ".ott", ".odp"), opendocument),
  ".epub": book,
}
