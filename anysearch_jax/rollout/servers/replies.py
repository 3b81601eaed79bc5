"""Checks the parts of replies that all engines' servers have.

A value of a reply that is missing, has the wrong type, is out of range or comes
from other weights than requested never enters a trajectory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from anysearch_jax import types
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import experts
from anysearch_jax.rollout.servers import server

# Valid log-probabilities. Rounding may give a token of probability 1 a
# log-probability a little above 0.
_LARGEST_LOGP = 1e-3
_SMALLEST_LOGP = -1e30
_QUOTED_CHARACTERS = 200  # Of a reply's value, in errors.


class Span(NamedTuple):
  """Consecutive tokens that one set of weights sampled.

  Attributes:
    name: name of the weights.
    start: place of the first token.
    end: place after the last one.
  """

  name: str
  start: int
  end: int


def expect(condition: bool, content: object, expected: object) -> None:
  """Raises EngineError unless a condition of a reply holds.

  Args:
    condition: whether the reply is valid.
    content: the part of the reply that is not, for the message.
    expected: a valid part.
  """
  if not condition:
    quoted = str(content)[:_QUOTED_CHARACTERS]
    raise types.EngineError(f"The reply has {quoted}, expected {expected}.")


def typed_field(values: Any, name: str, kind: type) -> Any:
  """Returns a field of a reply's object.

  Args:
    values: the object, of which nothing is known.
    name: name of the field.
    kind: type that its value must have.

  Raises:
    types.EngineError: it has another type.
  """
  value = values.get(name) if isinstance(values, dict) else None
  expect(
    type(value) is kind, f"{name} {value!r}", f"one of type {kind.__name__}"
  )
  return value


def finite_logp(logp: Any, token: int) -> float:
  """Returns the log-probability of a token, at most 0, after checks."""
  # JSON has no NaN: a server may send null.
  if logp is None or (isinstance(logp, float) and not math.isfinite(logp)):
    raise server.NotFiniteError(
      f"The reply has log-probability {logp} of token {token}, expected a "
      "finite number."
    )
  expect(
    type(logp) in (float, int) and _SMALLEST_LOGP <= logp <= _LARGEST_LOGP,
    f"log-probability {logp!r} of token {token}",
    "a finite number that is not positive",
  )
  return min(float(logp), 0.0)


def spans(values: Mapping[str, Any]) -> list[Span]:
  """Returns which weights sampled a reply's tokens: `weight_versions`."""
  return [
    Span(
      typed_field(span, "version", str),
      typed_field(span, "start", int),
      typed_field(span, "end", int),
    )
    for span in typed_field(values, "weight_versions", list)
  ]


def check_scored(sampled: Sequence[Span], name: str) -> None:
  """Raises EngineError unless weights called `name` made a whole reply."""
  names = [span.name for span in sampled]
  expect(set(names) == {name}, f"weights {names}", f"{name!r}")


def turn(
  pairs: Sequence[tuple[Any, int]],
  sampled: Sequence[Span],
  *,
  max_tokens: int,
  vocab_size: int,
  versions: Mapping[str, int],
  cached: int,
  reason: str,
) -> server.Reply:
  """Returns the tokens of a turn, after checks.

  Args:
    pairs: the log-probability and the id of each sampled token.
    sampled: the weights that sampled them.
    max_tokens: maximum number of tokens to sample.
    vocab_size: ids are below this number.
    versions: policy versions of the weights that may have sampled, by name,
      oldest first.
    cached: number of prompt tokens that the server found in its KV cache.
    reason: why the server ended the turn, in its words.

  Raises:
    server.OtherWeightsError: other weights sampled.
    server.NotFiniteError: a log-probability is NaN or infinite.
    types.EngineError: the reply is invalid.
  """
  ids = tuple(token for _, token in pairs)
  expect(
    1 <= len(ids) <= max_tokens,
    f"{len(ids)} sampled tokens",
    f"1 to {max_tokens}",
  )
  logps = tuple(finite_logp(logp, token) for logp, token in pairs)
  expect(
    all(0 <= token < vocab_size for token in ids),
    f"token ids {[*ids]}",
    f"ids below {vocab_size}",
  )
  token_versions = _versions(sampled, len(ids), versions)
  return server.Reply(ids, logps, token_versions, cached, reason)


def _versions(
  sampled: Sequence[Span], count: int, version_by_name: Mapping[str, int]
) -> tuple[int, ...]:
  """Returns the policy version of each token.

  Spans must follow each other without gaps, and a later span must have the same
  weights or newer ones.
  """
  names = list(version_by_name)
  versions: list[int] = []
  oldest = 0  # Index of the oldest weights that may have sampled the next span.
  for name, start, end in sampled:
    if name not in version_by_name:
      raise server.OtherWeightsError(
        f"The reply has weights {name[:_QUOTED_CHARACTERS]!r}, expected "
        f"{' or '.join(map(repr, names))}; was the server started again, or "
        "did another run hand weights to it?",
        name,
      )
    follows = start == len(versions) <= end <= count
    if not follows or name not in names[oldest:]:
      break
    oldest = names.index(name)
    versions += [version_by_name[name]] * (end - start)
  else:
    if len(versions) == count:
      return tuple(versions)
  quoted = str([tuple(span) for span in sampled])[:_QUOTED_CHARACTERS]
  raise types.EngineError(
    f"The reply has weight_versions {quoted}, expected spans in order over "
    f"{count} tokens."
  )


def check_experts(
  ids: np.ndarray, count: int, a: architecture_lib.Architecture
) -> np.ndarray:
  """Returns the experts of tokens as a run records them, after checks.

  Args:
    ids: expert ids as a server sent them, expected `[count, L, K]`.
    count: number of tokens.
    a: the policy's architecture.

  Raises:
    types.EngineError: the ids cannot be right.
  """
  like = experts.record(a)
  is_valid = ids.shape == (count, *like.shape)
  is_valid = is_valid and bool(np.all((ids >= 0) & (ids < a.experts)))
  if is_valid and a.active > 1:
    # If a server has no record of a token, all of its ids are 0.
    is_valid = bool(np.all(ids[..., 0] != ids[..., 1]))
  expect(
    is_valid,
    "routed_experts that cannot be right",
    f"ids of {count} tokens x {like.shape}, below {a.experts}",
  )
  return ids.astype(like.dtype)
