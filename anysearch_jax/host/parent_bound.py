"""Becomes a program that Linux ends with its parent, however that ends.

    python -I anysearch_jax/host/parent_bound.py PARENT PROGRAM [ARGUMENT ...]

The child asks for this itself, because code between fork and exec is not safe
in a process with threads. PARENT is the parent's process id. On other systems
the program just starts.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG, see prctl(2).


def main(parent: str, *command: str) -> None:
  """Replaces this process by a command."""
  if sys.platform == "linux":
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
  if os.getppid() == int(parent):  # Otherwise it has ended already.
    os.execv(command[0], command)


if __name__ == "__main__":
  main(*sys.argv[1:])
