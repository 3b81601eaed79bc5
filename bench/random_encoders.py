"""Random BERT encoders of real shapes, in folders as Hugging Face has them.

Every value is drawn, biases and norm scales too, large enough that a wrong
position, mask or layout moves the vectors.
"""

from __future__ import annotations

import pathlib
import string
from typing import Any

import numpy as np
import transformers

from anysearch_jax.policy import parameters as weights
from anysearch_jax.policy import tensor_files
from retrieval.encoder import bert

# Settings of the real ones.
CASES: dict[str, dict[str, Any]] = {
  "bert-base": {
    "hidden_size": 768,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
  },
  "e5-small": {
    "hidden_size": 384,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
  },
  "minilm": {
    "hidden_size": 384,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
  },
}
_SYLLABLES = [a + b for a in "bcdfghjklmnprstvwz" for b in "aeiou"]
_WORDS = 4000


def vocabulary() -> dict[str, int]:
  """A WordPiece vocabulary: special tokens, letters, pieces, whole words."""
  letters = [*string.printable.strip(), *"éßñ中文"]
  pieces = [f"##{p}" for p in (*letters, *_SYLLABLES)]
  special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
  every = dict.fromkeys([*special, *letters, *pieces, *words()])
  return {token: i for i, token in enumerate(every)}


def words() -> list[str]:
  """Words that are one token each."""
  rng = np.random.default_rng(3)
  return [
    "".join(rng.choice(_SYLLABLES, size)) for size in rng.integers(1, 4, _WORDS)
  ]


def texts(count: int, *, seed: int = 0, mean: float = 100) -> list[str]:
  """Texts of about `mean` words, one in ten of them unknown to the model."""
  rng = np.random.default_rng(seed)
  known = np.asarray(words())
  out = []
  for size in rng.normal(mean, mean / 4, count).astype(int).clip(1):
    some = rng.choice(known, size)
    rare = rng.random(size) < 1 / 10
    some = [
      "".join(rng.choice(_SYLLABLES, 4)) if unknown else str(word)
      for word, unknown in zip(some, rare, strict=True)
    ]
    out.append(" ".join(some))
  return out


def make(
  case: str,
  folder: pathlib.Path,
  *,
  seed: int = 0,
  prefix: str = "",
  **sizes: Any,
) -> bert.Architecture:
  """Saves a float32 model of a case with its tokenizer; needs no torch.

  Args:
    case: of `CASES`.
    folder: made if it is not there.
    seed: of the weights.
    prefix: of the names in the file.
    **sizes: settings of the configuration that take the case's place.
  """
  tokens = vocabulary()
  config = transformers.BertConfig(
    **{"architectures": ["BertModel"], "vocab_size": len(tokens) + 7}
    | CASES[case]
    | sizes
  )
  config.save_pretrained(folder)
  transformers.BertTokenizerFast(tokens).save_pretrained(folder)
  a = bert.from_hf(config.to_dict())
  rng = np.random.default_rng(seed)

  def leaf(row: weights.Weight) -> np.ndarray:
    noise = rng.standard_normal(row.shape, np.float32)
    if len(row.layer_shape) == 1:
      return 0.2 * noise + (row.init is None)
    return noise * a.d_model**-0.5

  table = bert.rows(a, prefix)
  tensor_files.save(folder, weights.tree(table, leaf), table)
  return a
