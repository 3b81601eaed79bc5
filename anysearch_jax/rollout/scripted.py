"""An engine whose turns a function writes: for bounds, tests and tools."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from anysearch_jax import types
from anysearch_jax.rollout import stops

Say = Callable[[types.GenerateRequest, str], str]


class ScriptedEngine:
  """A `types.Engine` whose turns come from a function, with log-prob 0.

  Args:
    say: returns the text of a turn, given the request and the decoded context.
      The text is cut after its first stop text. A text without a stop text gets
      an end-of-turn token.
    codec: encodes the text.
  """

  def __init__(self, say: Say, codec: types.TextCodec):
    self._say = say
    self._codec = codec
    self.counters: Counter[str] = Counter()

  async def generate(self, request: types.GenerateRequest) -> types.Generation:
    """Returns the scripted turn, truncated to `max_tokens`."""
    said = self._say(request, self._codec.decode(request.token_ids))
    text = stops.cut(said, request.stop)
    finish = types.Finish.STOP
    if text is None:
      text, finish = said, types.Finish.END_OF_TURN
    ids = self._codec.encode(text)
    if finish is types.Finish.END_OF_TURN:
      ids.append(min(self._codec.end_of_turn_ids))
    if len(ids) > request.max_tokens:
      ids, finish = ids[: request.max_tokens], types.Finish.LENGTH
      text = self._codec.decode(ids)
    self.counters["sampled_tokens"] += len(ids)
    n = len(ids)
    return types.Generation(tuple(ids), (0.0,) * n, text, finish, (0,) * n)

  def release(self, address: types.Address) -> None:
    """Does nothing: this engine keeps no cache."""
