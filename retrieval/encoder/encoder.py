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

from anysearch_jax.host import git_lfs, platforms
from anysearch_jax.policy import tensor_files
from anysearch_jax.retrieval.encoder import batched, encoder_settings, models

# The tokenizers' result for a text needs many times the memory of its ids.
_TEXTS_AT_ONCE = 4096
# Lone surrogates, which cannot be encoded.
_SURROGATES = re.compile("[\ud800-\udfff]")


class Encoder:
  """A `search.Encoder`: E5, BGE, gte-modernbert, Qwen3-Embedding and others.

  It is thread-safe.

  Args:
    folder: contains `config.json`, safetensors and `tokenizer.json`.
    dtype: dtype of the weights and the matrix products; vectors are float32.
      None: bfloat16 on accelerators, float32 on CPUs.
    devices: devices over which rows are sharded, each with all weights; None:
      one CPU device, because accelerators are for the policy.
    overrides: fields of `EncoderSettings`, see `encoder_settings.settle`.

  Attributes:
    settings: prefixes, pooling and the maximum length.
    dim: width of a vector.
    cut: number of texts so far that were longer than the maximum.

  Raises:
    ValueError: a file or a setting is missing or not supported; the message
      names it.
  """

  def __init__(
    self,
    folder: str | os.PathLike,
    *,
    dtype: Any = None,
    devices: Sequence[jax.Device] | None = None,
    **overrides: Any,
  ):
    folder = pathlib.Path(folder)
    model = models.describe(folder)
    self.settings = settings = encoder_settings.settle(
      folder,
      default_pooling=model.pooling,
      model_tokens=model.max_tokens,
      **overrides,
    )
    self._tokenizer, self._end, sha256 = _tokenizer(
      folder, model, settings.max_tokens
    )
    self.dim = model.dim
    self.cut = 0
    devices = [platforms.cpu()] if devices is None else devices
    if dtype is None:
      on_cpu = devices[0].platform == "cpu"
      dtype = jnp.float32 if on_cpu else jnp.bfloat16
    mesh = jax.sharding.Mesh(np.asarray(devices), ("data",))
    replicated = jax.sharding.NamedSharding(mesh, jax.P())

    def vectors(params: Any, ids: jax.Array, lengths: jax.Array) -> jax.Array:
      hidden = model.hidden(params, ids, lengths)
      return models.pool(hidden, lengths, settings.pooling)

    self._model = batched.BatchedModel(
      vectors,
      model.load(folder, sharding=replicated, dtype=dtype),
      dim=model.dim,
      mesh=mesh,
      shapes=batched.shapes(devices, settings.max_tokens),
    )
    self.compile = self._model.compile_queries
    self._identity = {
      "folder": str(folder.absolute()),
      "weights_sha256": tensor_files.digest(folder),
      "tokenizer_sha256": sha256,
      "dtype": jnp.dtype(dtype).name,
      **model.identity,
    }

  @classmethod
  def like(
    cls,
    identity: Mapping[str, Any],
    folder: str | os.PathLike | None = None,
    devices: Sequence[jax.Device] | None = None,
  ) -> Encoder:
    """Loads an encoder with the settings in another encoder's identity.

    Args:
      identity: the identity of the other encoder. The caller compares it with
        that of the result; the weights are not compared here.
      folder: the folder to load; None: the one that the identity names.
      devices: see the class.

    Raises:
      KeyError: the identity lacks a setting.
      ValueError: see the class.
    """
    names = (*encoder_settings.NAMES, "dtype")
    return cls(
      identity["folder"] if folder is None else folder,
      **{name: identity[name] for name in names},
      devices=devices,
    )

  def identity(self) -> dict[str, Any]:
    """Returns JSON values that identify the vectors, and the `folder`."""
    return self._identity | dataclasses.asdict(self.settings)

  def queries(self, texts: Sequence[str]) -> np.ndarray:
    """Returns float32 unit vectors `[Q, dim]` of any texts, in their order.

    Raises:
      ValueError: the vectors are not finite.
    """
    ids = self._ids(texts, self.settings.query_prefix)
    return self._model(ids, for_queries=True)

  def passages(self, texts: Sequence[str]) -> np.ndarray:
    """Returns vectors of passages, as `queries` does, in larger calls."""
    return self._model(self._ids(texts, self.settings.passage_prefix))

  def tokenizer(self) -> tuple[tokenizers.Tokenizer, int]:
    """See `search.Tokenized`."""
    (prefix,) = self._ids([""], self.settings.passage_prefix)
    untruncated = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
    untruncated.no_truncation()
    return untruncated, self.settings.max_tokens - len(prefix)

  def _ids(self, texts: Sequence[str], prefix: str) -> list[np.ndarray]:
    """Returns the int32 ids of each text with `prefix` before it, never empty.

    Lone surrogates are replaced by U+FFFD.
    """
    ids = []
    for start in range(0, len(texts), _TEXTS_AT_ONCE):
      encodings = self._tokenizer.encode_batch_fast(
        [
          prefix + _SURROGATES.sub("\ufffd", text)
          for text in texts[start : start + _TEXTS_AT_ONCE]
        ]
      )
      self.cut += sum(bool(x.overflowing) for x in encodings)
      ids += [np.asarray(x.ids + self._end, np.int32) for x in encodings]
    return ids


def _tokenizer(
  folder: pathlib.Path, model: models.Model, max_tokens: int
) -> tuple[tokenizers.Tokenizer, list[int], str]:
  """Returns a folder's tokenizer, the ids that end its texts, and its hash.

  The tokenizer adds special tokens and cuts long texts. If it adds none, the
  model's `end` ends every text, and a model without `end` is refused.
  """
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
    git_lfs.refuse_pointer(path)
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
  end = []
  if not special and model.end is not None:
    special = 1
    end = [model.end]
  if not 0 < special < max_tokens:
    raise ValueError(
      f"{folder}: the tokenizer adds {special} special tokens to a text; "
      f"expected 1 or more, and fewer than max_tokens, {max_tokens}."
    )
  # Overrides the padding and truncation that the file may configure.
  tokenizer.no_padding()
  tokenizer.enable_truncation(max_tokens - len(end))
  return tokenizer, end, hashlib.sha256(content).hexdigest()
