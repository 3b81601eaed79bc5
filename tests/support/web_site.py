"""A web site on an address of this machine, well behaved or hostile."""

from __future__ import annotations

import contextlib
import http.server
import threading

HOST = "127.0.0.2"  # The only address that tests let pages be fetched from.
TEXT = (
  "The Veldmark lighthouse was lit in 1871 and is 41 metres tall. Its keepers "
  "lived in the tower until 1962, when the lamp was made automatic. "
)
ARTICLE = (
  "<!doctype html><html><head><title>Veldmark &amp; its  light</title>"
  "<script>var menu = 1;</script></head><body><nav><ul><li><a href='/'>Home"
  "</a></li><li><a href='/x'>Contact</a></li></ul></nav><article><h1>Veldmark"
  "</h1>" + "".join(f"<p>Part {i}. {TEXT}</p>" for i in range(4)) + "</article>"
  "<footer>All rights reserved. Cookies.</footer></body></html>"
)


class Site:
  """Answers by path; `pages` maps paths to functions of a request handler.

  A path has its query, or stands for every query.

  post: answers every POST, whose content is `handler.body`.
  asked: the paths that were requested in order, and the bodies of POSTs.
  heads: the headers of each request.
  """

  def __init__(self, host: str = HOST, port: int = 0):
    site = self
    self.pages, self.asked, self.heads = {}, [], []
    self.post = reply(405)
    self.stopped = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
      protocol_version = "HTTP/1.1"

      def do_GET(self):
        path = self.path.partition("?")[0]
        page = site.pages.get(self.path) or site.pages.get(path)
        self._answer(self.path, page or reply(404, b"Not here."))

      def do_POST(self):
        size = int(self.headers.get("Content-Length", 0))
        self.body = self.rfile.read(size)
        self._answer(self.body, site.post)

      def _answer(self, asked, page):
        site.asked.append(asked)
        site.heads.append(dict(self.headers))
        self.close_connection = True
        with contextlib.suppress(OSError):  # The client has left.
          page(self)

      def log_message(self, *_):
        pass

    class Server(http.server.ThreadingHTTPServer):
      request_queue_size, daemon_threads = 256, True

    self._server = Server((host, port), Handler)
    self.port = self._server.server_port
    self.origin = f"http://{host}:{self.port}"
    threading.Thread(
      target=self._server.serve_forever, args=(0.01,), daemon=True
    ).start()

  def wrap(self, context):
    """Answers over TLS from now on."""
    plain = self._server.socket
    self._server.socket = context.wrap_socket(plain, server_side=True)

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self.stopped.set()
    self._server.shutdown()
    self._server.server_close()


def reply(status, data=b"", kind="text/html; charset=utf-8", **headers):
  """Returns a page with a body and headers (`content_encoding="gzip"`)."""

  def page(handler):
    handler.send_response(status)
    if kind:
      handler.send_header("Content-Type", kind)
    for name, value in headers.items():
      handler.send_header(name.replace("_", "-"), value)
    handler.send_header("Content-Length", str(len(data)))
    handler.send_header("Connection", "close")
    handler.end_headers()
    handler.wfile.write(data)

  return page


def redirect(target, status=302):
  """Returns a page that leads elsewhere."""
  return reply(status, location=target)


def endless(piece, site, pause=0.0):
  """Returns a page that sends `piece` for as long as the site is up."""

  def page(handler):
    handler.send_response(200)
    handler.send_header("Content-Type", "text/html")
    handler.end_headers()
    while not site.stopped.wait(pause):
      handler.wfile.write(piece)

  return page


def silent(site):
  """Returns a page that never answers."""
  return lambda handler: site.stopped.wait(30)
