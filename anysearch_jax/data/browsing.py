"""What rows of BrowseComp-Plus hide, and what rows of FRAMES link."""

from __future__ import annotations

import base64
import hashlib
import itertools
import operator
import re
import urllib.parse
from collections.abc import Mapping
from typing import Any


def revealed(row: Mapping[str, Any]) -> dict[str, Any]:
  """Decrypts what a row of BrowseComp-Plus says, except texts of documents.

  A text is base64 of UTF-8 that is XORed with the repeated SHA-256 of a canary,
  so that no crawler reads answers beside their questions (texttron's
  BrowseComp-Plus, scripts_build_index/decrypt_dataset.py, as OpenAI's
  simple-evals, browsecomp_eval.py). A query with spaces is plain.

  Args:
    row: has the canary as `canary`, unless it is plain.

  Returns:
    `query`, `answer`, `gold_doc_ids` and `evidence_doc_ids`.

  Raises:
    ValueError, KeyError, TypeError: the row has another form or canary.
  """
  key = hashlib.sha256((row.get("canary") or "").encode()).digest()

  def shown(text: str) -> str:
    data = base64.b64decode(text, validate=True)
    return bytes(map(operator.xor, data, itertools.cycle(key))).decode()

  if " " in row["query"]:
    shown = str  # type: ignore[assignment]
  return {name: shown(row[name]) for name in ("query", "answer")} | {
    f"{kind}_doc_ids": [shown(each["docid"]) for each in row[f"{kind}_docs"]]
    for kind in ("gold", "evidence")
  }


def articles(row: Mapping[str, Any]) -> list[str]:
  """Returns the titles of the Wikipedia articles that a row of FRAMES links.

  A cell has an address, the text of a list, or several of them with remarks.
  """
  links = [
    link.split()[0].strip("'\"[],;")
    for name, cell in row.items()
    if name.startswith(("wiki_links", "wikipedia_link"))
    for link in re.split("(?=https?://)", str(cell))[1:]
  ]
  paths = (re.search(r"/wiki/([^?#]+)", link) for link in links)
  named = (urllib.parse.unquote(path[1]) for path in paths if path)
  return list(dict.fromkeys(name.replace("_", " ") for name in named))
