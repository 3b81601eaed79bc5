"""Fetching pages over real connections, from friendly and hostile sites."""

from __future__ import annotations

import asyncio
import dataclasses
import gzip
import ipaddress
import re
import resource
import socket
import time
import zlib

import httpx2
import pytest
import web_site

pages_lib = pytest.importorskip(
  "anysearch_jax.retrieval.web_pages.pages", reason="needs the extra [web]"
)

from anysearch_jax import config as config_lib  # noqa: E402
from anysearch_jax import types  # noqa: E402
from anysearch_jax.retrieval.web_pages import fetching  # noqa: E402

LIMITS = config_lib.PagesConfig(
  deadline=5.0, allow_private=(f"{web_site.HOST}/32",)
)
SHORT = dataclasses.replace(LIMITS, deadline=0.5)


@pytest.fixture
def site():
  with web_site.Site() as made:
    made.pages["/a"] = web_site.reply(200, web_site.ARTICLE.encode())
    yield made


def read(url, limits=LIMITS, words=500, **settings):
  """Returns a page as a passage, or its error."""
  reader = pages_lib.PageReader(
    limits, words=words, fetcher=fetching.Fetcher(limits, **settings)
  )
  try:
    return asyncio.run(reader.read(url))
  except fetching.PageError as error:
    assert reader.counters[f"failed_{error.why}"] == 1
    return error
  finally:
    reader.close()


def failed(url, why, sentence, limits=LIMITS, **settings):
  error = read(url, limits, **settings)
  assert isinstance(error, fetching.PageError), error
  assert error.why == why and sentence in str(error), error


def test_the_main_text_of_a_page_is_read(site):
  page = read(f"{site.origin}/a#part")
  assert page.id == f"{site.origin}/a"
  assert page.title == '"Veldmark & its light"'
  assert page.text.startswith("Veldmark\nPart 0. The Veldmark lighthouse")
  assert page.text.count("41 metres") == 4
  assert "Home" not in page.text and "var menu" not in page.text
  assert site.asked == ["/robots.txt", "/a"]
  for head in site.heads:
    assert head["User-Agent"] == "anysearch_jax"
    assert head["Host"] == f"{web_site.HOST}:{site.port}"
    assert "Cookie" not in head and "Authorization" not in head


@pytest.mark.parametrize(
  ("kind", "data", "expected"),
  [
    ("text/plain; charset=utf-8", "Zürich".encode(), "Zürich"),
    ("text/plain; charset=Shift_JIS", "東京".encode("shift_jis"), "東京"),
    ("text/plain; charset=ISO-2022-JP", "東京".encode("iso2022_jp"), "東京"),
    ("text/plain", "Zürich".encode("utf-16"), "Zürich"),
    ("text/plain", "Zürich".encode("windows-1252"), "Zürich"),
    ("text/plain; charset=zlib_codec", b"plain", "plain"),
    ("text/plain; charset=unicode_escape", rb"a\x41", r"a\\x41"),
    ("text/plain; charset=utf-8", b"a\xff\xfeb", "a\ufffd\ufffdb"),
    (
      "text/html",
      b"<meta charset=koi8-r><title>x</title><p>" + "Москва".encode("koi8-r"),
      "Москва",
    ),
  ],
)
def test_charsets_are_read_and_broken_ones_do_no_harm(
  site, kind, data, expected
):
  site.pages["/c"] = web_site.reply(200, data, kind)
  assert re.fullmatch(expected, read(f"{site.origin}/c").text)


def test_redirects_are_followed_to_the_address_that_is_told(site):
  site.pages["/1"] = web_site.redirect("2?x=1")
  site.pages["/2?x=1"] = web_site.redirect(f"{site.origin}/a", 308)
  assert read(f"{site.origin}/1").id == f"{site.origin}/a"
  # One site, so its robots.txt is read once.
  assert site.asked == ["/robots.txt", "/1", "/2?x=1", "/a"]


