"""Opens and fills databases of passages that others run."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from absl import flags

from anysearch_jax import config as config_lib
from anysearch_jax import types
from launch import progress
from retrieval import filters

KINDS = ("milvus", "postgres")


def make(c: config_lib.RetrievalConfig) -> tuple[types.BatchRetriever, Any]:
  """Returns the retriever of a database, and its identity.

  Args:
    c: of a kind among `KINDS`.

  Raises:
    ValueError: the database cannot be opened, or a setting is invalid.
  """
  address = c.milvus if c.kind == "milvus" else c.postgres
  module, connection = _connected(c.kind, address, c.key_variable)
  ranking, found = c.ranking or module.RANKINGS[0], filters.parse(c.filter)
  made: Any
  if c.kind == "milvus":
    name = c.collection or "passages"
    built = module.described(connection, name)
    made = module.MilvusRetriever(
      connection,
      name,
      ranking=ranking,
      encoder=_encoder(c, ranking, built),
      filters=found,
    )
  else:
    name = c.table or "passages"
    with connection.connection() as one:
      built = module.described(one, name)
    made = module.PostgresRetriever(
      connection,
      name,
      ranking=ranking,
      encoder=_encoder(c, ranking, built or {}),
      filters=found,
      ef_search=c.ef_search,
    )
  return made, made.identity()


def build(f: flags.FlagValues, corpus: Any, encoder: Any) -> str:
  """Fills a collection or a table; returns a line that says so.

  Args:
    f: the flags of launch.build_index.
    corpus: a `passages.Corpus`.
    encoder: encoder of passages; None: words only.

  Raises:
    ValueError: a setting is invalid, or the database cannot be filled.
  """
  if not f.address:
    raise ValueError(f"--address: expected where {f.kind} is.")
  module, connection = _connected(f.kind, f.address, f.key_variable or "")
  line = progress.Line(len(corpus), unit="passage", clock=time.monotonic)
  module.build(
    connection,
    f.table,
    corpus,
    encoder=encoder,
    language=f.language,
    vectors=f.graph or ("FLAT" if f.kind == "milvus" else "flat"),
    fields=f.fields,
    on_rows=lambda done, of: line.tick(done),
  )
  connection.close()
  return f"{f.kind}: {f.table} of {len(corpus)} passages"


def _connected(kind: str, address: str, variable: str) -> tuple[Any, Any]:
  """Returns the module of a kind of database, and a client or a pool.

  Raises:
    ValueError: a package or a key is missing, or there is no server.
  """
  module: Any
  try:
    if kind == "milvus":
      from retrieval import milvus

      module = milvus
    else:
      from retrieval import postgres

      module = postgres
  except ImportError as error:
    raise ValueError(
      f"{kind} needs a package that is missing ({error}); run pip install -e "
      f"'.[{kind}]'."
    ) from None
  key = ""
  if variable:
    # Imported late: a run without a service needs no HTTP.
    from anysearch_jax.host import redaction

    redaction.check_variable(variable, f"The variable with {kind}'s key")
    if not (key := os.environ.get(variable, "")):
      raise ValueError(f"{variable} is not set; expected {kind}'s key in it.")
  try:
    return module, (
      module.connect(address, token=key)
      if kind == "milvus"
      else module.connect(address, password=key)
    )
  except types.RetrievalError as error:
    raise ValueError(f"retrieval.{kind}: {error}") from None


def _encoder(
  c: config_lib.RetrievalConfig, ranking: str, built: Mapping[str, Any]
) -> Any:
  """Returns the encoder of what was built; None if words are ranked alone."""
  if ranking not in ("dense", "hybrid"):
    return None
  named = built.get("encoder")
  if not c.encoder or named is None:
    raise ValueError(
      f"retrieval.encoder: found {c.encoder!r} for ranking {ranking} of "
      f"{'vectors' if named else 'no vectors'}; expected the folder of the "
      f"encoder that launch.build_index --kind={c.kind} had."
    )
  from retrieval.encoder import encoder as encoder_lib

  return encoder_lib.Encoder.like(named, c.encoder)
