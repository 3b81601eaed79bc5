"""Observations as plain values, and those of files that were written before.

A trajectory holds what its calls showed as `types.Observation`. Files of
earlier versions hold queries, documents (ids and titles) and spans instead. Of
them this is derived: the tool is `search`; the texts and the turn are read from
the `<information>` blocks, if there is one for each search. Otherwise, as in
Search-o1's markers, texts are "" and turns -1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from anysearch_jax import types
from anysearch_jax.environment import protocol

# A passage of an information block: what follows its rank. Skips the marks that
# systems put around rank and title, and keeps the title.
_PASSAGE = re.compile(r"^Doc \d+[^\w\n]*(?:Title: ?)?(.*)$", re.M)
_TITLE = re.compile(r"(.*?)(?:\)| ##>) (.*)", re.S)


def to_values(found: Sequence[types.Observation]) -> list[dict[str, Any]]:
  """Returns observations as JSON values; `from_values` restores them."""
  return [
    {
      "tool": each.tool,
      "argument": each.argument,
      "turn": each.turn,
      "tokens": each.tokens,
      "passages": [
        {"id": p.id, "title": p.title, "text": p.text} for p in each.passages
      ],
    }
    for each in found
  ]


def from_values(values: Mapping[str, Any]) -> tuple[types.Observation, ...]:
  """Returns the observations of a stored trajectory or episode.

  Args:
    values: as JSON, with `observations`. Without them, as earlier versions
      wrote: `queries`, `spans` (pairs, or mappings of `author` and `text`) and
      maybe `documents`.

  Returns:
    One observation for each charged call. Scores of passages are not stored.
  """
  if "observations" in values:
    return tuple(
      types.Observation(
        each["tool"],
        each["argument"],
        each["turn"],
        tuple(types.Passage(**passage) for passage in each["passages"]),
        each["tokens"],
      )
      for each in values["observations"]
    )
  queries = values["queries"]
  documents = values.get("documents") or [[] for _ in queries]
  blocks = _blocks(values["spans"])
  # The last search of a truncated episode has no block: no turn followed it.
  if len(blocks) not in (len(queries), len(queries) - 1):
    blocks = []
  blocks += [(-1, [])] * (len(queries) - len(blocks))
  return tuple(
    types.Observation(protocol.SEARCH, query, turn, _passages(texts, shown))
    for query, shown, (turn, texts) in zip(queries, documents, blocks)
  )


def _blocks(spans: Sequence[Any]) -> list[tuple[int, list[str]]]:
  """Returns turn and passages of each information block."""
  found, turn = [], -1
  for span in spans:
    author, text = span.values() if isinstance(span, Mapping) else span
    if author in ("model", types.Author.MODEL):
      turn += 1
    elif (block := protocol.last_content(text, "information")) is not None:
      found.append((turn, [each.strip() for each in _PASSAGE.findall(block)]))
  return found


def _passages(
  texts: Sequence[str], shown: Sequence[Any]
) -> tuple[types.Passage, ...]:
  """Returns passages from their lines, and from their documents if known."""
  if not shown:
    parts = [(_TITLE.fullmatch(text), text) for text in texts]
    return tuple(
      types.Passage("", m[1], m[2]) if m else types.Passage("", "", text)
      for m, text in parts
    )
  texts = texts if len(texts) == len(shown) else [""] * len(shown)
  names = [d.values() if isinstance(d, Mapping) else d for d in shown]
  return tuple(
    types.Passage(
      id_, title, text.removeprefix(" ".join(title.split())).lstrip(")#> ")
    )
    for text, (id_, title) in zip(texts, names, strict=True)
  )
