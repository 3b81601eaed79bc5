"""Texts of HTML that is large or hostile, within a bound of CPU time."""

from __future__ import annotations

import time

import pytest
import web_site

extraction = pytest.importorskip(
  "retrieval.web_pages.pages", reason="needs the extra [web]"
)
from lxml import html  # noqa: E402

from retrieval.web_pages import fetching  # noqa: E402

# Of CPU time, 2.6 on a busy machine. Without a bound some take minutes.
_SECONDS = 8.0


def text(body):
  data = f"<html><head><title>T</title></head><body>{body}</body></html>"
  page = fetching.Fetched("x", "text/html", "utf-8", data.encode(), True)
  return extraction.text(page)


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
  found = text(body)
  assert time.thread_time() - began < _SECONDS
  assert "word" in found.text and not found.is_whole


def test_of_a_large_page_the_first_elements_are_read():
  words = [f"w{i}" for i in range(20_000)]
  found = text("".join(f"<p>{word}</p>" for word in words))
  # html, head, title and body count too.
  assert found.text.split() == words[: extraction._MOST - 4]
  assert found.title == "T" and not found.is_whole
  assert text(web_site.ARTICLE).is_whole


@pytest.mark.parametrize(
  ("most", "left"),
  [
    *((1, "0"), (3, "01234"), (6, "012345678"), (7, "01234567891011")),
  ],
)
def test_what_is_cut_is_what_follows(most, left):
  tree = html.fromstring(
    "<div>0<a>1<b>2</b>3</a>4<i>5</i>6<p>7<q>8<s>9</s>10</q></p>11</div>"
  )
  assert extraction._cut(tree, most) == (most >= 7)
  tags = ["div", "a", "b", "i", "p", "q", "s"]
  assert [element.tag for element in tree.iter()] == tags[:most]
  assert "".join(tree.itertext()) == left
