"""Bodies of pages that are compressed in several parts."""

from __future__ import annotations

import asyncio
import gzip

import httpx2
import pytest
import web_site

from retrieval.web_pages import addresses, bodies

TEXT = web_site.ARTICLE.encode()


def members(count):
  """Returns the article as this number of gzip members."""
  size = -(-len(TEXT) // count)
  starts = range(0, len(TEXT), size)
  return [gzip.compress(TEXT[start : start + size]) for start in starts]


def unpacked(pieces, most):
  """Returns what `bodies.read` makes of a gzip body in these pieces."""

  async def stream():
    for piece in pieces:
      yield piece

  response = httpx2.Response(
    200, headers={"content-encoding": "gzip"}, content=stream()
  )
  return asyncio.run(bodies.read(response, most))


@pytest.mark.parametrize(
  "between, end", [(b"", b""), (b"\0" * 512, b"no gzip")]
)
def test_all_members_of_a_gzip_body_are_read(between, end):
  data = between.join(members(5)) + end
  for size in (1, 2, 7, 100, len(data)):
    pieces = [data[i : i + size] for i in range(0, len(data), size)]
    assert unpacked(pieces, 1 << 20) == (TEXT, False)
    assert unpacked(pieces, 500) == (TEXT[:500], True)


def test_members_that_are_broken_or_endless_are_refused():
  first, empty = gzip.compress(b"a"), gzip.compress(b"")
  with pytest.raises(addresses.PageError, match="compression is broken"):
    unpacked([first, b"\x1f\x8bno gzip at all"], 1000)
  assert unpacked([empty * 1000, first], 1000) == (b"a", False)
  with pytest.raises(addresses.PageError, match="more than 1024 parts"):
    unpacked([empty] * 2000, 1000)
