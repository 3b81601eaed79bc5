"""Tests that quotes contain no part of a key, however a server encodes it."""

from __future__ import annotations

import base64
import html
import json
import re
import string
import urllib.parse

import fake_retriever as fake
import httpx2
import hypothesis
import pytest
from hypothesis import strategies as st

from anysearch_jax.host import redaction
from anysearch_jax.retrieval import http_retriever as client
from anysearch_jax.retrieval import web_search

KEY = "sk-Proj/9fQ+aZ_71&vB%2dTqLm8xW4eRy"
LETTERS = string.ascii_letters + string.digits + string.punctuation


def mixed(text):
  """Percent-escapes all characters, with upper- and lower-case digits."""
  codes = (f"%{ord(c):02x}" for c in text)
  return "".join(c.upper() if i % 2 else c for i, c in enumerate(codes))


def basic(text, before, encode):
  return encode(b"u" * before + text.encode() + b":x" * (before % 2)).decode()


ECHOES = {
  "as it is": str,
  "lower case": str.lower,
  "quote": lambda s: urllib.parse.quote(s, safe=""),
  "quote_plus": urllib.parse.quote_plus,
  "quoted twice": lambda s: urllib.parse.quote(urllib.parse.quote(s)),
  "every character quoted": mixed,
  "JSON": lambda s: json.dumps({"key": s}),
  "JSON in JSON": lambda s: json.dumps(json.dumps(s)),
  "JSON codes": lambda s: "".join(f"\\u{ord(c):04X}" for c in s),
  "repr": lambda s: repr({"key": s.encode()}),
  "HTML": html.escape,
  "HTML codes": lambda s: "".join(f"&#{ord(c)};" for c in s),
  "hexadecimal": lambda s: s.encode().hex(),
  "wrapped lines": lambda s: "\n".join(re.findall(".{1,7}", s)),
  **{
    f"{name} after {before} bytes": lambda s, b=before, e=encode: basic(s, b, e)
    for before in range(3)
    for name, encode in (
      ("base64", base64.b64encode),
      ("urlsafe base64", base64.urlsafe_b64encode),
      ("unpadded base64", lambda b: base64.b64encode(b).rstrip(b"=")),
      ("quoted base64", lambda b: mixed(base64.b64encode(b).decode()).encode()),
    )
  },
}


def readings(text):
  """Returns what a reader could decode from a quote."""
  found = {text, re.sub(r"\s", "", text), text.replace("\\", "")}
  found |= {urllib.parse.unquote(urllib.parse.unquote(t)) for t in found}
  found |= {html.unescape(t) for t in found}
  found |= {
    re.sub(r"\\+u00(..)", lambda m: chr(int(m[1], 16)), t, flags=re.I)
    for t in found
    if not re.search(r"\\u00(?![0-9a-fA-F]{2})", t)
  }
  for t in list(found):
    for digits in re.findall("[0-9a-fA-F]{16,}", t):
      found.add(bytes.fromhex(digits[: len(digits) // 2 * 2]).decode("latin-1"))
    for run in re.findall("[A-Za-z0-9+/]{8,}", t.translate({45: 43, 95: 47})):
      for skip in range(4):
        part = run[skip:]
        data = base64.b64decode(part[: len(part) // 4 * 4])
        found.add(data.decode("latin-1"))
  return found


def leaks(text, key):
  """Finds parts of a key of 10 characters or more, ignoring letter case."""
  key = key.lower()
  size = min(10, len(key))
  parts = {key[i : i + size] for i in range(len(key) - size + 1)}
  said = [t.lower() for t in readings(text)]
  return [part for part in parts if any(part in t for t in said)]


@hypothesis.given(
  key=st.text(LETTERS, min_size=8, max_size=70),
  echo=st.sampled_from(sorted(ECHOES)),
  before=st.integers(0, 330),
  end=st.integers(0, 500),
  most=st.sampled_from([80, 200, 300]),
)
@hypothesis.settings(deadline=None, max_examples=40)
def test_a_quote_has_no_part_of_a_key(key, echo, before, end, most):
  told = "~ " * (before // 2) + ECHOES[echo](key)
  redact = redaction.Redactor("", key)
  # The server may have cut the echo, and may write more after it.
  for text in (told, told[:end], told[:end] + " (bad)"):
    for value in (text, text.encode(), {"error": text}):
      quote = redact.quote(value, most)
      assert len(quote) <= most
      assert not leaks(quote, key), quote


@hypothesis.given(text=st.text(max_size=300))
def test_a_text_without_a_key_is_quoted_unchanged(text):
  assert redaction.Redactor("")(text) == text
  assert redaction.Redactor("\x01\x02\x03\x04\x05" * 5)(text) == text


def test_a_key_is_replaced_and_an_odd_echo_hides_the_text():
  redact = redaction.Redactor(KEY)
  assert redact(f"Bad key {KEY} today.") == "Bad key ... today."
  for echo in (KEY.lower(), KEY[3:12], mixed(KEY)):
    assert redact(f"Bad key {echo}") == redaction._HIDDEN


def shapes(headers):
  """Returns errors and answers that show the key where a message is cut."""
  (key,) = (
    value.removeprefix("Bearer ")
    for name, value in headers.items()
    if value.endswith(KEY)
  )
  for echo in ECHOES.values():
    for before in range(250, 310, 14):
      yield httpx2.Response(403, json={"detail": "~" * before + echo(key)})
      yield httpx2.Response(500, text="~" * before + echo(key))
    for before in range(0, 80, 14):
      told = "~" * before + echo(key)
      yield httpx2.Response(200, text=told)
      yield httpx2.Response(200, json={"result": told, "organic": told})
  for line in ("HTTP/1.1 2x0 ", ""):
    yield httpx2.RemoteProtocolError(f"illegal status line: {line}{KEY}")


def make_http(transport):
  return client.HttpRetriever(
    fake.URL, token_variable="A_KEY", patience=PATIENCE, transport=transport
  )


def make_web(transport):
  how = {"price": 0, "key_variable": "A_KEY", "patience": PATIENCE}
  return web_search.WebRetriever("serper", **how, transport=transport)


PATIENCE = fake.http_calls.Patience(retries=0, pause=0.001)


@pytest.mark.parametrize("make", [make_http, make_web])
def test_no_search_error_contains_a_part_of_the_key(make, monkeypatch):
  monkeypatch.setenv("A_KEY", KEY)
  left = None

  def answer(request):
    nonlocal left
    left = left or list(shapes(request.headers))
    found = left.pop()
    if isinstance(found, Exception):
      raise found
    return found

  retriever = make(httpx2.MockTransport(answer))
  said = []
  try:
    while left is None or left:
      said += fake.search(retriever, fake.ask("q"))
  finally:
    retriever.close()
  assert len(said) > 250
  assert not leaks("\n".join(map(str, said)), KEY)


def test_no_error_contains_the_password_of_a_proxy(monkeypatch):
  monkeypatch.setenv("A_KEY", "k" * 20)
  secret = KEY[:20]
  quoted = urllib.parse.quote(secret, safe="")
  monkeypatch.setenv("HTTPS_PROXY", f"http://me:{quoted}@127.0.0.1:9")
  basic_of_proxy = base64.b64encode(b"me:" + secret.encode()).decode()
  told = httpx2.Response(403, text=f"Not {basic_of_proxy}, {secret}!")
  retriever = make_web(httpx2.MockTransport(lambda request: told))
  try:
    (said,) = fake.search(retriever, fake.ask("q"))
  finally:
    retriever.close()
  assert "403" in str(said) and not leaks(str(said), secret)
