"""The record of a run in its folder, and of its changes.

`config.json` is the configuration of the latest start, `provenance.json` the
policy, questions, retriever and packages of the run. Its `changes` has an entry
for each resumed start that differed: the rollout from which the change holds,
and each setting's old and new value.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from anysearch_jax import config as config_lib
from anysearch_jax.config import settings as config_settings
from anysearch_jax.host import disk, json_files

_CONFIG = "config.json"
_PROVENANCE = "provenance.json"
# A run cannot resume with another policy, other questions or other texts.
# Another retriever is only a change of learning, because its identity may
# change although the corpus is the same, for example with the server's address.
_IDENTITY = (
  "policy",
  "questions",
  "prompts",
  "evidence",
  "demonstrations",
)


def begin(
  folder: pathlib.Path,
  config: config_lib.ExperimentConfig,
  provenance: Mapping[str, Any],
  *,
  allow: bool,
) -> None:
  """Creates the run folder, or checks that the run in it may resume.

  An existing run is not modified here: `record_start` does that after the
  checkpoint has been checked too.

  Args:
    folder: the run folder.
    config: configuration of this start.
    provenance: result of `parts.provenance`.
    allow: whether learning settings may differ from those of the run.

  Raises:
    ValueError: the folder contains another run, or learning settings differ and
      `allow` is false.
  """
  folder.mkdir(parents=True, exist_ok=True)
  check_config(folder, config, allow=allow)
  path = folder / _PROVENANCE
  if not path.is_file():
    _write(path, provenance)
  differences = _sources(json_files.read(path), provenance)
  if refusal := config_settings.refusal(differences, allow=allow):
    raise ValueError(f"{path}: {refusal}")
  if not (folder / _CONFIG).is_file():
    _write(folder / _CONFIG, config_settings.to_dict(config))


def check_config(
  folder: pathlib.Path, config: config_lib.ExperimentConfig, *, allow: bool
) -> None:
  """Compares a configuration with that of the folder's run, if there is one.

  Args:
    folder: the run folder.
    config: configuration of this start.
    allow: whether learning settings may differ from those of the run.

  Raises:
    ValueError: as for `begin`.
  """
  path = folder / _CONFIG
  if path.is_file():
    differences = config_settings.changes(json_files.read(path), config)
    if refusal := config_settings.refusal(differences, allow=allow):
      raise ValueError(f"{path}: {refusal}")


def record_start(
  folder: pathlib.Path,
  config: config_lib.ExperimentConfig,
  provenance: Mapping[str, Any],
  *,
  rollout: int,
  changes: Sequence[config_settings.Change],
) -> list[config_settings.Change]:
  """Records this start in the run folder, and the differences in `changes`.

  Args:
    folder: the run folder.
    config: configuration of this start.
    provenance: result of `parts.provenance`.
    rollout: the first rollout that this start trains on.
    changes: differences from the checkpoint that it resumes from.

  Returns:
    The settings that differ from the previous start or, if none do, from the
    checkpoint; then the sources that differ.
  """
  record = json_files.read(folder / _PROVENANCE)
  previous_config = json_files.read(folder / _CONFIG)
  differences = [
    *(config_settings.changes(previous_config, config) or changes),
    *_sources(record, provenance),
  ]
  history = record.get("changes", [])
  entry = {
    "rollout": rollout,
    "settings": {c.path: [c.old, c.new] for c in differences},
  }
  # A start that was killed before its first checkpoint noted the same change.
  if differences and entry not in history[-1:]:
    history.append(entry)
  # config.json comes first: if the process dies between the two writes, the
  # next start finds the change again by comparing with the checkpoint.
  _write(folder / _CONFIG, config_settings.to_dict(config))
  # The packages remain those of the first start.
  values = {**record, **provenance, "packages": record["packages"]}
  if history:
    values["changes"] = history
  _write(folder / _PROVENANCE, values)
  return differences


def _sources(
  record: Mapping[str, Any], provenance: Mapping[str, Any]
) -> list[config_settings.Change]:
  """Returns the changes of the run's inputs between two starts.

  Folders and files may move, because their contents are compared by hash. The
  names of what a user wrote are compared in config.json, and their hashes here.
  """
  changes = []
  for name in (*_IDENTITY, "retriever", "own"):
    old = _leaves(name, record)
    new = _leaves(name, provenance)
    kind = config_settings.Kind.LEARNING
    if name in _IDENTITY:
      kind = config_settings.Kind.IDENTITY
    changes += [
      config_settings.Change(
        path=path, kind=kind, old=old.get(path), new=new.get(path)
      )
      for path in old | new
      if old.get(path) != new.get(path)
      and not path.endswith((".folder", ".file", ".name"))
    ]
  return changes


def _leaves(name: str, provenance: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the values of one source by path, as JSON stores them."""
  values = json.loads(json.dumps({name: provenance.get(name)}))
  return dict(config_settings.leaves(values))


def _write(path: pathlib.Path, values: Mapping[str, Any]) -> None:
  """Writes a JSON file, unless it already contains these values."""
  text = json_files.text(values)
  if not path.is_file() or path.read_text() != text:
    disk.write_whole(path, text)
