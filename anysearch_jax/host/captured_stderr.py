"""Captures what C++ libraries, such as compilers, write to standard error."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator


class Captured:
  """The captured text; it is complete once the `with` block has ended."""

  text: str = ""


@contextlib.contextmanager
def standard_error() -> Iterator[Captured]:
  """Redirects standard error to a file while the `with` block runs.

  The redirection is of file descriptor 2, because C++ libraries do not use
  Python's `sys.stderr`.
  """
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
