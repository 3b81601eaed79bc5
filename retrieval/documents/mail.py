"""Reads letters of e-mail, alone or in a mailbox."""

from __future__ import annotations

import contextlib
import email
import email.policy
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from anysearch_jax.retrieval import decoding
from anysearch_jax.retrieval.documents import markup, parts

_SAMPLE_BYTES = 64
_HEADERS = ("from", "to", "cc", "date", "subject")
# A plain form of a text that is shorter than this share of another is none.
_WHOLE = 0.4
# No more is parsed of a header: the parser takes far more memory than its size,
# and time that grows with its square.
_HEADER_CHARACTERS = 20_000
# A line of a mailbox that begins a letter.
_FROM_LINE = re.compile(rb"^From [^\n]*\d\d:\d\d[^\n]*\n", re.M)


def letter(path: pathlib.Path) -> Iterator[parts.Part]:
  """Yields a letter with its headers, and names its attachments."""
  yield _part(parts.check_size(path).read_bytes())


def mailbox(path: pathlib.Path) -> Iterator[parts.Part]:
  """Yields the letters of a mailbox as parts."""
  data = parts.check_size(path).read_bytes()
  starts = [match.end() for match in _FROM_LINE.finditer(data)]
  ends = [match.start() for match in _FROM_LINE.finditer(data)][1:]
  if not starts:
    raise parts.ReadError("is no mailbox: no line begins a letter by `From `")
  for number, (start, end) in enumerate(
    zip(starts, [*ends, len(data)], strict=True), start=1
  ):
    yield _part(data[start:end])._replace(heading=f"letter {number}")


def _part(data: bytes) -> parts.Part:
  if b"\0" in data[:_SAMPLE_BYTES]:  # Saved as UTF-16.
    data = parts.decode(data).encode()
  message = email.message_from_bytes(data, policy=email.policy.default)
  unread: list[str] = []
  lost = ""
  text = "\n\n".join(_texts(message, unread))
  if unread:
    lost = f"has attachments that are not read: {', '.join(unread)}"
  elif any(
    len(value) > _HEADER_CHARACTERS
    for name, value in message.raw_items()
    if name.lower() in _HEADERS
  ):
    lost = f"has a header of more than {_HEADER_CHARACTERS} characters"
  return parts.Part(text, _header(message, "subject"), lost=lost)


def _texts(message: Any, unread: list[str]) -> Iterator[str]:
  """Yields the headers and the texts of a letter, and of letters in it.

  Args:
    message: the letter, or a part of it.
    unread: gets the names of the attachments that are no text.
  """
  headers = {name: _header(message, name) for name in _HEADERS}
  lines = [
    f"{name.title()}: {value}" for name, value in headers.items() if value
  ]
  if lines:
    yield "\n".join(lines)
  kind = message.get_content_type()
  if kind == "multipart/alternative":
    forms = [
      "\n\n".join(_texts(part, unread)) for part in message.get_payload()
    ]
    yield _best(forms)
  elif message.is_multipart():
    for part in message.get_payload():
      yield from _texts(part, unread)
  elif kind.startswith("text/"):
    text = _decoded(message)
    yield markup.html_part(text).text if kind == "text/html" else text
  elif not message.get("content-id"):  # A picture within the text has one.
    name = message.get_filename() or kind
    unread.append(name)
    yield f"Attachment: {name}"


def _best(forms: Sequence[str]) -> str:
  """Returns the first, plain form of a text, unless it only names another."""
  if not forms:
    return ""
  longest = max(forms, key=len)
  is_whole = len(forms[0]) > _WHOLE * len(longest)
  return forms[0] if is_whole else longest


def _header(message: Any, name: str) -> str:
  # A damaged header breaks the parser of its kind.
  with contextlib.suppress(Exception):
    for raw_name, value in message.raw_items():
      if raw_name.lower() == name:
        header = message.policy.header_fetch_parse(
          name, value[:_HEADER_CHARACTERS]
        )
        return " ".join(str(header).split())
  return ""


def _decoded(message: Any) -> str:
  data = message.get_payload(decode=True)
  try:
    text = decoding.decode(data, message.get_content_charset() or "")
  except ValueError:
    text = data.decode(errors="replace")
  return re.sub("\r\n?", "\n", text)


READERS: dict[str, Callable[[pathlib.Path], Iterator[parts.Part]]] = {
  ".eml": letter,
  ".mbox": mailbox,
}