@pytest.mark.parametrize(
  ("page", "why", "sentence"),
  [
    (web_site.redirect("/x"), "redirects", "more than 5 redirects"),
    (web_site.redirect("http://169.254.169.254/"), "address", "not public"),
    (web_site.redirect("file:///etc/passwd"), "address", "no address of a pa"),
    (web_site.redirect("http://[::1"), "redirects", "an invalid address"),
    (web_site.redirect("http://a:b@127.0.0.2/"), "address", "names a user"),
    (web_site.reply(500), "status", "HTTP 500"),
    (web_site.reply(200, b"%PDF", "application/pdf"), "type", "only pages of"),
    (web_site.reply(200, b"%PDF", ""), "type", "only pages of text"),
    (web_site.reply(200, b"x", content_encoding="br"), "type", "is not gzip"),
    (web_site.reply(200, b"no", content_encoding="gzip"), "type", "'gzip' can"),
    (
      lambda handler: handler.wfile.write(b"no HTTP\r\n\r\n"),
      "connection",
      "RemoteProtocolError",
    ),
    (web_site.reply(200, b""), "text", "has no text"),
    (
      web_site.reply(200, b"<html><script>x</script></html>"),
      "text",
      "no text",
    ),
  ],
)
def test_what_is_no_page_is_a_fact_with_its_reason(site, page, why, sentence):
  site.pages["/x"] = page
  failed(f"{site.origin}/x", why, sentence)


@pytest.mark.parametrize(
  ("encoding", "squeeze"),
  [
    ("GZIP", gzip.compress),
    ("deflate", zlib.compress),
    ("deflate", lambda data: zlib.compress(data, wbits=-15)),
  ],
)
def test_compressed_pages_are_read(site, encoding, squeeze):
  data = squeeze(web_site.ARTICLE.encode())
  site.pages["/x"] = web_site.reply(200, data, content_encoding=encoding)
  assert read(f"{site.origin}/x").text.count("41 metres") == 4


@pytest.mark.parametrize("host", ["127.0.0.1", "[::ffff:127.0.0.1]", "0x7f.1"])
def test_a_redirect_into_this_machine_is_refused(site, host):
  with web_site.Site("127.0.0.1") as inside:
    inside.pages["/secret"] = web_site.reply(200, b"secret")
    target = f"http://{host}:{inside.port}/secret"
    site.pages["/x"] = web_site.redirect(target)
    failed(f"{site.origin}/x", "address", "not public")
    failed(target, "address", "not public")
    assert inside.asked == []


def test_a_name_is_resolved_once_and_its_checked_address_is_asked(site):
  """A second look-up would give the address of this machine (rebinding)."""
  answers = [web_site.HOST, web_site.HOST]
  asked = []

  async def resolve(host, port):
    asked.append(host)
    return [answers.pop(0) if answers else "127.0.0.1"]

  url = f"http://rebound.test:{site.port}"
  page = read(f"{url}/a", resolve=resolve)
  assert page.id == f"{url}/a"
  assert {head["Host"] for head in site.heads} == {f"rebound.test:{site.port}"}
  # For the page, and for its robots.txt; never for a connection.
  assert asked == ["rebound.test"] * 2
  answers += [web_site.HOST]
  failed(f"{url}/a", "robots", "cannot be read", resolve=resolve)


def test_a_gzip_bomb_costs_no_memory(site):
  squeeze = zlib.compressobj(9, wbits=31)
  blocks = [
    squeeze.compress(b"<p>" + b"a " * 500_000)
    + squeeze.flush(zlib.Z_FULL_FLUSH)
    for _ in range(2)
  ]
  data = blocks[0] + blocks[1] * 2000  # 2 GB when it is expanded.
  assert len(data) < 4_000_000
  site.pages["/x"] = web_site.reply(200, data, content_encoding="gzip")
  before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  page = read(f"{site.origin}/x", words=3)
  assert isinstance(page, types.Passage) and page.text == "a a a ..."
  # Kilobytes; a part of it is the trees of 2 MB of HTML.
  assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


def test_an_archive_is_not_unpacked_as_a_page(site):
  """trafilatura would unpack it."""
  data = gzip.compress(b"<html><p>inner text of an archive</p></html>")
  site.pages["/x"] = web_site.reply(200, data, "text/html")
  found = read(f"{site.origin}/x")
  assert "inner text" not in getattr(found, "text", "")


def test_of_an_endless_page_the_beginning_is_read(site):
  piece = b"<p>word word</p>" * 1000
  site.pages["/x"] = web_site.endless(piece, site)
  limits = dataclasses.replace(LIMITS, largest=50_000)
  assert read(f"{site.origin}/x", limits, words=2).text.startswith("word word")


