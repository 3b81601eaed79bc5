"""Removes keys from the replies of services before they are quoted.

A server may echo the headers of a request in an error page, in a URL, in HTML,
or inside the base64 of an `Authorization: Basic` header. If such a text were
cut first, a part of a key could remain that a search for the whole key does not
find. `Redactor.quote` therefore redacts first and cuts afterwards.
"""

from __future__ import annotations

import base64
import html
import json
import re
import urllib.parse
import urllib.request

import httpx2

# A text with this many consecutive characters of a key is not shown.
_RUN_CHARACTERS = 8
# Keys shorter than this may be words of a passage, so `scrub` keeps them.
_SCRUBBED_CHARACTERS = 16
# A quote is taken from this many first characters of a text.
_QUOTED_CHARACTERS = 4096
_HIDDEN = "(a text with a part of the key, which is not shown)"
# One character in JSON or Python, escaped once or more.
_ESCAPE = re.compile(r"\\+(?:u00|x)([0-9a-f]{2})", re.IGNORECASE)
_DECODING_ROUNDS = 4
# Ignores letter case, and maps the URL-safe alphabet of base64 to the standard.
_FOLD = str.maketrans(
  "ABCDEFGHIJKLMNOPQRSTUVWXYZ-_", "abcdefghijklmnopqrstuvwxyz+/"
)
_ADDRESS = re.compile(r"https?://[^/\s@?#,|]+(/[^\s@?#]*)?")
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")


class Redactor:
  """Replaces keys by "..."."""

  def __init__(self, *secrets: str):
    self._literals = {s: _spellings(s) for s in secrets if s}
    self._runs = {
      reading[i : i + _RUN_CHARACTERS]
      for spellings in self._literals.values()
      for spelling in spellings
      for reading in _decodings(spelling) - {""}
      for i in range(max(1, len(reading) - _RUN_CHARACTERS + 1))
    }

  def __call__(self, text: str) -> str:
    """Returns a text in which "..." replaces the keys.

    A text in which a key is encoded otherwise, in several ways or in part, is
    replaced whole: nobody can say where the key begins in it.
    """
    for spellings in self._literals.values():
      for spelling in spellings:
        text = text.replace(spelling, "...")
    readings = _decodings(text) if self._runs else ()
    if any(run in reading for reading in readings for run in self._runs):
      return _HIDDEN
    return text

  def quote(self, value: object, length: int) -> str:
    """Returns text, bytes or a value's `repr`, redacted, then cut to `length`.

    It is one line. U+FFFD replaces what could steer a terminal, and halves of
    surrogate pairs.
    """
    if isinstance(value, bytes):
      value = value[: 4 * _QUOTED_CHARACTERS].decode(errors="replace")
    text = value if isinstance(value, str) else repr(value)
    text = "".join(map(_printable, text[:_QUOTED_CHARACTERS]))
    return self(text)[:length]

  def scrub(self, data: bytes) -> bytes:
    """Returns an answer's bytes without whole keys of 16 characters or more.

    The answer is still going to be parsed, so parts that merely resemble a key
    are kept.
    """
    for secret, spellings in self._literals.items():
      for spelling in spellings if len(secret) >= _SCRUBBED_CHARACTERS else ():
        data = data.replace(spelling.encode(), b"...")
    return data


def _printable(character: str) -> str:
  if character.isprintable():
    return character
  return " " if character.isspace() else "\ufffd"


def proxy_passwords() -> list[str]:
  """Returns the passwords of the environment's proxies (HTTPS_PROXY)."""
  passwords = []
  for url in urllib.request.getproxies().values():
    try:
      password = urllib.parse.urlsplit(url).password
    except ValueError:
      continue
    passwords += [password, urllib.parse.unquote(password)] if password else []
  return passwords


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
  """Raises ValueError, without the value, unless it can name a variable."""
  if not _VARIABLE.fullmatch(name):
    raise ValueError(
      f"{field}: expected the name of an environment variable (capitals, "
      "digits and underscores), found something else, which is not shown: it "
      "may be the key itself. Put the key into the environment."
    )


def _spellings(secret: str) -> list[str]:
  """Returns the forms in which services write a key, base64 at any offset."""
  raw = secret.encode()
  spellings = [secret, urllib.parse.quote(secret, safe=""), html.escape(secret)]
  spellings += [json.dumps(secret)[1:-1], raw.hex()]
  # base64 encodes groups of 3 bytes, so a key has 3 spellings within a text.
  for offset in range(3):
    text = base64.b64encode(b"\0" * offset + raw).decode().rstrip("=")
    # The first and last characters also encode the bytes next to the key.
    end = len(text)
    if (offset + len(raw)) % 3:
      end -= 1
    core = text[(0, 2, 3)[offset] : end]
    if len(core) >= _RUN_CHARACTERS:
      spellings += [core, core.translate(str.maketrans("+/", "-_"))]
  return list(dict.fromkeys(spellings))


def _decodings(text: str) -> set[str]:
  """Returns a text's readings, with URL, HTML and codes decoded 0 to 3 times.

  Letter case, white space and backslashes, which may occur anywhere, are
  ignored.
  """
  readings = set()
  for _ in range(_DECODING_ROUNDS):
    readings.add("".join(text.split()).replace("\\", "").translate(_FOLD))
    text = _ESCAPE.sub(lambda match: chr(int(match[1], 16)), text)
    text = html.unescape(urllib.parse.unquote(text))
  return readings
