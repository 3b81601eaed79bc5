"""A text encoder: a Hugging Face folder, on any devices.

It is of BERT's family or ModernBERT's, or a decoder of a family that policies
have. A text's vector does not depend on the other texts in a call (see
`batched`).
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from anysearch_jax.host import platforms
from anysearch_jax.policy import tensor_files
from retrieval.encoder import (
  batched,
  encoder_settings,
  encoder_tokenizer,
  models,
)


class Encoder:
  """A `search.Encoder` from a folder; `load` makes one. It is thread-safe.

  Attributes:
    settings: prefixes, pooling and the maximum length.
    dim: width of a vector.
  """

  def __init__(
    self,
    model: batched.BatchedModel,
    tokenizer: encoder_tokenizer.EncoderTokenizer,
    settings: encoder_settings.EncoderSettings,
    *,
    dim: int,
    identity: dict[str, Any],
  ):
    """Stores the parts; see `load`.

    Args:
      model: maps tokens to unit vectors `[dim]`.
      tokenizer: the tokenizer, which cuts texts to `settings.max_tokens`.
      settings: prefixes, pooling and the maximum length.
      dim: width of a vector.
      identity: hashes of the weights and the tokenizer, the dtype, and the
        fields of the architecture.
    """
    self.settings, self.dim = settings, dim
    self._model, self._tokenizer = model, tokenizer
    self._identity = identity

  @classmethod
  def load(
    cls,
    folder: str | os.PathLike,
    *,
    pooling: str | None = None,
    query_prefix: str | None = None,
    passage_prefix: str | None = None,
    max_tokens: int | None = None,
    dtype: Any = None,
    devices: Sequence[jax.Device] | None = None,
    batch_tokens: int | None = None,
  ) -> Encoder:
    """Loads a folder: E5, BGE, gte-modernbert, Qwen3-Embedding and others.

    Args:
      folder: contains `config.json`, safetensors and `tokenizer.json`.
      pooling: `mean`, `cls` or `lasttoken`; None here and below: see
        `encoder_settings`.
      query_prefix: text before each query.
      passage_prefix: text before each passage.
      max_tokens: the most tokens of a text, including prefix and special
        tokens; longer texts are cut.
      dtype: dtype of the weights and the matrix products; vectors are float32.
        None: bfloat16 on accelerators, float32 on CPUs.
      devices: devices over which rows are sharded, each with all weights; None:
        one CPU device, because accelerators are for the policy.
      batch_tokens: tokens of a call for passages on each device; None: a
        default for the kind of device.

    Raises:
      ValueError: a file or a setting is missing or not supported; the message
        names it.
    """
    folder = pathlib.Path(folder)
    model = models.describe(folder)
    settings = encoder_settings.settle(
      folder,
      pooling=pooling,
      query_prefix=query_prefix,
      passage_prefix=passage_prefix,
      max_tokens=max_tokens,
      usual=model.pooling,
      most=model.max_tokens,
    )
    tokenizer = encoder_tokenizer.EncoderTokenizer(
      folder,
      vocab_size=model.vocab_size,
      max_tokens=settings.max_tokens,
      end=model.end,
    )
    devices = [platforms.cpu()] if devices is None else devices
    if dtype is None:
      on_cpu = devices[0].platform == "cpu"
      dtype = jnp.float32 if on_cpu else jnp.bfloat16
    mesh = jax.sharding.Mesh(np.asarray(devices), ("data",))
    whole = jax.sharding.NamedSharding(mesh, jax.P())
    params = model.load(folder, sharding=whole, dtype=dtype)

    def vectors(
      params: models.Params, ids: jax.Array, lengths: jax.Array
    ) -> jax.Array:
      hidden = model.hidden(params, ids, lengths)
      return models.pool(hidden, lengths, settings.pooling)

    return cls(
      batched.BatchedModel(
        vectors,
        params,
        dim=model.dim,
        mesh=mesh,
        shapes=batched.shapes(devices, settings.max_tokens, batch_tokens),
      ),
      tokenizer,
      settings,
      dim=model.dim,
      identity={
        "folder": str(folder.absolute()),
        "weights_sha256": tensor_files.digest(folder),
        "tokenizer_sha256": tokenizer.sha256,
        "dtype": jnp.dtype(dtype).name,
        **model.identity,
      },
    )

  @classmethod
  def like(
    cls,
    identity: Mapping[str, Any],
    folder: str | os.PathLike | None = None,
    **options: Any,
  ) -> Encoder:
    """Loads an encoder with the settings of another one.

    The weights are not compared; the caller compares the identities.

    Args:
      identity: identity of the other encoder.
      folder: folder to load; None: the folder of the other encoder.
      **options: `devices` and `batch_tokens` of `load`.

    Raises:
      ValueError: as for `load`.
    """
    said = (*encoder_settings.NAMES, "dtype")
    return cls.load(
      identity["folder"] if folder is None else folder,
      **{name: identity[name] for name in said},
      **options,
    )

  def identity(self) -> dict[str, Any]:
    """Returns JSON values that identify the vectors, and the `folder`."""
    return self._identity | dataclasses.asdict(self.settings)

  def queries(self, texts: Sequence[str]) -> np.ndarray:
    """Returns float32 unit vectors `[Q, dim]`, in the order of `texts`.

    Args:
      texts: any texts, including empty ones.

    Raises:
      ValueError: the vectors are not finite.
    """
    return self._encode(texts, self.settings.query_prefix, few=True)

  def passages(self, texts: Sequence[str]) -> np.ndarray:
    """Returns vectors of passages, as `queries` does, in larger calls."""
    return self._encode(texts, self.settings.passage_prefix, few=False)

  def programs(self) -> int:
    """Returns the number of compiled programs, one for each shape of call."""
    return self._model.programs()

  def _encode(
    self, texts: Sequence[str], prefix: str, *, few: bool
  ) -> np.ndarray:
    """Returns the vectors of texts with `prefix` before them."""
    return self._model(self._tokenizer.ids(texts, prefix), few=few)