def test_slow_and_silent_pages_end_at_the_deadline(site):
  site.pages["/drip"] = web_site.endless(b"a", site, pause=0.05)
  site.pages["/silent"] = web_site.silent(site)
  for path in ("/drip", "/silent"):
    started = time.monotonic()
    failed(f"{site.origin}{path}", "late", "not read in the time", SHORT)
    assert time.monotonic() - started < 15


@pytest.mark.parametrize(
  ("rules", "why"),
  [
    (web_site.reply(200, b"User-agent: *\nDisallow: /a", "text/plain"), True),
    (
      web_site.reply(
        200,
        b"User-agent: anysearch_jax\nDisallow: /\n\nUser-agent: *\nAllow: /",
        "application/octet-stream",
      ),
      True,
    ),
    (web_site.reply(200, b"\xef\xbb\xbfUser-agent: *\nDisallow: /a"), True),
    (web_site.reply(500), True),
    (web_site.reply(429), True),
    (web_site.redirect("/robots.txt"), False),
    (web_site.reply(200, b"User-agent: *\nDisallow: /b", "text/plain"), False),
    (web_site.reply(200, b"User-agent: *\nDisallow: /\nAllow: /a"), False),
    (web_site.reply(200, b"\0\xff" * 999), False),
    (web_site.reply(404), False),
  ],
)
def test_robots_txt_is_honoured(site, rules, why):
  site.pages["/robots.txt"] = rules
  if why:
    failed(f"{site.origin}/a", "robots", "/robots.txt ")
    assert "/a" not in site.asked
  else:
    assert isinstance(read(f"{site.origin}/a"), types.Passage)


def test_a_redirect_is_checked_by_the_rules_of_its_own_site(site):
  with web_site.Site() as other:
    other.pages["/robots.txt"] = web_site.reply(
      200, b"User-agent: *\nDisallow:/"
    )
    other.pages["/b"] = web_site.reply(200, b"<p>text</p>")
    site.pages["/x"] = web_site.redirect(f"{other.origin}/b")
    failed(f"{site.origin}/x", "robots", f"{other.origin}/robots.txt")
    assert other.asked == ["/robots.txt"]


def test_rules_are_read_again_after_a_day_and_failures_after_a_minute(site):
  now = [0.0]
  fetcher = fetching.Fetcher(LIMITS, clock=lambda: now[0])

  def fetch():
    try:
      return asyncio.run(fetcher.fetch(f"{site.origin}/a"))
    except fetching.PageError as error:
      return error.why

  site.pages["/robots.txt"] = web_site.reply(500)
  assert fetch() == "robots"
  site.pages["/robots.txt"] = web_site.reply(404)
  assert fetch() == "robots"
  now[0] = 61.0
  assert fetch() != "robots"
  site.pages["/robots.txt"] = web_site.reply(500)
  now[0] = 86_000.0
  assert fetch() != "robots"
  now[0] = 87_000.0
  assert fetch() == "robots"


# Texts of pages.

# Of CPU time, 2.6 on a busy machine. Without a bound some take minutes.
_SECONDS = 8.0


def text_of(body):
  data = f"<html><head><title>T</title></head><body>{body}</body></html>"
  page = fetching.Fetched("x", "text/html", "utf-8", data.encode(), True)
  return pages_lib.text(page)


