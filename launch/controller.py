r"""A run's two roles: a controller that samples, and the trainers.

    python -m launch.train --config=... --output=/shared/run --role=controller \
        --controller=http://10.0.0.1:7000 --bind=0.0.0.0 \
        --controller_key_variable=CONTROLLER_KEY
    python -m launch.train --config=... --output=/shared/run --role=trainer \
        --controller=http://10.0.0.1:7000 \
        --controller_key_variable=CONTROLLER_KEY

They may start in any order and on different machines, which share the run
folder. Either may die: the other waits `--away` seconds for it. Several trainer
processes train together by the flags of `launch/distributed`.
"""

from __future__ import annotations

import contextlib
import hmac
import http.server
import json
import pathlib
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from absl import app, flags, logging

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.config import settings as config_settings
from anysearch_jax.launch import progress, stopping

if TYPE_CHECKING:
  from anysearch_jax.training import controller as controller_lib
  from anysearch_jax.training import remote

CONTROLLER, TRAINER = "controller", "trainer"
LOCK = "controller.lock"
# Placement settings in which the sides must agree all the same.
_AGREED = ("pipeline.async_level", "engine.kind", "sglang.deltas")
# Inputs of a run that may differ: where the retriever is, and versions.
_FREE = ("retriever", "packages")
_LARGEST = 1 << 32  # Bytes of a request: stored rollouts of a checkpoint.
_SECONDS = 75  # For a client to send its request, or to read the answer.


def define_flags() -> None:
  flags.DEFINE_enum(
    "role", None, [CONTROLLER, TRAINER], "Only sample, or train; default: both."
  )
  flags.DEFINE_string(
    "controller", None, "With --role: the controller's address, http://H:PORT."
  )
  flags.DEFINE_string("bind", None, "Where it listens, if not at --controller.")
  flags.DEFINE_string(
    "controller_key_variable", None, "Variable with a secret of both sides."
  )
  flags.DEFINE_float("away", 1800, "Seconds to wait for the other side.", 1)


def check_flags() -> str | None:
  """Returns the role; refuses flags that do not go with it.

  Raises:
    app.UsageError: a flag is missing, wrong or without effect.
  """
  from anysearch_jax.host import redaction

  f = flags.FLAGS
  if f.role is None:
    for name in ("controller", "bind", "controller_key_variable"):
      if f[name].value is not None:
        raise app.UsageError(f"--{name}: found it without --role.")
    return None
  if not redaction.is_address(f.controller or ""):
    raise app.UsageError(
      f"--controller: found {f.controller!r}, expected the controller's "
      "address, such as http://10.0.0.1:7000."
    )
  together = (f.coordinator, f.processes, f.process, f.distributed or None)
  if f.role == CONTROLLER and any(x is not None for x in together):
    raise app.UsageError(
      "--role=controller: found flags of several processes; expected none, a "
      "run has one controller. Give them to the trainers."
    )
  return f.role


def key() -> str:
  """Returns the secret that the flags name, "" without."""
  from anysearch_jax.host import http_calls

  variable = flags.FLAGS.controller_key_variable
  if variable is None:
    return ""
  try:
    return http_calls.secret_in(variable, "the controller's key")
  except ValueError as error:
    raise app.UsageError(f"--controller_key_variable: {error}") from error


