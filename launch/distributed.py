r"""One run on several hosts: the same command on each, under `jax.distributed`.

    python -m launch.train ... --coordinator=10.0.0.1:1234 --processes=2 \
        --process=0     # and --process=1 on the other host
    srun python -m launch.train ... --distributed

With `--distributed` JAX finds the other processes by itself: SLURM, Open MPI,
Kubernetes (GKE) and TPU pods. Under SLURM and Open MPI each process has one
GPU, so start one process per GPU; with plain addresses each process has all
GPUs of its host, which `mesh.trainer` and `mesh.rollout` may divide. All hosts
must share the run folder (a shared file system) and each needs the policy.

During training, a signal to any process stops all of them before the next
rollout, with one checkpoint. An error that a process finds before training or
while sampling ends all processes with the same message. A process that fails
anywhere else exits at once, without waiting for the others; the others exit
when their next collective with it fails, or when JAX has missed its heartbeat,
after 100 seconds.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import NamedTuple

from absl import app, flags

from launch import stopping

# Seconds that JAX waits beyond our timeout: after its own timeout JAX ends the
# process without naming what it waited for.
_GRACE = 60


class Address(NamedTuple):
  """Where several processes meet, and which of them this is."""

  coordinator: str
  processes: int
  process: int


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


def connect() -> None:
  """Joins the other processes, if flags name them.

  Call before JAX computes anything. If the others do not connect in time, the
  process exits with an error message.

  Raises:
    app.UsageError: the flags are incomplete or contradict each other.
  """
  f = flags.FLAGS
  where = address(f.coordinator, f.processes, f.process, f.distributed)
  if where is None and not f.distributed:
    return
  import jax  # Imported late: `jax_setup.configure` has set its flags by now.

  # JAX's preemption service would handle SIGTERM itself; see `Trainer.stop`.
  jax.config.update("jax_enable_preemption_service", False)

  def give_up() -> None:
    sys.stderr.write(
      f"launch: waited {f.connect_timeout} seconds for "
      f"{_others(where)}; expected the same command on every host at about the "
      "same time, and a way through to the coordinator's port. Raise "
      "--connect_timeout if they are slow to start.\n"
    )
    sys.stderr.flush()
    os._exit(1)

  watch = threading.Timer(f.connect_timeout, give_up)
  watch.daemon = True
  watch.start()
  try:
    jax.distributed.initialize(
      coordinator_address=where and where.coordinator,
      num_processes=where and where.processes,
      process_id=where and where.process,
      # The three values suffice, so JAX need not detect a cluster.
      cluster_detection_method="deactivate" if where else None,
      initialization_timeout=f.connect_timeout + _GRACE,
    )
  except (ValueError, RuntimeError) as error:
    sys.exit(
      f"launch: could not connect to {_others(where)} ({error}); outside of a "
      "cluster that JAX knows, name --coordinator, --processes and --process."
    )
  finally:
    watch.cancel()


def address(
  coordinator: str | None,
  processes: int | None,
  process: int | None,
  distributed: bool,
) -> Address | None:
  """Returns where the processes meet, from the flags.

  None if JAX finds the other processes itself or if there are none.

  Raises:
    app.UsageError: the flags are incomplete or contradict each other.
  """
  if coordinator is None and processes is None and process is None:
    return None
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
  return Address(coordinator, processes, process)


@contextlib.contextmanager
def leaves_at_once() -> Iterator[None]:
  """Exits at once if this process fails in a way that the others do not know.

  An orderly exit would wait at a barrier for the others, while they wait for
  this process in a collective.
  """
  try:
    yield
  except (Exception, SystemExit) as error:
    import jax  # `connect` has initialised it by now.

    code = error.code if isinstance(error, SystemExit) else 1
    # All processes agreed on this stop and exit together.
    agreed = code == stopping.RESUME and not isinstance(
      error, stopping.StoppedError
    )
    if jax.process_count() == 1 or agreed:
      raise
    if not isinstance(error, SystemExit):
      traceback.print_exc()
    elif isinstance(code, str):
      print(code, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


def _others(where: Address | None) -> str:
  if where is None:
    return "the cluster's other processes"
  return (
    f"{where.processes} processes at {where.coordinator}, of which this is "
    f"{where.process}"
  )
