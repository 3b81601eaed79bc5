"""Counts the matrix-product FLOPs of a jaxpr, with loops multiplied out.

XLA's own cost analysis counts the body of a loop once, which is far too low for
a decoder that scans its layers. The count is the sum over all devices, with
recomputation: 2 m n k for each product. It excludes elementwise operations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from jax.extend import core

# cuDNN's attention is a custom call without visible products. With queries
# `[B, T, N, H]` and keys `[B, T, N, H]`, the forward pass has two products; the
# backward pass recomputes the scores and has four more.
_FUSED_PRODUCTS = {
  "dot_product_attention_fwd": 2,
  "dot_product_attention_bwd": 5,
}
# Queries and keys of a tile of cuDNN's attention, which computes whole tiles.
TILE = 128
# A function whose loops only the device knows has its FLOPs in its name.
_NAMED = "flops_"
# The name of every splash attention kernel begins with this.
_SPLASH = "splash_"


def count(
  jaxpr: core.ClosedJaxpr | core.Jaxpr,
  *,
  trips: int = 1,
  inner: int = 1,
  segment: int | None = None,
) -> int:
  """Counts the FLOPs of one call.

  Args:
    jaxpr: of the whole program, as `jax.jit(f).trace(...).jaxpr`.
    trips: iterations to assume for a `while`, whose bound only the device
      knows. Loops of fixed length (`scan`) have theirs in the jaxpr.
    inner: iterations to assume for a `while` in the body of another.
    segment: tokens of the causal segments that attention's rows are packed
      with; the last one of a row is shorter. Masked tiles that the kernel skips
      then do not count: those after a query and those of other segments. None
      counts every score.

  Returns:
    The total over all devices. A conditional counts its most expensive branch;
    a Pallas kernel counts its body times its grid, splash with a `segment`
    excepted.
  """
  if isinstance(jaxpr, core.ClosedJaxpr):
    jaxpr = jaxpr.jaxpr
  return sum(
    _equation(equation, trips, inner, segment) for equation in jaxpr.eqns
  )


def packed_scores(row: int, segment: int) -> int:
  """Returns the scores that cuDNN computes for a row of packed segments.

  All but the last have `segment` tokens. Padding at its end is a segment too.
  """
  whole, rest = divmod(row, segment)
  return whole * _causal_scores(segment) + _causal_scores(rest)


def splash_blocks(row: int, segment: int, block: int) -> int:
  """Returns the blocks that splash attention computes for a packed row.

  Unlike cuDNN's, a block may belong to two segments, which have `segment`
  tokens but for the last. `row` is a multiple of `block`. See
  `self_attention.shared_blocks`.
  """
  found = 0
  for i in range(row // block):
    # Keys begin with the segment of the first query.
    start = i * block // segment * segment
    found += i - start // block + 1
  return found


def _causal_scores(tokens: int) -> int:
  """Returns the scores in the tiles on and below the diagonal."""
  tiles = math.ceil(tokens / TILE)
  return TILE * TILE * tiles * (tiles + 1) // 2


def _equation(
  equation: Any, trips: int, inner: int, segment: int | None
) -> int:
  name, params = equation.primitive.name, equation.params
  shapes: list[Any] = [
    getattr(x.aval, "shape", ()) for x in equation.invars[:2]
  ]
  if name == "dot_general":
    (contracted, _), _ = params["dimension_numbers"]
    depth = math.prod(shapes[0][axis] for axis in contracted)
    return 2 * math.prod(equation.outvars[0].aval.shape) * depth
  if name == "jit" and params["name"].startswith(_NAMED):
    return int(params["name"].removeprefix(_NAMED))
  for prefix, products in _FUSED_PRODUCTS.items():
    if name.startswith(prefix):
      (b, t, n, h), (_, s, *_) = shapes
      scores = t * s if segment is None else packed_scores(t, segment)
      return products * 2 * b * n * scores * h
  within = (inner, 1) if name == "while" else (trips, inner)
  counts = [
    count(jaxpr, trips=within[0], inner=within[1], segment=segment)
    for jaxpr in _jaxprs(params)
  ]
  if name == "cond":
    return max(counts)
  total = _repeats(name, params, trips) * sum(counts)
  splash = name == "pallas_call" and str(params["name"]).startswith(_SPLASH)
  if segment and splash:
    # The last axis of the grid has a row's blocks, of queries or of keys. The
    # queries `[..., N, T, H]` follow the tables of blocks.
    mapping = params["grid_mapping"]
    row = equation.invars[mapping.num_index_operands].aval.shape[-2]
    blocks = mapping.grid[-1]
    computed = splash_blocks(row, segment, row // blocks)
    return total * computed // blocks**2
  return total


def _repeats(name: str, params: dict[str, Any], trips: int) -> int:
  """Returns how often an equation runs the jaxprs in its parameters."""
  match name:
    case "scan":
      return params["length"]
    case "while":
      return trips
    case "shard_map":
      # The body is one device's work. The parameter's name depends on the
      # release of JAX.
      axes = params.get("newly_manual_axes") or params["manual_axes"]
      return math.prod(params["mesh"].shape[axis] for axis in axes)
    case "pallas_call":
      return math.prod(params["grid_mapping"].grid)
  return 1


def _jaxprs(params: dict[str, Any]) -> Iterator[core.ClosedJaxpr | core.Jaxpr]:
  for value in params.values():
    values = value if isinstance(value, tuple | list) else (value,)
    for item in values:
      if isinstance(item, core.ClosedJaxpr | core.Jaxpr):
        yield item
