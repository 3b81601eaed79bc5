"""The models of encoders: BERT's kin and ModernBERT, or the policy's decoder.

A decoder reads a text from left to right, so its last token, an end of text
that the tokenizer appends, has seen all of it (Qwen3-Embedding).
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from anysearch_jax.host import json_files
from anysearch_jax.policy import (
  decoder,
  hf_architecture,
  hf_config,
  table,
  tensor_files,
)
from anysearch_jax.policy import parameters as weights
from anysearch_jax.retrieval.encoder import bidirectional

Params = dict[str, Any]

_DECODERS = ("qwen2", "qwen3", "llama")
# Tensors of published decoders that the table lacks: buffers, and a head that
# an encoder does not use.
_IGNORED = (
  r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq|lm_head\..*"
)


class Model(NamedTuple):
  """Maps tokens to hidden states.

  Attributes:
    vocab_size: number of rows of the embedding.
    max_tokens: the most tokens of a text.
    dim: width of a hidden state.
    identity: the fields of the architecture as JSON values.
    load: reads the weights of a folder, with `sharding` and `dtype` of each.
    hidden: maps parameters, ids `[B, T]` and lengths `[B]` to `[B, T, D]`.
    pooling: the usual pooling of the family.
    end: id of the token that ends a text if the tokenizer adds none, or None.
  """

  vocab_size: int
  max_tokens: int
  dim: int
  identity: dict[str, Any]
  load: Callable[..., Params]
  hidden: Callable[[Params, jax.Array, jax.Array], jax.Array]
  pooling: str = "mean"
  end: int | None = None


def describe(folder: pathlib.Path) -> Model:
  """Returns the model that a folder's config.json describes.

  Raises:
    ValueError: the file is missing, or the model is not supported; the message
      names the folder.
  """
  path = folder / "config.json"
  hf_config.refuse_adapter(folder)
  if not path.is_file():
    hf_config.refuse_gguf(folder)
    raise ValueError(
      f"{folder}: no config.json; expected a Hugging Face folder of an encoder."
    )
  config = json_files.read(path)
  kind = config.get("model_type")
  try:
    if kind in _DECODERS:
      return _decoder(config)
    if kind in bidirectional.KINDS:
      a = bidirectional.from_hf(config)
      return Model(
        vocab_size=a.vocab_size,
        max_tokens=a.max_tokens,
        dim=a.d_model,
        identity=a.identity(),
        load=lambda folder, **options: bidirectional.load(folder, a, **options),
        hidden=lambda params, *text: bidirectional.forward(params, a, *text),
      )
    supported = ", ".join(map(repr, (*bidirectional.KINDS, *_DECODERS)))
    raise ValueError(
      f"config.json: model_type {kind!r} is not supported; expected one of "
      f"{supported}."
    )
  except ValueError as error:
    raise ValueError(f"{folder}: {error}") from error


def _decoder(config: Mapping[str, Any]) -> Model:
  """Returns the policy's decoder; its LM head is not read."""
  config = dict(config)
  # A decoder that was saved without its head, as embedding models are.
  names = config.get("architectures") or []
  if isinstance(names, list) and all(
    isinstance(name, str) and name.endswith("Model") for name in names
  ):
    config.pop("architectures", None)
  a = table.headless(hf_architecture.from_hf(config))
  end = config.get("eos_token_id")
  if isinstance(end, list) and end:
    end = end[0]
  if type(end) is not int or not 0 <= end < a.vocab_size:
    end = None

  def load(folder: pathlib.Path, *, sharding: Any, dtype: Any) -> Params:
    """Reads the weights; their names may lack the prefix `model.`."""
    rows = table.base_rows(a)
    names = tensor_files.headers(folder)
    if not any(name.startswith("model.") for name in names):
      rows = [
        dataclasses.replace(row, name=row.name.removeprefix("model."))
        for row in rows
      ]
    shardings = weights.tree(rows, lambda row: sharding)
    return tensor_files.load(
      folder, rows, shardings=shardings, dtype=dtype, ignored=_IGNORED
    )

  def hidden(params: Params, ids: jax.Array, lengths: jax.Array) -> jax.Array:
    """Returns hidden states after the final norm."""
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    segments = (positions < lengths[:, None]).astype(jnp.int32)
    compute = decoder.Compute(dtype=params["embed"].dtype)
    return decoder.forward(params, a, ids, positions, segments, compute=compute)

  fields = dataclasses.asdict(a)
  del fields["lora"]
  return Model(
    vocab_size=a.vocab_size,
    max_tokens=a.max_context,
    dim=a.d_model,
    pooling="lasttoken",
    end=end,
    identity=fields | {"end": end},
    load=load,
    hidden=hidden,
  )


def pool(hidden: jax.Array, lengths: jax.Array, pooling: str) -> jax.Array:
  """Returns the unit vectors of texts.

  Args:
    hidden: `[B, T, D]`.
    lengths: int `[B]`; 0 marks a row of padding.
    pooling: `mean` over a text's tokens, `cls`, its first token, or
      `lasttoken`, its last one.

  Returns:
    float32 `[B, D]`.
  """
  hidden = hidden.astype(jnp.float32)
  if pooling == "cls":
    x = hidden[:, 0]
  elif pooling == "lasttoken":
    last = jnp.maximum(lengths - 1, 0)[:, None, None]
    x = jnp.take_along_axis(hidden, last, axis=1)[:, 0]
  else:
    visible = jnp.arange(hidden.shape[1]) < lengths[:, None]
    x = jnp.where(visible[..., None], hidden, 0).sum(1)
    x /= jnp.maximum(lengths, 1)[:, None]
  norm = jnp.sqrt(jnp.square(x).sum(-1, keepdims=True))
  return x / jnp.maximum(norm, 1e-12)
