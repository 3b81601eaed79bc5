"""The stages of a pipeline, from a TOML file.

    [[stage]]
    retrieve = { kind = "index", index = "indexes/bm25" }
    keep = 100

    [[stage]]
    retrieve = { kind = "index", index = "indexes/e5" }
    keep = 100
    deadline = 2.0
    optional = true

    [[stage]]
    rerank = { model = "models/bge-reranker-base" }
    keep = 10

    [[stage]]
    cut = { score = 0.0 }

All stages that retrieve come first; several are asked at the same time and
fused. `retrieve` has the fields of `config.RetrievalConfig`.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

KINDS = ("retrieve", "rerank", "cut")
_MOST_BYTES = 1 << 20
_OPTIONS = {
  "rerank": {
    "model": str,
    "url": str,
    "name": str,
    "key_variable": str,
    "max_tokens": int,
    "batch": int,
  },
  "cut": {"score": float, "characters": int},
}
_LEAST = {"max_tokens": 1, "batch": 1, "characters": 1, "score": -math.inf}
_KEEP = {"retrieve": 100, "rerank": 10, "cut": 100}


@dataclasses.dataclass(frozen=True)
class Stage:
  """One stage.

  Attributes:
    kind: one of `KINDS`.
    options: what the stage does, checked by whoever makes it.
    name: a name of its own, such as `rerank`.
    keep: the most passages of a query that the stage hands on.
    deadline: seconds that the stage may take for a batch of queries.
    cache: number of queries (of a reranker: of passages) whose results are
      kept; 0: none.
    optional: whether a search goes on without the stage if it fails or is late;
      otherwise the search fails.
  """

  kind: str
  options: Mapping[str, Any]
  name: str
  keep: int
  deadline: float = 30.0
  cache: int = 16384
  optional: bool = False

  def __post_init__(self):
    where = f"stage {self.name!r}"
    for field, least in (("keep", 1), ("cache", 0)):
      found = getattr(self, field)
      if type(found) is not int or found < least:
        raise ValueError(
          f"{where}: {field} is {found!r}, expected a number of at least "
          f"{least}."
        )
    if (
      type(self.deadline) not in (int, float)
      or not 0 < self.deadline < math.inf
    ):
      raise ValueError(
        f"{where}: deadline is {self.deadline!r}, expected seconds above 0."
      )
    if type(self.optional) is not bool:
      raise ValueError(
        f"{where}: optional is {self.optional!r}, expected true or false."
      )


def read(path: str | pathlib.Path) -> tuple[Stage, ...]:
  """Reads the stages of a file.

  Raises:
    ValueError: the file is missing or is not a pipeline; the message names it.
  """
  path = pathlib.Path(path)
  try:
    with path.open("rb") as file:
      content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
      raise ValueError(f"it has more than {_MOST_BYTES} bytes")
    values = tomllib.loads(content.decode())
  except (OSError, ValueError, RecursionError) as error:
    raise ValueError(
      f"{path}: found no pipeline ({error}); expected a TOML file of stages, "
      "see docs/retrieval.md."
    ) from error
  try:
    return parse(values)
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from error


def parse(values: Mapping[str, Any]) -> tuple[Stage, ...]:
  """Returns the stages of a parsed file.

  Raises:
    ValueError: a key or value is invalid, or the stages are in another order.
  """
  tables = values.get("stage")
  if set(values) != {"stage"} or not isinstance(tables, list) or not tables:
    raise ValueError(
      f"found the keys {', '.join(values) or 'of nothing'}, expected only "
      "[[stage]], at least once."
    )
  stages: list[Stage] = []
  for number, table in enumerate(tables, start=1):
    stages.append(_stage(table, number, [each.name for each in stages]))
  kinds = [stage.kind for stage in stages]
  first = kinds.count("retrieve")
  if not first or "retrieve" in kinds[first:]:
    raise ValueError(
      f"found stages that {', '.join(kinds)}; expected one or more that "
      "retrieve, before all others."
    )
  return tuple(stages)


def _stage(table: Any, number: int, names: Sequence[str]) -> Stage:
  """Returns the stage of a table; `names` are those of earlier ones."""
  kinds = [k for k in KINDS if isinstance(table, Mapping) and k in table]
  if len(kinds) != 1:
    raise ValueError(
      f"stage {number}: found {table!r}, expected exactly one of "
      f"{', '.join(KINDS)}."
    )
  kind = kinds[0]
  options = table[kind]
  rest = {key: value for key, value in table.items() if key != kind}
  known = {f.name for f in dataclasses.fields(Stage)} - {"kind", "options"}
  if unknown := sorted(set(rest) - known):
    raise ValueError(
      f"stage {number}: unknown key {unknown[0]!r}, expected "
      f"{', '.join(sorted(known))}."
    )
  if not isinstance(options, Mapping):
    raise ValueError(
      f"stage {number}: {kind} is {options!r}, expected a table such as "
      f"{kind} = {{ ... }}."
    )
  _check(kind, options, number)
  name = rest.pop("name", "") or kind
  if not isinstance(name, str) or "." in name:
    raise ValueError(f"stage {number}: name is {name!r}, expected a text.")
  if "name" not in table and name in names:
    name = f"{name}{number}"
  if name in (*names, "fused"):
    raise ValueError(
      f"stage {number}: the name {name!r} is taken, expected another name."
    )
  return Stage(kind, dict(options), name, **{"keep": _KEEP[kind], **rest})


def _check(kind: str, options: Mapping[str, Any], number: int) -> None:
  """Checks the options of a reranker or a cut."""
  if kind not in _OPTIONS:
    return
  expected = _OPTIONS[kind]
  for key, value in options.items():
    wanted = expected.get(key)
    whole = wanted is float and type(value) is int
    if wanted is None or (type(value) is not wanted and not whole):
      raise ValueError(
        f"stage {number}: found {kind}.{key} = {value!r}, expected one of "
        + ", ".join(f"{k} ({t.__name__})" for k, t in expected.items())
        + "."
      )
    if key in _LEAST and not value >= _LEAST[key]:
      raise ValueError(
        f"stage {number}: found {kind}.{key} = {value!r}, expected a number"
        + (f" of at least {_LEAST[key]}." if _LEAST[key] > 0 else ".")
      )
  if kind == "cut" and not options:
    raise ValueError(f"stage {number}: cut needs a score, characters, or both.")
  if kind == "rerank" and bool(options.get("model")) == bool(
    options.get("url")
  ):
    raise ValueError(
      f"stage {number}: rerank needs a model (a folder) or a url, and not both."
    )
