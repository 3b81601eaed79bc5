"""Pages of the web as passages: in searches, as a tool, and replayed."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import json
import ssl
import time

import httpx2
import pytest
import web_site

pages_lib = pytest.importorskip(
  "anysearch_jax.retrieval.web_pages.pages", reason="needs the extra [web]"
)
from anysearch_jax import config as config_lib  # noqa: E402
from anysearch_jax import types  # noqa: E402
from anysearch_jax.launch import retrievers  # noqa: E402
from anysearch_jax.retrieval import requests as requests_lib  # noqa: E402
from anysearch_jax.retrieval import web_search  # noqa: E402
from anysearch_jax.retrieval.web_pages import fetching  # noqa: E402
from anysearch_jax.rollout import searching  # noqa: E402

PAGES = config_lib.PagesConfig(
  deadline=5.0, allow_private=(f"{web_site.HOST}/32",)
)


@pytest.fixture
def site():
  with web_site.Site() as made:
    made.pages["/a"] = web_site.reply(200, web_site.ARTICLE.encode())
    made.pages["/pdf"] = web_site.reply(200, b"%PDF", "application/pdf")
    yield made


def ask(retriever, *queries, k=3, tool="search"):
  requests = [types.SearchRequest(query, k, tool=tool) for query in queries]
  return asyncio.run(requests_lib.answers(retriever, requests))


def engine_of(site, *paths):
  """Makes the site a SearXNG server whose results are its own pages."""
  results = [
    {"url": f"{site.origin}{path}", "title": path, "content": "A snippet."}
    for path in paths
  ]
  found = json.dumps({"results": results}).encode()
  for query in ("q", "r"):
    site.pages[f"/search?q={query}&format=json"] = web_site.reply(
      200, found, "application/json"
    )


def test_a_tool_gets_the_page_or_a_sentence(site):
  reader = pages_lib.PageReader(PAGES, words=5)
  paths = ("/a\ud800", "/pdf", "/none")
  page, pdf, none, odd = ask(
    reader, *(f" {site.origin}{path}\n" for path in paths), "Emma", tool="fetch"
  )
  reader.close()
  assert [p.text for p in page] == ["Veldmark\nPart 0. The Veldmark ..."]
  assert pdf[0].text.startswith("Not opened. ") and "pdf" in pdf[0].text
  assert "HTTP 404" in none[0].text and pdf[0].title == ""
  assert "'Emma' is no address of a page" in odd[0].text
  assert reader.counters == {
    **{"pages": 4, "read": 1, "cut": 1, "large": 0, "failures": 3},
    **{"failed_type": 1, "failed_status": 1, "failed_address": 1},
  }


def test_first_results_show_their_pages_and_others_their_snippets(site):
  engine_of(site, "/a", "/pdf", "/a?again")
  made = pages_lib.SearchWithPages(
    web_search.WebRetriever("searxng", price=0.25, address=site.origin),
    pages_lib.PageReader(PAGES, words=50),
    first=2,
  )
  (found,) = ask(made, "q")
  made.close()
  assert [p.id for p in found] == [
    f"{site.origin}{path}" for path in ("/a", "/pdf", "/a?again")
  ]
  assert [p.title for p in found] == ['"/a"', '"/pdf"', '"/a?again"']
  assert "41 metres" in found[0].text
  assert [p.text for p in found[1:]] == ["A snippet."] * 2
  assert "/a?again" not in site.asked
  counters = made.counters
  assert counters["cost"] == 0.25 and counters["snippets"] == 1
  assert counters["pages/read"] == counters["pages/failed_type"] == 1


def test_pages_of_a_search_are_late_at_the_same_time(site):
  site.pages["/slow"] = web_site.silent(site)
  engine_of(site, "/slow", "/a", "/slow")
  limits = dataclasses.replace(PAGES, deadline=1.0)
  made = pages_lib.SearchWithPages(
    web_search.WebRetriever("searxng", price=0, address=site.origin),
    pages_lib.PageReader(limits, words=50),
    first=3,
  )
  started = time.monotonic()
  found = ask(made, "q", "r")
  assert time.monotonic() - started < 15
  made.close()
  for slow, page, again in found:
    assert slow.text == again.text == "A snippet."
    assert "41 metres" in page.text
  assert made.counters["snippets"] == 4


def config(site, **values):
  made = config_lib.ExperimentConfig()
  return dataclasses.replace(
    made,
    episode=dataclasses.replace(made.episode, prompts="paper_fetch"),
    retrieval=config_lib.RetrievalConfig(
      kind="web", web="searxng", url=site.origin, **values
    ),
  )


def test_a_replay_makes_no_request(site, tmp_path):
  engine_of(site, "/a", "/pdf")
  log = str(tmp_path / "answers.sqlite")
  pages = dataclasses.replace(PAGES, first=1)
  live = retrievers.make(config(site, pages=pages, log=log), None)
  address = f"{site.origin}/a"
  searched = ask(live, "q")
  opened = ask(live, address, f"{site.origin}/pdf", k=10, tool="fetch")
  assert "41 metres" in searched[0][0].text and opened[0][0].id == address
  asked = len(site.asked)
  strict = config(site, pages=pages, log=log, log_mode="strict")
  again = retrievers.make(strict, None)
  assert ask(again, "q") == searched
  same = ask(again, address, f"{site.origin}/pdf", k=10, tool="fetch")
  assert same == opened
  assert len(site.asked) == asked
  assert again.identity() == live.identity()
  assert live.identity()["tools"]["fetch"]["identity"]["kind"] == "pages"


def test_costs_and_failures_of_every_tool_are_metrics(site, tmp_path):
  engine_of(site, "/a", "/pdf")
  pages = dataclasses.replace(PAGES, first=2)
  log = str(tmp_path / "answers.sqlite")
  made = retrievers.make(config(site, pages=pages, price=0.5, log=log), None)
  searcher = searching.BatchingRetriever(made, config_lib.SearchConfig())

  async def run():
    await searcher.search(types.SearchRequest("q", 3))
    await searcher.search(types.SearchRequest("r", 3))
    opened = types.SearchRequest(f"{site.origin}/none", 10, tool="fetch")
    await searcher.search(opened)

  asyncio.run(run())
  found = searching.metrics(searcher.counters)
  for name, value in {
    **{"search/cost": 1.0, "search/queries": 2.0, "search/recorded": 2.0},
    **{"search/snippets": 2.0, "search/pages/read": 2.0},
    **{"search/pages/failed_type": 2.0, "fetch/failed_status": 1.0},
  }.items():
    assert found[f"search/source/{name}"] == value, name
  searcher.counters.clear()  # As at the end of a rollout.
  asyncio.run(searcher.search(types.SearchRequest("q", 2)))
  found = searching.metrics(searcher.counters)
  assert found["search/source/search/cost"] == 0.5


def test_certificates_are_of_the_name_and_not_of_the_address(
  site, tmp_path, monkeypatch
):
  """The connection is made to an IP address that no certificate names."""
  x509 = pytest.importorskip("cryptography.x509")
  from cryptography.hazmat.primitives import hashes, serialization
  from cryptography.hazmat.primitives.asymmetric import ec

  key = ec.generate_private_key(ec.SECP256R1())
  name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "site.test")])
  names = [x509.DNSName("site.test")]
  now = datetime.datetime.now(datetime.UTC)
  certificate = (
    x509.CertificateBuilder(name, name, key.public_key(), 1)
    .not_valid_before(now - datetime.timedelta(days=1))
    .not_valid_after(now + datetime.timedelta(days=1))
    .add_extension(x509.SubjectAlternativeName(names), False)
    .sign(key, hashes.SHA256())
  )
  pem = serialization.Encoding.PEM
  file = tmp_path / "site.pem"
  plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
  secret = key.private_bytes(pem, *plain)
  file.write_bytes(secret + certificate.public_bytes(pem))
  context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
  context.load_cert_chain(file)
  site.wrap(context)
  monkeypatch.setenv("SSL_CERT_FILE", str(file))

  async def resolve(host, port):
    return [web_site.HOST]

  def fetch(host):
    fetcher = fetching.Fetcher(PAGES, resolve=resolve)
    url = httpx2.URL(f"https://{host}:{site.port}/a")
    return asyncio.run(fetcher.fetch(str(url)))

  assert b"Veldmark" in fetch("site.test").data
  with pytest.raises(fetching.PageError, match="cannot be read"):
    fetch("other.test")
