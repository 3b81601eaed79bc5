"""The turns of the engine, and the tokens that may end them.

A stop text is found in decoded text, wherever token boundaries are. The device
cannot decode text: it halts a row at every token that could complete a stop
text. The host then decodes the turn, and resumes the row if the turn contains
no stop text. The completing token is kept whole, even if its text continues
after the stop text.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.policy import tokenizer as tokenizer_lib
from anysearch_jax.rollout.jax_engine import kv_memory, kv_store
from anysearch_jax.rollout.jax_engine import sampling as sampling_lib

_BITS = 32

Stop = tuple[str, ...]


def halting_tokens(
  token_texts: Sequence[str],
  stops: Sequence[str],
  end_of_turn_ids: Collection[int],
  *,
  vocab_size: int,
) -> np.ndarray:
  """Returns the mask of tokens that halt a row, bool `[vocab_size]`.

  A token could complete a stop text if it contains the stop text, or if it
  begins with a suffix of it (the rest was sampled before; the token may
  continue beyond the stop text). A token with only part of a character decodes
  to U+FFFD and could complete any stop text that is not ASCII.

  Args:
    token_texts: what each token adds to the decoded text.
    stops: the texts that end a turn; there may be none.
    end_of_turn_ids: tokens that end a turn by themselves.
    vocab_size: the policy's; ids beyond `token_texts` are padding.
  """
  suffixes = {stop[i:] for stop in stops for i in range(len(stop))}
  longest = max((len(stop) for stop in stops), default=0)
  parts = not all(stop.isascii() for stop in stops)
  halts = np.zeros(vocab_size, bool)
  for token, text in enumerate(token_texts):
    halts[token] = (
      any(text[:n] in suffixes for n in range(1, min(len(text), longest) + 1))
      or any(stop in text for stop in stops)
      or (parts and "\N{REPLACEMENT CHARACTER}" in text)
    )
  halts[[i for i in end_of_turn_ids if i < vocab_size]] = True
  return halts


class Halting:
  """Finds the tokens that halt the rows of a call.

  Each set of stop texts has a bit, and a row halts at the tokens that have its
  bit. With more sets than bits some share one: their rows then halt more often
  than they must, which costs time and changes no text.

  Attributes:
    tokens: uint32 `[V]`, the bits of each token. A new set replaces the array,
      because decode calls keep it on the devices.
  """

  def __init__(
    self, tokenizer: tokenizer_lib.Tokenizer, *, vocab_size: int, stop: Stop
  ):
    self._ends = tokenizer.end_of_turn_ids
    self._texts = tokenizer.token_texts()
    self.tokens = np.zeros(vocab_size, np.uint32)
    self._bits: dict[Stop, int] = {}
    # The first turns of a run ask for the same set at once.
    self._adding = threading.Lock()
    self._add(stop)

  async def bit(self, stop: Stop) -> int:
    """Returns the bit of a set of stop texts.

    A new set is computed on another thread, because that may take a second.

    Raises:
      ValueError: a text is empty.
    """
    if "" in stop:
      raise ValueError(
        f"stop: found {stop!r}, expected texts of one character or more."
      )
    if stop not in self._bits:
      await asyncio.to_thread(self._add, stop)
    return self._bits[stop]

  def _add(self, stop: Stop) -> None:
    """Gives a set of stop texts its bit, if it has none."""
    with self._adding:
      if stop in self._bits:
        return
      halts = halting_tokens(
        self._texts, stop, self._ends, vocab_size=len(self.tokens)
      )
      bit = 1 << (len(self._bits) % _BITS)
      self.tokens = self.tokens | halts * np.uint32(bit)
      self._bits[stop] = bit


@dataclasses.dataclass(eq=False)
class Turn:
  """A turn that waits or runs; sampled tokens are appended to `context`.

  sampling: how its tokens are drawn. stop_bit: of its stop texts in `Halting`.
  row: its episode's KV cache, while it runs. flying: whether a decode call in
  progress contains it. scored: log-probabilities of the tokens of its context
  that decode calls took; a turn that samples none ends with them.
  """

  request: types.GenerateRequest
  future: asyncio.Future[types.Generation]
  context: list[int]
  sampling: config_lib.SamplingConfig
  stop_bit: int
  logps: list[float] = dataclasses.field(default_factory=list)
  row: kv_memory.Row = dataclasses.field(init=False, repr=False)
  flying: bool = False
  scored: list[float] = dataclasses.field(default_factory=list, repr=False)

  @property
  def left(self) -> int:
    """Number of tokens that the turn may still sample."""
    return self.request.max_tokens - len(self.logps)

  @property
  def missing(self) -> int:
    """Number of tokens to prefill; the last one is decode's first input."""
    return len(self.context) - 1 - self.row.cached

  def extend(self, decoded: kv_store.Decoded, lane: int) -> int:
    """Adds what a decode call sampled in a lane, and tells its caller.

    Returns how many missing tokens the call took before it sampled.
    """
    self.flying = False
    count = int(decoded.counts[lane])
    known = min(count, self.missing)
    logps, drawn = decoded.logps[lane].tolist(), decoded.tokens[lane]
    sampled = drawn[known:count].tolist()
    self.context += sampled
    self.scored[self.row.cached :] = logps[:known]
    self.logps += logps[known:count]
    self.row.cached += count
    told = self.request.on_tokens
    if told is not None and sampled and not self.future.done():
      told(sampled)
    return known

  def ended(
    self, tokenizer: tokenizer_lib.Tokenizer, halts: np.ndarray, version: int
  ) -> types.Generation | None:
    """Returns the finished turn, or None if it must sample more tokens.

    Args:
      tokenizer: decodes what was sampled.
      halts: `Halting.tokens`.
      version: of the policy.
    """
    if self.missing > 0 or (self.left > 0 and not self.logps):
      return None  # The call only took missing tokens.
    if not self.logps:
      scored = tuple(self.scored)
      return types.Generation((), scored, "", types.Finish.LENGTH, ())
    may_end = int(halts[self.context[-1]]) & self.stop_bit
    if not may_end and self.left > 0:
      return None
    ids = tuple(self.context[-len(self.logps) :])
    text = tokenizer.decode(ids)
    said = self.request.cut(text)
    if said is not None:
      finish = types.Finish.STOP
    elif ids[-1] in tokenizer.end_of_turn_ids:
      finish = types.Finish.END_OF_TURN
    elif self.left > 0:
      return None
    else:
      finish = types.Finish.LENGTH
    logps, versions = tuple(self.logps), (version,) * len(ids)
    return types.Generation(ids, logps, said or text, finish, versions)


