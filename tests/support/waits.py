"""Waits for what other threads and processes do, and ports for them."""

from __future__ import annotations

import secrets
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
  """Returns one that outgoing connections, from 32,768 on, do not take."""
  port = 20_000 + secrets.randbelow(12_768)
  try:
    with socket.create_server(("127.0.0.1", port)):
      return port
  except OSError:
    return free_port()
