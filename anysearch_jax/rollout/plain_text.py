"""A codec without a vocabulary, for models whose tokenizer is not at hand."""

from __future__ import annotations

import re
from collections.abc import Sequence

from anysearch_jax.environment import wording

# Text that becomes one id: up to four ASCII characters, or one other character.
_PIECE = re.compile(r"[\x01-\x7f]{1,4}|[^\x01-\x7f]")
_END = 0  # The id of the end of a turn, which has no text.
_FIRST_ASCII = 1 << 24  # Ids of ASCII texts begin here; below are characters.
_ID_BYTES = 4
# Control tokens of the usual families, to be neutralised in outside texts:
# a server reads them as control tokens wherever they occur.
_CONTROL = (
  "<|im_start|>",
  "<|im_end|>",
  "<|endoftext|>",
  "<|end_of_text|>",
  "<|begin_of_text|>",
  "<|start_header_id|>",
  "<|end_header_id|>",
  "<|eot_id|>",
  "<|eom_id|>",
  "<|python_tag|>",
  "<|end|>",
  "<|user|>",
  "<|assistant|>",
  "<|system|>",
  "<|start|>",
  "<|message|>",
  "<|return|>",
  "<start_of_turn>",
  "<end_of_turn>",
  "<bos>",
  "<eos>",
  "<s>",
  "</s>",
  "[INST]",
  "[/INST]",
  "<<SYS>>",
  "<</SYS>>",
)


class PlainText:
  """A codec for models whose tokenizer is not at hand.

  It has no vocabulary and no chat template. An id stands for up to four ASCII
  characters or for one other character, which is about what tokenizers make of
  prose. Lengths in tokens are therefore estimates, but no text is changed:
  decoding gives what was encoded.
  """

  end_of_turn_ids = frozenset({_END})
  end_of_turn_id: int | None = _END
  control_tokens: tuple[str, ...] = _CONTROL

  def encode(self, text: str) -> list[int]:
    """Returns the ids of a text."""
    return [_id(piece) for piece in _PIECE.findall(text)]

  def decode(self, ids: Sequence[int]) -> str:
    """Returns the text of ids."""
    return "".join(map(_text, ids))

  def transcript(self, ids: Sequence[int]) -> str:
    """Returns the text that a server is sent for ids."""
    return self.decode(ids)

  def render(
    self, content: str, system: str = "", prefill: str = "", chat: bool = True
  ) -> tuple[str, list[int]]:
    """Returns the texts themselves as the prompt, as for a base model.

    Args:
      content: the user's message.
      system: a text before it.
      prefill: a text after it, which begins the reply.
      chat: ignored, because there is no chat template.

    Returns:
      The prompt and its ids.
    """
    del chat
    text = wording.joined(content, system, prefill)
    return text, self.encode(text)


def _id(piece: str) -> int:
  """Returns the id of a text that matches `_PIECE`.

  ASCII texts are read as a big-endian number of four bytes, whose first byte is
  not 0. Another character is its code point plus one (0 is `_END`), which is
  below these numbers. Both fit into int32.
  """
  if piece.isascii() and piece != "\0":
    return int.from_bytes(piece.encode().ljust(_ID_BYTES, b"\0"))
  return ord(piece) + 1


def _text(token: int) -> str:
  """Returns the text of an id, the inverse of `_id`."""
  if token == _END:
    return ""
  if token < _FIRST_ASCII:
    return chr(token - 1)
  return token.to_bytes(_ID_BYTES).rstrip(b"\0").decode()
