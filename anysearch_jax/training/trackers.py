"""Sends the metrics of a run to Weights & Biases or MLflow.

Both are set up by their own variables: `WANDB_MODE=offline` writes to the run
folder, `MLFLOW_TRACKING_URI` names a server or a database.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import queue
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from absl import logging as absl_logging

from anysearch_jax.config import settings
from anysearch_jax.host import json_files

Values = Mapping[str, Any]
_PROJECT = "anysearch"
_IDS = "trackers.json"
_MAX_ERROR = 300  # Characters of an error that a warning shows.
_PATIENCE = 30.0  # Seconds that the last records may take.


class _Wandb:
  """A run at Weights & Biases.

  Attributes:
    id: the run's id there, with which a resumed training continues it.

  Args:
    folder: of the run; its name is the run's name.
    config: the configuration as plain values.
    run_id: of the run to continue; "" begins one.
  """

  def __init__(self, folder: pathlib.Path, config: Values, run_id: str):
    import wandb

    self.id = run_id or uuid.uuid4().hex[:8]
    self._run = wandb.init(
      project=os.environ.get("WANDB_PROJECT", _PROJECT),
      name=folder.name,
      id=self.id,
      resume="allow",
      dir=folder,
      config=dict(config),
      allow_val_change=True,
      # It would replace stdout, whose closing stops a training.
      settings=wandb.Settings(console="off", quiet=True),
    )

  def log(self, step: int, values: Values) -> None:
    self._run.log(dict(values), step=step, commit=True)

  def finish(self, status: str) -> None:
    """Ends the run as "finished", "stopped" (it will resume) or "failed"."""
    if status == "stopped":
      self._run.mark_preempting()
    self._run.finish(exit_code=0 if status == "finished" else 1)


class _Mlflow:
  """A run at MLflow, with the attributes and arguments of `_Wandb`."""

  _STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
  _BATCH = 100  # Parameters of one request, which MLflow limits.

  def __init__(self, folder: pathlib.Path, config: Values, run_id: str):
    from mlflow import MlflowClient, entities

    # It would print a traceback for each record; `Sender` has a sentence.
    logging.getLogger("mlflow").setLevel(logging.CRITICAL)
    self._entities = entities
    self._client = MlflowClient()
    self.id = run_id
    if run_id:
      self._client.update_run(run_id, status="RUNNING")
      return
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
    experiment = self._client.get_experiment_by_name(name)
    if experiment is None:
      experiment_id = self._client.create_experiment(name)
    else:
      experiment_id = experiment.experiment_id
    run = self._client.create_run(experiment_id, run_name=folder.name)
    self.id = run.info.run_id
    # A parameter cannot change later, so a resumed run keeps these.
    leaves = [entities.Param(k, str(v)) for k, v in settings.leaves(config)]
    for i in range(0, len(leaves), self._BATCH):
      self._client.log_batch(self.id, params=leaves[i : i + self._BATCH])

  def log(self, step: int, values: Values) -> None:
    milliseconds = int(time.time() * 1000)
    metrics = [
      self._entities.Metric(name, float(value), milliseconds, step)
      for name, value in values.items()
    ]
    self._client.log_batch(self.id, metrics=metrics)

  def finish(self, status: str) -> None:
    self._client.set_terminated(self.id, self._STATUS[status])


Tracker = _Wandb | _Mlflow
KINDS: dict[str, type[Tracker]] = {"wandb": _Wandb, "mlflow": _Mlflow}


class Sender:
  """Sends records to a tracker, in a thread of its own.

  A tracker that is slow or fails therefore neither delays nor ends a training:
  the first failure is logged as a warning, and `close` logs how many records
  were lost.
  """

  def __init__(self, name: str, tracker: Tracker):
    self._name = name
    self._tracker = tracker
    self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
    self._written = 0
    self._sent = 0
    self._thread = threading.Thread(target=self._send, daemon=True)
    self._thread.start()

  def write(self, step: int, values: Values) -> None:
    """Queues a record; `step` is the number of the last optimizer step."""
    self._written += 1
    self._queue.put((step, values))

  def close(self, status: str) -> None:
    """Ends the run at the tracker; waits for the records that are queued."""
    self._queue.put(status)
    self._thread.join(_PATIENCE)
    if lost := self._written - self._sent:
      absl_logging.warning(
        "--%s: %d of %d records were not sent; metrics.jsonl has all.",
        self._name,
        lost,
        self._written,
      )

  def _send(self) -> None:
    """Sends the queued records, up to the status that ends the run."""
    item = None
    warned = False
    while not isinstance(item, str):
      item = self._queue.get()
      try:
        if isinstance(item, str):
          self._tracker.finish(item)
        else:
          self._tracker.log(*item)
          self._sent += 1
      except Exception as error:  # Libraries raise errors of many kinds.
        if not warned:
          absl_logging.warning(
            "--%s: %s; training goes on.",
            self._name,
            " ".join(str(error).split())[:_MAX_ERROR],
          )
        warned = True


@contextlib.contextmanager
def open_senders(
  names: Sequence[str], *, folder: pathlib.Path, config: Values
) -> Iterator[list[Sender]]:
  """Opens trackers, and ends their runs when the block ends.

  Args:
    names: of the trackers, keys of `KINDS`.
    folder: of the run. Its name becomes the run's name, and its file
      `trackers.json` has the ids with which a resumed training continues.
    config: the configuration as plain values.

  Yields:
    A sender for each tracker.

  Raises:
    ValueError: a package is missing, or a tracker cannot be opened.
  """
  path = folder / _IDS
  status = "failed"
  ids = json_files.read(path) if path.is_file() else {}
  senders: list[Sender] = []
  try:
    for name in names:
      try:
        tracker = KINDS[name](folder, config, ids.get(name, ""))
      except ModuleNotFoundError as error:
        raise ValueError(
          f"--{name}: {error}; pip install 'anysearch_jax[{name}]'."
        ) from error
      except Exception as error:
        raise ValueError(
          f"--{name}: {type(error).__name__}: {error}. Without a network, set "
          "WANDB_MODE=offline or MLFLOW_TRACKING_URI=sqlite:///mlflow.db; "
          f"without its id in {path}, a new run begins."
        ) from error
      ids[name] = tracker.id
      senders.append(Sender(name, tracker))
    if ids:
      json_files.write(path, ids)
    yield senders
    status = "finished"
  except SystemExit as error:
    status = "stopped" if error.code == os.EX_TEMPFAIL else "failed"
    raise
  finally:
    for sender in senders:
      sender.close(status)
