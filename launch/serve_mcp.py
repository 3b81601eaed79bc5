r"""Serves a policy to clients of the Model Context Protocol.

    python -m launch.serve_mcp --config=configs/quickstart.py

A client starts this command itself and talks to it over standard input and
output; docs/serving.md shows the lines of its configuration. The tool `answer`
asks the policy under a budget, `search` asks the retriever alone, and each
answer's trajectory is a resource. --http serves the same at
http://127.0.0.1:8401/mcp, for clients on this machine only.

The end of the input, Ctrl-C, SIGTERM and SIGHUP end the command with 0. With
--http, calls that are under way are answered first, within --grace seconds. A
second signal ends it at once. `launch.policies` lists the ways to name a
policy.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import socket
import sys
import threading
import typing
from collections.abc import Iterator, Sequence

import anyio
import uvicorn
from absl import app, flags

import anysearch_jax
from anysearch_jax import types
from launch import agents, http_server, jax_setup, policies, stopping
from launch import flags as launch_flags

if typing.TYPE_CHECKING:
  from anysearch_jax.agent import agent as agent_lib
  from anysearch_jax.serving import mcp_server

_CHUNK = 65536


def define_flags() -> None:
  """Defines the command's flags; importing the module defines none."""
  launch_flags.define_config()
  policies.define_flags()
  flags.DEFINE_integer(
    "max_budget", 10, "Largest budget of a question.", lower_bound=0
  )
  flags.DEFINE_integer("seed", 42, "Of the random numbers.", lower_bound=0)
  flags.DEFINE_float(
    "deadline", None, "Seconds to answer in; default: no limit.", lower_bound=0
  )
  flags.DEFINE_bool("http", False, "Serve streamable HTTP instead of stdio.")
  flags.DEFINE_string("host", "127.0.0.1", "Loopback address for --http.")
  flags.DEFINE_integer("port", 8401, "For --http; 0: any free one.", 0, 65535)
  flags.DEFINE_float(
    "grace", 30, "Seconds for open calls when --http is stopped.", 0
  )
  launch_flags.define_process()


def main(argv: Sequence[str]) -> None:
  f = flags.FLAGS
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected argument {argv[1]!r}.")
  if f.http and f.host not in ("127.0.0.1", "::1", "localhost"):
    raise app.UsageError(
      f"--host={f.host}: expected 127.0.0.1, ::1 or localhost; whoever reaches "
      "the server can ask, because MCP over HTTP has no keys here."
    )
  config, chosen = policies.read_flags(launch_flags.read_config())
  make = _service_class()
  with contextlib.ExitStack() as stack:
    # From here on only the protocol is written to standard output.
    wire = None if f.http else stack.enter_context(_only_protocol())
    jax_setup.configure(threads=f.threads, cache=f.cache)
    try:
      prepared = agents.prepare(config, chosen, allow_cpu=f.allow_cpu)
      agent = stack.enter_context(agents.loading_agent(prepared))
      service = make(
        agent,
        version=anysearch_jax.__version__,
        examples=prepared.examples,
        max_budget=f.max_budget,
        passages=config.episode.top_k,
        seed=f.seed,
        deadline=f.deadline,
        prices=agents.prices(config),
      )
      if wire is None:
        agent.result()
        _serve_http(service, host=f.host, port=f.port, grace=f.grace)
      else:
        _serve_stdio(service, wire, agent)
        if agent.done():
          agent.result()
    except (OSError, ValueError, types.EngineError) as error:
      sys.exit(f"launch.serve_mcp: {error}")


class _Wire(typing.NamedTuple):
  """Descriptors of the client's ends: what it writes, and what it reads."""

  stdin: int
  stdout: int


@contextlib.contextmanager
def _only_protocol() -> Iterator[_Wire]:
  """Sends what is printed to standard error; yields the client's ends.

  Also what C++ libraries print, because the descriptor itself is replaced.
  """
  sys.stdout.flush()
  wire = _Wire(os.dup(0), os.dup(1))
  os.dup2(2, 1)
  try:
    yield wire
  finally:
    sys.stdout.flush()
    os.dup2(wire.stdout, 1)


