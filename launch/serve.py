r"""Serves a policy: over HTTP to OpenAI's clients, or to MCP clients.

    anysearch serve --config=configs/quickstart.py --port=8400
    anysearch serve --documents=my_notes

`max_tool_calls` of a request is its search budget, `max_output_tokens` its
token budget; anysearch_jax/serving/service.py lists the paths. The server is
ready when GET /health answers 200. By default only this machine can reach it.
Others need keys:

    anysearch serve --keys=keys.json --new_key=alice    # prints the key
    anysearch serve --config=... --keys=keys.json --host=0.0.0.0

    anysearch serve --mcp --config=configs/quickstart.py

A client of the Model Context Protocol starts this itself and talks to it over
standard input and output; anysearch_jax/serving/mcp_server.py has the tools.
`--mcp --http` serves the same at http://127.0.0.1:8401/mcp, for clients on this
machine only. The end of the input or a signal ends the command with 0.
See docs/serving.md.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import pathlib
import sys
import typing
from collections.abc import Iterator, Sequence

from absl import app, flags

import anysearch_jax
from anysearch_jax import config as config_lib
from anysearch_jax.host import http_server
from anysearch_jax.launch import documents, jax_setup, policies, stopping
from anysearch_jax.launch import flags as launch_flags
from anysearch_jax.serving import keys

if typing.TYPE_CHECKING:
  from anysearch_jax.agent import agent as agent_lib
  from anysearch_jax.serving import mcp_server

# Asked before the first client, so that the engine compiles its programs.
_WARM_UP_QUESTION = "?"


def define_flags() -> None:
  policies.define_flags()
  flags.DEFINE_integer(
    "port",
    None,
    "TCP port to listen at; 0: any free one. Default: 8400, with --mcp --http "
    "8401.",
    0,
    65535,
  )
  flags.DEFINE_string(
    "name",
    None,
    "Name of the model for clients; default: that of the configuration, or of "
    "the policy with --documents.",
  )
  flags.DEFINE_integer(
    "budget",
    3,
    "Searches that an answer may use if the request does not say.",
    lower_bound=0,
  )
  flags.DEFINE_integer(
    "max_budget", 10, "Limit on the searches that a request may ask for.", 0
  )
  flags.DEFINE_float(
    "deadline",
    None,
    "Limit on the seconds of a request; default: 120, with --mcp no limit.",
    lower_bound=0.1,
  )
  flags.DEFINE_bool("mcp", False, "Serve MCP over standard input and output.")
  flags.DEFINE_bool(
    "http",
    False,
    "With --mcp: serve MCP over HTTP instead, to clients of this machine.",
  )
  flags.DEFINE_integer(
    "queue",
    0,
    "Limit on the questions under way at a time, beyond which requests are "
    "refused; 0: eight for each slot of the engine.",
    0,
  )
  flags.DEFINE_integer(
    "connections",
    4096,
    "Limit on the connections at a time; it is lower if this process may open "
    "fewer files.",
    1,
  )
  flags.DEFINE_string(
    "keys",
    None,
    "File of the clients' keys and their limits; default: no client needs one.",
  )
  flags.DEFINE_string(
    "new_key",
    None,
    "Name of a client: add a key for it to --keys, print the key, and end.",
  )
  launch_flags.define_listening()
  launch_flags.define_process()


def main(argv: Sequence[str]) -> None:
  f = flags.FLAGS
  if f.new_key is not None:
    _add_key()
    return
  if f.http and not f.mcp:
    raise app.UsageError("--http goes with --mcp.")
  config = documents.read_config()
  client_keys: tuple[keys.Key, ...] = ()
  if f.keys and not f.mcp:
    client_keys = keys.read(pathlib.Path(f.keys))
  config, choice = policies.read_flags(config, finds_servers=True)
  if f.mcp:
    _serve_mcp(config, choice)
    # Python and XLA tear down for seconds, and a client kills its server two
    # seconds after it hung up. Everything of ours is closed by now.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
  _serve_http(config, choice, client_keys)


def _serve_http(
  config: config_lib.ExperimentConfig,
  choice: policies.PolicyChoice,
  client_keys: tuple[keys.Key, ...],
) -> None:
  """Serves OpenAI's clients until a signal arrives."""
  f = flags.FLAGS
  port = 8400 if f.port is None else f.port
  deadline = f.deadline or 120.0
  if not f.keys and not http_server.is_loopback(f.host):
    raise app.UsageError(
      f"--host={f.host}: found no --keys, so whoever reaches this machine "
      "could spend its searches; expected --keys=FILE, or an address of this "
      "machine such as 127.0.0.1."
    )
  # Before the weights are read.
  http_server.listening(f.host, port).close()
  jax_setup.configure(threads=f.threads, cache=f.cache)
  documents.update(config)
  # A line of JSON for each request.
  log = logging.getLogger("anysearch_jax.serving")
  log.addHandler(logging.StreamHandler())
  log.setLevel(logging.INFO)
  log.propagate = False
  from anysearch_jax.launch import agents
  from anysearch_jax.retrieval.documents import originals
  from anysearch_jax.serving import fields, keys, service

  with contextlib.ExitStack() as stack:
    guard = None
    if f.keys:  # Before the policy, which may take minutes to load.
      file = pathlib.Path(f.keys)
      usage = file.with_suffix(".usage.sqlite")
      guard = keys.Guard(client_keys, usage, file=file)
      stack.callback(guard.close)
    prepared = agents.prepare(config, choice, allow_cpu=f.allow_cpu)
    agent = stack.enter_context(agents.open_agent(prepared, documents.followed))
    # Without the address of a model elsewhere, so that the greeting has one
    # URL, that of this service.
    is_elsewhere = choice.kind == "openai"
    policy = choice.name.rpartition("@")[0] if is_elsewhere else choice.name
    has_documents = f.documents or f.index
    name = pathlib.Path(policy).name if has_documents else config.name
    if choice.endpoint is None:  # Nothing compiles for a model elsewhere.
      agent.ask((agent.examples or [_WARM_UP_QUESTION])[0], budget=0)
    http_service = service.Service(
      agent,
      fields.Served(
        model=f.name or name,
        budget=min(f.budget, f.max_budget),
        max_budget=f.max_budget,
        max_tokens=config.episode.max_generated,
        seconds=deadline,
        sampling=config.sampling,
        prices=agents.prices(config),
      ),
      guard=guard,
      documents=(
        originals.Originals(config.retrieval.index)
        if config.retrieval.kind == "index"
        else None
      ),
      max_questions=f.queue,
    )
    http_server.serve(
      service.create_app(http_service),
      http_service,
      title=f"{config.name} ({policy})",
      host=f.host,
      port=port,
      connections=f.connections,
      headers=10,
      signals=stopping.on_signals,
      request=deadline,
      grace=f.grace,
      hosts=f.hosts,
    )


