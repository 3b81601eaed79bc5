"""The outcomes of a study's finished trainings, in one file, and its tables."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from anysearch_jax import config as config_lib
from anysearch_jax.config import values as config_values
from anysearch_jax.evaluation import columns, outcomes
from anysearch_jax.report import evidence_tables, tables
from configs import study_rows
from launch import flags as launch_flags


def settings(
  row: study_rows.Row, trained: study_rows.Row, *, config: str
) -> str:
  """Returns a digest of what defines a row: how it is trained and evaluated.

  It has the values that differ from the defaults, without seed and name, so
  that a new setting with its default changes no digest.

  Args:
    row: the row.
    trained: the row whose policy it evaluates; itself if it trains its own.
    config: the study's configuration file.
  """
  parts = []
  for one, overrides in (
    (trained, trained.overrides),
    (row, (*row.overrides, *row.evaluation)),
  ):
    loaded = launch_flags.load_config(one.config or config)
    changed = launch_flags.override(loaded, overrides)
    changed = dataclasses.replace(changed, seed=0, name="")
    parts.append(
      _changed(
        config_values.to_dict(changed),
        config_values.to_dict(config_lib.ExperimentConfig()),
      )
    )
  untrained = row.policy_of == study_rows.UNTRAINED
  return outcomes.digest(
    json.dumps(part, sort_keys=True)
    for part in (*parts, row.scaffold, untrained)
  )


def _changed(found: Any, default: Any) -> Any:
  if not isinstance(found, dict) or not isinstance(default, dict):
    return found
  return {
    key: _changed(value, default.get(key))
    for key, value in found.items()
    if value != default.get(key)
  }


class Store:
  """The outcomes of all finished trainings of a study.

  Args:
    path: the study's own file; need not exist.
    others: files of the same study that was run elsewhere.
    digests: of `settings`, by the names of the study's rows.

  Raises:
    ValueError: a file is damaged or missing, or holds a row that had other
      settings.
  """

  def __init__(
    self,
    path: pathlib.Path,
    others: Sequence[pathlib.Path],
    digests: Mapping[str, str],
  ):
    self._path, self._digests = path, digests
    self._found: dict[tuple[str, int], outcomes.Outcomes] = {}
    for other in [*others, *([path] if path.is_file() else [])]:
      try:
        trainings = outcomes.read(other)
      except OSError as error:
        raise ValueError(f"--outcomes: {error}") from error
      for one in trainings:
        expected = digests.get(one.row)
        if expected is not None and one.settings != expected:
          raise ValueError(
            f"{other}: {one.row} with seed {one.seed} had other settings than "
            "this study's row; delete its line, or run the study with the "
            "configuration of then."
          )
        self._found[one.key] = one

  @property
  def known(self) -> frozenset[tuple[str, int]]:
    """Row and seed of each training."""
    return frozenset(self._found)

  def add(
    self, finished: Iterable[tuple[str, int, pathlib.Path]], questions: int
  ) -> list[str]:
    """Adds finished evaluations and writes the file.

    Args:
      finished: row, seed and `episodes.jsonl` of each.
      questions: how many every training is asked at each budget.

    Returns:
      A sentence for each evaluation that cannot be used.
    """
    unusable = []
    for row, seed, path in finished:
      if (row, seed) in self._found:
        continue
      try:
        found = outcomes.of(
          columns.read(path), row=row, seed=seed, settings=self._digests[row]
        )
        if found.right.shape[1] != questions:
          raise ValueError(
            f"{row}, seed {seed}: found {found.right.shape[1]} questions, "
            f"expected {questions}, as this study asks."
          )
      except ValueError as error:
        unusable.append(str(error))
      else:
        self._found[found.key] = found
    outcomes.write(self._path, self._found.values())
    return unusable

  def page(
    self,
    title: str,
    rows: Sequence[study_rows.Row],
    families: Mapping[str, Sequence[evidence_tables.Claim]],
  ) -> str:
    """Returns the tables and the claims as Markdown.

    Args:
      title: of the page.
      rows: of the study, the one that others are compared with first.
      families: the claims, by the heading under which they are decided.
    """
    trainings = {
      row.name: [one for one in self._found.values() if one.row == row.name]
      for row in rows
    }
    trainings = {
      name: sorted(found, key=lambda one: one.seed)
      for name, found in trainings.items()
      if found
    }
    labels = {row.name: row.label for row in rows}
    first, parts = rows[0].name, [f"# {title}\n"]
    for table in dict.fromkeys(row.table for row in rows):
      shown = {
        row.name: trainings[row.name]
        for row in rows
        if row.name in trainings and (row.table == table or row.name == first)
      }
      if not shown.keys() - {first} and table != rows[0].table:
        continue
      parts += [f"## Table: {table}\n"]
      parts += [tables.to_markdown(evidence_tables.accuracy(shown, labels))]
      if first in shown and len(shown) > 1:
        differences = evidence_tables.against(first, shown, labels)
        parts += [tables.to_markdown(differences)]
    for heading, claims in families.items():
      verdicts = evidence_tables.verdicts(claims, trainings)
      parts += [
        f"## Claims: {heading}\n",
        evidence_tables.claims_table(verdicts),
      ]
    return "\n".join(parts)
