"""Captures what C++ libraries, such as compilers, write to standard error."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def standard_error() -> Iterator[io.StringIO]:
  """Redirects standard error to a file while the `with` block runs.

  The redirection is of file descriptor 2, because C++ libraries do not use
  Python's `sys.stderr`.

  Yields:
    A buffer, which holds the captured text once the block has ended.
  """
  captured = io.StringIO()
  sys.stderr.flush()
  original = os.dup(2)
  with tempfile.TemporaryFile() as file:
    os.dup2(file.fileno(), 2)
    try:
      yield captured
    finally:
      sys.stderr.flush()
      os.dup2(original, 2)
      os.close(original)
      file.seek(0)
      captured.write(file.read().decode(errors="replace"))
