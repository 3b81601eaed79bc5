"""The figures that a stage notes, case by case."""

from __future__ import annotations

import dataclasses
import gc
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from anysearch_jax.host import json_files

Figures = Mapping[str, Any]
# Names of figures: milliseconds, and the share of them that is the floor, the
# shortest time that the device's peaks allow.
MS = "ms"
SHARE = "share of the floor"


@dataclasses.dataclass
class Notes:
  """The figures of one stage, by case.

  Attributes:
    folder: folder of the run; the stage's file is replaced after each figure.
    stage: name of the stage.
    rehearse: whether sizes are tiny.
    server: address of an SGLang server; empty without one.
    figures: figures by name; those of a case are below the case's name.
  """

  folder: pathlib.Path
  stage: str
  rehearse: bool
  server: str = ""
  figures: dict[str, Any] = dataclasses.field(default_factory=dict)

  def add(self, figures: Figures) -> None:
    """Adds figures that belong to no case."""
    self.figures |= figures
    for name, value in figures.items():
      print(f"{name:32} {value}", flush=True)
    self.write()

  def case(self, name: str, measure: Callable[[], Figures]) -> None:
    """Measures one case; if it fails, its figure says why.

    Memory that only the case used is free afterwards.
    """
    # Only the sentence is kept: a traceback would keep the arrays of its
    # frames, and the next case could not have their memory.
    figures: Figures
    try:
      figures = measure()
    except Exception as error:
      figures = {"failed": sentence(error)}
    gc.collect()
    self.add({name: dict(figures)})

  def write(self, **outcome: str) -> None:
    """Writes the figures, and how the stage ended."""
    path = self.folder / "stages" / f"{self.stage}.json"
    json_files.write(path, {**outcome, "figures": self.figures})


def sentence(error: BaseException) -> str:
  """Returns an error's kind and the first line of its message.

  Of a group of errors it takes the first.
  """
  while isinstance(error, BaseExceptionGroup):
    error = error.exceptions[0]
  lines = str(error).strip().splitlines() or [""]
  return f"{type(error).__name__}: {lines[0][:300]}"
