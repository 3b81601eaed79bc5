"""Loads the inputs of a report, rows and training runs, from folders."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers

from anysearch_jax.evaluation import columns, journal, metrics
from anysearch_jax.host import git_lfs, json_files
from anysearch_jax.report import study, trajectories

EPISODES = "episodes.jsonl"
# Number of complete episodes of each row, for the trajectory browser.
_SAMPLE_SIZE = 500
_SHOWN_ROLLOUTS = 3  # Last rollouts of a training run that the browser shows.


@dataclasses.dataclass(frozen=True)
class Source:
  """A row's evaluation folders, and the training run that contains them.

  Attributes:
    label: name of the row.
    folders: evaluations of one method; several are runs with different seeds.
      Empty if the run has no evaluation yet.
    run: the first folder's training run; None if it is not in one.
  """

  label: str
  folders: tuple[pathlib.Path, ...]
  run: pathlib.Path | None = None


def sources(item: str) -> list[Source]:
  """Finds the rows that an unlabelled command-line argument names.

  Args:
    item: text for `parse_item`; the folders are evaluations, or runs with
      `evaluation/<name>/` inside. Evaluations with equal labels form one row.

  Raises:
    ValueError: a folder does not exist, or is neither an evaluation nor a run;
      or only some of the folders have an evaluation.
  """
  label, paths = parse_item(item)
  evaluations_by_path = {path: evaluations(path) for path in paths}
  if not any(evaluations_by_path.values()):
    return [Source(label or paths[0].resolve().name, (), paths[0])]
  rows: dict[str, list[pathlib.Path]] = {}
  for path, folders in evaluations_by_path.items():
    if not folders:
      raise ValueError(_no_evaluation(path))
    for folder in folders:
      rows.setdefault(_label(label, path, folder), []).append(folder)
  sources = []
  for name, folders in rows.items():
    run = folders[0].parent.parent
    sources.append(Source(name, tuple(folders), run if _is_run(run) else None))
  return sources


def parse_item(item: str) -> tuple[str, tuple[pathlib.Path, ...]]:
  """Reads `folder` or `label=folder`, several folders joined by `+`.

  Both may contain `=` and `+`, see `anysearch report`; only a folder on its own
  may have a `+` in its name. Longer folder names are preferred. The label is ""
  if there is none. Raises ValueError if the item does not name existing
  folders.
  """
  starts = [i + 1 for i, character in enumerate(item) if character == "="]
  for start in [0, *starts]:
    label = item[: max(0, start - 1)].strip()
    folders = _folders(item[start:])
    if folders and (label or not start):
      return label, folders
  raise ValueError(
    f"{item}: found no such folder; expected folder or label=folder, several "
    "folders joined by +, all of which exist. Correct the path, or run what "
    "writes it first."
  )


def _folders(text: str) -> tuple[pathlib.Path, ...]:
  """Reads one existing folder, or several joined by `+`; else nothing."""
  whole = pathlib.Path(text.strip())
  names = [text] if whole.is_dir() else text.split("+")
  names = [name.strip() for name in names]
  if not all(name and pathlib.Path(name).is_dir() for name in names):
    return ()
  return tuple(map(pathlib.Path, names))


def evaluations(folder: pathlib.Path) -> list[pathlib.Path]:
  """Returns the folder if it is an evaluation, otherwise the run's evaluations.

  It is empty for a training run without an evaluation. Raises ValueError if the
  folder is neither an evaluation nor a run.
  """
  if (folder / EPISODES).is_file():
    return [folder]
  inside = sorted((folder / "evaluation").glob(f"*/{EPISODES}"))
  if not inside and not _is_run(folder):
    raise ValueError(_no_evaluation(folder))
  return [path.parent for path in inside]


def _no_evaluation(folder: pathlib.Path) -> str:
  return (
    f"{folder}: found neither {EPISODES} nor evaluation/*/{EPISODES}; expected "
    "the folder of a finished evaluation or of a run that has one. "
    f"{how_to_evaluate(folder)}"
  )


def how_to_evaluate(folder: pathlib.Path) -> str:
  """Says how a folder gets an evaluation, also while its training runs."""
  saved = folder / "checkpoints"
  if not any(path.name.isdecimal() for path in saved.glob("*")):
    return "Run anysearch evaluate first, or correct the path."
  return (
    "Evaluate its newest checkpoint first: anysearch evaluate --config=FILE "
    f"--checkpoint={folder} --output={folder}/evaluation/plain."
  )


def _label(label: str, path: pathlib.Path, folder: pathlib.Path) -> str:
  """Returns an evaluation's label: its run's, and its name unless `plain`.

  Args:
    label: the label of the command line; may be empty.
    path: the folder of the command line, a run or the evaluation itself.
    folder: the evaluation.
  """
  if path == folder and label:
    return label
  in_run = folder.parent.name == "evaluation"
  base = label or (folder.parent.parent if in_run else folder).resolve().name
  if in_run and folder.name != "plain":
    return f"{base}, {folder.name}"
  return base


def report_folder(source: Source) -> pathlib.Path:
  """Returns the folder for a row's report: its run, or its evaluation."""
  return source.run or source.folders[0]


def _is_run(folder: pathlib.Path) -> bool:
  return (folder / "metrics.jsonl").is_file()


