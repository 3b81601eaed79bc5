r"""One run on several hosts: the same command on each, under `jax.distributed`.

    anysearch train ... --coordinator=10.0.0.1:1234 --processes=2 \
        --process=0     # and --process=1 on the other host
    srun anysearch train ... --distributed

With `--distributed` JAX finds the other processes by itself: SLURM, Open MPI,
Kubernetes (GKE) and TPU pods. Under SLURM and Open MPI each process has one
GPU, so start one process per GPU; with plain addresses each process has all
GPUs of its host, which `mesh.trainer` and `mesh.rollout` may divide. All hosts
must share the run folder (a shared file system) and each needs the policy.

An error that all processes find ends all of them with the same message. A
process that fails anywhere else exits at once, without waiting for the others.
The others end too, and the same command resumes: with 75 and a sentence where a
collective fails, and after `--heartbeat` seconds by JAX itself, whose last
lines name the process, with SIGABRT (134 in a shell).
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator

from absl import app, flags

from anysearch_jax.launch import stopping

# Seconds that JAX waits beyond our timeout: after its own timeout JAX ends the
# process without naming what it waited for.
_GRACE_SECONDS = 60
# Seconds that the first process gives the others to report an error that they
# share: JAX ends them as soon as its coordinator, in the first one, is gone.
_SAME_ERROR_SECONDS = 5.0
# Errors of collectives after another process has gone, in the words of Gloo,
# NCCL and JAX's coordination service.
_GONE = re.compile(
  r"gloo|remote process exited|network error|connection (closed|reset|refused)"
  r"|socket closed|unavailable:|deadline_exceeded:|heartbeat",
  re.IGNORECASE,
)


def define_flags() -> None:
  """Defines the flags that `connect` reads."""
  flags.DEFINE_string(
    "coordinator",
    None,
    "host:port where process 0 listens for the others; the same on all hosts.",
  )
  flags.DEFINE_integer(
    "processes",
    None,
    "Number of processes of the run, with --coordinator.",
    lower_bound=1,
  )
  flags.DEFINE_integer(
    "process",
    None,
    "Number of this process, below --processes; 0 listens at --coordinator.",
    lower_bound=0,
  )
  flags.DEFINE_bool(
    "distributed",
    False,
    "Join the processes that JAX finds by itself (SLURM, Open MPI, GKE, TPU "
    "pods), without --coordinator, --processes and --process.",
  )
  flags.DEFINE_integer(
    "connect_timeout",
    300,
    "Seconds to wait for the other processes; raise it if hosts start late.",
    lower_bound=1,
  )
  flags.DEFINE_integer(
    "heartbeat",
    100,
    "Seconds without an answer after which a process counts as gone and the "
    "others end; raise it for networks that stall.",
    lower_bound=10,
  )


def connect() -> None:
  """Joins the other processes, if flags name them.

  Call before JAX computes anything. If the others do not connect in time, the
  process exits with a sentence.

  Raises:
    app.UsageError: see `is_named`.
  """
  f = flags.FLAGS
  has_addresses = is_named()
  if not has_addresses and not f.distributed:
    return
  import jax  # Imported late: `jax_setup.configure` has set its flags by now.

  # JAX's preemption service would handle SIGTERM itself; see `Trainer.stop`.
  jax.config.update("jax_enable_preemption_service", False)

  other_processes = "the cluster's other processes"
  if has_addresses:
    other_processes = (
      f"{f.processes} processes at {f.coordinator}, of which this is "
      f"{f.process}"
    )

  def give_up() -> None:
    stopping.say(
      f"launch: waited {f.connect_timeout} seconds for {other_processes}; "
      "expected the same command on every host at about the same time, and a "
      "way through to the coordinator's port. Raise --connect_timeout if they "
      "are slow to start."
    )
    os._exit(1)

  timer = threading.Timer(f.connect_timeout, give_up)
  timer.daemon = True
  timer.start()
  try:
    jax.distributed.initialize(
      coordinator_address=f.coordinator,
      num_processes=f.processes,
      process_id=f.process,
      # The three values suffice, so JAX need not detect a cluster.
      cluster_detection_method="deactivate" if has_addresses else None,
      initialization_timeout=f.connect_timeout + _GRACE_SECONDS,
      heartbeat_timeout_seconds=f.heartbeat,
    )
  except (ValueError, RuntimeError) as error:
    sys.exit(
      f"launch: could not connect to {other_processes} ({error}); outside of a "
      "cluster that JAX knows, name --coordinator, --processes and --process."
    )
  finally:
    timer.cancel()


def is_named() -> bool:
  """Returns whether flags, and not JAX itself, say where the processes meet.

  Raises:
    app.UsageError: they are incomplete or contradict each other.
  """
  f = flags.FLAGS
  if f.coordinator is None and f.processes is None and f.process is None:
    return False
  _, _, port = (f.coordinator or "").rpartition(":")
  is_in_range = f.process is not None and f.process < (f.processes or 0)
  if f.distributed or not is_in_range or not port.isdecimal():
    suffix = " and --distributed" if f.distributed else ""
    raise app.UsageError(
      f"--coordinator, --processes, --process: found {f.coordinator}, "
      f"{f.processes}, {f.process}{suffix}; "
      "expected host:port, how many, and a number below that; or --distributed "
      "alone."
    )
  return True


@contextlib.contextmanager
def leaves_at_once(resume_sentence: Callable[[], str]) -> Iterator[None]:
  """Exits at once if this process fails in a way that the others do not know.

  An orderly exit would wait at a barrier for the others, while they wait for
  this process in a collective. If a collective failed because another process
  is gone, the exit code is `stopping.RESUME`.

  Args:
    resume_sentence: returns a sentence that says from where the run resumes.
  """
  import jax

  if not jax.distributed.is_initialized():
    yield
    return
  try:
    yield
  except (Exception, SystemExit) as error:
    code = error.code if isinstance(error, SystemExit) else 1
    # All processes agreed on this stop and exit together.
    if code == stopping.RESUME and not isinstance(error, stopping.StoppedError):
      raise
    if line := _lost_process_line(error):
      code = stopping.RESUME
      stopping.say(
        f"launch: a collective failed ({line}), as when another process ended "
        f"or is out of reach. {resume_sentence()}"
      )
    elif isinstance(error, stopping.StoppedError):
      stopping.say(f"stopped. {resume_sentence()}")
    elif not isinstance(error, SystemExit):
      traceback.print_exc()
    elif isinstance(code, str):
      stopping.say(code)
    sys.stdout.flush()
    sys.stderr.flush()
    if jax.process_count() > 1 and jax.process_index() == 0:
      time.sleep(_SAME_ERROR_SECONDS)
    os._exit(code if isinstance(code, int) else 1)


def _lost_process_line(error: BaseException | None) -> str:
  """Returns the first line of a collective's error; "" for other errors.

  A collective that fails while it is compiled or started raises a ValueError.
  """
  import jax

  while error is not None:
    is_collective = isinstance(error, jax.errors.JaxRuntimeError | ValueError)
    if is_collective and _GONE.search(str(error)):
      return str(error).partition("\n")[0][:200]
    error = error.__cause__ or error.__context__
  return ""
