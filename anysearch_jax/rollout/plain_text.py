"""A codec for models whose tokenizer is not at hand.

An id stands for up to four ASCII characters or for one other character, which
is about what tokenizers make of prose. Lengths in tokens are therefore
estimates, but no text is changed: decoding gives what was encoded.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

# Ids of ASCII texts have this bit, those of other characters do not. All ids
# fit into int32.
_ASCII = 1 << 30
_MOST = 4
_PIECE = re.compile(r"[\x00-\x7f]{1,4}|[^\x00-\x7f]")
_END = 0
# Control tokens of the usual families, to be neutralised in outside texts:
# a server reads them as control tokens wherever they occur.
_CONTROL = (
  *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|end_of_text|>"),
  *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
  *("<|eot_id|>", "<|eom_id|>", "<|python_tag|>", "<|end|>", "<|user|>"),
  *("<|assistant|>", "<|system|>", "<|start|>", "<|message|>", "<|return|>"),
  *("<start_of_turn>", "<end_of_turn>", "<bos>", "<eos>", "<s>", "</s>"),
  *("[INST]", "[/INST]", "<<SYS>>", "<</SYS>>"),
)


class PlainText:
  """A `types.TextCodec` without a vocabulary or a chat template."""

  end_of_turn_ids = frozenset({_END})
  end_of_turn_id = _END
  control_tokens: tuple[str, ...] = _CONTROL

  def encode(self, text: str) -> list[int]:
    """Returns the ids of a text."""
    return [_id(piece) for piece in _PIECE.findall(text)]

  def decode(self, ids: Sequence[int]) -> str:
    """Returns the text of ids."""
    return "".join(map(_text, ids))

  def transcript(self, ids: Sequence[int]) -> str:
    """Returns what a server is sent for ids: their text."""
    return self.decode(ids)

  def render(self, content: str) -> tuple[str, list[int]]:
    """Returns the content itself as the prompt, as for a base model."""
    return content, self.encode(content)


def _id(piece: str) -> int:
  if not piece.isascii():
    return ord(piece)
  packed = 0
  for character in piece.ljust(_MOST, "\0"):
    packed = packed << 7 | ord(character)
  return _ASCII | (len(piece) - 1) << 28 | packed


def _text(token: int) -> str:
  if token == _END:
    return ""
  if not token & _ASCII:
    return chr(token)
  characters = (chr(token >> 7 * i & 127) for i in reversed(range(_MOST)))
  return "".join(characters)[: (token >> 28 & 3) + 1]
