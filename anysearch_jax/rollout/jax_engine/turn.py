"""A turn that the engine samples over several decode calls."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.policy import tokenizer as tokenizer_lib
from anysearch_jax.rollout import stops
from anysearch_jax.rollout.jax_engine import halting as halting_lib
from anysearch_jax.rollout.jax_engine import kv_memory, kv_store
from anysearch_jax.rollout.jax_engine import sampling as sampling_lib


@dataclasses.dataclass(eq=False)
class Turn:
  """A turn that waits or runs; sampled tokens are appended to `context`.

  sampling: how its tokens are drawn. halts: bool `[V]`, tokens that may end it.
  """

  request: types.GenerateRequest
  future: asyncio.Future[types.Generation]
  context: list[int]
  sampling: config_lib.SamplingConfig
  halts: np.ndarray
  logps: list[float] = dataclasses.field(default_factory=list)

  @property
  def sampled(self) -> int:
    """Number of tokens sampled so far."""
    return len(self.logps)

  @property
  def left(self) -> int:
    """Number of tokens that the turn may still sample."""
    return self.request.max_tokens - self.sampled

  def check_over(self) -> None:
    """Raises RuntimeError if the turn is being sampled."""
    if not self.future.done():
      raise RuntimeError(
        f"Turn {self.request.turn} of {self.request.address} is being sampled; "
        "wait for it or release the episode."
      )

  def ended(
    self, tokenizer: tokenizer_lib.Tokenizer, version: int
  ) -> types.Generation | None:
    """Returns the finished turn, or None if it must sample more tokens.

    Args:
      tokenizer: decodes the turn to look for a stop text.
      version: of the weights that sampled.
    """
    if not self.halts[self.context[-1]] and self.left > 0:
      return None
    ids = tuple(self.context[-self.sampled :])
    text = tokenizer.decode(ids)
    said = stops.cut(text, self.request.stop)
    if said is not None:
      finish = types.Finish.STOP
    elif ids[-1] in tokenizer.end_of_turn_ids:
      finish = types.Finish.END_OF_TURN
    elif self.left > 0:
      return None
    else:
      finish = types.Finish.LENGTH
    versions = (version,) * len(ids)
    return types.Generation(
      ids, tuple(self.logps), said or text, finish, versions
    )


@dataclasses.dataclass(eq=False)
class Running:
  """A turn with its episode's KV cache.

  flying: whether a decode call in progress contains the turn.
  """

  turn: Turn
  row: kv_memory.Row
  flying: bool = False

  @property
  def missing(self) -> int:
    """Number of tokens to prefill; the last one is decode's first input."""
    return len(self.turn.context) - 1 - self.row.cached

  def extend(self, decoded: kv_store.Decoded, lane: int) -> None:
    """Adds what a decode call sampled in a lane, and tells its caller."""
    self.flying = False
    turn, count = self.turn, int(decoded.counts[lane])
    sampled = decoded.tokens[lane, :count].tolist()
    turn.context += sampled
    turn.logps += decoded.logps[lane, :count].tolist()
    self.row.cached += count
    if turn.request.on_tokens is not None and not turn.future.done():
      turn.request.on_tokens(sampled)


def bounded(
  request: types.GenerateRequest, max_context: int
) -> types.GenerateRequest:
  """Caps `max_tokens` so that the context stays within `max_context`.

  Raises:
    types.EngineError: there is no room for a single token.
  """
  room = max_context - len(request.token_ids)
  if room < 1:
    raise types.EngineError(
      f"The context of {len(request.token_ids)} tokens has no room in the "
      f"engine's {max_context}; raise engine.max_context or lower "
      "episode.max_context."
    )
  if request.max_tokens > room:
    request = dataclasses.replace(request, max_tokens=room)
  return request


class DecodeCall(NamedTuple):
  """The host side of a decode call.

  turns: its rows. halts: uint32 `[V]`, tokens that halt rows. restricted:
  whether top-p or top-k is on in a row.
  """

  turns: kv_store.Turns[np.ndarray]
  halts: np.ndarray
  restricted: bool


def decode_call(
  table: np.ndarray,
  lanes: Mapping[int, Running],
  halting: halting_lib.Halting,
) -> DecodeCall:
  """Returns a decode call.

  Args:
    table: int `[R, M]`, pages of each lane.
    lanes: the turns by lane; the other lanes are padding.
    halting: finds the tokens that halt rows.
  """
  tokens, starts, limits, sampled = np.zeros((4, len(table)), np.int32)
  addresses = np.zeros((len(table), 5), np.uint32)
  stops_of = np.ones(len(table), np.uint32)
  settings = [config_lib.SamplingConfig()] * len(table)
  halts, bits = halting.call(
    [(r.turn.request.stop, r.turn.halts) for r in lanes.values()]
  )
  stops_of[list(lanes)] = bits
  for lane, running in lanes.items():
    turn = running.turn
    tokens[lane], starts[lane] = turn.context[-1], running.row.cached
    limits[lane], sampled[lane] = turn.left, turn.sampled
    settings[lane] = turn.sampling
    address = turn.request.address
    addresses[lane] = (
      address.rollout,
      address.question,
      address.attempt,
      address.sample,
      turn.request.turn,
    )
  turns = kv_store.Turns(
    table,
    tokens,
    starts,
    limits,
    addresses,
    sampled,
    stops_of,
    sampling_lib.settings(settings),
  )
  restricted = any(map(sampling_lib.restricts, settings))
  return DecodeCall(turns, halts, restricted)


class Flight(NamedTuple):
  """A decode call in progress, and the turns in its lanes."""

  width: int
  lanes: dict[int, Running]
  decoded: asyncio.Future[kv_store.Decoded]

  def counters(self, decoded: kv_store.Decoded) -> dict[str, int]:
    """Returns what the call adds to the engine's counters."""
    sampled = int(decoded.counts.sum())
    return {
      "decode_calls": 1,
      "lanes_offered": self.width * int(decoded.counts.max()),
      "lanes_used": sampled,
      "sampled_tokens": sampled,
    }


def give_up(*flights: Flight | None) -> None:
  """Cancels calls, or retrieves their errors so that asyncio logs none."""
  for flight in flights:
    if flight is None or flight.decoded.cancel():
      continue
    if not flight.decoded.cancelled():
      flight.decoded.exception()


def fail(turns: Iterable[Turn], error: BaseException) -> None:
  """Raises an error where the turns are waited for."""
  for turn in turns:
    if not turn.future.done():
      turn.future.set_exception(error)
