"""A server with OpenAI's interface whose replies a test decides."""

from __future__ import annotations

import contextlib
import json
import types

import web_site


@contextlib.contextmanager
def served(reply, status=200):
  """Runs a server; `asked` collects its requests.

  Args:
    reply: of every request, JSON or bytes; or a function of a request's body
      that returns a status and a reply.
    status: of every reply that is no function's.
  """
  with web_site.Site("127.0.0.1") as site:
    server = types.SimpleNamespace(url=f"{site.origin}/v1", asked=[])

    def post(handler):
      body = json.loads(handler.body)
      server.asked.append((handler.path, dict(handler.headers), body))
      code, said = reply(body) if callable(reply) else (status, reply)
      data = said if isinstance(said, bytes) else json.dumps(said).encode()
      web_site.reply(code, data)(handler)

    site.post = post
    yield server


def completion(text, finish="stop", **more):
  """Returns the reply of a text completion; `more` is of its choice."""
  return {
    "choices": [{"index": 0, "text": text, "finish_reason": finish, **more}],
    "usage": {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14},
  }
