"""Stop texts are found in decoded text, wherever token boundaries are.

The device cannot decode text. It halts a row at every token that could complete
a stop text. The host then decodes the turn, and resumes the row if the turn
contains no stop text. The completing token is kept whole, even if its text
continues after the stop text.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np


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


def cut(text: str, stops: Sequence[str]) -> str | None:
  """Returns `text` up to the end of its first stop text, None without one."""
  ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
  return text[: min(ends)] if ends else None