def load_row(label: str, *folders: pathlib.Path) -> metrics.Row:
  """Reads the `episodes.jsonl` of one or more evaluations.

  Several folders form one row: evaluations of one method, of one training or
  of several.

  Raises ValueError if a budget is of more than searches, a file is missing, an
  episode is invalid, a (question, budget, seed) of a training occurs twice, or
  two policies are checkpoints of one training.
  """
  paths = [folder / EPISODES for folder in folders]
  for path in paths:
    if not path.is_file():
      raise ValueError(
        f"Row {label!r}: found no {path}; expected the folder of a finished "
        "evaluation. Run the evaluation first, or correct its path."
      )
  try:
    _check_trainings(folders)
    sample = columns.Sample(_SAMPLE_SIZE)
    trainings = [_training_of(folder) for folder in folders]
    table = columns.read(*paths, runs=trainings, sample=sample)
    uncapped = np.isinf([table.token_cap, table.dollar_cap, table.second_cap])
    if not uncapped.all():
      raise ValueError(
        "found budgets in more units than searches; expected searches alone. "
        "docs/budgets.md says how pairs of caps are compared."
      )
    return metrics.Row(label, tuple(sample.episodes()), table)
  except ValueError as error:
    raise ValueError(f"Row {label!r}: {error}") from error


def _check_trainings(folders: Sequence[pathlib.Path]) -> None:
  """Checks that no two evaluations played different policies of one run.

  Such policies are not independent, but would count as two trainings.
  """
  # By run: the training, the checkpoint and the folder of its first evaluation.
  first_by_run: dict[pathlib.Path, tuple[str, str, pathlib.Path]] = {}
  for folder in folders:
    policy = _policy_of(folder)
    if "checkpoint" in policy:
      run = pathlib.Path(policy["checkpoint"]).resolve()
      checkpoint = f"checkpoint {policy.get('rollout')}"
    else:
      policy_folder = pathlib.Path(policy.get("folder", ".")).resolve()
      run = policy_folder.parent
      checkpoint = policy_folder.name
      if not _is_run(run):
        continue  # The policy belongs to no run.
    training, first_checkpoint, first = first_by_run.setdefault(
      run, (_training_of(folder), checkpoint, folder)
    )
    # Runs of two machines may have one path, but not two checkpoints as well.
    if first_checkpoint != checkpoint and training != _training_of(folder):
      raise ValueError(
        f"{first} and {folder}: found two policies of one training, "
        f"{first_checkpoint} and {checkpoint} of {run}; expected one of each "
        "training, because its "
        "checkpoints are not independent. Give each a row of its own."
      )


def _training_of(folder: pathlib.Path) -> str:
  """Names the training whose policy an evaluation played.

  It is named by the policy, which `provenance.json` identifies; evaluations
  without one are named by the folder of their run.
  """
  policy = _policy_of(folder)
  for key in ("sha256", "scripted", "openai"):
    if policy.get(key):
      return f"{key} {policy[key]}"
  return str(folder.resolve().parent.parent)


def _policy_of(folder: pathlib.Path) -> Mapping[str, Any]:
  """Returns the identity of the policy that an evaluation played."""
  path = folder / "provenance.json"
  return json_files.read(path, missing={}).get("policy", {})


def decoder(folder: pathlib.Path) -> trajectories.Decoder | None:
  """Returns the decoder of an evaluation's policy, None if it is missing.

  `config.json` holds the policy's path at the time of the evaluation. If the
  run was moved since, its `policy` or `source` is used.
  """
  run = folder.parent.parent
  policy = json_files.read(folder / "config.json", missing={}).get("policy")
  folders = [pathlib.Path(policy)] if policy else []
  for policy_folder in [*folders, run / "policy", run / "source"]:
    path = policy_folder / "tokenizer.json"
    if path.is_file():
      git_lfs.refuse_pointer(path)
      core = tokenizers.Tokenizer.from_file(str(path))
      return lambda ids: core.decode(list(ids), skip_special_tokens=False)
  return None


def load_training(label: str, folder: pathlib.Path) -> study.Training:
  """Reads `metrics.jsonl` and, if there is one, `config.json` of a run.

  If a rollout was repeated after a resume, its last record counts. Raises
  ValueError if the metrics are missing, or a line of them is not JSON.
  """
  path = folder / "metrics.jsonl"
  if not path.is_file():
    raise ValueError(
      f"Training run {label!r}: found no {path}; expected the folder of a "
      "training run. Train it first, or correct its path."
    )
  advice = "Remove the line if a crash cut it."
  with path.open("rb") as file:
    lines = journal.parse(
      file, source=str(path), row_kind="rollout", advice=advice
    )
    records = {
      record.get("rollout", number): record
      for number, (_, record) in enumerate(lines)
    }
  return study.Training(
    label,
    tuple(records[key] | {"rollout": key} for key in sorted(records)),
    json_files.read(folder / "config.json", missing={}),
  )


def recorded_rollouts(label: str, folder: pathlib.Path) -> trajectories.Sample:
  """Reads a run's last recorded rollouts, with rewards and advantages.

  The `seed` of an episode is the number of its rollout; trajectories without an
  advantage are left out.
  """
  paths = sorted((folder / "trajectories").glob("rollout-*.jsonl"))
  episodes = []
  for path in paths[-_SHOWN_ROLLOUTS:]:
    rollout = int(path.stem.rpartition("-")[2])
    for group in map(json.loads, path.read_bytes().splitlines()):
      shared = {k: v for k, v in group.items() if k != "trajectories"}
      episodes += [
        shared | trajectory | {"seed": rollout, "training": True}
        for trajectory in group["trajectories"]
        if "advantage" in trajectory
      ]
  return trajectories.Sample(f"{label}, training", episodes)
