"""Looks up the texts of passages that questions name by their ids."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import Any

from anysearch_jax.data import cells, files


class CorpusError(ValueError):
  """A corpus has another layout or lacks a passage that a question names."""


def filled(metadata: Sequence[str], corpus: pathlib.Path) -> list[str]:
  """Adds `supporting` to metadata that has `gold_doc_ids` but no texts.

  Args:
    metadata: the metadata of questions, as JSON.
    corpus: JSON lines in Search-R1's layout (`id`, `contents`), also `.gz`.
      It is read once.

  Returns:
    The metadata in the same order.

  Raises:
    CorpusError: the corpus is not in this layout, or lacks a passage.
    files.UnreadableError: it cannot be read.
  """
  known: list[dict[str, Any]] = list(map(json.loads, metadata))
  lacking = [
    values
    for values in known
    if values.get("gold_doc_ids")
    and not any(p.get("text") for p in values.get("supporting", ()))
  ]
  passages = _read(
    corpus, {id_ for values in lacking for id_ in values["gold_doc_ids"]}
  )
  for values in lacking:
    values["supporting"] = [passages[id_] for id_ in values["gold_doc_ids"]]
  return [
    json.dumps(values, ensure_ascii=False, sort_keys=True) for values in known
  ]


def _read(corpus: pathlib.Path, ids: set[str]) -> dict[str, dict[str, str]]:
  """Returns the titles and texts of passages, by their ids."""
  found: dict[str, dict[str, str]] = {}
  for number, row in files.rows(corpus):
    if isinstance(row, cells.MalformedError) or not isinstance(
      row.get("contents"), str
    ):
      raise CorpusError(
        f"{corpus}, row {number}: found no passage, expected an id and "
        "contents, as in corpora of launch.build_index."
      )
    if (id_ := str(row.get("id"))) in ids:
      title, _, text = row["contents"].partition("\n")
      found[id_] = {"title": title.strip('"'), "text": text}
  if missing := sorted(ids - found.keys()):
    raise CorpusError(
      f"{corpus}: {len(missing)} of {len(ids)} passages that questions name "
      f"are not in it ({', '.join(missing[:5])}); name the corpus that their "
      "gold_doc_ids refer to."
    )
  return found
