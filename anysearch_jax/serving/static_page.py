"""The page at `/`: its three files, and what a browser may do with them."""

from __future__ import annotations

import importlib.resources

import fastapi

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


def add(app: fastapi.FastAPI) -> None:
  """Adds the page's routes to an app."""
  for path, (name, kind) in _FILES.items():
    content = importlib.resources.files(__package__).joinpath("page", name)
    _add(app, path, content.read_bytes(), kind)


def _add(app: fastapi.FastAPI, path: str, content: bytes, kind: str) -> None:
  @app.get(path, include_in_schema=False)
  async def page() -> fastapi.Response:
    return fastapi.Response(content, headers=_HEADERS, media_type=kind)
