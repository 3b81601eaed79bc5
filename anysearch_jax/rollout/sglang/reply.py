"""Validates the reply of a server to /generate.

A value that is missing, has the wrong type, is out of range or comes from other
weights than requested never enters a trajectory.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from anysearch_jax import types
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import experts

# Rounding may give a certain token a log-probability a little above 0.
_ABOVE_ZERO = 1e-3
_LEAST = -1e30


class OtherWeightsError(types.EngineError):
  """A reply comes from unknown weights, called `name`."""

  def __init__(self, sentence: str, name: str):
    super().__init__(sentence)
    self.name = name


class NotFiniteError(types.EngineError):
  """A reply has a log-probability that is no finite number."""


class Reply(NamedTuple):
  """The tokens that a server sampled.

  cached: number of prompt tokens that the server found in its KV cache.
  reason: the server's `finish_reason`.
  """

  ids: tuple[int, ...]
  logps: tuple[float, ...]
  versions: tuple[int, ...]
  cached: int
  reason: Mapping[str, Any]


def read(
  reply: Mapping[str, Any],
  *,
  prompt: int,
  most: int,
  vocab_size: int,
  versions: Mapping[str, int],
) -> Reply:
  """Validates a reply and returns what a trajectory needs.

  The ids are read from the list of log-probabilities, so that each id certainly
  belongs to its log-probability.

  Args:
    reply: the JSON object.
    prompt: number of tokens that were sent.
    most: maximum number of tokens to sample.
    vocab_size: ids are below this number.
    versions: the names of weights that may have sampled, oldest first, with
      their policy versions.

  Raises:
    OtherWeightsError: other weights sampled.
    NotFiniteError: a log-probability is NaN or infinite.
    types.EngineError: the reply is invalid.
  """
  meta = _field(reply, "meta_info", dict)
  reason = _field(meta, "finish_reason", dict)
  if reason.get("type") == "abort":
    why = reason.get("message") or "no reason given"
    raise types.EngineError(f"The request was aborted: {why}.")
  entries = _field(meta, "output_token_logprobs", list)
  count = _field(meta, "completion_tokens", int)
  seen = _field(meta, "prompt_tokens", int)
  _expect(1 <= count <= most, f"{count} sampled tokens", f"1 to {most}")
  _expect(len(entries) == count, f"{len(entries)} log-probabilities", count)
  _expect(seen == prompt, f"a prompt of {seen} tokens", f"the {prompt} sent")
  ids = [token for _, token in _pairs(entries)]
  logps = [_logp(*pair) for pair in _pairs(entries)]
  _expect(
    all(0 <= token < vocab_size for token in ids),
    f"token ids {ids}",
    f"ids below {vocab_size}",
  )
  _expect(
    reply.get("output_ids", ids) == ids,
    "output_ids that differ from the ids of the log-probabilities",
    "the same",
  )
  return Reply(
    tuple(ids),
    tuple(logps),
    _versions(meta, count, versions),
    _field(meta, "cached_tokens", int) if "cached_tokens" in meta else 0,
    reason,
  )


def routed(
  reply: Mapping[str, Any], count: int, a: architecture_lib.Architecture
) -> np.ndarray:
  """Returns the experts `[count, L, K]` of the newest tokens but the last.

  They are base64 of int32 (SGLang's srt/state_capturer/routed_experts.py).

  Raises:
    types.EngineError: there are none, or for another number of tokens.
  """
  text, like = reply["meta_info"].get("routed_experts"), experts.record(a)
  _expect(
    isinstance(text, str),
    "no routed_experts",
    "them: start the server with --enable-return-routed-experts",
  )
  try:
    ids = np.frombuffer(base64.b64decode(text, validate=True), "<i4")
    ids = ids.reshape(count, *like.shape)
  except ValueError:
    ids = np.full((1, *like.shape), -1)
  # Where a server has stored none, all of a token's are 0.
  _expect(
    bool(np.all((ids >= 0) & (ids < a.experts)))
    and (a.active < 2 or bool(np.all(ids[..., 0] != ids[..., 1]))),
    f"{len(text)} characters of routed_experts",
    f"ids of {count} tokens x {like.shape}, below {a.experts}",
  )
  return ids.astype(like.dtype)


def scores(
  reply: Mapping[str, Any], token_ids: Sequence[int], *, name: str
) -> list[float]:
  """Returns the log-probabilities of all tokens of a prompt but the first.

  Raises:
    types.EngineError: the reply is invalid, or for other tokens, or from other
      weights than those called `name`.
  """
  meta = _field(reply, "meta_info", dict)
  found = [each for each, _, _ in _spans(meta)]
  _expect(set(found) == {name}, f"weights {found}", f"{name!r}")
  pairs = _pairs(_field(meta, "input_token_logprobs", list))
  _expect(
    [token for _, token in pairs] == list(token_ids),
    "scores of other tokens",
    f"those of the {len(token_ids)} sent",
  )
  return [_logp(*pair) for pair in pairs[1:]]


def _pairs(entries: Sequence[Any]) -> list[tuple[Any, int]]:
  """Returns (log-probability, id) of entries that may also have a text."""
  for entry in entries:
    _expect(
      isinstance(entry, list) and len(entry) >= 2 and type(entry[1]) is int,
      f"{entry!r} for a token",
      "its log-probability and its id",
    )
  return [tuple(entry[:2]) for entry in entries]


def _logp(logp: Any, token: int) -> float:
  # JSON has no NaN: a server may send null.
  if logp is None or (isinstance(logp, float) and not math.isfinite(logp)):
    raise NotFiniteError(
      f"The reply has log-probability {logp} of token {token}, expected a "
      "finite number."
    )
  _expect(
    type(logp) in (float, int) and _LEAST <= logp <= _ABOVE_ZERO,
    f"log-probability {logp!r} of token {token}",
    "a finite number that is not positive",
  )
  return min(float(logp), 0.0)


def _spans(meta: Mapping[str, Any]) -> list[tuple[str, int, int]]:
  """Returns (name, first token, end) for each set of weights that sampled."""
  return [
    (_field(s, "version", str), _field(s, "start", int), _field(s, "end", int))
    for s in _field(meta, "weight_versions", list)
  ]


def _versions(
  meta: Mapping[str, Any], count: int, known: Mapping[str, int]
) -> tuple[int, ...]:
  """Returns the policy version of each token."""
  spans = _spans(meta)
  order = list(known)
  for name, _, _ in spans:
    if name not in known:
      raise OtherWeightsError(
        f"The reply has weights {name[:200]!r}, expected "
        f"{' or '.join(map(repr, order))}; was the server started again, or "
        "did another run hand weights to it?",
        name,
      )
  edges = [0, *(end for _, _, end in spans)]
  places = [order.index(name) for name, _, _ in spans]
  _expect(
    edges == sorted(edges)
    and edges[-1] == count
    and edges[:-1] == [start for _, start, _ in spans]
    and places == sorted(places),
    f"weight_versions {spans}",
    f"spans in order over {count} tokens",
  )
  return tuple(
    known[name] for name, start, end in spans for _ in range(start, end)
  )


def _field(values: Any, name: str, kind: type) -> Any:
  value = values.get(name) if isinstance(values, dict) else None
  _expect(
    type(value) is kind, f"{name} {value!r}", f"one of type {kind.__name__}"
  )
  return value


def _expect(holds: bool, found: object, expected: object) -> None:
  if not holds:
    raise types.EngineError(
      f"The reply has {str(found)[:200]}, expected {expected}."
    )
