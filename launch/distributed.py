r"""One run on several hosts: the same command on each, under `jax.distributed`.

    python -m launch.train ... --coordinator=10.0.0.1:1234 --processes=2 \
        --process=0     # and --process=1 on the other host
    srun python -m launch.train ... --distributed

With `--distributed` JAX finds the other processes by itself: SLURM, Open MPI,
Kubernetes (GKE) and TPU pods. Under SLURM and Open MPI each process has one
GPU, so start one process per GPU; with plain addresses each process has all
GPUs of its host, which `mesh.trainer` and `mesh.rollout` may divide. All hosts
must share the run folder (a shared file system) and each needs the policy.

An error that a process finds before training or while sampling ends all
processes with the same message. A process that fails anywhere else exits at
once, without waiting for the others. These exit with 75 and name the process
that is missing, as docs/operations.md says.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from absl import app, flags

from anysearch_jax.launch import stopping

# Seconds that JAX waits beyond our timeout: after its own timeout JAX ends the
# process without naming what it waited for.
_GRACE = 60
_BEAT = 1.0  # Seconds between a process's signs of life.
# Seconds of silence after which a process is missing, once something failed.
_SILENT = 6.0
# Seconds after the end of a process, in which the others may raise its error.
_SAME_ERROR = 10.0


def define_flags() -> None:
  """Defines the flags that `connect` reads."""
  flags.DEFINE_string(
    "coordinator", None, "host:port of process 0, where it will listen."
  )
  flags.DEFINE_integer("processes", None, "How many.", lower_bound=1)
  flags.DEFINE_integer("process", None, "Which one this is.", lower_bound=0)
  flags.DEFINE_bool(
    "distributed", False, "Several processes of a cluster that JAX knows."
  )
  flags.DEFINE_integer(
    "connect_timeout", 300, "Seconds to wait for the others.", lower_bound=1
  )
  flags.DEFINE_integer(
    "heartbeat",
    100,
    "Seconds after which a process that does not answer has left the run.",
    lower_bound=20,  # JAX ends a process after half of it, after `_SILENT`.
  )


def connect() -> None:
  """Joins the other processes, if flags name them.

  Call before JAX computes anything. If the others do not connect in time, the
  process exits with a sentence.

  Raises:
    app.UsageError: see `named`.
  """
  f = flags.FLAGS
  where = named(f.coordinator, f.processes, f.process, f.distributed)
  if not where and not f.distributed:
    return
  import jax  # Imported late: `jax_setup.configure` has set its flags by now.

  # JAX's preemption service would handle SIGTERM itself; see `Trainer.stop`.
  jax.config.update("jax_enable_preemption_service", False)

  others = "the cluster's other processes"
  if where:
    others = (
      f"{f.processes} processes at {f.coordinator}, of which this is "
      f"{f.process}"
    )

  def give_up() -> None:
    sys.stderr.write(
      f"launch: waited {f.connect_timeout} seconds for {others}; expected the "
      "same command on every host at about the same time, and a way through to "
      "the coordinator's port. Raise --connect_timeout if they are slow to "
      "start.\n"
    )
    sys.stderr.flush()
    os._exit(1)

  watch = threading.Timer(f.connect_timeout, give_up)
  watch.daemon = True
  watch.start()
  try:
    jax.distributed.initialize(
      coordinator_address=f.coordinator,
      num_processes=f.processes,
      process_id=f.process,
      # The three values suffice, so JAX need not detect a cluster.
      cluster_detection_method="deactivate" if where else None,
      initialization_timeout=f.connect_timeout + _GRACE,
      heartbeat_timeout_seconds=f.heartbeat,
    )
  except (ValueError, RuntimeError) as error:
    sys.exit(
      f"launch: could not connect to {others} ({error}); outside of a "
      "cluster that JAX knows, name --coordinator, --processes and --process."
    )
  finally:
    watch.cancel()


def named(
  coordinator: str | None,
  processes: int | None,
  process: int | None,
  distributed: bool,
) -> bool:
  """Returns whether flags say where the processes meet.

  Raises:
    app.UsageError: they are incomplete or contradict each other.
  """
  if coordinator is None and processes is None and process is None:
    return False
  if coordinator is None or processes is None or process is None or distributed:
    found = f"found {coordinator}, {processes}, {process}"
    raise app.UsageError(
      f"--coordinator, --processes, --process: {found}"
      f"{' and --distributed' if distributed else ''}; expected all three, or "
      "--distributed alone."
    )
  host, _, port = coordinator.rpartition(":")
  if not host or not port.isdecimal():
    raise app.UsageError(
      f"--coordinator: found {coordinator!r}, expected host:port."
    )
  if process >= processes:
    raise app.UsageError(
      f"--process: found {process}, expected 0 to {processes - 1}."
    )
  return True


@contextlib.contextmanager
def leaves_at_once(saved: Callable[[], str]) -> Iterator[None]:
  """Exits at once if this process fails in a way that the others do not know.

  An orderly exit would wait at a barrier for the others, while they wait for
  this process in a collective. If another process is missing, the exit code is
  `stopping.RESUME`. `saved` says from where the run resumes.
  """
  # JAX offers its key-value store nowhere else.
  from jax._src import distributed as jax_distributed

  state = jax_distributed.global_state
  if state.client is None:
    yield
    return
  peers = _Peers(state.client, state.process_id, state.num_processes, saved)
  host = (state.coordinator_address or "").rpartition(":")[0].strip("[]")
  peers.watch(host)
  try:
    yield
    peers.code = 0
  except (Exception, SystemExit) as error:
    code = error.code if isinstance(error, SystemExit) else 1
    # All processes agreed on this stop and exit together.
    if code == stopping.RESUME and not isinstance(error, stopping.StoppedError):
      peers.code = code
      raise
    if _is_of_jax(error):
      peers.leave_without_missing()
    if isinstance(error, stopping.StoppedError):
      stopping.say(f"stopped. {saved()}")
    elif not isinstance(error, SystemExit):
      traceback.print_exc()
    elif isinstance(code, str):
      print(code, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)
  finally:
    peers.stop()


class _Peers:
  """Knows which other processes live, and leaves if one does not.

  When a process is missing, a collective raises here or waits forever. In the
  second case JAX aborts the process after `--heartbeat` seconds, at once if the
  missing process is the first one, which has the key-value store. Its callback
  for that cannot be used from Python (it throws `std::bad_cast`), so this class
  handles the abort's signal. An abort for any other reason goes its way, and
  none changes `code`, the exit code, once it is decided.

  `client` is of JAX's key-value store.
  """

  def __init__(
    self, client: Any, process: int, processes: int, saved: Callable[[], str]
  ):
    self.code: int | None = None
    self._client, self._own, self._saved = client, process, saved
    self._answered = time.monotonic()
    self._seen = {
      other: ("", self._answered)
      for other in range(processes)
      if other != process
    }
    self._connections: list[socket.socket] = []
    self._lost: set[int] = set()  # Those whose connection ended.
    self._stopped = threading.Event()
    self._thread = threading.Thread(target=self._beat, daemon=True)
    self._thread.start()
    # Python would only note the signal, and the process would end before it
    # could act.
    self._handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._on_abort)
    ctypes.CDLL(None).signal(signal.SIGABRT, self._handler)

  def stop(self) -> None:
    """Ends the signs of life; the interpreter must not end during a call."""
    self._stopped.set()
    self._tell("bye")
    self._thread.join(_SILENT)

  def watch(self, host: str) -> None:
    """Watches the others by connections between process 0 and each of them.

    The kernel closes the connection of a process that ends. Where `host`, that
    of process 0, cannot be reached at another port, `--heartbeat` remains.
    """
    name, word = "watched", secrets.token_hex(8)
    with contextlib.suppress(Exception):
      if self._own == 0:
        listening = socket.create_server(("", 0))
        port = listening.getsockname()[1]
        self._client.key_value_set(name, f"{port} {word}", allow_overwrite=True)
        threading.Thread(
          target=self._accept, args=(listening, word), daemon=True
        ).start()
        return
      port, word = self._client.blocking_key_value_get(name, 60_000).split()
      connection = socket.create_connection((host, int(port)), timeout=10)
      connection.settimeout(None)
      connection.sendall(f"{word} {self._own}\n".encode())
      self._connections.append(connection)
      threading.Thread(
        target=self._read, args=(connection, 0), daemon=True
      ).start()

  def _accept(self, listening: socket.socket, word: str) -> None:
    while True:
      connection, _ = listening.accept()
      with contextlib.suppress(OSError, ValueError):
        connection.settimeout(10)
        said, process = connection.recv(100).decode().split()
        if said != word:
          raise ValueError
        connection.settimeout(None)
        self._connections.append(connection)
        threading.Thread(
          target=self._read, args=(connection, int(process)), daemon=True
        ).start()

  def _read(self, connection: socket.socket, other: int) -> None:
    """Leaves if a connection ends and the other process did not say so."""
    said = ""
    with contextlib.suppress(OSError):
      while part := connection.recv(100):
        said += part.decode(errors="replace")
    if "bye" in said:
      return
    lost = [int(word) for word in said.split() if word.isdecimal()] or [other]
    self._lost.update(lost)
    if not self._stopped.wait(_SAME_ERROR) and self.code is None:
      self._leave(lost)

  def _tell(self, word: str) -> None:
    for connection in self._connections:
      with contextlib.suppress(OSError):
        connection.sendall(f"{word}\n".encode())

  def _leave(self, missing: Sequence[int]) -> None:
    """Exits with a sentence, and tells the others which process is missing."""
    self._tell(" ".join(map(str, missing)))
    names = " and ".join(map(str, missing))
    stopping.say(
      f"launch: found no sign of life of process {names}, which ended, is "
      f"stopped or out of reach. {self._saved()}"
    )
    sys.stdout.flush()
    os._exit(stopping.RESUME)

  def leave_without_missing(self) -> None:
    """Exits with a sentence if a process is missing; else returns in time."""
    for _ in range(int(2 * _SILENT / _BEAT)):
      if missing := self._missing():
        self._leave(missing)
      time.sleep(_BEAT)

  def _on_abort(self, number: int) -> None:
    if self.code is not None:
      os._exit(self.code)
    self.leave_without_missing()

  def _beat(self) -> None:
    for count in itertools.count():
      with contextlib.suppress(Exception):  # Then `_answered` becomes old.
        self._client.key_value_set(
          f"alive/{self._own}", str(count), allow_overwrite=True
        )
        found = dict(self._client.key_value_dir_get("alive/"))
        self._answered = time.monotonic()
        for other, (before, _) in self._seen.items():
          if (beat := found.get(f"alive/{other}", before)) != before:
            self._seen[other] = beat, self._answered
      if self._stopped.wait(_BEAT):
        return

  def _missing(self) -> list[int]:
    silent = [
      other
      for other, (_, at) in self._seen.items()
      if other in self._lost or self._answered - at > _SILENT
    ]
    unanswered = time.monotonic() - self._answered > _SILENT
    return silent or [0] * unanswered


def _is_of_jax(error: BaseException | None) -> bool:
  """Returns whether JAX raised this error or one that led to it.

  A collective that fails while it is compiled or started raises a ValueError.
  """
  import jax

  while error is not None and not (
    isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in str(error)
  ):
    error = error.__cause__ or error.__context__
  return error is not None