def identity(
  config: config_lib.ExperimentConfig, provenance: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns what controller and trainers must have in common."""
  placement = config_settings.Kind.PLACEMENT
  settings = {
    path: value
    for path, value, meta, _ in config_settings.listed(config)
    if meta and (meta.kind is not placement or path in _AGREED)
  }
  inputs = {k: v for k, v in provenance.items() if k not in _FREE}
  hashes = {
    path: value
    for path, value in config_settings.leaves(inputs)
    if not path.endswith((".folder", ".file", ".name"))
  }
  return json.loads(json.dumps(settings | hashes))


def client() -> remote.Client:
  """Returns the trainers' client of the controller that the flags name."""
  from anysearch_jax.training import remote

  f = flags.FLAGS
  return remote.Client(url=f.controller.rstrip("/"), key=key(), away=f.away)


def run(
  config: config_lib.ExperimentConfig,
  folder: pathlib.Path,
  *,
  questions: Sequence[types.Question],
  retriever: Any,
  provenance: Mapping[str, Any],
) -> bool:
  """Samples for trainers to the end; returns whether the training finished.

  `retriever` answers searches in batches; `progress` tells that they wait.

  Raises:
    ValueError: it cannot listen, or another controller has the folder.
    types.EngineError: the engine failed, or trainers were silent for too long
      (messages.AwayError).
  """
  from anysearch_jax.host import run_lock
  from anysearch_jax.launch import http_server
  from anysearch_jax.training import collection, sampler
  from anysearch_jax.training import controller as controller_lib
  from anysearch_jax.training import timeline as timeline_lib

  f, rollouts = flags.FLAGS, config.curriculum.rollouts
  where = urllib.parse.urlsplit(f.controller)
  host, secret = f.bind or where.hostname or "", key()
  if not secret and not http_server.is_loopback(host):
    raise ValueError(
      f"--controller: found {host} without --controller_key_variable; expected "
      "a key, because others reach this address."
    )
  line = progress.Line(rollouts, unit="rollout")
  with contextlib.ExitStack() as held:
    held.enter_context(run_lock.hold(folder / LOCK))
    opened = http_server.listening(host, where.port or 80)
    held.enter_context(opened)
    timeline = timeline_lib.Timeline(time.monotonic)
    policy, engine = controller_lib.opened(config, retriever)
    stream = collection.QuestionStream.of(questions, config)
    held.enter_context(contextlib.closing(engine))
    adapts = getattr(engine, "adapts", False)

    def make() -> sampler.Sampler:
      return sampler.Sampler(
        config,
        stream,
        codec=policy.tokenizer,
        engine=engine,
        retriever=retriever,
        timeline=timeline,
      )

    made = controller_lib.Controller(
      make,
      parts=(engine, retriever),
      identity=identity(config, provenance),
      about={"retriever": provenance["retriever"], "adapts": adapts},
      folder=folder,
      timeline=timeline,
      away=f.away,
    )
    held.enter_context(serving(opened, made, secret))
    print(f"controller at {http_server.address(opened)}", flush=True)
    held.enter_context(line.telling(lambda: made.said() or retriever.waits()))
    grace = made.stop_seconds if f.grace is None else lambda: f.grace
    with stopping.saving(made.stop, grace):
      return made.wait()


@contextlib.contextmanager
def serving(
  opened: Any, made: controller_lib.Controller, secret: str
) -> Iterator[None]:
  """Answers requests at a listening socket inside."""
  handler = type("Handler", (_Handler,), {"made": made, "secret": secret})
  server = http.server.ThreadingHTTPServer(
    opened.getsockname()[:2], handler, bind_and_activate=False
  )
  server.socket.close()
  server.socket = opened
  server.daemon_threads = True
  thread = threading.Thread(
    target=server.serve_forever, args=(0.1,), name="controller", daemon=True
  )
  thread.start()
  try:
    yield
  finally:
    server.shutdown()
    thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
  """Answers one connection of a trainer."""

  protocol_version, timeout = "HTTP/1.1", _SECONDS
  made: controller_lib.Controller
  secret: str

  def handle(self) -> None:
    """Answers requests; a client that goes away makes them again."""
    with contextlib.suppress(ConnectionError):
      super().handle()

  def do_GET(self) -> None:
    """Answers probes; anyone may ask."""
    if self.path != "/health":
      self._send(404, b"There is no such route.")
      return
    state = {"state": self.made.said() or "samples"}
    self._send(200, json.dumps(state).encode(), "application/json")

  def do_POST(self) -> None:
    """Answers a request of `training/controller`."""
    from anysearch_jax.host import processes
    from anysearch_jax.training import controller as controller_lib
    from anysearch_jax.training import messages

    given = self.headers.get("Authorization", "").encode()
    wanted = f"Bearer {self.secret}".encode() if self.secret else b""
    kind = self.headers.get("Content-Type", "")
    size = self.headers.get("Content-Length", "")
    # Without a key, a web page could otherwise have a browser ask.
    refused = None
    if not hmac.compare_digest(given, wanted):
      refused = 401, "found no key or another one; expected the controller's."
    elif kind != "application/octet-stream":
      refused = 415, "found another content type than the trainers'."
    elif not size.isdecimal() or int(size) > _LARGEST:
      refused = 413, f"found {size or 'no'} bytes, expected at most {_LARGEST}."
    if refused:
      self.close_connection = True
      self._send(refused[0], refused[1].encode())
      return
    try:
      values, _ = processes.decode(self.rfile.read(int(size)))
    except ValueError as error:
      self._send(408, str(error).encode())
      return
    try:
      found = self.made.answer(self.path.strip("/"), values)
    except messages.RefusedError as error:
      self._send(409, str(error).encode())
    except controller_lib.BusyError as error:
      self.close_connection = True
      self._send(503, str(error).encode())
    except Exception as error:
      if not isinstance(error, types.EngineError):
        logging.exception("A request for %s failed.", self.path)
      self._send(200, processes.encode(None, error))
    else:
      if found is None:
        self._send(204, b"")
      else:
        self._send(200, processes.encode(found))

  def _send(
    self, status: int, content: bytes, kind: str = "application/octet-stream"
  ) -> None:
    self.send_response(status)
    if status != 204:
      self.send_header("Content-Type", kind)
      self.send_header("Content-Length", str(len(content)))
    self.end_headers()
    self.wfile.write(content)

  def log_message(self, format: str, *args: Any) -> None:
    """Writes no line for each request."""
