"""Filters: which passages a run may find, by fields of the corpus's rows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from anysearch_jax.host import json_files
from anysearch_jax.retrieval import passages

Filters = Mapping[str, Sequence[str]]

# Characters that no database stores: NUL and lone surrogates.
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
    values = json_files.parse(text)
  except (ValueError, RecursionError):
    values = None
  if isinstance(values, dict) and values:
    allowed = {}
    for name, value in values.items():
      items = value if isinstance(value, list) else [value]
      allowed[name] = [field_text(item) for item in items]
    if all(texts and None not in texts for texts in allowed.values()):
      return {name: tuple(map(str, texts)) for name, texts in allowed.items()}
  raise ValueError(
    f"retrieval.filter: found {text!r:.100}, expected JSON with a text, a "
    'number or a list of these for each field, such as {"source": ["wiki", '
    '"news"], "year": 2018}.'
  )


def field_text(value: Any) -> str | None:
  """Returns a field's value as the text that is stored and compared.

  Returns None if the value is neither a text nor a number. Numbers are compared
  by their text, so 2018 and 2018.0 are "2018". U+FFFD replaces characters that
  no database stores.
  """
  if isinstance(value, bool) or not isinstance(value, str | int | float):
    return None
  if isinstance(value, float) and value.is_integer():
    value = int(value)
  return _UNSTORABLE.sub("\ufffd", str(value))


def check_fields(corpus: passages.Corpus, names: Sequence[str]) -> None:
  """Checks that the corpus has the fields; reads rows until it has seen all.

  Raises:
    ValueError: a name is empty or repeated, or no row has the field.
  """
  if "" in names or len(set(names)) < len(names):
    raise ValueError(
      f"fields: found {','.join(names)!r}, expected different names."
    )
  missing = set(names)
  for row in range(len(corpus)):
    if not missing:
      return
    fields = corpus.fields(row, sorted(missing))
    missing -= {name for name, value in fields.items() if value is not None}
  if missing:
    raise ValueError(
      f"fields: found no passage with the field {min(missing)!r}, expected a "
      "field of the corpus's rows."
    )


def row_fields(
  corpus: passages.Corpus, row: int, names: Sequence[str]
) -> dict[str, str]:
  """Returns fields of a row as texts; missing and null ones are left out.

  Args:
    corpus: the corpus.
    row: a row of it, from 0.
    names: names of the fields.

  Raises:
    ValueError: a value is neither a text nor a number.
  """
  texts = {}
  for name, value in corpus.fields(row, names).items():
    if value is None:
      continue
    text = field_text(value)
    if text is None:
      raise ValueError(
        f"Passage {corpus[row].id!r}: found {value!r:.60} in field {name!r}, "
        "expected a text or a number."
      )
    texts[name] = text
  return texts
