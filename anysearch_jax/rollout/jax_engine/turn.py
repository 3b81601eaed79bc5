"""The turns of the engine, and the tokens that may end them.

A stop text such as `</search>` is found in decoded text, wherever token
boundaries are: a policy may spell it with many different tokens. The device
cannot decode text, so it halts a row at every token that could complete a stop
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

_BITS = 32  # Of an entry of `Halting.tokens`.

StopTexts = tuple[str, ...]


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
  is_ascii = all(stop.isascii() for stop in stops)

  def could_complete(text: str) -> bool:
    prefix_lengths = range(1, min(len(text), longest) + 1)
    return (
      any(text[:length] in suffixes for length in prefix_lengths)
      or any(stop in text for stop in stops)
      or (not is_ascii and "\N{REPLACEMENT CHARACTER}" in text)
    )

  halts = np.zeros(vocab_size, bool)
  for token, text in enumerate(token_texts):
    halts[token] = could_complete(text)
  halts[[token for token in end_of_turn_ids if token < vocab_size]] = True
  return halts


class Halting:
  """Finds the tokens that halt the rows of a call.

  Each set of stop texts has a bit, and a row halts at the tokens that have its
  bit. So rows with different stop texts share one call. With more sets than
  bits, some sets share a bit: their rows then halt more often than they must,
  which costs time and changes no text.

  Args:
    tokenizer: the policy's.
    vocab_size: the policy's.
    stop: a set of stop texts to add at once.

  Attributes:
    tokens: uint32 `[V]`, the bits of each token. A new set replaces the array,
      because decode calls keep it on the devices.
  """

  def __init__(
    self,
    tokenizer: tokenizer_lib.Tokenizer,
    *,
    vocab_size: int,
    stop: StopTexts,
  ):
    self._end_of_turn_ids = tokenizer.end_of_turn_ids
    self._token_texts = tokenizer.token_texts()
    self.tokens = np.zeros(vocab_size, np.uint32)
    self._bits: dict[StopTexts, int] = {}
    # The first turns of a run ask for the same set at once.
    self._lock = threading.Lock()
    self._add_stop_texts(stop)

  async def bit(self, stop: StopTexts) -> int:
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
      await asyncio.to_thread(self._add_stop_texts, stop)
    return self._bits[stop]

  def _add_stop_texts(self, stop: StopTexts) -> None:
    """Gives a new set of stop texts a bit."""
    with self._lock:
      if stop in self._bits:
        return
      halts = halting_tokens(
        self._token_texts,
        stop,
        self._end_of_turn_ids,
        vocab_size=len(self.tokens),
      )
      bit = 1 << (len(self._bits) % _BITS)
      self.tokens = self.tokens | halts * np.uint32(bit)
      self._bits[stop] = bit


@dataclasses.dataclass(eq=False)
class Turn:
  """A turn that waits or runs; sampled tokens are appended to `context`.

  Attributes:
    request: the request that it answers.
    future: gets the finished turn.
    context: the tokens so far: the request's, then the sampled ones.
    sampling: how its tokens are drawn.
    stop_bit: the bit of its stop texts in `Halting`.
    logps: log-probabilities of the sampled tokens.
    row: its episode's KV cache, while it runs.
    is_decoding: whether a decode call in progress contains it.
    told: number of tokens of `context` that need not be told any more.
    context_logps: log-probabilities of the context's tokens, with
      `engine.exact`. A turn that samples no token returns them.
  """

  request: types.GenerateRequest
  future: asyncio.Future[types.Generation]
  context: list[int]
  sampling: config_lib.SamplingConfig
  stop_bit: int
  logps: list[float] = dataclasses.field(default_factory=list)
  row: kv_memory.Row = dataclasses.field(init=False, repr=False)
  is_decoding: bool = False
  told: int = dataclasses.field(init=False)
  context_logps: list[float] = dataclasses.field(
    default_factory=list, repr=False
  )

  def __post_init__(self):
    self.told = len(self.context)

  @property
  def remaining(self) -> int:
    """Number of tokens that the turn may still sample."""
    return self.request.max_tokens - len(self.logps)

  @property
  def missing(self) -> int:
    """Number of tokens to prefill; the last one is decode's first input."""
    return len(self.context) - 1 - self.row.cached

  def extend(self, decoded: kv_store.Decoded, lane: int) -> int:
    """Appends the tokens that a decode call sampled in a lane.

    Returns:
      The number of tokens of the context that the call prefilled before it
      sampled; 0 without `engine.exact`.
    """
    self.is_decoding = False
    count = int(decoded.counts[lane])
    prefilled = min(count, self.missing)
    logps = decoded.logps[lane].tolist()
    self.context += decoded.tokens[lane][prefilled:count].tolist()
    # A preempted turn scores its context again from the first missing token.
    self.context_logps[self.row.cached :] = logps[:prefilled]
    self.logps += logps[prefilled:count]
    self.row.cached += count
    return prefilled

  def tell(self) -> None:
    """Passes the tokens that were not yet told to the request's `on_tokens`.

    Raises:
      Exception: an error of `on_tokens`, such as that its client has left.
    """
    on_tokens = self.request.on_tokens
    untold = self.context[self.told :]
    self.told = len(self.context)
    if on_tokens is not None and untold and not self.future.done():
      on_tokens(untold)

  def generation(
    self, tokenizer: tokenizer_lib.Tokenizer, halts: np.ndarray, version: int
  ) -> types.Generation | None:
    """Returns the finished turn, or None if it must sample more tokens.

    Args:
      tokenizer: decodes the sampled tokens.
      halts: `Halting.tokens`.
      version: version of the policy.
    """
    if self.missing > 0 or (self.remaining > 0 and not self.logps):
      return None  # The call only prefilled.
    if not self.logps:  # A request of no token: its context was scored.
      return types.Generation(
        token_ids=(),
        logps=tuple(self.context_logps),
        text="",
        finish=types.Finish.LENGTH,
        versions=(),
      )
    may_end = int(halts[self.context[-1]]) & self.stop_bit
    if not may_end and self.remaining > 0:
      return None
    ids = tuple(self.context[-len(self.logps) :])
    text = tokenizer.decode(ids)
    stopped_text = self.request.cut(text)
    if stopped_text is not None:
      finish = types.Finish.STOP
    elif ids[-1] in tokenizer.end_of_turn_ids:
      finish = types.Finish.END_OF_TURN
    elif self.remaining > 0:
      return None
    else:
      finish = types.Finish.LENGTH
    return types.Generation(
      token_ids=ids,
      logps=tuple(self.logps),
      text=stopped_text or text,
      finish=finish,
      versions=(version,) * len(ids),
    )


