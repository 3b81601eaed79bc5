"""Random BERT encoders in Hugging Face folders.

Every value is random, including biases and norm scales, and large enough that a
wrong position, mask or layout changes the vectors.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import shutil
import string
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import transformers

from anysearch_jax.policy import parameters as weights
from anysearch_jax.policy import tensor_files
from anysearch_jax.retrieval.encoder import bidirectional

_SIZES = {
  "hidden_size": 64,
  "num_attention_heads": 2,
  "intermediate_size": 96,
  "num_hidden_layers": 1,
}
_SYLLABLES = [a + b for a in "bcdfghjklmnprstvwz" for b in "aeiou"]
_WORDS = 4000


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  folder = tmp_path_factory.mktemp("encoders") / "tiny"
  make(folder)
  return folder


@pytest.fixture
def own(tmp_path, folder):
  """Returns a folder that a test may change."""
  return shutil.copytree(folder, tmp_path / "own")


def write(path: pathlib.Path, values: Any) -> None:
  path.parent.mkdir(exist_ok=True)
  path.write_text(json.dumps(values))


def vocabulary() -> dict[str, int]:
  """Returns a WordPiece vocabulary: special tokens, letters, pieces, words."""
  letters = [*string.printable.strip(), *"éßñ中文"]
  pieces = [f"##{p}" for p in (*letters, *_SYLLABLES)]
  special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
  every = dict.fromkeys([*special, *letters, *pieces, *words()])
  return {token: i for i, token in enumerate(every)}


def words() -> list[str]:
  """Returns words that are one token each."""
  rng = np.random.default_rng(3)
  return [
    "".join(rng.choice(_SYLLABLES, size)) for size in rng.integers(1, 4, _WORDS)
  ]


def texts(count: int, *, seed: int = 0, mean: float = 100) -> list[str]:
  """Returns texts of about `mean` words, a tenth not in the vocabulary."""
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


@contextlib.contextmanager
def tensors(folder: pathlib.Path) -> Iterator[dict[str, np.ndarray]]:
  """Yields a model's tensors by name, and saves what they became."""
  path = folder / "model.safetensors"
  found = safetensors.numpy.load_file(path)
  yield found
  safetensors.numpy.save_file(found, path)


def make(
  folder: pathlib.Path, *, prefix: str = "", **sizes: Any
) -> bidirectional.Architecture:
  """Saves a float32 model with its tokenizer; needs no torch.

  Args:
    folder: folder of the model; created if missing.
    prefix: prefix of the names in the file.
    **sizes: settings of the configuration.
  """
  tokens = vocabulary()
  settings: dict[str, Any] = {
    "architectures": ["BertModel"],
    "vocab_size": len(tokens) + 7,
  }
  config = transformers.BertConfig(**settings | _SIZES | sizes)
  config.save_pretrained(folder)
  # A name of some releases: in others it is the same class as `BertTokenizer`.
  transformers.BertTokenizerFast(tokens).save_pretrained(folder)
  a = bidirectional.from_hf(config.to_dict())
  rng = np.random.default_rng(0)

  def leaf(row: weights.Weight) -> np.ndarray:
    noise = rng.standard_normal(row.shape, np.float32)
    if len(row.layer_shape) == 1:
      return 0.2 * noise + (row.init is None)
    return noise * a.d_model**-0.5

  table = bidirectional.rows(a, prefix)
  tensor_files.save(folder, weights.tree(table, leaf), table)
  return a
