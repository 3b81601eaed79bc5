"""Reads markup: web pages, notebooks, reStructuredText, Org, LaTeX, XML, RTF.

html-to-markdown (Rust, MIT) keeps the words of tables, captions and lists.
"""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

from anysearch_jax.retrieval import decoding
from anysearch_jax.retrieval.documents import parts, splitting

# What a page shows to nobody, and its menus.
_UNREAD = ("script", "style", "template", "noscript", "svg", "nav")
# The converter leaves these elements out; as others, they are text.
_RENAMED = ("header", "footer", "aside", "form", "dialog", "menu")
_KEPT_ATTRIBUTES = ("colspan", "rowspan", "start")
_RST_UNDERLINE = re.compile(r"([!-/:-@\[-`{-~])\1{2,}[ \t]*")
_ORG_HEADING = re.compile(r"^(\*{1,6})[ \t]+(\S.*)$", re.M)
_ORG_TITLE = re.compile(r"^#\+title:(.*)$", re.M | re.I)
_TEX_COMMENT = re.compile(r"(?<!\\)%.*")
_TEX_HEADING = re.compile(
  r"\\(part|chapter|(?:sub){0,2}section|paragraph)\*?"
  # Bounded, so that a run of headings without an end takes linear time.
  r"(?:\[[^\]]{0,999}\])?\{((?:[^{}]|\{[^{}]{0,999}\}){0,999})\}"
)
_TEX_LEVELS = (
  "part",
  "chapter",
  "section",
  "subsection",
  "subsubsection",
  "paragraph",
)
# Groups that the parser leaves out, and marks of binary data without its
# length, on which it fails.
_RTF_ASIDE = re.compile(r"\{\\(?:footnote|(?:header|footer)[lrf]?)\b ?")
_RTF_BIN = re.compile(r"\\bin(?!\d)")
_TEX_TITLE = re.compile(r"\\title\{((?:[^{}]|\{[^{}]*\})*)\}")


def plain(path: pathlib.Path) -> Iterator[parts.Part]:
  """Yields the text of a file."""
  yield parts.Part(parts.read_text(path))


def markdown(path: pathlib.Path) -> Iterator[parts.Part]:
  """Yields the text of a Markdown file, titled by its first heading."""
  yield _markdown_part(parts.read_text(path))


def html(path: pathlib.Path) -> Iterator[parts.Part]:
  """Yields the text of a web page, but for its menus, as Markdown."""
  yield html_part(parts.read_text(path))


def html_part(source: str) -> parts.Part:
  """Returns a page of HTML as a part."""
  from lxml import etree

  try:
    tree = decoding.parse_html(source)
  except etree.ParserError:  # It has no element.
    return parts.Part("")
  title = tree.findtext(".//title") or ""
  etree.strip_elements(tree, etree.Comment, *_UNREAD, with_tail=False)
  for image in tree.iter("img"):
    image.text = image.get("alt")
  etree.strip_tags(tree, "a", "img")
  for element in tree.iter(etree.Element):
    if element.tag in _RENAMED:
      element.tag = "div"
    for name in element.keys():
      if name not in _KEPT_ATTRIBUTES:
        del element.attrib[name]
  return to_markdown(etree.tostring(tree, encoding="unicode"), title)


def to_markdown(source: str, title: str = "") -> parts.Part:
  """Returns clean HTML as a part; the default title is its first heading."""
  import html_to_markdown

  options = html_to_markdown.ConversionOptions(
    compact_tables=True, extract_metadata=False, autolinks=False
  )
  text = html_to_markdown.convert(source, options).content
  return _markdown_part(text or "", title)


def _markdown_part(text: str, title: str = "") -> parts.Part:
  return parts.Part(text, title or splitting.title(text), is_markdown=True)


def restructured_text(path: pathlib.Path) -> Iterator[parts.Part]:
  """Yields the text of a reStructuredText file with Markdown's headings.

  The levels of headings are the characters that underline them, in the order
  in which they occur.
  """
  lines = parts.read_text(path).split("\n")
  marks: list[tuple[str, bool]] = []
  out: list[str] = []
  for line in lines:
    words = out[-1] if out else ""
    is_underline = (
      _RST_UNDERLINE.fullmatch(line)
      and words.strip()
      and not _RST_UNDERLINE.fullmatch(words)
      and len(line.rstrip()) >= len(words.strip())
      and (len(out) < 2 or not out[-2].strip() or _is_rule(out[-2], line))
    )
    if not is_underline:
      out.append(line)
      continue
    has_overline = len(out) > 1 and _is_rule(out[-2], line)
    mark = (line[0], has_overline)
    if mark not in marks:
      marks.append(mark)
    if has_overline:
      del out[-2]
    out[-1] = f"{'#' * min(marks.index(mark) + 1, 6)} {words.strip()}"
    out.append("")
  yield _markdown_part("\n".join(out))


