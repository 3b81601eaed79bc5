"""The tokens that halt the rows of a call, for the stop texts of each row.

A call has one array of 32 bits a token. Each set of stop texts in the call has
a bit, and a row halts at the tokens that have its bit. With more sets than bits
some share one: their rows then halt more often than they must, which costs time
and changes no text, because a row that halts without a stop text continues.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from anysearch_jax.policy import tokenizer as tokenizer_lib
from anysearch_jax.rollout import stops

_BITS = 32
# Sets of stop texts that are remembered: a few MB for the largest vocabularies.
_KNOWN = 64

Stop = tuple[str, ...]


class Halting:
  """Finds the tokens that halt rows.

  Args:
    tokenizer: of the policy.
    vocab_size: of the policy.
    stop: the stop texts of most requests.
  """

  def __init__(
    self, tokenizer: tokenizer_lib.Tokenizer, *, vocab_size: int, stop: Stop
  ):
    self._ends = tokenizer.end_of_turn_ids
    self._texts = tokenizer.token_texts()
    self._vocab_size = vocab_size
    self._stop = stop
    self._known: OrderedDict[Stop, np.ndarray] = OrderedDict()
    self._known[stop] = self._find(stop)
    self._call: tuple[tuple[Stop, ...], np.ndarray] = ((), np.zeros(0))

  async def of(self, stop: Stop) -> np.ndarray:
    """Returns the tokens that may end a turn, bool `[V]`.

    A set that was not asked for lately is computed on another thread, because
    that may take a second.

    Raises:
      ValueError: a stop text is empty.
    """
    if "" in stop:
      raise ValueError(
        f"stop: found {stop!r}, expected texts of one character or more."
      )
    found = self._known.get(stop)
    if found is None:
      found = await asyncio.to_thread(self._find, stop)
      self._known[stop] = found
      while len(self._known) > _KNOWN:
        oldest = next(key for key in self._known if key != self._stop)
        del self._known[oldest]
    self._known.move_to_end(stop)
    return found

  def call(
    self, rows: Sequence[tuple[Stop, np.ndarray]]
  ) -> tuple[np.ndarray, list[int]]:
    """Returns the halting tokens of a call.

    Args:
      rows: the stop texts of each row and what `of` found for them.

    Returns:
      uint32 `[V]`, the same array as for the last call if it had the same sets
      of stop texts; and the bit of each row.
    """
    halts = {self._stop: self._known[self._stop], **dict(rows)}
    sets = tuple(halts)
    if sets != self._call[0]:
      bits = np.zeros(self._vocab_size, np.uint32)
      for i, tokens in enumerate(halts.values()):
        bits |= tokens.astype(np.uint32) << np.uint32(i % _BITS)
      self._call = sets, bits
    number = {stop: i % _BITS for i, stop in enumerate(sets)}
    return self._call[1], [1 << number[stop] for stop, _ in rows]

  def _find(self, stop: Stop) -> np.ndarray:
    return stops.halting_tokens(
      self._texts, stop, self._ends, vocab_size=self._vocab_size
    )