def decode_rows(
  table: np.ndarray,
  lanes: Mapping[int, Turn],
  given: int = 0,
) -> kv_store.Turns[np.ndarray]:
  """Returns the rows of a decode call; lanes without a turn are padding.

  `table`, int `[R, M]`, has the pages of each lane. A row takes at most `given`
  of its missing tokens; if that is 0, no turn may miss any.
  """
  last, starts, limits, sampled = np.zeros((4, len(table)), np.int32)
  addresses = np.zeros((len(table), 5), np.uint32)
  stops = np.ones(len(table), np.uint32)
  settings = [config_lib.SamplingConfig()] * len(table)
  tokens = np.full((len(table), given), -1, np.int32)
  for lane, turn in lanes.items():
    missing, starts[lane] = turn.missing, turn.row.cached
    last[lane] = turn.context[-1 - missing]
    if missing:
      taken = turn.context[-missing:][:given]
      tokens[lane, : len(taken)] = taken
    limits[lane] = missing + turn.left
    sampled[lane] = len(turn.logps) - missing
    settings[lane] = turn.sampling
    stops[lane] = turn.stop_bit
    a, number = turn.request.address, turn.request.turn
    addresses[lane] = a.rollout, a.question, a.attempt, a.sample, number
  return kv_store.Turns(
    *(table, last, starts, limits, addresses, sampled, stops),
    sampling_lib.settings(settings),
    tokens if given else None,
  )
