"""Which argument of a tool is the query, and which the number of results."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

# In the order in which they are taken; case and punctuation do not matter.
QUERIES = (
  *("query", "q", "searchquery", "question", "search", "searchterm", "term"),
  *("text", "input", "prompt", "keywords", "request"),
)
COUNTS = (
  *("k", "topk", "topn", "numresults", "maxresults", "nresults", "limit"),
  *("count", "num", "n", "size", "resultscount", "numberofresults"),
  *("maxnumresults", "pagesize"),
)


@dataclasses.dataclass(frozen=True)
class Arguments:
  """How a search becomes the arguments of a call.

  query: name of the argument for the query.
  count: name of the argument for the number of results; "": none.
  most: the largest number that the tool allows; None: it names none.
  is_list: the query is an item of a list.
  fixed: arguments of every call.
  """

  query: str
  count: str = ""
  most: int | None = None
  is_list: bool = False
  fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def of(self, query: str, k: int) -> dict[str, Any]:
    """Returns the arguments of a call."""
    values: dict[str, Any] = dict(self.fixed)
    values[self.query] = [query] if self.is_list else query
    if self.count:
      values[self.count] = k if self.most is None else min(k, self.most)
    return values


def choose(tool: Any, names: Sequence[str]) -> str:
  """Returns the tool to call among those of a server.

  Args:
    tool: its configured name; "": the only tool, or the one named `search`.
    names: the tools of the server.

  Raises:
    ValueError: there is no such tool, or several could be meant.
  """
  listed = ", ".join(sorted(names)[:20]) or "none"
  if tool in names:
    return tool
  if tool:
    raise ValueError(
      f"retrieval.mcp.tool: found {tool!r}; the server's tools are: {listed}."
    )
  if len(names) == 1 or "search" in names:
    return names[0] if len(names) == 1 else "search"
  raise ValueError(
    "retrieval.mcp.tool: found nothing; expected the name of one of the "
    f"server's tools: {listed}."
  )


def detect(
  schema: Mapping[str, Any],
  *,
  query: str = "",
  count: str = "",
  fixed: Mapping[str, Any] | None = None,
) -> Arguments:
  """Returns how a search becomes arguments, from the tool's input schema.

  Args:
    schema: JSON schema of the tool's arguments.
    query, count: configured names; "": detected by name and type.
    fixed: arguments of every call.

  Raises:
    ValueError: a name is no argument of the tool, the query cannot be told, or
      the tool requires other arguments.
  """
  fixed = dict(fixed or {})
  found = schema.get("properties")
  properties = {
    name: each if isinstance(each, Mapping) else {}
    for name, each in (found if isinstance(found, Mapping) else {}).items()
  }
  listed = ", ".join(properties) or "none"
  for field, name in (("query", query), ("k", count)):
    if name and name not in properties:
      raise ValueError(
        f"retrieval.mcp.{field}: found {name!r}; the tool's arguments are: "
        f"{listed}."
      )
    if name and name in fixed:
      raise ValueError(
        f"retrieval.mcp.arguments: found {name!r}, which is retrieval.mcp."
        f"{field} too; expected other arguments."
      )
  if unknown := [name for name in fixed if name not in properties]:
    raise ValueError(
      f"retrieval.mcp.arguments: found {unknown[0]!r}; the tool's arguments "
      f"are: {listed}."
    )
  required = _required(schema)
  free = {k: v for k, v in properties.items() if k not in fixed}
  query = query or _query(free, required)
  if not query:
    raise ValueError(
      "retrieval.mcp.query: found nothing, and no argument that is clearly a "
      f"query; expected one of the tool's arguments: {listed}."
    )
  rest = {k: v for k, v in free.items() if k != query}
  count = count or _named(rest, COUNTS, ("integer", "number"))
  missing = [n for n in required if n not in (query, count) and n not in fixed]
  if missing:
    raise ValueError(
      f"retrieval.mcp.arguments: the tool also requires "
      f"{', '.join(missing)}; expected them in a JSON object."
    )
  most = properties.get(count, {}).get("maximum")
  return Arguments(
    query,
    count,
    int(most) if isinstance(most, int | float) and most >= 1 else None,
    _kinds(properties[query]) == {"array"},
    fixed,
  )


def _required(schema: Mapping[str, Any]) -> list[str]:
  found = schema.get("required")
  return (
    [n for n in found if isinstance(n, str)] if isinstance(found, list) else []
  )


def _query(properties: Mapping[str, Any], required: Sequence[str]) -> str:
  """Returns the argument that is a query: by name, or the only candidate."""
  named = _named(properties, QUERIES, ("string",))
  named = named or _named(properties, ("queries", *QUERIES), ("array",))
  if named:
    return named
  texts = [k for k, v in properties.items() if "string" in _kinds(v)]
  needed = [name for name in texts if name in required]
  for some in (needed, texts):
    if len(some) == 1:
      return some[0]
  return ""


def _named(
  properties: Mapping[str, Any], names: Sequence[str], kinds: Sequence[str]
) -> str:
  by_name = {
    re.sub(r"[^a-z]", "", name.lower()): name
    for name, each in properties.items()
    if _kinds(each) & set(kinds)
  }
  return next((by_name[name] for name in names if name in by_name), "")


def _kinds(schema: Any) -> set[str]:
  """Returns the JSON types that a schema allows, besides null."""
  if not isinstance(schema, Mapping):
    return set()
  own = schema.get("type")
  kinds = {own} if isinstance(own, str) else set()
  if isinstance(own, list):
    kinds = {each for each in own if isinstance(each, str)}
  for key in ("anyOf", "oneOf"):
    some = schema.get(key)
    for each in some if isinstance(some, list) else ():
      kinds |= _kinds(each)
  return kinds - {"null"}
