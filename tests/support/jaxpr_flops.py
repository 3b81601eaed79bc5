"""Counts the matrix-product FLOPs of a jaxpr, with loops multiplied out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from jax.extend import core


def count(jaxpr: core.ClosedJaxpr | core.Jaxpr) -> int:
  """Returns 2 m n k of every product; a `cond` counts its largest branch."""
  if isinstance(jaxpr, core.ClosedJaxpr):
    jaxpr = jaxpr.jaxpr
  return sum(map(_equation, jaxpr.eqns))


def _equation(equation: Any) -> int:
  name, params = equation.primitive.name, equation.params
  if name == "dot_general":
    (contracted, _), _ = params["dimension_numbers"]
    shape = equation.invars[0].aval.shape
    depth = math.prod(shape[axis] for axis in contracted)
    return 2 * math.prod(equation.outvars[0].aval.shape) * depth
  counts = [count(jaxpr) for jaxpr in _jaxprs(params)]
  if name == "cond":
    return max(counts)
  return (params["length"] if name == "scan" else 1) * sum(counts)


def _jaxprs(params: dict[str, Any]) -> Iterator[core.ClosedJaxpr | core.Jaxpr]:
  for value in params.values():
    values = value if isinstance(value, tuple | list) else (value,)
    for item in values:
      if isinstance(item, core.ClosedJaxpr | core.Jaxpr):
        yield item
