"""Opens and fills collections of Milvus."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from absl import flags

from anysearch_jax import config as config_lib
from launch import progress

if TYPE_CHECKING:
  from retrieval import milvus


def make(c: config_lib.RetrievalConfig) -> milvus.MilvusRetriever:
  """Returns the retriever of a collection.

  Raises:
    ValueError: the collection cannot be opened, or a setting is invalid.
  """
  name = c.collection or "passages"
  collection = _collection(c.milvus, name, c.key_variable)
  from retrieval import filters, milvus

  encoder, named = None, collection.described().get("encoder")
  if c.ranking in ("dense", "hybrid") and c.encoder and named:
    from retrieval.encoder import encoder as encoder_lib

    encoder = encoder_lib.Encoder.like(named, c.encoder)
  return milvus.MilvusRetriever(
    collection,
    ranking=c.ranking,
    encoder=encoder,
    filters=filters.parse(c.filter),
  )


def build(f: flags.FlagValues, corpus: Any, encoder: Any) -> str:
  """Fills a collection; returns a line that says so.

  Args:
    f: the flags of launch.build_index.
    corpus: a `passages.Corpus`.
    encoder: encoder of passages; None: words only.

  Raises:
    ValueError: a setting is invalid, or the collection cannot be filled.
  """
  if not f.address:
    raise ValueError("--address: expected where Milvus is.")
  collection = _collection(f.address, f.collection, f.key_variable or "")
  from retrieval import milvus

  line = progress.Line(len(corpus), unit="passage")
  milvus.build(
    collection,
    corpus,
    encoder=encoder,
    language=f.language,
    vectors=f.graph or "flat",
    fields=f.fields,
    on_rows=lambda done, of: line.tick(done),
  )
  collection.client.close()
  return f"milvus: {f.collection} of {len(corpus)} passages"


def _collection(address: str, name: str, variable: str) -> milvus.Collection:
  """Returns the collection at an address."""
  try:
    from retrieval import milvus
  except ImportError as error:
    raise ValueError(
      f"milvus needs a package that is missing ({error}); run pip install -e "
      "'.[milvus]'."
    ) from None
  key = ""
  if variable:
    # Imported late: a run without a service needs no HTTP.
    from anysearch_jax.host import http_calls

    key = http_calls.secret_in(variable, "Milvus's key")
  return milvus.Collection(address, name, key=key)
