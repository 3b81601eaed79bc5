"""Conversion between configuration dataclasses and plain (JSON) values."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from typing import Any


def to_dict(config: Any) -> dict[str, Any]:
  """Returns a configuration dataclass as nested dicts; tuples stay tuples."""
  return dataclasses.asdict(config)


def leaves(
  values: Mapping[str, Any], path: str = ""
) -> Iterator[tuple[str, Any]]:
  """Yields the values of nested dicts with their dotted paths."""
  for key, value in values.items():
    if isinstance(value, Mapping):
      yield from leaves(value, f"{path}{key}.")
    else:
      yield f"{path}{key}", value


def renamed(stored: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a saved configuration with the names that settings have today.

  A setting that the configuration is older than gets the value that held before
  it, if that is not today's default.

  Args:
    stored: nested plain values as any version of this project saved them.
  """
  today = dict(stored)
  objective = dict(stored.get("objective", {}))
  divides = objective.pop("normalize_std", None)
  if divides is not None:
    objective.setdefault("normalize", "group" if divides else "none")
    today["objective"] = objective
  if "data" in stored:
    # The first configurations name no world: there was one, `fixed`.
    today["data"] = {"world": "fixed", **stored["data"]}
  return today


def from_dict(cls: type, values: Mapping[str, Any], *, path: str = "config"):
  """Builds config dataclass `cls` from nested plain values, strictly.

  Raises:
    ValueError: a key is unknown or a value has the wrong type; the message
      names its path.
  """
  hints = typing.get_type_hints(cls)
  fields = {field.name for field in dataclasses.fields(cls)}
  unknown = sorted(set(values) - fields)
  if unknown:
    raise ValueError(
      f"{path}: unknown key {unknown[0]!r}; expected one of "
      f"{', '.join(sorted(fields))}."
    )
  return cls(
    **{
      key: _typed(hints[key], value, f"{path}.{key}")
      for key, value in values.items()
    }
  )


def _typed(hint: Any, value: Any, path: str) -> Any:
  """Returns `value` converted to type `hint`; raises ValueError otherwise."""
  if isinstance(hint, type) and dataclasses.is_dataclass(hint):
    if not isinstance(value, Mapping):
      raise ValueError(f"{path}: found {value!r}, expected a group of values.")
    return from_dict(hint, value, path=path)
  if typing.get_origin(hint) is tuple:
    if not isinstance(value, list | tuple):
      raise ValueError(f"{path}: found {value!r}, expected a list.")
    (item, _) = typing.get_args(hint)
    return tuple(_typed(item, v, f"{path}[{i}]") for i, v in enumerate(value))
  if hint is float and type(value) is int:
    return float(value)
  if type(value) is not hint:
    raise ValueError(
      f"{path}: found {value!r} ({type(value).__name__}), expected "
      f"{hint.__name__}."
    )
  return value
