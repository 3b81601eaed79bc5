"""The models of encoders: BERT and its kin, or the policy's own decoder.

A decoder reads a text from left to right, so its last token, an end of text
that the tokenizer appends, has seen all of it (Qwen3-Embedding).
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from anysearch_jax.policy import (
  architecture,
  decoder,
  hf_config,
  table,
  tensor_files,
)
from anysearch_jax.policy import parameters as weights
from retrieval.encoder import bert, encoder_settings, modernbert, nomic

Params = dict[str, Any]

_ENCODERS: Mapping[str, Any] = {
  "bert": bert,
  "roberta": bert,
  "xlm-roberta": bert,
  "modernbert": modernbert,
  "nomic_bert": nomic,
}
_DECODERS = ("qwen2", "qwen3", "llama")
# What published decoders have beside the rows of the table: buffers, and a head
# that an encoder does not use.
_IGNORED = (
  r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq|lm_head\..*"
)


class Model(Protocol):
  """Maps tokens to hidden states.

  Attributes:
    vocab_size: number of rows of the embedding.
    max_tokens: the most tokens of a text.
    dim: width of a hidden state.
    pooling: the usual pooling of the family.
    end: id of the token that ends a text if the tokenizer adds none, or None.
  """

  vocab_size: int
  max_tokens: int
  dim: int
  pooling: str
  end: int | None

  def load(
    self,
    folder: pathlib.Path,
    *,
    sharding: jax.sharding.Sharding,
    dtype: Any,
  ) -> Params:
    """Reads the weights of a folder."""
    ...

  def hidden(
    self, params: Params, ids: jax.Array, lengths: jax.Array
  ) -> jax.Array:
    """Returns `[B, T, D]` for ids `[B, T]` of texts of `lengths` tokens."""
    ...

  def identity(self) -> dict[str, Any]:
    """Returns the fields of the architecture as JSON values."""
    ...


def describe(folder: pathlib.Path) -> Model:
  """Returns the model that a folder's config.json describes.

  Raises:
    ValueError: the file is missing, or the model is not supported; the message
      names the folder.
  """
  path = folder / "config.json"
  if not path.is_file():
    raise ValueError(
      f"{folder}: no config.json; expected a Hugging Face folder of an encoder."
    )
  hf_config.refuse_adapter(folder)
  config = encoder_settings.read(path, dict)
  try:
    kind = config.get("model_type")
    if kind in _DECODERS:
      return DecoderModel.from_hf(config)
    if not isinstance(kind, str) or kind not in _ENCODERS:
      known = ", ".join(map(repr, (*_ENCODERS, *_DECODERS)))
      raise ValueError(
        f"config.json: model_type {kind!r} is not supported; expected one of "
        f"{known}."
      )
    return BertModel(_ENCODERS[kind], config)
  except ValueError as error:
    raise ValueError(f"{folder}: {error}") from error


class BertModel:
  """A model whose tokens see the whole text, or a window of it, as a `Model`.

  Args:
    family: module of the family: `bert`, or one with the same functions.
    config: a config.json; a wrong one raises ValueError as `bert.from_hf`.
  """

  pooling = "mean"
  end: int | None = None

  def __init__(self, family: Any, config: Mapping[str, Any]):
    self._family, self._a = family, family.from_hf(config)
    self.vocab_size, self.max_tokens = self._a.vocab_size, self._a.max_tokens
    self.dim = self._a.d_model

  def load(
    self,
    folder: pathlib.Path,
    *,
    sharding: jax.sharding.Sharding,
    dtype: Any,
  ) -> Params:
    """See `bert.load`."""
    return self._family.load(folder, self._a, sharding=sharding, dtype=dtype)

  def hidden(
    self, params: Params, ids: jax.Array, lengths: jax.Array
  ) -> jax.Array:
    """See `bert.forward`."""
    return self._family.forward(params, self._a, ids, lengths)

  def identity(self) -> dict[str, Any]:
    """See `Model`."""
    return self._a.identity()


class DecoderModel:
  """The policy's decoder as a `Model`.

  Args:
    a: its architecture; the LM head is not read.
    end: id of the token that ends a text, or None.
  """

  pooling = "lasttoken"

  def __init__(self, a: architecture.Architecture, end: int | None):
    self._a = table.headless(a)
    self.vocab_size, self.max_tokens = a.vocab_size, a.max_context
    self.dim, self.end = a.d_model, end

  @classmethod
  def from_hf(cls, config: Mapping[str, Any]) -> DecoderModel:
    """Reads a config.json; raises ValueError as `architecture.from_hf`."""
    config = dict(config)
    # A decoder that was saved without its head, as embedding models are.
    names = config.get("architectures") or []
    if isinstance(names, list) and all(
      isinstance(name, str) and name.endswith("Model") for name in names
    ):
      config.pop("architectures", None)
    end = config.get("eos_token_id")
    end = end[0] if isinstance(end, list) and end else end
    return cls(architecture.from_hf(config), end if type(end) is int else None)

  def load(
    self,
    folder: pathlib.Path,
    *,
    sharding: jax.sharding.Sharding,
    dtype: Any,
  ) -> Params:
    """Reads the weights; their names may lack the prefix `model.`.

    Raises:
      ValueError: a tensor is missing, unknown or misshaped.
    """
    rows = table.base_rows(self._a)
    names = tensor_files.headers(folder)
    if not any(name.startswith("model.") for name in names):
      rows = [
        dataclasses.replace(row, name=row.name.removeprefix("model."))
        for row in rows
      ]
    return tensor_files.load(
      folder,
      rows,
      shardings=weights.tree(rows, lambda row: sharding),
      dtype=dtype,
      ignored=_IGNORED,
    )

  def hidden(
    self, params: Params, ids: jax.Array, lengths: jax.Array
  ) -> jax.Array:
    """Returns hidden states after the final norm; see `Model`."""
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    return decoder.forward(
      params,
      self._a,
      ids,
      positions,
      (positions < lengths[:, None]).astype(jnp.int32),
      compute=decoder.Compute(dtype=params["embed"].dtype),
    )

  def identity(self) -> dict[str, Any]:
    """See `Model`."""
    fields = dataclasses.asdict(self._a)
    del fields["lora"]
    return fields | {"end": self.end}
