"""Small corpora and an encoder without a model, for tests of retrieval."""

from __future__ import annotations

import gzip
import hashlib
import json

import numpy as np


def lines(count):
  """Returns passages of a few words; every third is about water."""
  for i in range(count):
    about = "water" if i % 3 == 0 else "fire"
    text = f"Passage number n{i} is about {about}."
    yield json.dumps({"id": str(i), "contents": f'"Title {i}"\n{text}'})


def write(path, count=20, *, extra=()):
  """Writes a corpus file (gzip if its name says so) unless it is the same."""
  data = "".join(line + "\n" for line in (*lines(count), *extra)).encode()
  if path.suffix == ".gz":
    data = gzip.compress(data, mtime=0)
  if not path.exists() or path.read_bytes() != data:
    path.write_bytes(data)
  return path


def damage(file, place=-1):
  """Flips a bit of a file's byte, its last by default."""
  content = bytearray(file.read_bytes())
  content[place] ^= 1
  file.write_bytes(content)


def units(count, dim=16, seed=0):
  """Returns random unit vectors, float32 `[count, dim]`."""
  x = np.random.default_rng(seed).normal(size=(count, dim)).astype(np.float32)
  return x / np.linalg.norm(x, axis=1, keepdims=True)


def bm25(documents, query, *, k1=1.2, b=0.75):
  """Computes Lucene's BM25 of lists of words in float64 from its formula."""
  mean = np.mean([len(d) for d in documents])
  scores = np.zeros(len(documents))
  for word in query:
    having = sum(word in d for d in documents)
    idf = np.log(1 + (len(documents) - having + 0.5) / (having + 0.5))
    for i, d in enumerate(documents):
      n = d.count(word)
      scores[i] += idf * n / (n + k1 * (1 - b + b * len(d) / mean))
  return scores


class Encoder:
  """Derives unit vectors from the hash of a text; counts encoded texts."""

  def __init__(self, dim=16, name="hash"):
    self.dim, self.name, self.encoded = dim, name, 0

  def queries(self, texts):
    return np.stack([self._one(t) for t in texts])

  def passages(self, texts):
    self.encoded += len(texts)
    return np.stack([self._one(t) for t in texts])

  def identity(self):
    return {"name": self.name}

  def _one(self, text):
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    x = np.random.default_rng(seed).normal(size=self.dim)
    return (x / np.linalg.norm(x)).astype(np.float32)
