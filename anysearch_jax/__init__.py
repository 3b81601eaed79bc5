"""AnySearch in JAX: one search policy for any budget.

`__init__.pyi` lists the public API, for type checkers and for this file. Public
names keep their place, and each is imported when it is first used: `import
anysearch_jax` imports no JAX. `examples/` uses these names only.
"""

from __future__ import annotations

import ast
import importlib
import pathlib
from typing import Any

__version__ = "0.2.0"

_STUB = pathlib.Path(__file__).with_suffix(".pyi")


def _public_names() -> dict[str, tuple[str, str | None]]:
  """Returns each public name's module, with its name there if it has one."""
  places: dict[str, tuple[str, str | None]] = {}
  for statement in ast.parse(_STUB.read_text("utf-8")).body:
    if isinstance(statement, ast.Import):
      (alias,) = statement.names
      places[str(alias.asname)] = alias.name, None
    elif isinstance(statement, ast.ImportFrom):
      (alias,) = statement.names
      places[str(alias.asname)] = str(statement.module), alias.name
  return places


_PUBLIC = _public_names()

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
  """Imports a public name when it is first used (PEP 562)."""
  if name not in _PUBLIC:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  module_name, attribute = _PUBLIC[name]
  module = importlib.import_module(module_name)
  value = getattr(module, attribute) if attribute else module
  globals()[name] = value
  return value


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})
