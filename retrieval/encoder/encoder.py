"""A text encoder: a Hugging Face folder, on any devices.

It is of BERT's family or ModernBERT's, or a decoder of a family that policies
have. A text's vector does not depend on the other texts in a call (see
`batched`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers

from anysearch_jax.host import platforms
from anysearch_jax.policy import tensor_files
from retrieval.encoder import batched, encoder_settings, models

# The tokenizers' result for a text needs many times the memory of its ids.
_TEXTS_AT_ONCE = 4096
# Lone surrogates, which cannot be encoded.
_SURROGATES = re.compile("[\ud800-\udfff]")


class Encoder:
  """A `search.Encoder` from a folder; `load` makes one. It is thread-safe.

  Attributes:
    settings: prefixes, pooling and the maximum length.
    dim: width of a vector.
  """

  def __init__(
    self,
    model: batched.BatchedModel,
    tokenizer: _Tokenizer,
    settings: encoder_settings.EncoderSettings,
    *,
    dim: int,
    identity: dict[str, Any],
  ):
    """Stores the parts; see `load`."""
    self.settings, self.dim = settings, dim
    self._model, self._tokenizer = model, tokenizer
    self._identity = identity

  @property
  def cut(self) -> int:
    """The number of texts so far whose end was not read."""
    return self._tokenizer.cut

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
    tokenizer = _Tokenizer(folder, model, settings.max_tokens)
    devices = [platforms.cpu()] if devices is None else devices
    if dtype is None:
      on_cpu = devices[0].platform == "cpu"
      dtype = jnp.float32 if on_cpu else jnp.bfloat16
    mesh = jax.sharding.Mesh(np.asarray(devices), ("data",))
    whole = jax.sharding.NamedSharding(mesh, jax.P())

    def vectors(params: Any, ids: jax.Array, lengths: jax.Array) -> jax.Array:
      hidden = model.hidden(params, ids, lengths)
      return models.pool(hidden, lengths, settings.pooling)

    return cls(
      batched.BatchedModel(
        vectors,
        model.load(folder, sharding=whole, dtype=dtype),
        dim=model.dim,
        mesh=mesh,
        shapes=batched.shapes(devices, settings.max_tokens),
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
    devices: Sequence[jax.Device] | None = None,
  ) -> Encoder:
    """Loads an encoder with the settings of another one.

    The weights are not compared; the caller compares the identities.

    Args:
      identity: identity of the other encoder.
      folder: folder to load; None: the folder of the other encoder.
      devices: see `load`.

    Raises:
      ValueError: as for `load`.
    """
    said = (*encoder_settings.NAMES, "dtype")
    return cls.load(
      identity["folder"] if folder is None else folder,
      **{name: identity[name] for name in said},
      devices=devices,
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

  def tokenizer(self) -> tuple[tokenizers.Tokenizer, int]:
    """See `search.Tokenized`."""
    (prefix,) = self._tokenizer.ids([""], self.settings.passage_prefix)
    return self._tokenizer.whole(), self.settings.max_tokens - len(prefix)

  def compile(self) -> None:
    """See `search.Compiled`; queries of up to 4096 tokens."""
    self._model.compile_queries()

  def passages(self, texts: Sequence[str]) -> np.ndarray:
    """Returns vectors of passages, as `queries` does, in larger calls."""
    return self._encode(texts, self.settings.passage_prefix, few=False)

  def _encode(
    self, texts: Sequence[str], prefix: str, *, few: bool
  ) -> np.ndarray:
    """Returns the vectors of texts with `prefix` before them."""
    return self._model(self._tokenizer.ids(texts, prefix), few=few)


class _Tokenizer:
  """Tokenizes texts, adds special tokens, cuts long texts. It is thread-safe.

  Args:
    folder: folder with a `tokenizer.json`.
    model: ids must be below its `vocab_size`; its `end` ends every text if the
      tokenizer adds no special token, and without one such a tokenizer is
      refused.
    max_tokens: the most ids of a text, including special tokens.

  Raises:
    ValueError: the tokenizer is missing or does not fit the model.
  """

  def __init__(
    self, folder: pathlib.Path, model: models.Model, max_tokens: int
  ):
    path = folder / "tokenizer.json"
    if not path.is_file():
      raise ValueError(
        f"{folder}: no tokenizer.json; load the tokenizer once with "
        "transformers and save it with save_pretrained."
      )
    content = path.read_bytes()
    try:
      tokenizer = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # The library raises plain `Exception`.
      raise ValueError(
        f"{path}: this is not a tokenizer ({error}); copy it again."
      ) from error
    size = max(tokenizer.get_vocab().values(), default=-1) + 1
    if size > model.vocab_size:
      raise ValueError(
        f"{folder}: the tokenizer has {size} tokens, but the embedding has "
        f"{model.vocab_size} rows; they belong to different models."
      )
    special = tokenizer.num_special_tokens_to_add(is_pair=False)
    self._end: list[int] = []
    if not special and model.end is not None:
      self._end, special = [model.end], 1
    if not 0 < special < max_tokens:
      raise ValueError(
        f"{folder}: the tokenizer adds {special} special tokens to a text; "
        f"expected 1 or more, and fewer than max_tokens, {max_tokens}."
      )
    # Overrides the padding and truncation that the file may configure.
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_tokens - len(self._end))
    self.sha256 = hashlib.sha256(content).hexdigest()
    self._tokenizer, self.cut = tokenizer, 0

  def whole(self) -> tokenizers.Tokenizer:
    """Returns a copy that cuts no text."""
    copy = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
    copy.no_truncation()
    return copy

  def ids(self, texts: Sequence[str], prefix: str) -> list[np.ndarray]:
    """Returns the int32 ids of each text with `prefix` before it, never empty.

    Lone surrogates are replaced by U+FFFD.
    """
    out = []
    for start in range(0, len(texts), _TEXTS_AT_ONCE):
      some = texts[start : start + _TEXTS_AT_ONCE]
      found = self._tokenizer.encode_batch_fast(
        [prefix + _SURROGATES.sub("\ufffd", text) for text in some]
      )
      self.cut += sum(bool(each.overflowing) for each in found)
      out += [np.asarray(each.ids + self._end, np.int32) for each in found]
    return out
