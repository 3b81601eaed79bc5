"""Removes keys from the replies of services before they are quoted.

A server may echo the headers of a request in an error page, in a URL, in HTML,
or inside the base64 of an `Authorization: Basic` header. If such a text were
cut first, a part of a key could remain that a search for the whole key does not
find. `Redactor.quote` therefore redacts first and cuts afterwards.
"""

from __future__ import annotations

import base64
import html
import re
import urllib.parse
import urllib.request

import httpx2

# This many consecutive characters of a key are removed wherever they occur.
_RUN = 8
# A key's first characters, at least this many, are removed at a text's end.
_TAIL = 4
# Keys shorter than this may be words of a passage, so `scrub` keeps them.
_SCRUBBED = 16
# A quote is taken from this many first characters of a text.
_WINDOW = 4096
# One escaped character of a URL, JSON, Python or HTML, escaped once or more.
# Backslashes and white space are skipped, because they may occur anywhere.
_ESCAPE = re.compile(
  r"%(?:25)*(?P<url>[0-9a-f]{2})|\\+(?:u00|x)(?P<code>[0-9a-f]{2})"
  r"|&(?:amp;)*(?P<html>#\d{1,3}|#x0*[0-9a-f]{1,2}|lt|gt|quot|apos);"
  r"|(?P<amp>&(?:amp;)+)|\\+|\s+",
  re.IGNORECASE,
)
# Ignores letter case, and maps the URL-safe alphabet of base64 to the standard.
_FOLD = str.maketrans(
  "ABCDEFGHIJKLMNOPQRSTUVWXYZ-_", "abcdefghijklmnopqrstuvwxyz+/"
)
_ADDRESS = re.compile(r"https?://[^/\s@?#]+(/[^\s@?#]*)?")
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")


class Redactor:
  """Replaces traces of keys by "...".

  Args:
    secrets: the keys; empty ones are ignored.
  """

  def __init__(self, *secrets: str):
    spellings = [each for s in secrets if s for each in _spellings(s)]
    # A key may contain what looks like an escape: keep it both as it is and
    # decoded.
    self._needles = {s.translate(_FOLD) for s in spellings}
    self._needles |= {"".join(_decoded(s)[0]) for s in spellings} - {""}
    self._runs: dict[int, set[str]] = {}
    for needle in self._needles:
      size = min(_RUN, len(needle))
      found = self._runs.setdefault(size, set())
      found |= {needle[i : i + size] for i in range(len(needle) - size + 1)}
    self._literals = [
      each.encode()
      for secret in secrets
      if len(secret) >= _SCRUBBED
      for each in (*_spellings(secret), urllib.parse.quote(secret, safe=""))
    ]

  def __call__(self, text: str) -> str:
    """Returns a text in which "..." replaces each run of 8 characters of a key.

    Runs are found in every encoding of `_ESCAPE`, in hexadecimal and in base64.
    Keys shorter than 8 characters are replaced whole. A text can end inside a
    key, so the first 4 to 8 characters of a key are replaced at its end too.
    """
    if not self._needles:
      return text
    letters, starts, ends = _decoded(text)
    folded = "".join(letters)
    hidden = bytearray(len(folded))
    for size, runs in self._runs.items():
      for i in range(len(folded) - size + 1):
        if folded[i : i + size] in runs:
          hidden[i : i + size] = b"\1" * size
    for size in range(min(_RUN, len(folded)), _TAIL - 1, -1):
      if any(needle.startswith(folded[-size:]) for needle in self._needles):
        hidden[-size:] = b"\1" * size
        break
    parts, kept = [], 0
    for match in re.finditer(b"\1+", hidden):
      parts.append(text[kept : starts[match.start()]])
      kept = ends[match.end() - 1]
    return "...".join([*parts, text[kept:]])

  def quote(self, value: object, most: int) -> str:
    """Returns text, bytes or a value's `repr`, redacted, then cut to `most`."""
    if isinstance(value, bytes):
      value = value[: 4 * _WINDOW].decode(errors="replace")
    text = value if isinstance(value, str) else repr(value)
    return self(text[:_WINDOW])[:most]

  def scrub(self, data: bytes) -> bytes:
    """Returns an answer's bytes without whole keys of 16 characters or more.

    The answer is still going to be parsed, so parts that merely resemble a key
    are kept.
    """
    for literal in self._literals:
      data = data.replace(literal, b"...")
    return data


def proxy_passwords() -> list[str]:
  """Returns the passwords of the environment's proxies (HTTPS_PROXY)."""
  found = []
  for url in urllib.request.getproxies().values():
    try:
      password = urllib.parse.urlsplit(url).password
    except ValueError:
      continue
    found += [password, urllib.parse.unquote(password)] if password else []
  return found


def is_address(url: str) -> bool:
  """Returns whether a URL is HTTP without user, password, query or fragment."""
  try:
    httpx2.URL(url)
  except httpx2.InvalidURL:
    return False
  return _ADDRESS.fullmatch(url) is not None


def shown(url: str) -> str:
  """Returns a configured address in a form that an error message may show."""
  if re.search("[@?#]", url):
    return "one with a user, a query or a fragment, which is not shown"
  return repr(url)


def check_variable(name: str, field: str) -> None:
  """Refuses a value that is not the name of an environment variable.

  Raises:
    ValueError: the value may be a key; the message does not show it.
  """
  if not _VARIABLE.fullmatch(name):
    raise ValueError(
      f"{field}: expected the name of an environment variable (capitals, "
      "digits and underscores), found something else, which is not shown: it "
      "may be the key itself. Put the key into the environment."
    )


def _spellings(secret: str) -> list[str]:
  """Returns a key, its hexadecimal digits, and its base64 at all alignments."""
  raw = secret.encode()
  found = [secret, raw.hex()]
  # base64 encodes groups of 3 bytes, so a key has 3 spellings within a text.
  for before in range(3):
    text = base64.b64encode(b"\0" * before + raw).decode().rstrip("=")
    # The first and last characters also encode the bytes next to the key.
    last = len(text) - ((before + len(raw)) % 3 > 0)
    core = text[(0, 2, 3)[before] : last]
    if len(core) >= _TAIL:
      found += [core, core.translate(str.maketrans("+/", "-_"))]
  return found


def _decoded(text: str) -> tuple[list[str], list[int], list[int]]:
  """Returns the folded, unescaped characters and their starts and ends."""
  letters: list[str] = []
  starts: list[int] = []
  ends: list[int] = []

  def add(letter: str, start: int, end: int) -> None:
    letters.append(letter.translate(_FOLD))
    starts.append(start)
    ends.append(end)

  at = 0
  for match in _ESCAPE.finditer(text):
    for i in range(at, match.start()):
      add(text[i], i, i + 1)
    at = match.end()
    code = match["url"] or match["code"]
    if code:
      add(chr(int(code, 16)), match.start(), at)
    elif match["html"]:
      add(html.unescape(f"&{match['html']};")[:1], match.start(), at)
    elif match["amp"]:
      add("&", match.start(), at)
  for i in range(at, len(text)):
    add(text[i], i, i + 1)
  return letters, starts, ends
