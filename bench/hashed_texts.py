"""A corpus and an encoder that cost nearly nothing, to measure searches."""

from __future__ import annotations

import hashlib
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np


class Encoder:
  """A `search.Encoder`: derives a unit vector from the hash of each text."""

  def __init__(self, dim: int):
    self.dim = dim

  def identity(self) -> dict[str, Any]:
    return {"kind": "hash"}

  def passages(self, texts: Sequence[str]) -> np.ndarray:
    return self.queries(texts)

  def queries(self, texts: Sequence[str]) -> np.ndarray:
    seeds = (hashlib.sha256(text.encode()).digest()[:8] for text in texts)
    return unit(np.stack([normal(int.from_bytes(s), self.dim) for s in seeds]))


def normal(seed: int, *shape: int) -> np.ndarray:
  """Returns normal numbers of mean 0 and deviation 1, float32."""
  return np.random.default_rng(seed).standard_normal(shape, np.float32)


def unit(vectors: np.ndarray) -> np.ndarray:
  """Returns vectors `[..., D]` scaled to length 1."""
  return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def write_corpus(file: pathlib.Path, rows: int) -> None:
  """Writes passages of about a hundred words as JSON lines."""
  words = " ".join(f"word{i}" for i in range(100))
  with file.open("w") as out:
    for row in range(rows):
      contents = f'"Title {row}"\nPassage {row} says {words}.'
      out.write(json.dumps({"id": str(row), "contents": contents}) + "\n")
