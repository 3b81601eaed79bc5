"""Opens and fills databases of passages that others run."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from absl import flags

from anysearch_jax import config as config_lib
from anysearch_jax import types
from launch import progress

if TYPE_CHECKING:
  from retrieval import built

KINDS = ("milvus", "postgres")


def make(c: config_lib.RetrievalConfig) -> tuple[types.BatchRetriever, Any]:
  """Returns the retriever of a database, and its identity.

  Args:
    c: of a kind among `KINDS`.

  Raises:
    ValueError: the database cannot be opened, or a setting is invalid.
  """
  from retrieval import built, filters

  table = _table(
    c.kind,
    c.milvus or c.postgres,
    c.collection or c.table or "passages",
    c.key_variable,
    **({"ef_search": c.ef_search} if c.kind == "postgres" else {}),
  )
  encoder = None
  if c.ranking in ("dense", "hybrid"):
    named = table.described().get("encoder")
    if not c.encoder or named is None:
      raise ValueError(
        f"retrieval.encoder: found {c.encoder!r} for ranking {c.ranking} of "
        f"{'vectors' if named else 'no vectors'}; expected the folder of the "
        f"encoder that launch.build_index --kind={c.kind} had."
      )
    from retrieval.encoder import encoder as encoder_lib

    encoder = encoder_lib.Encoder.like(named, c.encoder)
  made = built.DatabaseRetriever(
    table,
    ranking=c.ranking,
    encoder=encoder,
    filters=filters.parse(c.filter),
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
  from retrieval import built

  table = _table(f.kind, f.address, f.table, f.key_variable or "")
  line = progress.Line(len(corpus), unit="passage", clock=time.monotonic)
  built.build(
    table,
    corpus,
    encoder=encoder,
    language=f.language,
    vectors=f.graph or "flat",
    fields=f.fields,
    on_rows=lambda done, of: line.tick(done),
  )
  table.close()
  return f"{f.kind}: {f.table} of {len(corpus)} passages"


def _table(
  kind: str, address: str, name: str, variable: str, **options: Any
) -> built.Table:
  """Returns the collection or table at an address.

  Raises:
    ValueError: a package or a key is missing, or there is no server.
  """
  module: Any
  try:
    if kind == "milvus":
      from retrieval import milvus as module
    else:
      from retrieval import postgres as module
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
    return module.Table(module.connect(address, key=key), name, **options)
  except types.RetrievalError as error:
    raise ValueError(f"retrieval.{kind}: {error}") from None
