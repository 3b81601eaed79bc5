"""Tells the reasoning of a turn while its tokens are still being sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from anysearch_jax.environment import protocol

# A block of these names is an action; what the turn says before is reasoning.
_ACTIONS = ("<search>", "<answer>")
_TAGS = tuple(
  f"<{slash}{name}>" for slash in ("", "/") for name in protocol.TAGS
)
# An unfinished character of several bytes decodes to this one.
_UNFINISHED = "\ufffd"


class Reasoning:
  """Collects the tokens of one turn and tells its new reasoning.

  Args:
    decode: returns the text of ids.
    tell: called with each new piece of reasoning.
  """

  def __init__(
    self, decode: Callable[[Sequence[int]], str], tell: Callable[[str], None]
  ):
    self._decode = decode
    self._tell = tell
    self._ids: list[int] = []
    self._told = 0

  def add(self, ids: Sequence[int]) -> None:
    """Adds sampled tokens."""
    self._ids += ids
    text = self._decode(self._ids).rstrip(_UNFINISHED)
    self._show(of_turn(text[: len(text) - _partial_tag(text)]))

  def end(self, text: str) -> None:
    """Tells the rest of the reasoning of a finished turn."""
    self._show(of_turn(text))

  def _show(self, reasoning: str) -> None:
    if piece := reasoning[self._told :]:
      self._told = len(reasoning)
      self._tell(piece)


def of_turn(text: str) -> str:
  """Returns the text of a turn up to its first action, without tags.

  An extension of `text` only extends what is returned, unless `text` ends
  within a tag.
  """
  ends = (at for tag in _ACTIONS if (at := text.find(tag)) >= 0)
  text = text[: min(ends, default=len(text))]
  return protocol.TAG_PATTERN.sub("", text).lstrip()


def _partial_tag(text: str) -> int:
  """Returns the length of the end of `text` that may be an unfinished tag."""
  start = text.rfind("<")
  if start < 0:
    return 0
  end = text[start:]
  return len(end) if any(tag.startswith(end) for tag in _TAGS) else 0