def _is_rule(line: str, underline: str) -> bool:
  return line.rstrip() == underline.rstrip()


def org(path: pathlib.Path) -> Iterator[parts.Part]:
  """Yields the text of an Org file with Markdown's headings."""
  text = parts.read_text(path)
  title = _ORG_TITLE.search(text)
  text = _ORG_HEADING.sub(lambda m: f"{'#' * len(m[1])} {m[2]}", text)
  yield _markdown_part(text, title[1].strip() if title else "")


def tex(path: pathlib.Path) -> Iterator[parts.Part]:
  """Yields the source of a LaTeX file with Markdown's headings."""
  text = _TEX_COMMENT.sub("", parts.read_text(path))
  title = _TEX_TITLE.search(text)
  commands = {match[1] for match in _TEX_HEADING.finditer(text)}
  levels = [command for command in _TEX_LEVELS if command in commands]

  def heading(match: re.Match[str]) -> str:
    marks = "#" * (levels.index(match[1]) + 1)
    return f"\n\n{marks} {' '.join(match[2].split())}\n"

  text = _TEX_HEADING.sub(heading, text)
  yield _markdown_part(text, title[1] if title else "")


def xml(path: pathlib.Path) -> Iterator[parts.Part]:
  """Yields the text of an XML file: a line for each element that has text."""
  from lxml import etree

  root = parse_xml(parts.check_size(path).read_bytes())
  if root is None:
    raise parts.ReadError("is not XML")
  lines = []
  for event, element in etree.iterwalk(root, events=("start", "end")):
    if not isinstance(element.tag, str):
      continue
    if event == "start":
      values = [*element.attrib.values(), element.text or ""]
    else:
      values = [element.tail or ""]
    lines.append(" ".join(" ".join(values).split()))
  yield parts.Part("\n".join(filter(None, lines)))


def parse_xml(data: bytes) -> Any:
  """Returns the root of XML without its entities; None if it has none."""
  from lxml import etree

  parser = etree.XMLParser(
    recover=True,
    huge_tree=True,
    resolve_entities=False,
    no_network=True,
    remove_comments=True,
    remove_pis=True,
  )
  return etree.fromstring(data, parser)


def notebook(path: pathlib.Path) -> Iterator[parts.Part]:
  """Yields the cells of a Jupyter notebook: text, code and printed output."""
  try:
    cells = json.loads(parts.read_text(path))["cells"]
    blocks = [block for cell in cells for block in _cell_blocks(cell)]
  except (ValueError, LookupError, TypeError, AttributeError) as error:
    raise parts.ReadError("is no notebook of Jupyter, version 4") from error
  yield _markdown_part("\n\n".join(blocks))


def _cell_blocks(cell: dict[str, Any]) -> Iterator[str]:
  source = "".join(cell["source"])
  if cell["cell_type"] != "code":
    yield source
    return
  yield f"```\n{source}\n```"
  for output in cell.get("outputs", ()):
    data = output.get("data", {})
    text = output.get("text") or data.get("text/plain") or ""
    text = "".join(text) or output.get("evalue", "")
    if text:
      yield f"```\n{text}\n```"


def rtf(path: pathlib.Path) -> Iterator[parts.Part]:
  """Yields the text of a rich text file."""
  from striprtf import striprtf

  source = parts.check_size(path).read_bytes().decode("latin-1")
  source = _RTF_ASIDE.sub(r"{\\par ", _RTF_BIN.sub("", source))
  yield parts.Part(striprtf.rtf_to_text(source, errors="replace"))


READERS: dict[str, Callable[[pathlib.Path], Iterator[parts.Part]]] = {
  **dict.fromkeys((".md", ".markdown", ".qmd", ".rmd", ".mdx"), markdown),
  **dict.fromkeys((".html", ".htm", ".xhtml"), html),
  ".rst": restructured_text,
  ".org": org,
  ".tex": tex,
  **dict.fromkeys((".xml", ".rss", ".atom"), xml),
  ".ipynb": notebook,
  ".rtf": rtf,
}
