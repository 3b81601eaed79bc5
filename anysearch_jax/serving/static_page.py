"""The page at `/`: its three files, and what a browser may do with them."""

from __future__ import annotations

import importlib.resources
from collections.abc import Awaitable, Callable

from starlette import requests, responses, routing

_FILES = {
  "/": ("index.html", "text/html; charset=utf-8"),
  "/page.css": ("page.css", "text/css; charset=utf-8"),
  "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
# Nothing from elsewhere, no inline script, no frame around it:
# https://developer.mozilla.org/en-US/docs/Web/HTTP/Guides/CSP
_HEADERS = {
  "content-security-policy": (
    "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'"
  ),
  "x-content-type-options": "nosniff",
  "referrer-policy": "no-referrer",
  "cache-control": "no-cache",
}


def routes() -> list[routing.Route]:
  """Returns the page's routes."""
  return [
    routing.Route(path, _file(name, kind))
    for path, (name, kind) in _FILES.items()
  ]


def _file(
  name: str, kind: str
) -> Callable[[requests.Request], Awaitable[responses.Response]]:
  """Returns the handler that answers with a file."""
  file = importlib.resources.files(__package__).joinpath("page", name)
  content = file.read_bytes()

  async def page(_: requests.Request) -> responses.Response:
    return responses.Response(content, headers=_HEADERS, media_type=kind)

  return page
