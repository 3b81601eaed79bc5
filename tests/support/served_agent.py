"""An agent behind a real HTTP server on a thread, with a scripted policy."""

from __future__ import annotations

import contextlib
import json

import scripted
import served as served_lib
from scripted import CODEC, answer, search
from scripted_agent import EMMA

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.agent import agent as agent_lib
from anysearch_jax.host import http_server
from anysearch_jax.serving import fields, keys, service

PAGE = types.Passage("https://example.org/a", "A page", "Jane.")
CONFIG = config_lib.EpisodeConfig(max_generated=2000, max_context=9000)
SERVED = fields.Served("tiny", budget=2, max_budget=5, max_tokens=2000)


def script(request):
  """Searches in its first turn and answers in the next."""
  return answer("Jane") if request.turn else search("emma")


def guarding(folder, **limits):
  """Returns a client's key with these limits, and its guard."""
  path = folder / "keys.json"
  key = keys.add(path, "alice")
  listed = json.loads(path.read_text())
  listed["alice"] |= limits
  path.write_text(json.dumps(listed))
  return key, keys.Guard(keys.read(path), folder / "used.sqlite")


@contextlib.contextmanager
def served(
  *,
  agent=None,
  engine=None,
  retriever=None,
  slots=4,
  config=CONFIG,
  served=SERVED,
  **kwargs,
):
  """Yields the address of a service, and the service."""
  agent = agent or agent_lib.Agent(
    engine or scripted.Engine(script),
    CODEC,
    retriever or scripted.Retriever({"emma": [EMMA, PAGE]}),
    config=config,
    slots=slots,
    examples=[types.Question("q1", "Who wrote Emma?", ("Jane",))],
  )
  with agent:
    made = service.Service(agent, served, **kwargs)
    app = service.create_app(made)
    if not made.locked:
      app = http_server.OwnPages(app, "127.0.0.1")
    guard = http_server.Guard(
      max_connections=99, headers=60, request=60, on_closed=made.on_closed
    )
    with served_lib.listening(
      app, http=guard.protocol, timeout_graceful_shutdown=5
    ) as (_, port):
      yield f"http://127.0.0.1:{port}", made