def _serve_stdio(
  service: mcp_server.Service,
  wire: _Wire,
  agent: concurrent.futures.Future[agent_lib.Agent],
) -> None:
  """Serves one client until it closes its end or a signal arrives.

  It also ends if the agent cannot be loaded. Clients are answered while it is
  being loaded, because many of them wait for a minute at most.

  A thread copies the input into a socket that the server reads. A signal ends
  the copy, so that the server ends as it does when the client hangs up; a
  thread that is blocked in a read of the input could not be ended.
  """
  theirs, ours = socket.socketpair()
  os.dup2(theirs.fileno(), 0)
  theirs.close()

  def end(number: int) -> None:
    with contextlib.suppress(OSError):
      ours.shutdown(socket.SHUT_RDWR)

  def copy() -> None:
    with contextlib.suppress(OSError):  # The server has ended.
      while chunk := os.read(wire.stdin, _CHUNK):
        ours.sendall(chunk)
    end(0)

  def check(loaded: concurrent.futures.Future[agent_lib.Agent]) -> None:
    if loaded.exception() is not None:
      end(0)

  agent.add_done_callback(check)
  threading.Thread(target=copy, name="stdin", daemon=True).start()
  # The server takes descriptors 0 and 1 for itself while it runs, and points
  # them elsewhere for everybody else.
  os.dup2(wire.stdout, 1)
  try:
    with stopping.heard(end):
      anyio.run(service.server.run_stdio_async)
  except* (BrokenPipeError, ConnectionError):
    pass  # The client is gone.
  finally:
    os.dup2(2, 1)


class _Server(uvicorn.Server):
  """A server that answers open calls when it is stopped, and exits normally."""

  def __init__(
    self,
    config: uvicorn.Config,
    service: mcp_server.Service,
    *,
    grace: float,
    greeting: str,
  ):
    super().__init__(config)
    self._service, self._grace, self._greeting = service, grace, greeting

  async def startup(self, sockets: list[socket.socket] | None = None) -> None:
    await super().startup(sockets)
    # Printed only now, because signals are handled from here on.
    print(self._greeting, flush=True)

  @contextlib.contextmanager
  def capture_signals(self) -> Iterator[None]:
    def end(number: int) -> None:
      self.should_exit = True

    with stopping.heard(end):
      yield

  async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
    for server in self.servers:
      server.close()
    await self._service.drain(self._grace)
    await super().shutdown(sockets)


def _serve_http(
  service: mcp_server.Service, *, host: str, port: int, grace: float
) -> None:
  """Serves streamable HTTP until a signal arrives.

  Requests whose Host or Origin is not this machine are refused, so that a web
  page cannot use the server through the browser of its reader.

  Raises:
    OSError: the server cannot listen at the address.
  """
  # Its only error is that it ends the streams that clients keep open.
  logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
  config = uvicorn.Config(
    service.server.streamable_http_app(host=host),
    ws="none",
    log_config=None,
    access_log=False,
    server_header=False,
    # Open calls were answered before; clients keep other streams open.
    timeout_graceful_shutdown=1,
  )
  with http_server.listening(host, port) as opened:
    shown = f"[{host}]" if ":" in host else host
    port = opened.getsockname()[1]
    greeting = f"serving MCP at http://{shown}:{port}/mcp"
    _Server(config, service, grace=grace, greeting=greeting).run([opened])


def _service_class() -> type[mcp_server.Service]:
  """Returns the class that needs the packages of the extra `serve`.

  Exits with a sentence if they are missing.
  """
  try:
    from anysearch_jax.serving import mcp_server
  except ModuleNotFoundError as error:
    package = (error.name or "").partition(".")[0]
    if package == "anysearch_jax":
      raise
    sys.exit(
      f"launch.serve_mcp: found no package {package!r}; "
      "pip install -e '.[serve]'"
    )
  return mcp_server.Service


def _main(argv: Sequence[str]) -> None:
  """Runs the command and ends the process at once.

  Python and XLA tear down for seconds, and a client kills its server two
  seconds after it hung up. Everything of ours is closed by then.
  """
  main(argv)
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(0)


if __name__ == "__main__":
  # The client's log is no place for a library's warnings.
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
  define_flags()
  launch_flags.run(_main)
