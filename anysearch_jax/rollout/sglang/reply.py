"""What a server's reply to /generate says, or why it is not to be believed.

Nothing that is missing, of another type, out of range or of other weights than
were asked for gets into a trajectory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from anysearch_jax import types

# Rounding may put a certain token's probability a little above 1.
_ABOVE_ZERO = 1e-3
_LEAST = -1e30


class OtherWeightsError(types.EngineError):
  """A reply is of weights that were not handed over, called `name`."""

  def __init__(self, sentence: str, name: str):
    super().__init__(sentence)
    self.name = name


class Reply(NamedTuple):
  """Tokens as a server sampled them.

  cached: tokens of the prompt whose KV cache it had.
  reason: its `finish_reason`, in its own words.
  """

  ids: tuple[int, ...]
  logps: tuple[float, ...]
  versions: tuple[int, ...]
  cached: int
  reason: Mapping[str, Any]


def aborted(reply: Mapping[str, Any]) -> str | None:
  """Why the server gave a request up; None where it did not."""
  reason = _field(_field(reply, "meta_info", dict), "finish_reason", dict)
  if reason.get("type") != "abort":
    return None
  return str(reason.get("message") or "no reason given")


def read(
  reply: Mapping[str, Any],
  *,
  prompt: int,
  most: int,
  vocab_size: int,
  versions: Mapping[str, int],
) -> Reply:
  """Checks a reply and takes from it what a trajectory needs.

  Ids are those that the log-probabilities are of, one beside the other.

  Args:
    reply: the JSON object.
    prompt: tokens that were sent.
    most: tokens that were asked for.
    vocab_size: ids are below this number.
    versions: names of the weights that may have sampled, oldest first, and
      their policy versions.

  Raises:
    OtherWeightsError: other weights sampled.
    types.EngineError: what was found and what was expected.
  """
  meta = _field(reply, "meta_info", dict)
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
    _field(meta, "finish_reason", dict),
  )


def scores(
  reply: Mapping[str, Any], token_ids: Sequence[int], *, name: str
) -> list[float]:
  """Log-probabilities of a prompt's tokens but the first.

  Raises:
    types.EngineError: the reply is not of these tokens, or not of the weights
      called `name`.
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
  """What is said of tokens: a log-probability, an id, and maybe a text."""
  for entry in entries:
    _expect(
      isinstance(entry, list) and len(entry) >= 2 and type(entry[1]) is int,
      f"{entry!r} for a token",
      "its log-probability and its id",
    )
  return [tuple(entry[:2]) for entry in entries]


def _logp(logp: Any, token: int) -> float:
  # Not true of NaN.
  sound = type(logp) in (float, int) and _LEAST <= logp <= _ABOVE_ZERO
  _expect(
    sound,
    f"log-probability {logp!r} of token {token}",
    "a finite number that is not positive",
  )
  return min(float(logp), 0.0)


def _spans(meta: Mapping[str, Any]) -> list[tuple[str, int, int]]:
  """The weights that sampled: name, first token, end."""
  spans = meta.get("weight_versions")
  if spans is None:
    # Of a server that lets no request outlive an update.
    count = _field(meta, "completion_tokens", int)
    return [(_field(meta, "weight_version", str), 0, count)]
  return [
    (_field(s, "version", str), _field(s, "start", int), _field(s, "end", int))
    for s in _field(meta, "weight_versions", list)
  ]


def _versions(
  meta: Mapping[str, Any], count: int, known: Mapping[str, int]
) -> tuple[int, ...]:
  """The policy version of each token."""
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
