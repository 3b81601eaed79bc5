"""Citations open the files that were indexed, and nothing else."""

from __future__ import annotations

import dataclasses
import os
import time
import urllib.parse

import chromium
import httpx2
import pytest
import scripted
from reportlab.pdfgen import canvas
from scripted import answer, search
from served_agent import CONFIG, guarding, served

from anysearch_jax.retrieval.documents import folder, originals
from anysearch_jax.retrieval.index import opening
from anysearch_jax.retrieval.index import search as search_lib
from anysearch_jax.serving import originals as serving_originals

DOCUMENTS = dataclasses.replace(CONFIG, prompts="documents")
EVIL = "<html><body>The lease ends.<script>document.title='run'</script></body>"
PRIVATE = "Nobody may read this lease."
browser = chromium.browser


@pytest.fixture
def notes(tmp_path):
  notes = tmp_path / "notes"
  (notes / "sub").mkdir(parents=True)
  pages = canvas.Canvas(str(notes / "lease.pdf"))
  for text in ("Rent of the house.", "The lease ends in March."):
    pages.drawString(72, 720, text)
    pages.showPage()
  pages.save()
  (notes / "sub/evil page.html").write_text(EVIL)
  (notes / "sub/picture.svg").write_text(f"<svg>{EVIL}</svg>")
  (notes / "sub/feed.xml").write_text(f"<feed>{EVIL}</feed>")
  (notes / "miete.txt").write_bytes("Die Mietverträge.".encode("cp1252"))
  (notes / "sums.csv").write_text("name,sum\nlease,900\n" * 9000)
  (notes / "bad.md").write_bytes(b"\0\xff" * 99)
  os.mkdir(notes / os.fsdecode(b"\xff"))
  (notes / os.fsdecode(b"\xff/a#1?.md")).write_text("Odd lease.")
  (tmp_path / "private.txt").write_text(PRIVATE)
  return notes


@pytest.fixture
def opened(notes, tmp_path):
  """Opens a service over the notes."""
  index = tmp_path / "index"
  folder.update(notes, index)

  def serve(query="lease ends March", **settings):
    def said(request):
      return answer("In March [1].") if request.turn else search(query)

    return served(
      engine=scripted.Engine(said),
      retriever=search_lib.LocalRetriever(opening.open_index(index)),
      config=DOCUMENTS,
      documents=originals.Originals(index),
      **settings,
    )

  return serve


def cited(url, **headers):
  body = {"input": "When?", "max_tool_calls": 1}
  reply = httpx2.post(f"{url}/v1/responses", json=body, headers=headers).json()
  return reply["output"]


def test_both_apis_give_the_address_of_the_page_that_is_cited(opened, notes):
  with opened() as (url, _):
    items = cited(url)
    (citation,) = items[-1]["content"][0]["annotations"]
    body = {"messages": [{"role": "user", "content": "When?"}]}
    chat = httpx2.post(f"{url}/v1/chat/completions", json=body).json()
    (annotation,) = chat["choices"][0]["message"]["annotations"]
    got = httpx2.get(citation["url"])
  assert citation["url"] == f"{url}/documents/lease.pdf#page=2"
  assert annotation["url_citation"]["url"] == citation["url"]
  (call,) = [item for item in items if item["type"] == "web_search_call"]
  assert call["results"][0]["url"] == citation["url"]
  assert call["action"]["sources"][0]["url"] == citation["url"]
  assert got.content == (notes / "lease.pdf").read_bytes()
  assert got.headers["content-type"] == "application/pdf"
  assert got.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
  ("name", "kind", "disposition"),
  [
    ("sub/evil page.html", "text/plain; charset=utf-8", "inline"),
    ("sub/feed.xml", "text/plain; charset=utf-8", "inline"),
    ("sums.csv", "text/plain; charset=utf-8", "inline"),
    ("miete.txt", "text/plain; charset=utf-8", "inline"),
    (os.fsdecode(b"\xff/a#1?.md"), "text/plain; charset=utf-8", "inline"),
  ],
)
def test_files_are_shown_as_text_that_nothing_runs(
  opened, notes, name, kind, disposition
):
  with opened() as (url, _):
    quoted = urllib.parse.quote(os.fsencode(name))
    got = httpx2.get(f"{url}/documents/{quoted}")
  assert got.status_code == 200, got.text
  content = (notes / name).read_bytes()
  if name == "miete.txt":
    content = "Die Mietverträge.".encode()
  assert got.content == content
  assert got.headers["content-type"] == kind
  assert got.headers["content-disposition"].startswith(disposition)
  assert "sandbox" in got.headers["content-security-policy"]
  assert got.headers["cross-origin-resource-policy"] == "same-origin"


