"""Writes the files of a run: metrics, prompts, trajectories, the policy.

`metrics.jsonl` has one record for each rollout, `steps.jsonl` one for each
optimizer step; TensorBoard and `trackers` show the former.
"""

from __future__ import annotations

import contextlib
import json
import math
import pathlib
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from anysearch_jax.algorithms import grpo
from anysearch_jax.environment import records
from anysearch_jax.host import disk, json_files, processes
from anysearch_jax.policy import hf
from anysearch_jax.training import trackers

Values = Mapping[str, float | int | bool]


class Writer(contextlib.AbstractContextManager["Writer"]):
  """Appends the records of rollouts; use as a context manager.

  Besides, `sinks` get a rollout's step and its finite metrics.
  """

  def __init__(
    self, folder: str | pathlib.Path, sinks: Sequence[trackers.Sender] = ()
  ):
    # Imported late: a learner outside of a run writes no files.
    with _no_torch():
      from tensorboardX import event_file_writer

    self._sinks = sinks
    folder = pathlib.Path(folder)
    self._rollouts = folder / "metrics.jsonl"
    self._steps = folder / "steps.jsonl"
    self._board_folder = folder / "tensorboard"
    with disk.translate_errors(self._board_folder):
      self._board_folder.mkdir(parents=True, exist_ok=True)
      # Not a SummaryWriter: a full disk ends its thread, and later calls hang.
      self._board = event_file_writer.EventsWriter(
        str(self._board_folder / "events")
      )

  def write(self, step: int, values: Values, steps: Sequence[Values]) -> None:
    """Writes the metrics of a rollout; non-finite numbers become null.

    `steps` are those of its optimizer steps; `step` is the number of the last
    one.
    """
    first = step - len(steps) + 1
    numbered = [
      {"rollout": values["rollout"], "step": first + i, **of_step}
      for i, of_step in enumerate(steps)
    ]
    for path, lines in ((self._steps, numbered), (self._rollouts, [values])):
      with disk.translate_errors(path), path.open("a") as file:
        file.writelines(json.dumps(_plain(r)) + "\n" for r in lines)
    finite = {k: v for k, v in _plain(values).items() if v is not None}
    with disk.translate_errors(self._board_folder):
      self._show(step, finite)
    for sink in self._sinks:
      sink.write(step, finite)

  def keep_before(self, rollout: int) -> None:
    """Removes the records of rollouts that a resumed run will repeat.

    This includes an incomplete last line, left by a kill or a full disk.
    """
    for path in (self._rollouts, self._steps):
      text = path.read_text() if path.exists() else ""
      lines = text[: text.rfind("\n") + 1].splitlines(keepends=True)
      kept = [line for line in lines if json.loads(line)["rollout"] < rollout]
      disk.write_whole(path, "".join(kept))

  def _show(self, step: int, values: Values) -> None:
    """Writes a rollout's event for TensorBoard."""
    from tensorboardX import summary
    from tensorboardX.proto import event_pb2, summary_pb2

    scalars = [
      scalar
      for name, value in values.items()
      for scalar in summary.scalar(name, value).value
    ]
    event = event_pb2.Event(
      wall_time=time.time(),
      step=step,
      summary=summary_pb2.Summary(value=scalars),
    )
    self._board.write_event(event)
    self._board.flush()

  def __exit__(self, *unused) -> None:
    with disk.translate_errors(self._board_folder):
      self._board.close()


def over_steps(
  steps: Sequence[Mapping[str, float]], *, on_policy: bool
) -> dict[str, float]:
  """Returns means over a rollout's optimizer steps; maxima for names in `_max`.

  `on_policy`: it was sampled with the weights that the first step updates.
  """
  out = {
    name: float(np.max(seen) if name.endswith("_max") else np.mean(seen))
    for name in steps[0]
    for seen in [[v[name] for v in steps]]
  }
  if on_policy:
    # Before the first step, only numerics separate engine and trainer.
    for name in ("", "_p50", "_p99", "_far", "_max"):
      out[f"policy/engine_gap{name}"] = steps[0][f"loss/logp_difference{name}"]
  return out


def of_step(values: Mapping[str, np.ndarray]) -> dict[str, float]:
  """Converts the metrics of an optimizer step to plain numbers.

  `loss/logp_difference_counts`, if present, becomes `loss/logp_difference_p50`
  and `_p99`, rounded up to an edge of `grpo.GAP_EDGES`, and `_far`, the share
  of tokens beyond 1 nat.
  """
  values = dict(values)
  counts = values.pop("loss/logp_difference_counts", None)
  out = {name: float(value) for name, value in values.items()}
  if counts is not None:
    edges = (*grpo.GAP_EDGES, math.inf)
    tokens, *beyond = counts.tolist()
    shares = [count / max(tokens, 1) for count in beyond] + [0.0]
    for name, quantile in (("p50", 0.5), ("p99", 0.99)):
      i = next(i for i, share in enumerate(shares) if share <= 1 - quantile)
      out[f"loss/logp_difference_{name}"] = edges[i]
    out["loss/logp_difference_far"] = shares[edges.index(1.0)]
  return out


def _plain(values: Values) -> dict[str, float | int | bool | None]:
  return {
    name: None if isinstance(v, float) and not math.isfinite(v) else v
    for name, v in values.items()
  }


@contextlib.contextmanager
def _no_torch() -> Iterator[None]:
  """Lets imports find no torch, if none is imported yet.

  tensorboardX imports it for nothing that is used here, in 1.3 s and 200 MB.
  https://github.com/lanpa/tensorboardX/blob/master/tensorboardX/writer.py
  """
  if "torch" in sys.modules:
    yield
    return
  sys.modules["torch"] = None  # type: ignore[assignment]  # Means: not found.
  try:
    yield
  finally:
    del sys.modules["torch"]


def begin(
  folder: pathlib.Path, policy: hf.Policy, prompts: Mapping[str, str]
) -> None:
  """Writes `source/` and `prompts.json`, and creates `trajectories/`.

  Later exports copy the files of the initial policy.
  """

  def write() -> None:
    (folder / "trajectories").mkdir(exist_ok=True)
    source = folder / "source"
    if not source.is_dir():
      with hf.atomic_directory(source) as beside:
        hf.save_files(beside, policy)
    json_files.write(folder / "prompts.json", prompts)

  with disk.translate_errors(folder):
    processes.on_main(write)


def record(
  folder: pathlib.Path, name: str, groups: Iterable[Mapping[str, Any]]
) -> pathlib.Path:
  """Writes groups of trajectories, one a line; returns the file's path."""
  path = folder / "trajectories" / f"{name}.jsonl"
  if processes.is_main():
    with disk.translate_errors(path):
      records.write(path, groups)
  return path


def export(
  folder: pathlib.Path, policy: hf.Policy, *, base: str, dtype: str
) -> None:
  """Writes `policy/`, and `adapter/` of adapters; all processes call it.

  The adapters belong to `base`, the folder of the initial policy.
  """
  policy = policy._replace(source=folder / "source")
  with disk.translate_errors(folder / "policy"):
    hf.save(folder / "policy", policy, dtype=dtype)
  if policy.architecture.lora is not None:
    with disk.translate_errors(folder / "adapter"):
      hf.save_adapter(folder / "adapter", policy, base=base)
