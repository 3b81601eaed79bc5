"""A server with OpenAI's interface whose replies a test decides."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading


class _Server(http.server.BaseHTTPRequestHandler):
  def do_POST(self):
    body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
    self.server.asked.append((self.path, dict(self.headers), body))
    status, reply = self.server.reply(body)
    data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
    self.send_response(status)
    self.send_header("Content-Length", str(len(data)))
    self.end_headers()
    self.wfile.write(data)

  def log_message(self, *args):
    pass


@contextlib.contextmanager
def served(reply, status=200):
  """Runs a server; `asked` collects its requests.

  Args:
    reply: of every request, JSON or bytes; or a function of a request's body
      that returns a status and a reply.
    status: of every reply that is no function's.
  """
  server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Server)
  server.asked = []
  server.reply = reply if callable(reply) else lambda body: (status, reply)
  server.url = f"http://127.0.0.1:{server.server_port}/v1"
  thread = threading.Thread(target=server.serve_forever, args=(0.01,))
  thread.start()
  try:
    yield server
  finally:
    server.shutdown()
    thread.join(10)
    server.server_close()


def completion(text, finish="stop", **more):
  """Returns the reply of a text completion; `more` is of its choice."""
  return {
    "choices": [{"index": 0, "text": text, "finish_reason": finish, **more}],
    "usage": {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14},
  }