def test_what_is_no_text_is_saved(notes, tmp_path):
  (notes / "a.ods").write_bytes(b"PK\3\4\0")
  response = serving_originals.Links(_Files(notes), None)._response("a.ods")
  assert response.media_type == "application/octet-stream"
  assert response.headers["content-disposition"].startswith("attachment")


class _Files:
  """Originals that are all files of a folder."""

  def __init__(self, place):
    self._place = place

  def open(self, name):
    return (self._place / name).open("rb")


@pytest.mark.parametrize(
  "path",
  [
    "../private.txt",
    "%2e%2e/private.txt",
    "..%2fprivate.txt",
    "sub/../../private.txt",
    "/etc/passwd",
    "bad.md",
    "nothing.md",
    "sub",
    "",
    "lease.pdf%00",
  ],
)
def test_no_other_file_is_served(opened, tmp_path, path):
  with opened() as (url, _):
    for asked in (path, f"{tmp_path}/{path}"):
      head = f"GET /documents/{asked} HTTP/1.1\r\nhost: localhost\r\n\r\n"
      with httpx2.Client() as client:
        got = client.get(httpx2.URL(url, raw_path=head.split()[1].encode()))
      assert got.status_code == 404
      assert PRIVATE not in got.text and "root:" not in got.text


def test_a_document_that_changed_is_a_sentence(opened, notes, tmp_path):
  with opened() as (url, _):
    address = f"{url}/documents/"
    (notes / "sums.csv").unlink()
    gone = httpx2.get(f"{address}sums.csv")
    (notes / "sums.csv").symlink_to(tmp_path / "private.txt")
    linked = httpx2.get(f"{address}sums.csv")
    (notes / "miete.txt").write_text("other")
    changed = httpx2.get(f"{address}miete.txt")
    os.remove(notes / "lease.pdf")
    os.mkfifo(notes / "lease.pdf")
    piped = httpx2.get(f"{address}lease.pdf")
    (notes / "sub").rename(notes / "moved")
    (notes / "sub").symlink_to("/etc")
    moved = httpx2.get(f"{address}sub/feed.xml")
  assert "No such file" in gone.json()["error"]["message"]
  for got in (gone, linked, changed, piped, moved):
    assert got.status_code == 404
    assert "ask again to search what is there now." in got.text
    assert PRIVATE not in got.text


def test_a_key_or_a_link_of_the_last_hour_is_needed(
  opened, tmp_path, monkeypatch
):
  key, guard = guarding(tmp_path)
  authorization = f"Bearer {key}"
  with opened(guard=guard) as (url, service):
    items = cited(url, authorization=authorization)
    (citation,) = items[-1]["content"][0]["annotations"]
    link, _, page = citation["url"].partition("#")
    assert page == "page=2" and key not in link
    assert httpx2.get(link).status_code == 200
    plain = f"{url}/documents/lease.pdf"
    assert httpx2.get(plain).status_code == 401
    headers = {"authorization": authorization}
    assert httpx2.get(plain, headers=headers).status_code == 200
    for forged in (
      link.replace("lease.pdf", "miete.txt"),
      link.replace("key=alice", "key=bob"),
      link.replace("expires=1", "expires=9"),
      link[:-1],
      f"{link}é",
    ):
      assert httpx2.get(forged).status_code == 401, forged
    with monkeypatch.context() as patch:
      later = time.time() + 3601
      patch.setattr(serving_originals.time, "time", lambda: later)
      assert "ask again" in httpx2.get(link).text
    guard.keys = ()
    assert httpx2.get(link).status_code == 401


@pytest.mark.skipif(chromium.BINARY is None, reason="needs Chromium")
def test_browsers_run_nothing_and_the_page_opens_a_citation_beside_itself(
  opened, browser
):
  with opened() as (url, _):
    browser.open(f"{url}/documents/sub/evil%20page.html", width=900, height=700)
    assert "<script>" in browser.run("document.body.innerText")
    assert browser.run("document.title") != "run"
    browser.errors.clear()
    browser.open(f"{url}/", width=1280, height=700)
    wait(browser, "document.getElementById('model').innerText")
    browser.press("When?")
    browser.press("Enter")
    wait(browser, "document.querySelector('.cite')")
    browser.run("document.querySelector('.cite').click()")
    link = "document.querySelector('#passage a')"
    cited = f"{url}/documents/lease.pdf#page=2"
    found = browser.run(f"[{link}.href, {link}.target, {link}.rel]")
    assert found == [cited, "_blank", "noopener noreferrer"]
    wait(browser, "document.querySelector('#passage iframe')")
    frame = "document.querySelector('#passage iframe')"
    assert browser.run(f"{frame}.src").startswith(cited)
    assert not browser.errors


def wait(browser, expression):
  """Waits until an expression of the page is true."""
  end = time.monotonic() + 20
  while not browser.run(f"Boolean({expression})"):
    assert time.monotonic() < end, browser.run("document.body.innerText")
    time.sleep(0.05)
