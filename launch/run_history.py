"""What a run folder notes of its run, and of how it changed.

`config.json` is the configuration of the newest start, `provenance.json` what
that start learned from. Its `changes` lists what differed at each start that
resumed: the rollout from which it holds, and each setting's old and new value.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from anysearch_jax import config as config_lib
from anysearch_jax.config import changes as config_changes
from anysearch_jax.config import values as config_values
from anysearch_jax.host import disk, json_files

_CONFIG, _PROVENANCE = "config.json", "provenance.json"
# What a run is trained on; other answers to its searches are a change of
# learning, because the same corpus may be served at another address.
_IDENTITY = ("policy", "questions")


def begin(
  folder: pathlib.Path,
  config: config_lib.ExperimentConfig,
  provenance: Mapping[str, Any],
  *,
  allow: bool,
) -> None:
  """Makes the run folder, or checks that its run may resume.

  Nothing of a run that is there changes: `resumed` does that, once the
  checkpoint was looked at too.

  Args:
    folder: of the run.
    config: of this start.
    provenance: as `parts.provenance` gives it.
    allow: whether settings of learning may change.

  Raises:
    ValueError: the folder holds another run, or one that learned otherwise.
  """
  folder.mkdir(parents=True, exist_ok=True)
  check(folder, config, allow=allow)
  path = folder / _PROVENANCE
  if not path.is_file():
    _write(path, provenance)
  changed = _sources(json_files.read(path), provenance)
  if refusal := config_changes.refusal(changed, allow=allow):
    raise ValueError(f"{path}: {refusal}")
  if not (folder / _CONFIG).is_file():
    _write(folder / _CONFIG, config_values.to_dict(config))


def check(
  folder: pathlib.Path, config: config_lib.ExperimentConfig, *, allow: bool
) -> None:
  """Checks a configuration against that of the folder's run, if there is one.

  Raises:
    ValueError: as `begin`.
  """
  path = folder / _CONFIG
  if path.is_file():
    changed = config_changes.changes(json_files.read(path), config)
    if refusal := config_changes.refusal(changed, allow=allow):
      raise ValueError(f"{path}: {refusal}")


def resumed(
  folder: pathlib.Path,
  config: config_lib.ExperimentConfig,
  provenance: Mapping[str, Any],
  *,
  rollout: int,
  changes: Sequence[config_changes.Change],
) -> list[config_changes.Change]:
  """Has the folder tell of this start, and keeps what was there in `changes`.

  Args:
    folder: of the run, which `begin` has checked.
    config: of this start.
    provenance: of this start.
    rollout: the first one that it trains on.
    changes: what differs from the checkpoint that it resumes from.

  Returns:
    What differs from the start before, or else from the checkpoint.
  """
  noted = json_files.read(folder / _PROVENANCE)
  before = json_files.read(folder / _CONFIG)
  changed = [
    *(config_changes.changes(before, config) or changes),
    *_sources(noted, provenance),
  ]
  history = noted.get("changes", [])
  entry = {
    "rollout": rollout,
    "settings": {c.path: [c.old, c.new] for c in changed},
  }
  # A start that was killed before its first checkpoint made the same change.
  if changed and entry not in history[-1:]:
    history.append(entry)
  # First, because a change that is not noted yet is found again by the
  # checkpoint.
  _write(folder / _CONFIG, config_values.to_dict(config))
  _write(
    folder / _PROVENANCE,
    # The packages are those of the first start.
    {**noted, **provenance, "packages": noted["packages"]}
    | ({"changes": history} if history else {}),
  )
  return changed


def _sources(
  noted: Mapping[str, Any], provenance: Mapping[str, Any]
) -> list[config_changes.Change]:
  """What a start learns from that the one before did not.

  Folders may move: what lies in them is compared by its hash.
  """
  found = []
  for name in (*_IDENTITY, "retriever"):
    old, new = (
      dict(config_values.leaves(json.loads(json.dumps({name: p[name]}))))
      for p in (noted, provenance)
    )
    kind = (
      config_changes.Kind.IDENTITY
      if name in _IDENTITY
      else config_changes.Kind.LEARNING
    )
    found += [
      config_changes.Change(path, kind, old.get(path), new.get(path))
      for path in old | new
      if old.get(path) != new.get(path) and not path.endswith(".folder")
    ]
  return found


def _write(path: pathlib.Path, values: Mapping[str, Any]) -> None:
  """Writes a JSON file, unless it holds these values already."""
  text = json.dumps(values, indent=2) + "\n"
  if not path.is_file() or path.read_text() != text:
    disk.write_whole(path, text)
