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
    given: see `encoder_settings.settle`.

  Attributes:
    settings: prefixes, pooling and the maximum length.
    dim: width of a vector.
    cut: number of texts so far whose end was not read.

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
    **given: Any,
  ):
    folder = pathlib.Path(folder)
    model = models.describe(folder)
    self.settings = settings = encoder_settings.settle(
      folder, usual=model.pooling, most=model.max_tokens, **given
    )
    self._tokenizer, self._end, sha256 = _tokenizer(
      folder, model, settings.max_tokens
    )
    self.dim, self.cut = model.dim, 0
    devices = [platforms.cpu()] if devices is None else devices
    if dtype is None:
      on_cpu = devices[0].platform == "cpu"
      dtype = jnp.float32 if on_cpu else jnp.bfloat16
    mesh = jax.sharding.Mesh(np.asarray(devices), ("data",))
    whole = jax.sharding.NamedSharding(mesh, jax.P())

    def vectors(params: Any, ids: jax.Array, lengths: jax.Array) -> jax.Array:
      hidden = model.hidden(params, ids, lengths)
      return models.pool(hidden, lengths, settings.pooling)

    self._model = batched.BatchedModel(
      vectors,
      model.load(folder, sharding=whole, dtype=dtype),
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
    """Loads an encoder with the settings in another one's identity.

    From `folder`, or from the other one's. The weights are not compared; the
    caller compares the identities.
    """
    said = (*encoder_settings.NAMES, "dtype")
    return cls(
      identity["folder"] if folder is None else folder,
      **{name: identity[name] for name in said},
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
    return self._model(ids, few=True)

  def passages(self, texts: Sequence[str]) -> np.ndarray:
    """Returns vectors of passages, as `queries` does, in larger calls."""
    return self._model(self._ids(texts, self.settings.passage_prefix))

  def tokenizer(self) -> tuple[tokenizers.Tokenizer, int]:
    """See `search.Tokenized`."""
    (prefix,) = self._ids([""], self.settings.passage_prefix)
    whole = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
    whole.no_truncation()
    return whole, self.settings.max_tokens - len(prefix)

  def _ids(self, texts: Sequence[str], prefix: str) -> list[np.ndarray]:
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


def _tokenizer(
  folder: pathlib.Path, model: models.Model, max_tokens: int
) -> tuple[tokenizers.Tokenizer, list[int], str]:
  """Returns a folder's tokenizer, the ids that end its texts, and its hash.

  It adds special tokens and cuts long texts. The model's `end` ends every text
  if the tokenizer adds no special token; without one such a tokenizer is
  refused.
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
    raise ValueError(
      f"{path}: this is not a tokenizer ({error}); copy it again."
    ) from error
  size = max(tokenizer.get_vocab().values(), default=-1) + 1
  if size > model.vocab_size:
    raise ValueError(
      f"{folder}: the tokenizer has {size} tokens, but the embedding has "
      f"{model.vocab_size} rows; they belong to different models."
    )
  special, end = tokenizer.num_special_tokens_to_add(is_pair=False), []
  if not special and model.end is not None:
    special, end = 1, [model.end]
  if not 0 < special < max_tokens:
    raise ValueError(
      f"{folder}: the tokenizer adds {special} special tokens to a text; "
      f"expected 1 or more, and fewer than max_tokens, {max_tokens}."
    )
  # Overrides the padding and truncation that the file may configure.
  tokenizer.no_padding()
  tokenizer.enable_truncation(max_tokens - len(end))
  return tokenizer, end, hashlib.sha256(content).hexdigest()
