"""Policies of real shapes with random weights, or tiny ones to rehearse."""

from __future__ import annotations

import json
import math
import pathlib
import zlib
from collections.abc import Sequence

import jax

from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import parameters as weights
from anysearch_jax.policy import table
from anysearch_jax.policy import tokenizer as tokenizer_lib
from bench.first_gpu import notes as notes_lib
from launch import shipped

_TINY = {
  "hidden_size": 64,
  "intermediate_size": 96,
  "num_hidden_layers": 2,
  "num_attention_heads": 8,
  "num_key_value_heads": 2,
  "head_dim": 16,
  "vocab_size": 512,
}
# Every so many ids, one is a whole search or a whole answer.
_SEARCH, _ANSWER = 601, 1999
_FEW = 61  # The same in a tiny vocabulary.
_HEAD_ROOM = 0.95


def architecture(
  policy: str, *, rehearse: bool
) -> architecture_lib.Architecture:
  """Returns the architecture of a policy in configs/shapes."""
  path = pathlib.Path(shipped.find(f"configs/shapes/{policy}.json"))
  shape = json.loads(path.read_text())
  return architecture_lib.from_hf(shape | _TINY if rehearse else shape)


def parameters(a: architecture_lib.Architecture) -> int:
  return weights.count(table.rows(a))


def need(size: float) -> None:
  """Raises SkippedError if the first device cannot hold `size` bytes."""
  if not fits(size):
    raise notes_lib.SkippedError(
      f"needs {size / 2**30:.1f} GiB; the device gives {_limit() / 2**30:.1f}"
    )


def fits(size: float) -> bool:
  """Returns whether the first device can hold `size` bytes."""
  return size <= _HEAD_ROOM * _limit()


def _limit() -> float:
  """Returns the bytes that JAX may use; infinite if it does not say."""
  stats = jax.local_devices()[0].memory_stats() or {}
  return stats.get("bytes_limit", math.inf)


class Words(tokenizer_lib.Tokenizer):
  """A tokenizer of invented words, for policies with random weights.

  Most ids are words. Some are a whole search or a whole answer, so that a
  policy that draws ids at random searches now and then, and answers.
  """

  def __init__(self, vocab_size: int):
    self.vocab_size = vocab_size
    self.end_of_turn_ids = frozenset({0})
    self.control_tokens = ()
    self._every = (
      (_FEW, _FEW + 2) if vocab_size < _ANSWER else (_SEARCH, _ANSWER)
    )

  def encode(self, text: str) -> list[int]:
    return [
      1 + zlib.crc32(word.encode()) % (self.vocab_size - 1)
      for word in text.split()
    ]

  def decode(self, ids: Sequence[int]) -> str:
    return "".join(map(self._text, ids))

  def render(self, content: str) -> tuple[str, list[int]]:
    return content, self.encode(content)

  def token_texts(self) -> list[str]:
    return [self._text(i) for i in range(self.vocab_size)]

  def _text(self, token: int) -> str:
    search, answer = self._every
    if token and token % search == 0:
      return f"<search>word{token}</search>"
    if token and token % answer == 0:
      return f"<answer>word{token}</answer>"
    return f"word{token} " if token else ""
