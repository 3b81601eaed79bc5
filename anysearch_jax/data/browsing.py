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
  """Returns query, answer and ids of documents of a row of BrowseComp-Plus.

  Texts are base64 of UTF-8 that is XORed with the repeated SHA-256 of a canary,
  the row's `canary` (texttron/BrowseComp-Plus, scripts_build_index/
  decrypt_dataset.py); a query with spaces is plain.

  Raises:
    ValueError, KeyError, TypeError: the row has another form or canary.
  """
  key = hashlib.sha256((row.get("canary") or "").encode()).digest()

  def shown(text: str) -> str:
    if " " in row["query"]:
      return text
    data = base64.b64decode(text, validate=True)
    return bytes(map(operator.xor, data, itertools.cycle(key))).decode()

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