def decode_rows(
  table: np.ndarray,
  turns: Mapping[int, Turn],
  prefill_limit: int = 0,
) -> kv_store.Turns[np.ndarray]:
  """Returns the rows of a decode call; lanes without a turn are padding.

  Args:
    table: int `[R, pools M]`, the pages of each lane.
    turns: the turns by lane.
    prefill_limit: number of missing tokens that a row may prefill before it
      samples. If it is 0, no turn may miss any.
  """
  rows = len(table)
  last = np.zeros(rows, np.int32)
  starts = np.zeros(rows, np.int32)
  limits = np.zeros(rows, np.int32)
  sampled = np.zeros(rows, np.int32)
  addresses = np.zeros((rows, 5), np.uint32)
  stops = np.ones(rows, np.uint32)
  settings = [config_lib.SamplingConfig()] * rows
  forced = np.full((rows, prefill_limit), -1, np.int32)
  for lane, turn in turns.items():
    missing = turn.missing
    starts[lane] = turn.row.cached
    last[lane] = turn.context[-1 - missing]
    if missing:
      ids = turn.context[-missing:][:prefill_limit]
      forced[lane, : len(ids)] = ids
    limits[lane] = missing + turn.remaining
    # Negative while tokens are forced, so that the first draw is number 0.
    sampled[lane] = len(turn.logps) - missing
    settings[lane] = turn.sampling
    stops[lane] = turn.stop_bit
    address = turn.request.address
    addresses[lane] = (
      address.rollout,
      address.question,
      address.attempt,
      address.sample,
      turn.request.turn,
    )
  return kv_store.Turns(
    table=table,
    last=last,
    starts=starts,
    limits=limits,
    addresses=addresses,
    sampled=sampled,
    stops=stops,
    settings=sampling_lib.settings(settings),
    forced=forced if prefill_limit else None,
  )
