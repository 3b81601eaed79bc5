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
# How a gzip member begins, and the most of a body: they may all be empty.
_MAGIC = b"\x1f\x8b"
_MEMBERS = 1024


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
  is_first, members, waiting = True, 1, b""
  async for part in response.aiter_raw():
    waiting += part
    while waiting:
      if unpack.eof:
        # A gzip body may have several members, with zeros behind each.
        waiting = waiting.lstrip(b"\0")
        if coding == "deflate" or not _MAGIC.startswith(waiting[:2]):
          return
        if len(waiting) < len(_MAGIC):
          break
        unpack, members = zlib.decompressobj(wbits=31), members + 1
      try:
        piece = unpack.decompress(waiting, _PIECE)
      except zlib.error:
        if not is_first or coding != "deflate":
          raise _broken("is broken") from None
        unpack, is_first = zlib.decompressobj(wbits=-15), False
        continue
      is_first = False
      yield piece
      waiting = unpack.unused_data if unpack.eof else unpack.unconsumed_tail
      if members > _MEMBERS:
        raise _broken(f"has more than {_MEMBERS} parts")
  # All input is consumed, so this is at most what the window still holds.
  yield unpack.flush()


def _broken(what: str) -> addresses.PageError:
  return addresses.PageError(f"The page's compression {what}.", "type")
