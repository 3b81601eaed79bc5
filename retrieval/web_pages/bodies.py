"""Bodies of responses in pieces of bounded size, decompressed here.

A client's own decompression returns whatever one read expands to: a thousand
times as much with gzip. Here a read expands to a limited piece at a time.
"""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator

import httpx2

from retrieval.web_pages import addresses

# What requests accept.
ENCODINGS = "gzip, deflate"
_PIECE = 1 << 16


async def read(response: httpx2.Response, most: int) -> tuple[bytes, bool]:
  """Reads a body up to a size.

  Args:
    response: a streamed response that nothing was read of.
    most: the most bytes that are kept, after decompression.

  Returns:
    The bytes, and whether the body has more of them.

  Raises:
    PageError: the encoding is unknown or broken.
  """
  coding = response.headers.get("content-encoding", "").strip().lower()
  parts, size = [], 0
  async for part in _decoded(response, coding or "identity"):
    parts.append(part[: most - size])
    size += len(part)
    if size > most:
      return b"".join(parts), True
  return b"".join(parts), False


async def _decoded(
  response: httpx2.Response, coding: str
) -> AsyncIterator[bytes]:
  if coding == "identity":
    async for part in response.aiter_raw():
      yield part
    return
  if coding not in ("gzip", "x-gzip", "deflate"):
    raise addresses.PageError(
      f"The page is encoded as {coding[:40]!r}, expected gzip or deflate.",
      "type",
    )
  # 32: the header of gzip or of zlib; some servers send deflate without one.
  unpack = zlib.decompressobj(wbits=47)
  is_first = True
  async for part in response.aiter_raw():
    waiting = part
    while waiting:
      try:
        piece = unpack.decompress(waiting, _PIECE)
      except zlib.error:
        if not is_first or coding != "deflate":
          raise addresses.PageError(
            "The page's compression is broken.", "type"
          ) from None
        unpack, is_first = zlib.decompressobj(wbits=-15), False
        continue
      is_first = False
      yield piece
      waiting = unpack.unconsumed_tail
      if unpack.eof:
        return
  # All input is consumed, so this is at most what the window still holds.
  yield unpack.flush()
