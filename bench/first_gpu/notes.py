"""What a stage finds, kept in a file after each figure.

A stage that is ended by its time limit, by the kernel or by a signal therefore
leaves the figures that it had.
"""

from __future__ import annotations

import contextlib
import gc
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from anysearch_jax.host import json_files
from bench import harness

Figures = Mapping[str, Any]


class SkippedError(Exception):
  """The stage does not suit this machine; the message says why."""


class Notes:
  """The figures of one stage, by case.

  Args:
    path: file that is replaced after each figure.
    traces: folder for profiler traces of the stage.
    rehearse: whether sizes are tiny.
  """

  def __init__(
    self, path: pathlib.Path, *, traces: pathlib.Path, rehearse: bool
  ):
    self.rehearse = rehearse
    self.traces = traces
    self.figures: dict[str, Any] = {}
    self._path = path
    self._failed: list[str] = []
    self._cases = 0
    self._write()

  def add(self, figures: Figures) -> None:
    """Adds figures that belong to no case."""
    self.figures |= figures
    harness.print_numbers(figures)
    self._write()

  def case(self, name: str, measure: Callable[[], Figures]) -> None:
    """Measures one case; if it fails, its figure says why.

    Memory that only the case used is free afterwards.
    """
    print(f"-- {name}", flush=True)
    self._cases += 1
    # Only the sentence is kept: a traceback would keep the arrays of its
    # frames, and the next case could not have their memory.
    found: Figures
    try:
      found = measure()
    except SkippedError as error:
      found = {"skipped": str(error)}
    except Exception as error:
      found = {"failed": sentence(error)}
      self._failed.append(name)
    gc.collect()
    self.figures[name] = dict(found)
    harness.print_numbers(found)
    self._write()

  def check(self) -> None:
    """Raises RuntimeError if every case failed."""
    if self._cases and len(self._failed) == self._cases:
      raise RuntimeError(self.figures[self._failed[0]]["failed"])

  def close(self, **outcome: str) -> None:
    """Notes how the stage ended."""
    self._outcome = outcome
    self._write()

  _outcome: Mapping[str, str] = {}

  def _write(self) -> None:
    json_files.write(self._path, {**self._outcome, "figures": self.figures})


def read(path: pathlib.Path) -> dict[str, Any]:
  """Returns what a stage wrote; empty figures if it wrote nothing."""
  with contextlib.suppress(OSError, ValueError):
    return json_files.read(path)
  return {"figures": {}}


def sentence(error: BaseException) -> str:
  """Returns an error's kind and the first line of its message.

  Of a group of errors it takes the first.
  """
  while isinstance(error, BaseExceptionGroup):
    error = error.exceptions[0]
  lines = str(error).strip().splitlines() or [""]
  return f"{type(error).__name__}: {lines[0][:300]}"
