"""Additional inputs of `preparing`, besides the files that it prepares."""

from __future__ import annotations

import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from anysearch_jax.data import cells, files, formats


class BesideError(ValueError):
  """A file does not have the contents that its flag requires."""


class Beside(NamedTuple):
  """Additional inputs of `preparing.prepare`.

  Attributes:
    held_out: questions that training must not ask, besides those of the
      evaluation splits.
    aliases: by `answer_id`, the names that 2WikiMultihopQA's script accepts.
    corpus: file with the passages that training questions name by
      `gold_doc_ids`.
  """

  held_out: Collection[str] = ()
  aliases: Mapping[str, Sequence[str]] = {}
  corpus: pathlib.Path | None = None


NOTHING = Beside()


def read_questions(path: pathlib.Path) -> list[str]:
  """Returns the questions of a file, of any dataset and split.

  Raises:
    BesideError: a row is not a question; the error has its number.
    files.UnreadableError: the file cannot be read.
  """
  format_, out = None, []
  for number, row in files.rows(path):
    try:
      if isinstance(row, formats.MalformedError):
        raise row
      format_ = format_ or formats.recognize(row)
      if format_ is None:
        raise formats.MalformedError(f"no known format ({', '.join(row)})")
      out.append(formats.read(row, format_).question)
    except formats.MalformedError as error:
      raise BesideError(
        f"{path}, row {number}: {error}; expected a question. Correct it."
      ) from error
  return out


def read_aliases(path: pathlib.Path) -> dict[str, list[str]]:
  """Returns 2WikiMultihopQA's aliases and demonyms of entities, by their ids.

  Raises:
    BesideError: a row does not have the form of its `id_aliases.json`.
    files.UnreadableError: the file cannot be read.
  """
  names: dict[str, list[str]] = {}
  for number, row in files.rows(path):
    try:
      if isinstance(row, formats.MalformedError):
        raise row
      names[row["Q_id"]] = [
        cells.text(name)
        for column in ("aliases", "demonyms")
        for name in cells.listed(row, column)
      ]
    except (formats.MalformedError, KeyError, TypeError) as error:
      raise BesideError(
        f"{path}, row {number}: found no Q_id with aliases and demonyms "
        f"({error}); expected 2WikiMultihopQA's id_aliases.json."
      ) from error
  return names
