"""An encoder behind `/v1/embeddings`: llama.cpp, Ollama, vLLM and others."""

from __future__ import annotations

import asyncio
import functools
import itertools
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from anysearch_jax.host import http_calls, loop, openai_endpoint
from anysearch_jax.retrieval.encoder import encoder_settings

KIND = "served"
# Texts of a call, which a model on a CPU encodes in some seconds.
_BATCH = 16
# Calls at a time: a server encodes one while it receives the next.
_CONCURRENCY = 2
_DEADLINE_SECONDS = 300.0
# Characters down to which a text that is too long for the server is halved.
_LEAST_CHARACTERS = 200
# Statuses by which servers refuse a text that is too long.
_TOO_LONG = (400, 413, 422, 500)
_LISTED_MODELS = 8  # In an error.
# The prefixes of models that only servers have here, by a part of their names;
# of others see `encoder_settings`.
_PREFIXES = {
  "nomic-embed": {
    "query_prefix": "search_query: ",
    "passage_prefix": "search_document: ",
  },
  "embeddinggemma": {
    "query_prefix": "task: search result | query: ",
    "passage_prefix": "title: none | text: ",
  },
  "mxbai-embed": {
    "query_prefix": "Represent this sentence for searching relevant passages: ",
    "passage_prefix": "",
  },
}


@functools.cache
def open_encoder(
  url: str, model: str = "", key_variable: str = ""
) -> ServedEncoder:
  """Returns the encoder of this process.

  Args:
    url, model, key_variable: see `ServedEncoder`.
  """
  return ServedEncoder(url, model, key_variable)


class ServedEncoder:
  """A `search.Encoder` that asks a server; thread-safe.

  Args:
    url: address of the server's interface (`http://host:8080/v1`), with or
      without `/embeddings`.
    model: name of the model; "": the only one that the server names. The
      prefixes of queries and passages follow from it, see `encoder_settings`.
    key_variable: environment variable with the key; "": no key.

  Attributes:
    dim: width of a vector.
    cut: number of texts so far of which the end was not read.

  Raises:
    ValueError: the url is invalid, the key is missing, or the server has
      several models.
    types.RetrievalError: the server does not answer.
  """

  def __init__(self, url: str, model: str = "", key_variable: str = ""):
    self._endpoint = openai_endpoint.OpenAIEndpoint(
      url,
      "/embeddings",
      key_variable=key_variable,
      deadline=_DEADLINE_SECONDS,
      concurrency=_CONCURRENCY,
    )
    self._model = model or self._only_model()
    name = pathlib.PurePath(self._model).name
    self._prefixes = encoder_settings.trained_prefixes(name)
    for part, prefixes in _PREFIXES.items():
      if part in name.lower():
        self._prefixes = prefixes
    self.cut = 0
    (vector,) = loop.run(self._embed(["dimension"]))
    self.dim = len(vector)

  def queries(self, texts: Sequence[str]) -> np.ndarray:
    """Returns float32 unit vectors `[Q, dim]`; raises types.RetrievalError."""
    return self._vectors("query_prefix", texts)

  def passages(self, texts: Sequence[str]) -> np.ndarray:
    """Returns vectors of passages, as `queries` does."""
    return self._vectors("passage_prefix", texts)

  def identity(self) -> dict[str, Any]:
    """Returns JSON values that identify the vectors by the model's name."""
    return {"kind": KIND, "model": self._model, **self._prefixes}

  def _only_model(self) -> str:
    names = loop.run(self._endpoint.models())
    if len(names) != 1:
      raise ValueError(
        f"{self._endpoint.url}: found the models "
        f"{', '.join(names[:_LISTED_MODELS])}; expected the name of one that "
        "makes embeddings: --embeddings_model=NAME."
      )
    return names[0]

  def _vectors(self, prefix: str, texts: Sequence[str]) -> np.ndarray:
    prefixed = [self._prefixes[prefix] + text for text in texts]
    starts = range(0, len(texts), _BATCH)

    async def embed_all() -> list[list[list[float]]]:
      batches = (prefixed[start : start + _BATCH] for start in starts)
      return await asyncio.gather(*map(self._embed, batches))

    rows = [*itertools.chain.from_iterable(loop.run(embed_all()))]
    widths = {len(row) for row in rows} - {self.dim}
    if widths:
      raise http_calls.AnswerError(
        f"{self._endpoint.url}: found vectors of {widths.pop()} numbers, "
        f"expected {self.dim}; does the server still have the same model?"
      )
    vectors = np.array(rows, np.float32).reshape(len(rows), self.dim)
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    if not norms.all():
      raise http_calls.AnswerError(
        f"{self._endpoint.url}: found a vector of zeros, expected another; is "
        f"{self._model} a model that makes embeddings?"
      )
    return vectors / norms

  async def _embed(self, texts: Sequence[str]) -> list[list[float]]:
    """Returns the vectors of a batch; a text that is too long loses its end."""
    try:
      return await self._endpoint.embed(self._model, texts)
    except http_calls.StatusError as error:
      is_short = len(texts[0]) <= _LEAST_CHARACTERS
      if error.status not in _TOO_LONG or (len(texts) == 1 and is_short):
        raise
    if len(texts) == 1:
      self.cut += 1
      return await self._embed([texts[0][: len(texts[0]) // 2]])
    middle = len(texts) // 2
    first_vectors = await self._embed(texts[:middle])
    return first_vectors + await self._embed(texts[middle:])
