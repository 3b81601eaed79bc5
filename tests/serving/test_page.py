"""The page at `/` in a real browser."""

from __future__ import annotations

import dataclasses
import time

import chromium
import httpx2
import pytest
import scripted
from scripted import answer, search
from served_agent import CONFIG, guarding, served

from anysearch_jax import types

pytestmark = pytest.mark.skipif(
  chromium.BINARY is None, reason="needs Chromium on the PATH"
)

EVIL = "<img src=x onerror=alert(1)><script>document.title='hacked'</script>"


browser = chromium.browser


@pytest.fixture(scope="module")
def url():
  passage = types.Passage("1", EVIL, EVIL)
  with served(
    engine=scripted.Engine(
      lambda r: answer(f"Jane {EVIL}") if r.turn else search(f"emma {EVIL}")
    ),
    retriever=scripted.Retriever({f"emma {EVIL}": [passage]}),
    slots=8,
  ) as (address, _):
    yield address


def wait(browser, expression):
  """Waits until an expression of the page is true."""
  end = time.monotonic() + 20
  while not browser.run(expression):
    assert time.monotonic() < end, browser.run("document.body.innerText")
    time.sleep(0.05)


def opened(browser, url, width=1200):
  browser.errors.clear()
  browser.open(f"{url}/", width=width, height=900)
  wait(browser, "document.querySelectorAll('#list button').length > 0")
  return browser


ENDED = "document.querySelectorAll('article a').length"


def test_question_is_asked_and_answered_by_keyboard(browser, url):
  page = opened(browser, url)
  page.run("document.getElementById('question').focus()")
  page.press("Who wrote Emma?")
  page.press("Tab")  # To the budget: 3 of at most 5.
  page.press("ArrowRight")
  assert page.run("document.getElementById('shown').textContent") == "4"
  page.press("Tab")
  page.press("Enter")
  wait(page, f"{ENDED} === 1")
  text = page.run("document.querySelector('article').innerText")
  assert "Budget 4" in text and "search 1: emma" in text
  assert "3 searches left" in text and "Jane" in text
  assert not page.errors


def test_outside_text_is_shown_and_never_run(browser, url):
  page = opened(browser, url)
  page.run("document.querySelector('#list button').click()")
  wait(page, f"{ENDED} === 1")
  assert page.run("document.title") == "AnySearch"
  assert (
    page.run("document.querySelectorAll('article img, article script').length")
    == 0
  )
  page.run("document.querySelector('details details').open = true")
  found = "document.querySelector('details details p').textContent"
  assert EVIL in page.run(found)
  assert not page.errors


def test_every_budget_is_shown_side_by_side(browser, url):
  page = opened(browser, url)
  page.run("document.getElementById('question').value = 'Who?'")
  page.run("document.getElementById('every').click()")
  wait(page, f"{ENDED} === 5")
  heads = page.run(
    "[...document.querySelectorAll('article h2')].map(h => h.textContent)"
  )
  assert heads == [f"Budget {b}" for b in (0, 1, 2, 3, 5)]
  tops = page.run(
    "[...document.querySelectorAll('article')].slice(0, 3)"
    ".map(a => a.getBoundingClientRect().top)"
  )
  assert len(set(tops)) == 1
  # Only the answers, so that they can be compared.
  assert not page.run("document.querySelectorAll('.steps[open]').length")
  assert page.run("document.querySelector('article a').download.length") > 0
  assert not page.errors


def test_key_with_fewer_requests_at_a_time_is_asked_every_budget(
  browser, tmp_path
):
  key, guard = guarding(tmp_path, requests=2)
  engine = scripted.Engine(lambda _: answer("Jane"), seconds=lambda: 0.3)
  with served(engine=engine, guard=guard) as (address, _):
    page = opened(browser, address)
    page.run("document.getElementById('question').value = 'Who?'")
    page.run(f"document.getElementById('key').value = {key!r}")
    page.run("document.getElementById('every').click()")
    wait(page, f"{ENDED} === 5")
    assert page.run("document.querySelectorAll('.problem').length") == 0


def test_citation_opens_its_passage_and_a_refused_one_is_said(browser):
  source = types.Source("/home/joe/notes/lease.pdf", 3, f"Term > {EVIL}")
  lease = types.Passage("1", EVIL, EVIL, source=source)
  turns = [search("lease"), search("again"), answer("March [1], no [7].")]
  with served(
    engine=scripted.Engine(turns),
    retriever=scripted.Retriever({"lease": [lease], "again": [lease]}),
    config=dataclasses.replace(CONFIG, prompts="documents"),
  ) as (address, _):
    page = opened(browser, address)
    page.run("document.querySelector('#list button').click()")
    wait(page, "document.querySelectorAll('a[download]').length === 1")
    page.run("document.querySelector('.answer a').click()")
    wait(page, "document.querySelectorAll('details details[open]').length")
    passage = page.run("document.querySelector('details details').innerText")
    text = page.run("document.querySelector('article').innerText")
  head = f"[1] {EVIL} · lease.pdf · page 3 · Term > {EVIL}"
  assert passage.split("\n")[0] == head and EVIL in passage.split("\n", 1)[1]
  assert "March [1], no." in text and "It also cited [7]" in text
  assert page.run("document.title") == "AnySearch" and not page.errors


def test_browser_may_load_nothing_from_elsewhere(url):
  for path in ("/", "/page.js", "/page.css"):
    headers = httpx2.get(f"{url}{path}").headers
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'") and "http" not in policy
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
