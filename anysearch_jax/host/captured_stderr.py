"""What compilers write to the process's standard error, kept from the user."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator


class Captured:
  """What was written; complete once the `with` block has ended."""

  text: str = ""


@contextlib.contextmanager
def standard_error() -> Iterator[Captured]:
  """Takes file descriptor 2, which C++ libraries write to, for a while."""
  captured = Captured()
  sys.stderr.flush()
  kept = os.dup(2)
  with tempfile.TemporaryFile() as file:
    os.dup2(file.fileno(), 2)
    try:
      yield captured
    finally:
      sys.stderr.flush()
      os.dup2(kept, 2)
      os.close(kept)
      file.seek(0)
      captured.text = file.read().decode(errors="replace")
