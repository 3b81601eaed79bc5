"""Runs a command beside a scripted agent and a session, over HTTP.

    python -m tests.clients.beside_service COMMAND...

The agent answers "Jane" after a search for "emma"; a question with the word
"unanswerable" gets no answer. The environment of the command has its addresses:
`ANYSEARCH_URL` for OpenAI's APIs, `ANYSEARCH_MCP_URL` for MCP.

The session is played by programs with tools of their own. It calls their
`search`, and once that found "Jane" it answers so. Its address is
`ANYSEARCH_SESSION_URL`, its key `ANYSEARCH_SESSION_KEY`.
"""

from __future__ import annotations

import concurrent.futures
import os
import subprocess
import sys

import fake_sessions
import scripted
import scripted_agent
import served
import served_agent
from scripted import CODEC, answer, search

from anysearch_jax import types
from anysearch_jax.serving import mcp_server
from anysearch_jax.sessions import turns


def _script(request: types.GenerateRequest) -> str:
  """Returns the next turn of an episode."""
  _, _, question = CODEC.decode(request.token_ids).rpartition("question:")
  if "unanswerable" in question:
    return "nothing"
  return answer("Jane") if request.turn else search("emma")


def _play(request: turns.TurnRequest) -> turns.Message:
  """Returns the next message of a program's conversation."""
  names = [tool["name"] for tool in request.tools]
  first, *_, last = [request.messages[0], *request.messages]
  code = 'I search.\n<code>\nfinal_answer(search("emma"))\n</code>'
  if not names:
    writes_code = "final_answer" in first.content
    return turns.Message("assistant", code if writes_code else "Jane")
  if "Jane" not in last.content:
    call = turns.Call("call_1", "search", '{"query": "emma"}')
  elif "final_answer" in names:  # Of smolagents.
    call = turns.Call("call_2", "final_answer", '{"answer": "Jane"}')
  else:
    return turns.Message("assistant", "Jane")
  return turns.Message("assistant", "", calls=(call,))


def main(command: list[str]) -> int:
  """Runs the command; returns its exit status."""
  retriever = scripted.Retriever({"emma": [scripted_agent.EMMA]})
  loaded: concurrent.futures.Future = concurrent.futures.Future()
  with (
    served_agent.served(engine=scripted.Engine(_script)) as (url, service),
    scripted_agent.make(
      (search("emma"), answer("Jane")), retriever=retriever
    ) as agent,
    fake_sessions.listening(
      fake_sessions.Sessions(a=fake_sessions.Session(_play))
    ) as (sessions_url, _),
  ):
    loaded.set_result(agent)
    server = mcp_server.Service(loaded, version="1").server
    with served.listening(
      server.streamable_http_app(), timeout_graceful_shutdown=1
    ) as (_, port):
      environment = os.environ | {
        "ANYSEARCH_URL": f"{url}/v1",
        "ANYSEARCH_MCP_URL": f"http://127.0.0.1:{port}/mcp",
        "ANYSEARCH_SESSION_URL": f"{sessions_url}/sessions/a/v1",
        "ANYSEARCH_SESSION_KEY": fake_sessions.KEY,
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
      }
      # The client has packages of its own.
      environment.pop("PYTHONPATH", None)
      status = subprocess.run(command, env=environment, check=False).returncode
    assert service._running == 0
  return status


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