@pytest.mark.parametrize(
  "piece",
  [
    "<table><tr><td colspan=1000000>word</td></tr></table>",
    "<p class='content post'>word</p>",
    f"<article>{'<div>' * 200}word{'</div>' * 200}</article>",
  ],
)
def test_two_megabytes_of_hostile_html_cost_seconds(piece):
  body = piece * (2_000_000 // len(piece))
  began = time.thread_time()
  found = text_of(body)
  assert time.thread_time() - began < _SECONDS
  assert "word" in found.text and not found.is_whole


def test_of_a_large_page_the_first_elements_are_read():
  words = [f"w{i}" for i in range(20_000)]
  found = text_of("".join(f"<p>{word}</p>" for word in words))
  # html, head, title and body count too.
  assert found.text.split() == words[: pages_lib._MOST_ELEMENTS - 4]
  assert found.title == "T" and not found.is_whole
  assert text_of(web_site.ARTICLE).is_whole


# Addresses that pages may be fetched from, by hand.


OPEN = [
  *("93.184.216.34", "2606:2800:220:1::1", "::ffff:93.184.216.34"),
  "64:ff9b::5db8:d822",  # 93.184.216.34 behind NAT64.
]
CLOSED = [
  *("127.0.0.1", "0.0.0.0", "10.1.2.3", "224.0.0.1", "240.0.0.1", "::", "::1"),
  "100.64.0.1",  # Shared; Alibaba's metadata is 100.100.100.200.
  "169.254.169.254",  # Metadata of AWS, Google and Azure.
  "168.63.129.16",  # Azure's other one.
  "192.0.0.192",  # Oracle's.
  "fd00:ec2::254",  # AWS's metadata.
  *("::ffff:127.0.0.1", "::ffff:169.254.169.254"),
  "2002:7f00:1::",  # 127.0.0.1 in 6to4.
  *("64:ff9b::7f00:1", "64:ff9b:1::a00:1"),
  "2001:0:4136:e378:8000:63bf:3fff:fdd2",  # Teredo.
  *("fe80::1", "fec0::1", "fc00::1", "ff02::1"),
]


@pytest.mark.parametrize("address", OPEN + CLOSED)
def test_only_public_addresses_are_open(address):
  assert fetching.is_open(ipaddress.ip_address(address)) is (address in OPEN)


def test_an_allowed_network_is_open_in_every_spelling():
  allowed = fetching.networks(("10.0.0.0/8", "fd00::/8"))
  opens = ("10.1.2.3", "::ffff:10.1.2.3", "2002:0a01:203::", "fd00::1")
  closed = ("11.0.0.1", "127.0.0.1", "::ffff:127.0.0.1", "fc00::1")
  for address in (*opens, "8.8.8.8"):
    parsed = ipaddress.ip_address(address)
    assert fetching.is_open(parsed, allowed) is (address != "11.0.0.1")
  for address in closed[1:]:
    assert not fetching.is_open(ipaddress.ip_address(address), allowed)
  with pytest.raises(ValueError, match="found '10.0.0.1/8'.* such as 10.0"):
    fetching.networks(("10.0.0.1/8",))


@pytest.mark.parametrize(
  "host",
  [
    *("127.0.0.1", "2130706433", "0x7f.1", "localhost", "[::1]"),
    *("[::ffff:127.0.0.1]", "169.254.169.254", "0"),
  ],
)
def test_every_spelling_of_this_machine_is_refused(host):
  """By the system's own resolver, which reads them all as fetching."""
  with pytest.raises(fetching.PageError, match="not public|no address|no such"):
    url = fetching.parse(f"http://{host}/latest/meta-data")
    asyncio.run(fetching.resolve_checked(url))


def looked_up(*found):
  async def resolve(host, port):
    if isinstance(found[0], Exception):
      raise found[0]
    return found

  return resolve


def check(url, *found, allowed=()):
  return asyncio.run(
    fetching.resolve_checked(httpx2.URL(url), allowed, looked_up(*found))
  )


def test_one_private_address_among_public_ones_refuses_the_host():
  url = "https://both.example/"
  public = ("93.184.216.34", "2606:2800:220:1::1")
  assert check(url, *public) == list(public)
  for private in ("10.0.0.1", "::1", "fe80::1%eth0"):
    with pytest.raises(fetching.PageError, match="not public") as caught:
      check(url, *public, private)
    assert caught.value.why == "address"
    assert private not in str(caught.value)


def test_an_unknown_host_is_a_fact_and_a_broken_resolver_is_none():
  url = "http://a.example/"
  with pytest.raises(fetching.PageError, match="no such host"):
    check(url, socket.gaierror(socket.EAI_NONAME, "unknown"))
  with pytest.raises(types.RetrievalError, match="cannot be looked up") as met:
    check(url, socket.gaierror(socket.EAI_AGAIN, "temporary"))
  assert not isinstance(met.value, fetching.PageError)


@pytest.mark.parametrize(
  "text",
  [
    *("", "Emma", "file:///etc/passwd", "http://", "http://[::1/"),
    *("http://a.example:99999/", "http://user:pw@a.example/"),
    *("http://a\ud800.example/", "http://a.example/\ud800"),
    "http://a.example:\u00b2/",
  ],
)
def test_what_is_no_address_of_a_page_is_refused(text):
  with pytest.raises(fetching.PageError) as caught:
    fetching.parse(text)
  assert "pw" not in str(caught.value)
