"""Opens cited documents: links to their originals, which `/documents/` serves.

Whatever a file holds, no browser runs it: all but PDFs and pictures are sent as
plain text or to be saved, and no content is taken for another kind.
"""

from __future__ import annotations

import asyncio
import codecs
import hashlib
import hmac
import os
import secrets
import time
import urllib.parse
from collections.abc import Iterator
from typing import BinaryIO

from starlette import requests
from starlette import responses as responses_lib

from anysearch_jax import types
from anysearch_jax.host import openai_requests
from anysearch_jax.retrieval import decoding
from anysearch_jax.retrieval.documents import originals as originals_lib
from anysearch_jax.serving import fields, keys

PATH = "/documents/"
# A browser sends no key with a link, so links of clients with keys are signed.
_LINK_SECONDS = 3600
_CHUNK_BYTES = 1 << 16
_SHOWN = {
  ".pdf": "application/pdf",
  ".png": "image/png",
  ".jpg": "image/jpeg",
  ".jpeg": "image/jpeg",
  ".webp": "image/webp",
}
_SAVED = "application/octet-stream"
_TEXT = "text/plain; charset=utf-8"
# Of no use as they are, though they are text.
_SAVED_TEXTS = (".rtf",)
_HEADERS = {
  "content-security-policy": (
    "default-src 'none'; style-src 'unsafe-inline'; sandbox; "
    "frame-ancestors 'self'"
  ),
  "x-content-type-options": "nosniff",
  "cross-origin-resource-policy": "same-origin",
  "referrer-policy": "no-referrer",
  "cache-control": "private, no-store",
}
# Browsers show no PDF in a sandbox; their viewers run its scripts in their own.
_PDF_POLICY = "default-src 'none'; object-src 'self'; frame-ancestors 'self'"


class Links:
  """Links to the originals of documents, and what they lead to.

  Args:
    originals: the files of the index.
    guard: admits keys; None admits everybody.
  """

  def __init__(
    self, originals: originals_lib.Originals, guard: keys.Guard | None
  ):
    self._originals = originals
    self._guard = guard
    self._secret = secrets.token_bytes(32)

  def url(
    self, passage: types.Passage, request: requests.Request, key: str
  ) -> str:
    """Returns the address of a passage: its document's, if it has one.

    Args:
      passage: the passage.
      request: the request whose client gets the address.
      key: name of the client's key; "" without one.
    """
    name = self._originals.name(passage)
    if not name:
      return fields.url_of(passage)
    quoted = urllib.parse.quote(os.fsencode(name))
    url = str(request.base_url).rstrip("/") + PATH + quoted
    if self._guard is not None:
      expires = str(int(time.time()) + _LINK_SECONDS)
      query = {"key": key, "expires": expires}
      query["signature"] = self._signature(name, key, expires)
      url += f"?{urllib.parse.urlencode(query)}"
    is_paged = passage.source.page and name.lower().endswith(".pdf")
    return f"{url}#page={passage.source.page}" if is_paged else url

  async def respond(self, request: requests.Request) -> responses_lib.Response:
    """Returns an original.

    Raises:
      openai_requests.RequestError: 401, the request has neither a key nor a
        link that holds; 404, the index has no such file; 410, it is gone or
        changed.
    """
    # By its bytes, because a name need not be UTF-8.
    path = urllib.parse.unquote_to_bytes(request.scope["raw_path"])
    name = os.fsdecode(path.partition(PATH.encode())[2])
    if self._guard is not None and not self._is_signed(name, request):
      self._guard.authenticate(request.headers.get("authorization"))
    return await asyncio.to_thread(self._response, name)

  def _is_signed(self, name: str, request: requests.Request) -> bool:
    query = request.query_params
    key = query.get("key", "")
    expires = query.get("expires", "")
    if "signature" not in query or self._guard is None:
      return False
    signature = self._signature(name, key, expires)
    is_ours = hmac.compare_digest(
      signature.encode(), query["signature"].encode()
    )
    if is_ours and int(expires) > time.time() and self._guard.knows(key):
      return True
    raise openai_requests.RequestError(
      401,
      "Found a link that has expired or is of another service, expected one of "
      f"the last {_LINK_SECONDS // 60} minutes; ask again for a new one.",
      code="invalid_link",
    )

  def _signature(self, name: str, key: str, expires: str) -> str:
    signed = b"\0".join((os.fsencode(name), key.encode(), expires.encode()))
    return hmac.digest(self._secret, signed, hashlib.sha256).hex()

  def _response(self, name: str) -> responses_lib.Response:
    try:
      file = self._originals.open(name)
    except originals_lib.MissingError as error:
      raise openai_requests.RequestError(
        404, f"{error}", code="no_document"
      ) from error
    size = os.fstat(file.fileno()).st_size
    ending = os.path.splitext(name)[1].lower()
    kind = _SHOWN.get(ending, "")
    headers = _HEADERS | {"content-length": str(size)}
    content = _chunks(file, size)
    if ending == ".pdf":
      headers["content-security-policy"] = _PDF_POLICY
    elif not kind:
      kind = _SAVED
      if ending not in _SAVED_TEXTS:
        text = _text_chunks(file, size)
        if text is not None:
          kind = _TEXT
          content = text
          del headers["content-length"]
    disposition = "attachment" if kind == _SAVED else "inline"
    file_name = urllib.parse.quote(os.fsencode(os.path.basename(name)))
    headers["content-disposition"] = (
      f"{disposition}; filename*=UTF-8''{file_name}"
    )
    return responses_lib.StreamingResponse(
      content, headers=headers, media_type=kind
    )


def _chunks(file: BinaryIO, size: int) -> Iterator[bytes]:
  """Yields the bytes of a file that had this size, and closes it."""
  with file:
    while size > 0 and (chunk := file.read(min(size, _CHUNK_BYTES))):
      size -= len(chunk)
      yield chunk


def _text_chunks(file: BinaryIO, size: int) -> Iterator[bytes] | None:
  """Returns a file of text as chunks of UTF-8, None if it is no text."""
  start = file.read(_CHUNK_BYTES)
  file.seek(0)
  try:
    # Part of a character may be left at its end.
    codecs.getincrementaldecoder("utf-8")().decode(start)
    if b"\0" not in start:
      return _chunks(file, size)
  except UnicodeDecodeError:
    pass
  try:
    text = decoding.decode(file.read(size))
  except ValueError:
    file.seek(0)
    return None
  file.close()
  return iter([text.encode(errors="replace")])
