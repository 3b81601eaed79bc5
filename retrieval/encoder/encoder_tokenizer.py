"""The tokenizer of an encoder's folder."""

from __future__ import annotations

import hashlib
import pathlib
import re
from collections.abc import Sequence

import numpy as np
import tokenizers

# The library's result for a text needs many times the memory of its ids.
_TEXTS_AT_ONCE = 4096
# Lone surrogates, which cannot be encoded.
_SURROGATES = re.compile("[\ud800-\udfff]")


class EncoderTokenizer:
  """Tokenizes texts, adds special tokens, cuts long texts. It is thread-safe.

  Attributes:
    max_tokens: the most ids of a text.
    sha256: hash of the tokenizer's file.
  """

  def __init__(
    self,
    folder: str | pathlib.Path,
    *,
    vocab_size: int,
    max_tokens: int,
    end: int | None = None,
  ):
    """Reads a folder's `tokenizer.json`.

    Args:
      folder: folder of a model.
      vocab_size: rows of the model's embedding; all ids must be below.
      max_tokens: the most ids of a text, including special tokens.
      end: id that ends every text if the tokenizer adds no special token; None:
        a tokenizer that adds none is refused.

    Raises:
      ValueError: the tokenizer is missing or does not fit the model.
    """
    path = pathlib.Path(folder) / "tokenizer.json"
    if not path.is_file():
      raise ValueError(
        f"{folder}: no tokenizer.json; load the tokenizer once with "
        "transformers and save it with save_pretrained."
      )
    content = path.read_bytes()
    try:
      tokenizer = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # The library raises plain `Exception`.
      raise ValueError(
        f"{path}: this is not a tokenizer ({error}); copy it again."
      ) from error
    size = max(tokenizer.get_vocab().values(), default=-1) + 1
    if size > vocab_size:
      raise ValueError(
        f"{folder}: the tokenizer has {size} tokens, but the embedding has "
        f"{vocab_size} rows; they belong to different models."
      )
    special = tokenizer.num_special_tokens_to_add(is_pair=False)
    self._end: list[int] = []
    if special == 0 and end is not None and 0 <= end < vocab_size:
      self._end, special = [end], 1
    if not 0 < special < max_tokens:
      raise ValueError(
        f"{folder}: the tokenizer adds {special} special tokens to a text; "
        f"expected 1 or more, and fewer than max_tokens, {max_tokens}."
      )
    # Overrides the padding and truncation that the file may configure.
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_tokens - len(self._end))
    self.max_tokens = max_tokens
    self.sha256 = hashlib.sha256(content).hexdigest()
    self._tokenizer = tokenizer

  def ids(self, texts: Sequence[str], prefix: str = "") -> list[np.ndarray]:
    """Returns the int32 ids of each text with `prefix` before it, never empty.

    Lone surrogates are replaced by U+FFFD.
    """
    out = []
    for start in range(0, len(texts), _TEXTS_AT_ONCE):
      some = [
        prefix + _clean(text) for text in texts[start : start + _TEXTS_AT_ONCE]
      ]
      out += [
        np.asarray(encoding.ids + self._end, np.int32)
        for encoding in self._tokenizer.encode_batch_fast(some)
      ]
    return out


def _clean(text: str) -> str:
  return _SURROGATES.sub("\ufffd", text)
