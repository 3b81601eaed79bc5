"""A cross-encoder: scores a query and a passage that one model reads together.

It is a sequence classifier of the BERT family in a Hugging Face folder, such as
ms-marco-MiniLM or bge-reranker (https://arxiv.org/abs/1901.04085).
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from anysearch_jax.policy import hf_config, tensor_files
from anysearch_jax.policy import parameters as weights
from retrieval.encoder import (
  batched,
  bert,
  encoder_settings,
  encoder_tokenizer,
  placing,
)

_MAX_TOKENS = 512
# RoBERTa's four special tokens of a pair, and one token of each text.
_LEAST_TOKENS = 6
# Pairs have any length, so few programs matter more than little padding.
_FINE = 32
# The names of the layers of a head, by the family: a hidden one and the last.
_HEADS = {
  "bert": ("bert.pooler.dense", "classifier"),
  "roberta": ("classifier.dense", "classifier.out_proj"),
}


class CrossEncoder:
  """Scores pairs of texts; `load` makes one. It is thread-safe.

  Args:
    model: maps tokens to scores `[]`; its column is the length of the query.
    tokenizer: the tokenizer, which cuts pairs to its maximum length.
    identity: JSON values; models with equal values give equal scores.
  """

  def __init__(
    self,
    model: batched.BatchedModel,
    tokenizer: encoder_tokenizer.EncoderTokenizer,
    *,
    identity: dict[str, Any],
  ):
    self._model, self._tokenizer = model, tokenizer
    self._identity = identity

  @classmethod
  def load(
    cls,
    folder: str | os.PathLike,
    *,
    max_tokens: int | None = None,
    dtype: Any = None,
    devices: Sequence[jax.Device] | None = None,
    batch_tokens: int | None = None,
  ) -> CrossEncoder:
    """Loads a folder of BertForSequenceClassification, or of (XLM-)RoBERTa's.

    Args:
      folder: contains `config.json`, safetensors and `tokenizer.json`.
      max_tokens: the most tokens of a pair with its special tokens; of a pair
        that is longer, the longer text is cut. None: 512, or what the model can
        read.
      dtype: dtype of the weights and the matrix products; None: bfloat16 on
        accelerators, float32 on CPUs.
      devices: devices over which pairs are sharded, each with all weights;
        None: one CPU device.
      batch_tokens: tokens of a call on each device; None: a default for the
        kind of device.

    Raises:
      ValueError: a file or a setting is missing or not supported; the message
        names it.
    """
    folder = pathlib.Path(folder)
    a, head, labels = _described(folder)
    if max_tokens is None:
      max_tokens = min(_MAX_TOKENS, a.max_tokens)
    if not _LEAST_TOKENS <= max_tokens <= a.max_tokens:
      raise ValueError(
        f"max_tokens: found {max_tokens} for {folder}; expected "
        f"{_LEAST_TOKENS} to {a.max_tokens}."
      )
    tokenizer = encoder_tokenizer.EncoderTokenizer(
      folder, vocab_size=a.vocab_size, max_tokens=max_tokens
    )
    placed = placing.place(devices, dtype)
    params = bert.load(
      folder, a, sharding=placed.whole, dtype=placed.dtype, head=head
    )

    def score(
      params: bert.Params, ids: jax.Array, lengths: jax.Array, first: jax.Array
    ) -> jax.Array:
      hidden = bert.forward(params, a, ids, lengths, first)
      return _score(params, hidden[:, 0])

    return cls(
      batched.BatchedModel(
        score,
        params,
        out=(),
        mesh=placed.mesh,
        shapes=batched.shapes(
          placed.devices, max_tokens, batch_tokens
        )._replace(fine=_FINE),
      ),
      tokenizer,
      identity={
        "kind": "cross_encoder",
        "weights_sha256": tensor_files.digest(folder),
        "tokenizer_sha256": tokenizer.sha256,
        "dtype": jnp.dtype(placed.dtype).name,
        "max_tokens": max_tokens,
        "labels": labels,
        **a.identity(),
      },
    )

  def identity(self) -> dict[str, Any]:
    """Returns JSON values that identify the scores."""
    return self._identity

  def scores(self, pairs: Sequence[tuple[str, str]]) -> np.ndarray:
    """Returns the float32 score of each (query, passage), higher is better.

    The score is the model's only logit, or the log odds of its second label.

    Raises:
      ValueError: a score is not finite.
    """
    ids, first = self._tokenizer.pairs(pairs)
    return self._model(ids, [first])

  def compile(self) -> None:
    """Compiles all programs, so that no later call waits for that."""
    self._model.compile(columns=1)

  def programs(self) -> int:
    """Returns the number of compiled programs, one for each shape of call."""
    return self._model.programs()


def head_rows(
  family: str, a: bert.Architecture, labels: int
) -> list[weights.Weight]:
  """Returns the rows of a classifier's head.

  Args:
    family: `bert` or `roberta`.
    a: the architecture under it.
    labels: number of logits.
  """
  rows = []
  for key, name, gives in zip(
    ("head", "logits"), _HEADS[family], (a.d_model, labels), strict=True
  ):
    for path, part, shape in (
      (key, "weight", (gives, a.d_model)),
      (f"{key}_bias", "bias", (gives,)),
    ):
      rows.append(
        weights.Weight(
          path=(path,),
          shape=shape,
          axes=(None,) * len(shape),
          name=f"{name}.{part}",
          split=shape,
          perm=tuple(range(len(shape))),
          file_shape=shape,
          init=0.02,
        )
      )
  return rows


def _score(params: bert.Params, first: jax.Array) -> jax.Array:
  """Returns scores `[B]` of the hidden states `[B, D]` of the first tokens."""

  def dense(key: str, x: jax.Array) -> jax.Array:
    return (
      jnp.matmul(x, params[key].T, precision=jax.lax.Precision.HIGHEST)
      + params[f"{key}_bias"]
    )

  logits = dense("logits", jnp.tanh(dense("head", first))).astype(jnp.float32)
  if logits.shape[-1] == 1:
    return logits[:, 0]
  return logits[:, 1] - logits[:, 0]


def _described(
  folder: pathlib.Path,
) -> tuple[bert.Architecture, list[weights.Weight], int]:
  """Returns architecture, rows of the head, and number of labels of a folder.

  Raises:
    ValueError: it is no classifier of one or two labels.
  """
  path = folder / "config.json"
  if not path.is_file():
    raise ValueError(
      f"{folder}: no config.json; expected a Hugging Face folder of a "
      "cross-encoder."
    )
  hf_config.refuse_adapter(folder)
  config = encoder_settings.read(path, dict)
  try:
    a = bert.from_hf(config)
    labels = _labels(config)
  except ValueError as error:
    raise ValueError(f"{folder}: {error}") from error
  family = "bert" if config["model_type"] == "bert" else "roberta"
  return a, head_rows(family, a, labels), labels


def _labels(config: Mapping[str, Any]) -> int:
  names = config.get("architectures") or [""]
  if not str(names[0]).endswith("ForSequenceClassification"):
    raise ValueError(
      f"config.json: architecture {names[0]!r} has no scores; expected a "
      "cross-encoder, such as BertForSequenceClassification."
    )
  said = config.get("id2label")
  labels = len(said) if isinstance(said, dict) else config.get("num_labels", 2)
  if labels not in (1, 2):
    raise ValueError(
      f"config.json: {labels} labels; expected one (a relevance), or two of "
      "which the second is relevant."
    )
  return labels
