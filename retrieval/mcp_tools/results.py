"""Passages in a tool's result: structured, JSON in a text, or plain text."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from anysearch_jax import types

# Keys of lists of results, and of a result's parts, in the order of choice.
_LISTS = (
  *("passages", "results", "documents", "docs", "hits", "result", "items"),
  *("data", "sources", "organic", "matches", "chunks", "pages", "content"),
)
_TEXTS = (
  *("text", "contents", "content", "passage", "page_content", "body"),
  *("raw_content", "markdown", "chunk", "snippet", "description", "summary"),
)
_TITLES = ("title", "name", "heading", "headline", "filename")
_IDS = ("id", "_id", "url", "link", "uri", "href", "doc_id", "docid", "source")
_SCORES = ("score", "similarity", "relevance", "relevance_score")
# Objects that hold the parts of a result.
_WITHIN = ("document", "metadata", "_source", "entity", "payload")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")


def passages(result: Any) -> tuple[types.Passage, ...] | None:
  """Returns the passages of a tool's result, in its order.

  Structured content comes first, then JSON in a text block, then each text as
  a passage. A passage without an id gets one from its text.

  Args:
    result: an `mcp_types.CallToolResult` without error.

  Returns:
    The passages; None if the result is neither empty nor text.
  """
  structured = _of_value(result.structured_content)
  if structured is not None:
    return structured
  found: list[types.Passage] = []
  is_text = not result.content
  for block in result.content:
    some = _of_block(block)
    is_text |= some is not None
    found += some or ()
  return tuple(found) if is_text else None


def said(result: Any) -> str:
  """Returns the texts of a result, such as the message of an error."""
  texts = (getattr(block, "text", None) for block in result.content)
  return " ".join(text for text in texts if isinstance(text, str))


def _of_block(block: Any) -> Sequence[types.Passage] | None:
  """Returns the passages of a content block; None if it has no text."""
  if block.type == "text":
    return _of_text(block.text)
  if block.type == "resource":
    text = getattr(block.resource, "text", None)
    if isinstance(text, str):
      return _made({"id": str(block.resource.uri), "text": text})
  if block.type == "resource_link":
    return _made(
      {
        "id": str(block.uri),
        "title": block.title or block.name,
        "text": block.description or block.name,
      }
    )
  return None


def _of_text(text: str) -> Sequence[types.Passage]:
  if text.lstrip()[:1] in ("{", "["):
    try:
      value = json.loads(text)
    except (ValueError, RecursionError):
      value = None
    found = _of_value(value)
    if found is not None:
      return found
  return _made(text)


def _of_value(value: Any) -> tuple[types.Passage, ...] | None:
  """Returns the passages in a JSON value; None if it has no results."""
  items = _items(value)
  if items is None:
    return tuple(_made(value)) or None if isinstance(value, Mapping) else None
  made = [passage for item in items for passage in _made(item)]
  return tuple(made) if made or not items else None


def _items(value: Any) -> list[Any] | None:
  """Returns the list of results in a JSON value."""
  if isinstance(value, list):
    # Of several queries' lists, only ours is there.
    is_nested = len(value) == 1 and isinstance(value[0], list)
    return value[0] if is_nested else value
  if not isinstance(value, Mapping):
    return None
  for key in _LISTS:
    if isinstance(value.get(key), list):
      return _items(value[key])
  for key in _LISTS:
    if isinstance(value.get(key), Mapping):
      return _items(value[key])
  # Some wrap text that is JSON itself.
  inner = value.get("result")
  if isinstance(inner, str) and inner.lstrip()[:1] in ("{", "["):
    try:
      return _items(json.loads(inner))
    except (ValueError, RecursionError):
      return None
  return None


def _made(item: Any) -> Sequence[types.Passage]:
  """Returns a result as a passage; none if it has no text."""
  if isinstance(item, str):
    item = {"text": item}
  if not isinstance(item, Mapping):
    return ()
  parts = [item, *(v for k in _WITHIN if isinstance(v := item.get(k), Mapping))]
  text = _first(parts, _TEXTS) or _first(parts, ("result",))
  title = _first(parts, _TITLES)
  if not title and "contents" in {*parts[0], *parts[-1]} and "\n" in text:
    title, text = text.split("\n", 1)  # Search-R1's form.
  text = text.strip() or title
  if not text:
    return ()
  digest = hashlib.sha256(f"{title}\n{text}".encode()).hexdigest()
  name = _first(parts, _IDS) or f"sha256:{digest[:16]}"
  return (types.Passage(name, " ".join(title.split()), text, _score(parts)),)


def _first(parts: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> str:
  for part in parts:
    for key in keys:
      value = part.get(key)
      if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
      if isinstance(value, str) and value.strip():
        return _CONTROL.sub("", value)
  return ""


def _score(parts: Sequence[Mapping[str, Any]]) -> float:
  for part in parts:
    for key in _SCORES:
      value = part.get(key)
      if isinstance(value, int | float) and not isinstance(value, bool):
        try:
          return float(value) if math.isfinite(value) else 0.0
        except OverflowError:
          return 0.0
  return 0.0
