r"""Serves a policy over HTTP, for OpenAI's clients, under search budgets.

    python -m launch.serve --config=configs/quickstart.py --port=8400

`max_tool_calls` of a request is its search budget, `max_output_tokens` its
token budget; anysearch_jax/serving/app.py lists the paths. The server is
ready when GET /health answers 200. By default only this machine can reach it.
Others need keys:

    python -m launch.serve --keys=keys.json --new_key=alice    # prints the key
    python -m launch.serve --config=... --keys=keys.json --host=0.0.0.0

Ctrl-C, SIGTERM or SIGHUP stop the server: new questions get 503, those under
way are answered within --grace seconds. See docs/serving.md.
"""

from __future__ import annotations

import contextlib
import logging
import pathlib
import sys
import typing
from collections.abc import Iterator, Sequence

from absl import app, flags

from anysearch_jax import config as config_lib
from anysearch_jax import types
from launch import agents, jax_setup, policies
from launch import flags as launch_flags

if typing.TYPE_CHECKING:
  from anysearch_jax.serving import keys as keys_lib

_WARM = "?"  # Compiles the engine's programs before the first client.


def define_flags() -> None:
  """Defines the command's flags; importing the module defines none."""
  launch_flags.define_config(required=False)
  policies.define_flags()
  flags.DEFINE_string("host", "127.0.0.1", "Address to listen at.")
  flags.DEFINE_integer("port", 8400, "0: any free one.", 0, 65535)
  flags.DEFINE_string(
    "name", None, "The model's name for clients; default: config.name."
  )
  flags.DEFINE_integer(
    "budget", 3, "Searches of a request that does not say.", lower_bound=0
  )
  flags.DEFINE_integer(
    "max_budget", 10, "The most searches of a request.", lower_bound=0
  )
  flags.DEFINE_float(
    "deadline", 120, "The longest of a request, in seconds.", lower_bound=0.1
  )
  flags.DEFINE_integer(
    "queue", 0, "Questions under way at a time; 0: eight for each slot.", 0
  )
  flags.DEFINE_integer("connections", 4096, "At a time.", 1)
  flags.DEFINE_string("keys", None, "File of the clients' keys.")
  flags.DEFINE_string(
    "new_key", None, "Adds a key of this name to --keys, prints it, and ends."
  )
  flags.DEFINE_bool("log_questions", False, "Whether the log has their texts.")
  flags.DEFINE_float(
    "grace", 30, "Seconds for what is open when it is stopped.", 0
  )
  launch_flags.define_process()


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected argument {argv[1]!r}.")
  f = flags.FLAGS
  if f.new_key is not None:
    _add_key()
    return
  if not f.config:
    raise app.UsageError("--config: found nothing, expected a configuration.")
  try:
    config = launch_flags.read_config()
  except ValueError as error:
    raise app.UsageError(str(error)) from error
  config, chosen = policies.read_flags(config)
  from launch import http_server

  if not f.keys and not http_server.is_loopback(f.host):
    raise app.UsageError(
      f"--host={f.host}: found no --keys, so whoever reaches this machine "
      "could spend its searches; expected --keys=FILE, or an address of this "
      "machine such as 127.0.0.1."
    )
  _check_address(f.host, f.port)
  jax_setup.configure(threads=f.threads, cache=f.cache)
  log_requests()
  try:
    with (
      # The keys first: a policy may take minutes to load.
      _guard(f.keys) as guard,
      agents.opened(config, chosen, allow_cpu=f.allow_cpu) as agent,
    ):
      from anysearch_jax.serving import app as serving_app
      from anysearch_jax.serving import fields, service

      agent.ask(_warming(agent.examples), budget=0)
      running = service.Service(
        agent,
        fields.Served(
          model=f.name or config.name,
          budget=min(f.budget, f.max_budget),
          max_budget=f.max_budget,
          max_tokens=config.episode.max_generated,
          seconds=f.deadline,
          sampling=config.sampling,
          prices=agents.prices(config),
        ),
        guard=guard,
        most=f.queue,
        log_questions=f.log_questions,
      )
      http_server.serve(
        serving_app.create_app(running),
        running,
        named=_described(config, chosen),
        host=f.host,
        port=f.port,
        connections=f.connections,
        headers=10,
        request=f.deadline,
        grace=f.grace,
      )
  except (OSError, ValueError, types.EngineError) as error:
    sys.exit(f"launch.serve: {error}")


def _check_address(host: str, port: int) -> None:
  """Exits if the server could not listen, before the weights are read."""
  from launch import http_server

  try:
    http_server.listening(host, port).close()
  except OSError as error:
    sys.exit(
      f"launch.serve: cannot listen at {host}:{port} ({error}); name another "
      "--port or --host."
    )


def _warming(examples: Sequence[types.Question]) -> types.Question | str:
  return examples[0] if examples else _WARM


def _described(
  config: config_lib.ExperimentConfig, chosen: policies.Chosen
) -> str:
  """Names the policy; of a model elsewhere the address is left out.

  The line of the greeting then has one URL, that of this service.
  """
  elsewhere = chosen.kind == "openai"
  policy = flags.FLAGS.openai_model if elsewhere else config.policy
  return f"{config.name} ({policy})"


@contextlib.contextmanager
def _guard(path: str | None) -> Iterator[keys_lib.Guard | None]:
  """Yields the guard of a file of keys; None without one."""
  from anysearch_jax.serving import keys

  if path is None:
    yield None
    return
  file = pathlib.Path(path)
  guard = keys.Guard(keys.read(file), file.with_suffix(".usage.sqlite"))
  try:
    yield guard
  finally:
    guard.close()


def _add_key() -> None:
  """Adds a key to the file of --keys and prints it."""
  from anysearch_jax.serving import keys

  f = flags.FLAGS
  if not f.keys:
    raise app.UsageError("--new_key: found no --keys, expected a file for it.")
  try:
    key = keys.add(pathlib.Path(f.keys), f.new_key)
  except (OSError, ValueError) as error:
    sys.exit(f"launch.serve: {error}")
  print(key)
  print(
    f"This is the only time that the key is shown; {f.keys} holds its SHA-256 "
    "and limits, which you may edit.",
    file=sys.stderr,
  )


def log_requests() -> None:
  """Writes a line of JSON for each request to stderr."""
  log = logging.getLogger("anysearch_jax.serving")
  handler = logging.StreamHandler()
  handler.setFormatter(logging.Formatter("%(message)s"))
  log.addHandler(handler)
  log.setLevel(logging.INFO)
  log.propagate = False


if __name__ == "__main__":
  define_flags()
  launch_flags.run(main)