def _add_key() -> None:
  f = flags.FLAGS
  if not f.keys:
    raise app.UsageError("--new_key: found no --keys, expected a file for it.")
  print(keys.add(pathlib.Path(f.keys), f.new_key))
  print(
    f"This is the only time that the key is shown; {f.keys} holds its SHA-256 "
    "and limits, which you may edit.",
    file=sys.stderr,
  )


def _serve_mcp(
  config: config_lib.ExperimentConfig, choice: policies.PolicyChoice
) -> None:
  """Serves MCP clients over standard input and output, or over HTTP."""
  f = flags.FLAGS
  if f.http and not http_server.is_loopback(f.host):
    raise app.UsageError(
      f"--host={f.host}: expected 127.0.0.1, ::1 or localhost; whoever reaches "
      "the server can ask, because MCP over HTTP has no keys here."
    )
  from anysearch_jax.serving import mcp_server

  with contextlib.ExitStack() as stack:
    # From here on only the protocol is written to standard output.
    stdout = None if f.http else stack.enter_context(_only_protocol())
    jax_setup.configure(threads=f.threads, cache=f.cache)
    from anysearch_jax.launch import agents

    prepared = agents.prepare(config, choice, allow_cpu=f.allow_cpu)
    agent = stack.enter_context(
      agents.open_in_thread(
        prepared, lambda: documents.update(config), documents.followed
      )
    )
    service = mcp_server.Service(
      agent,
      version=anysearch_jax.__version__,
      examples=prepared.examples,
      max_budget=f.max_budget,
      passages=config.episode.top_k,
      deadline=f.deadline,
      prices=agents.prices(config),
    )
    if stdout is None:
      agent.result()
      _serve_mcp_http(service)
    else:
      _serve_stdio(service, stdout, agent)


@contextlib.contextmanager
def _only_protocol() -> Iterator[int]:
  """Sends what is printed to standard error; yields the client's output.

  Also what C++ libraries print, because the descriptor itself is replaced.
  """
  sys.stdout.flush()
  stdout = os.dup(1)
  os.dup2(2, 1)
  try:
    yield stdout
  finally:
    sys.stdout.flush()
    os.dup2(stdout, 1)


def _serve_stdio(
  service: mcp_server.Service,
  stdout: int,
  agent: concurrent.futures.Future[agent_lib.Agent],
) -> None:
  """Serves one client until it closes its end or a signal arrives.

  It also ends if the agent cannot be loaded. Clients are answered while it is
  being loaded, because many of them wait for a minute at most. A signal ends
  the process: the server waits in a read of the input, which nothing else ends.
  """
  import anyio

  def check(future: concurrent.futures.Future[agent_lib.Agent]) -> None:
    if error := future.exception():
      stopping.say(f"anysearch serve: {error}")
      os._exit(1)

  agent.add_done_callback(check)
  # The server takes descriptors 0 and 1 for itself while it runs, and points
  # them elsewhere for everybody else.
  os.dup2(stdout, 1)
  try:
    with stopping.on_signals(lambda number: os._exit(0)):
      anyio.run(service.server.run_stdio_async)
  except* (BrokenPipeError, ConnectionError):
    pass  # The client is gone.
  finally:
    os.dup2(2, 1)


def _serve_mcp_http(service: mcp_server.Service) -> None:
  """Serves streamable HTTP until a signal arrives."""
  f = flags.FLAGS
  # Its only error is that it ends the streams that clients keep open.
  logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
  http_server.serve(
    # Without a host it leaves Host and Origin to us.
    service.server.streamable_http_app(host=""),
    service,
    title="MCP",
    path="/mcp",
    host=f.host,
    port=8401 if f.port is None else f.port,
    connections=f.connections,
    headers=10,
    signals=stopping.on_signals,
    request=1e9,  # A call may take as long as it likes.
    grace=f.grace,
    hosts=f.hosts,
  )


if __name__ == "__main__":
  # An MCP client's log is no place for a library's warnings.
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
  define_flags()
  launch_flags.run(
    main,
    plain_log=True,
    first_flags=(
      "documents",
      "openai",
      "openai_model",
      "local",
      "hf",
      "config",
      "budget",
      "port",
      "host",
      "keys",
      "mcp",
    ),
  )
