"""Where a run's numbers go: `metrics.jsonl` always, TensorBoard beside it."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Mapping

import tensorboardX


class Writer:
  """Appends one record a rollout; use as a context manager."""

  def __init__(self, folder: str | pathlib.Path):
    folder = pathlib.Path(folder)
    self._file = (folder / "metrics.jsonl").open("a")
    self._board = tensorboardX.SummaryWriter(str(folder / "tensorboard"))

  def write(self, step: int, values: Mapping[str, float | int | bool]) -> None:
    """One line of plain numbers; a value that is not finite becomes null."""
    record = {
      name: None if isinstance(v, float) and not math.isfinite(v) else v
      for name, v in values.items()
    }
    self._file.write(json.dumps(record) + "\n")
    self._file.flush()
    for name, value in record.items():
      if value is not None:
        self._board.add_scalar(name, value, step)

  def keep_before(self, rollout: int) -> None:
    """Drops the records of rollouts that a resumed run will do again."""
    self._file.close()
    path = pathlib.Path(self._file.name)
    lines = path.read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["rollout"] < rollout]
    beside = path.with_name(path.name + ".writing")
    beside.write_text("".join(kept))
    beside.rename(path)
    self._file = path.open("a")

  def __enter__(self) -> Writer:
    return self

  def __exit__(self, *unused) -> None:
    self._file.close()
    self._board.close()
