"""Runs a command beside a scripted agent, which it reaches over HTTP.

    python -m tests.clients.beside_service COMMAND...

The agent answers "Jane" after a search for "emma"; a question with the word
"unanswerable" gets no answer. The environment of the command has its addresses:
`ANYSEARCH_URL` for OpenAI's APIs, `ANYSEARCH_MCP_URL` for MCP.
"""

from __future__ import annotations

import concurrent.futures
import os
import subprocess
import sys

import scripted
import scripted_agent
import served
import served_agent
from scripted import CODEC, answer, search

from anysearch_jax import types
from anysearch_jax.serving import mcp_server


def _script(request: types.GenerateRequest) -> str:
  """Returns the next turn of an episode."""
  _, _, question = CODEC.decode(request.token_ids).rpartition("question:")
  if "unanswerable" in question:
    return "nothing"
  return answer("Jane") if request.turn else search("emma")


def main(command: list[str]) -> int:
  """Runs the command; returns its exit status."""
  retriever = scripted.Retriever({"emma": [scripted_agent.EMMA]})
  loaded: concurrent.futures.Future = concurrent.futures.Future()
  with (
    served_agent.served(engine=scripted.Engine(_script)) as (url, service),
    scripted_agent.make(
      (search("emma"), answer("Jane")), retriever=retriever
    ) as agent,
  ):
    loaded.set_result(agent)
    server = mcp_server.Service(loaded, version="1").server
    with served.listening(
      server.streamable_http_app(), timeout_graceful_shutdown=1
    ) as (_, port):
      environment = os.environ | {
        "ANYSEARCH_URL": f"{url}/v1",
        "ANYSEARCH_MCP_URL": f"http://127.0.0.1:{port}/mcp",
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
