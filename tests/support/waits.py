"""Waits for what other threads and processes do, and ports for them."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable


def wait_for(what: Callable[[], object], seconds: float = 30) -> None:
  """Waits until a function returns something true."""
  end = time.monotonic() + seconds
  while not what():
    assert time.monotonic() < end, "It did not happen."
    time.sleep(0.005)


def free_port() -> int:
  with socket.create_server(("127.0.0.1", 0)) as listening:
    return listening.getsockname()[1]
