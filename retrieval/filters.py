"""Filters: which passages a run may find, by fields of the corpus's rows."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from anysearch_jax.retrieval import passages

Filters = Mapping[str, Sequence[str]]

# Characters that no database stores: zeros and lone surrogates.
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")


def parse(text: str) -> dict[str, tuple[str, ...]]:
  """Returns the values that each field may have; {} for "".

  Args:
    text: JSON, a value or a list of values for each field, such as
      `{"source": ["wiki", "news"], "year": 2018}`.

  Raises:
    ValueError: the text is not such JSON.
  """
  if not text:
    return {}
  try:
    values = json.loads(text)
  except (ValueError, RecursionError):
    values = None
  if isinstance(values, dict) and values:
    lists = {k: v if isinstance(v, list) else [v] for k, v in values.items()}
    if all(v and None not in map(value, v) for v in lists.values()):
      return {k: tuple(str(value(x)) for x in v) for k, v in lists.items()}
  raise ValueError(
    f"retrieval.filter: found {text!r:.100}, expected JSON with a text, a "
    'number or a list of these for each field, such as {"source": ["wiki", '
    '"news"], "year": 2018}.'
  )


def value(found: Any) -> str | None:
  """Returns a field's value as it is stored and compared; None if it is none.

  Numbers are compared by their text, so 2018 and 2018.0 are "2018". U+FFFD
  replaces what no database stores.
  """
  if isinstance(found, bool) or not isinstance(found, str | int | float):
    return None
  if isinstance(found, float) and found.is_integer():
    found = int(found)
  return _UNSTORABLE.sub("\ufffd", str(found))


def check_fields(corpus: passages.Corpus, names: Sequence[str]) -> None:
  """Refuses fields that a build cannot keep; reads rows until each is found.

  Raises:
    ValueError: a name is empty or there twice, or no row has the field.
  """
  if "" in names or len(set(names)) < len(names):
    raise ValueError(
      f"fields: found {','.join(names)!r}, expected different names."
    )
  missing = set(names)
  for row in range(len(corpus)):
    if not missing:
      return
    found = corpus.fields(row, sorted(missing))
    missing -= {name for name, each in found.items() if each is not None}
  if missing:
    raise ValueError(
      f"fields: found no passage with the field {min(missing)!r}, expected a "
      "field of the corpus's rows."
    )


def of_row(
  corpus: passages.Corpus, row: int, names: Sequence[str]
) -> dict[str, str]:
  """Returns the values of a row's fields, as texts; missing ones are left out.

  Raises:
    ValueError: a value is neither a text nor a number.
  """
  out = {}
  for name, found in corpus.fields(row, names).items():
    if found is None:
      continue
    text = value(found)
    if text is None:
      raise ValueError(
        f"Passage {corpus[row].id!r}: found {found!r:.60} in field {name!r}, "
        "expected a text or a number."
      )
    out[name] = text
  return out
