r"""Serves an index over HTTP, for this project's client and for other clients.

    anysearch serve_retriever --index=indexes/e5 --port=8000

Supports the protocol of Search-R1's server and its variant by AnySearch's
authors; `retrieval/service/service.py` lists routes and errors. The server is
ready when GET /health answers 200. Queries of concurrent requests are searched
in one batch.

By default only this machine can reach the server. If you pass --host, set a
token too:

    export RETRIEVER_TOKEN=...
    anysearch serve_retriever --index=indexes/e5 \
        --host=0.0.0.0 --token_variable=RETRIEVER_TOKEN
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from typing import Any

from absl import app, flags

from anysearch_jax.host import http_calls, http_server
from anysearch_jax.launch import flags as launch_flags
from anysearch_jax.launch import jax_setup, stopping
from anysearch_jax.retrieval.service import dialects, service


def serve(
  search: service.Search,
  *,
  limits: dialects.Limits = dialects.DEFAULT,
  token: str = "",
  **listening: Any,
) -> None:
  """Serves the app of `service.create_app` until a signal arrives.

  Args:
    search: the index.
    limits: limits on requests and connections.
    token: token that clients must send; "": none.
    listening: host, port, grace and hosts, see `http_server.serve`.
  """
  asgi_app = service.create_app(search, limits=limits, token=token)
  search_service = asgi_app.state.service
  http_server.serve(
    asgi_app,
    search_service,
    title=f"{len(search)} passages",
    connections=limits.connections,
    headers=limits.headers,
    signals=stopping.on_signals,
    request=limits.seconds(limits.queries),
    **listening,
  )
  if search_service.batcher.busy:
    # A search still runs, although no request waits for it. Its thread cannot
    # be ended, so the process exits at once.
    logging.getLogger(__name__).warning("left a search unfinished")
    logging.shutdown()
    sys.stdout.flush()
    os._exit(0)


def define_flags() -> None:
  flags.DEFINE_string("index", None, "Folder of the index.", required=True)
  flags.DEFINE_string(
    "encoder",
    None,
    "Hugging Face folder of the encoder that made the index, if it has moved.",
  )
  flags.DEFINE_bool(
    "verify",
    False,
    "Read the whole index first and compare its hashes, which finds damaged "
    "files.",
  )
  flags.DEFINE_integer(
    "port", 8000, "TCP port to listen at; 0: any free one.", 0, 65535
  )
  flags.DEFINE_string(
    "token_variable",
    None,
    "Environment variable with the bearer token that clients must send; "
    "default: none is needed.",
  )
  for field in dataclasses.fields(dialects.Limits):
    define: Any = {
      "int": flags.DEFINE_integer,
      "float": flags.DEFINE_float,
    }[str(field.type)]
    define(field.name, field.default, field.metadata["help"])
  launch_flags.define_listening()
  launch_flags.define_devices()
  launch_flags.define_process()


def main(argv) -> None:
  f = flags.FLAGS
  try:
    names = [field.name for field in dataclasses.fields(dialects.Limits)]
    limit_values: dict[str, Any] = {name: f[name].value for name in names}
    limits = dialects.Limits(**limit_values)
  except ValueError as error:
    raise app.UsageError(f"--{error}") from error
  token = ""
  if f.token_variable is not None:
    token = http_calls.secret_in(f.token_variable, "the clients' token")
  jax_setup.configure(threads=f.threads, cache=f.cache, devices=f.devices)
  from anysearch_jax.host import platforms
  from anysearch_jax.retrieval.index import opening

  index = opening.open_index(
    f.index,
    encoder=f.encoder,
    devices=platforms.accelerators(),
    verify=f.verify,
  )
  # A first search loads what it needs, so the first client need not wait.
  index.search(["ready"], limits.topk)
  if not token and not http_server.is_loopback(f.host):
    print(
      f"warning: --host={f.host} without --token_variable: whoever reaches "
      "this machine can search.",
      file=sys.stderr,
    )
  serve(
    index,
    host=f.host,
    port=f.port,
    limits=limits,
    token=token,
    grace=f.grace,
    hosts=f.hosts,
  )


if __name__ == "__main__":
  define_flags()
  launch_flags.run(
    main,
    first_flags=(
      "index",
      "port",
      "host",
      "token_variable",
      "encoder",
      "verify",
      "topk",
      "queue",
      "deadline",
      "devices",
    ),
  )
