"""The retrievers over servers that others run: Milvus and PostgreSQL."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from anysearch_jax import config as config_lib
from anysearch_jax import types
from retrieval import filters

KINDS = ("milvus", "postgres")


def make(c: config_lib.RetrievalConfig) -> tuple[types.BatchRetriever, Any]:
  """Returns the retriever of a database, and its identity.

  Args:
    c: of a kind among `KINDS`.

  Raises:
    ValueError: the database cannot be opened, or a setting is invalid.
  """
  return _milvus(c) if c.kind == "milvus" else _postgres(c)


def milvus_client() -> Any:
  """Returns the package `retrieval.milvus`.

  Raises:
    ValueError: Milvus's own client is not installed.
  """
  try:
    from retrieval import milvus
    from retrieval.milvus import collection, retriever  # noqa: F401
  except ModuleNotFoundError as error:
    raise ValueError(
      f"Milvus needs a package that is missing ({error}); run pip install -r "
      "requirements-milvus.txt."
    ) from None
  return milvus


def _milvus(
  c: config_lib.RetrievalConfig,
) -> tuple[types.BatchRetriever, Any]:
  """Returns a retriever over a collection of Milvus, and its identity."""
  milvus = milvus_client()
  token = ""
  if c.key_variable:
    from anysearch_jax.host.http import calls

    token = calls.secret_in(c.key_variable, "the token of Milvus")
  client = milvus.collection.connect(c.milvus, token=token)
  collection, ranking = c.collection or "passages", c.ranking or "bm25"
  encoder = None
  if ranking != "bm25":
    built = milvus.collection.described(client, collection)
    encoder = _encoder(c, ranking, built)
  found = milvus.retriever.MilvusRetriever(
    client,
    collection,
    ranking=ranking,
    encoder=encoder,
    filters=filters.parse(c.filter),
    token=token,
  )
  return found, found.identity()


def postgres_client() -> Any:
  """Returns the package `retrieval.postgres`.

  Raises:
    ValueError: PostgreSQL's own client is not installed.
  """
  try:
    from retrieval import postgres
    from retrieval.postgres import retriever, server, table  # noqa: F401
  except ImportError as error:
    raise ValueError(
      f"PostgreSQL needs a package that is missing ({error}); run pip install "
      "-r requirements-postgres.txt."
    ) from None
  return postgres


def password(variable: str) -> str:
  """Returns the password in an environment variable; "" without a variable.

  Raises:
    ValueError: the variable is not set.
  """
  if not variable:
    return ""
  from anysearch_jax.host.http import redaction

  redaction.check_variable(variable, "The variable with PostgreSQL's password")
  if not (value := os.environ.get(variable, "")):
    raise ValueError(
      f"{variable} is not set; expected PostgreSQL's password in it."
    )
  return value


def _postgres(
  c: config_lib.RetrievalConfig,
) -> tuple[types.BatchRetriever, Any]:
  """Returns a retriever over a table of PostgreSQL, and its identity."""
  postgres = postgres_client()
  server = postgres.server.Server(c.postgres, password=password(c.key_variable))
  table, ranking = c.table or "passages", c.ranking or "bm25"
  try:
    encoder = None
    if ranking != "bm25":
      built, _ = server.run(
        lambda connection: postgres.table.described(connection, table)
      )
      encoder = _encoder(c, ranking, built)
    found = postgres.retriever.PostgresRetriever(
      server,
      table,
      ranking=ranking,
      encoder=encoder,
      filters=filters.parse(c.filter),
      ef_search=c.ef_search,
    )
  except types.RetrievalError as error:
    raise ValueError(f"retrieval.postgres: {error}") from None
  return found, found.identity()


def _encoder(
  c: config_lib.RetrievalConfig, ranking: str, built: Mapping[str, Any]
) -> Any:
  """Returns the encoder of what was built; see `make`."""
  named = built.get("encoder")
  if not c.encoder or named is None:
    raise ValueError(
      f"retrieval.encoder: found {c.encoder!r} for ranking {ranking} of "
      f"{'vectors' if named else 'no vectors'}; expected the folder of the "
      f"encoder that launch.build_{c.kind} had."
    )
  from retrieval.encoder import encoder as encoder_lib

  return encoder_lib.Encoder.like(named, c.encoder)
