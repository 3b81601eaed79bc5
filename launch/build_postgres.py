r"""Fills a table of PostgreSQL with a corpus of passages.

    python -m launch.build_postgres --corpus=wiki-18.jsonl.gz \
        --postgres=postgresql://me@127.0.0.1/mine --output=indexes/postgres
    python -m launch.build_postgres --corpus=wiki-18.jsonl.gz \
        --postgres="host=127.0.0.1 dbname=mine user=me" \
        --password_variable=MINE --encoder=models/e5-base-v2 --vectors=hnsw \
        --output=indexes/postgres

The table has an index of words (BM25 over PostgreSQL's full-text search), and
with --encoder also vectors (pgvector): `flat` is exact search, `hnsw` a graph.
--output is a folder for the line offsets of the corpus.

If the command is stopped, running it again resumes. A run searches the table
with --config.retrieval.kind=postgres; see docs/databases.md.
"""

from __future__ import annotations

import sys
import time

from absl import app, flags

from launch import flags as launch_flags
from launch import jax_setup, progress


def define_flags() -> None:
  """Defines the command's flags; importing the module defines none."""
  flags.DEFINE_string("corpus", None, "JSON lines.", required=True)
  flags.DEFINE_string(
    "postgres", None, "Address without a password.", required=True
  )
  flags.DEFINE_string("output", None, "Folder for offsets.", required=True)
  flags.DEFINE_string("table", "passages", "Name of the table.")
  flags.DEFINE_string("encoder", None, "Hugging Face folder of the encoder.")
  flags.DEFINE_string("language", "english", "As of launch.build_index.")
  flags.DEFINE_list("fields", [], "Other fields of the rows, for filters.")
  flags.DEFINE_float("k1", 0.9, "BM25's saturation.", 0)
  flags.DEFINE_float("b", 0.4, "BM25's length normalisation.", 0, 1)
  flags.DEFINE_enum(
    "vectors", "flat", ["flat", "hnsw"], "How vectors are searched."
  )
  flags.DEFINE_string(
    "password_variable", "", "Environment variable with the password."
  )
  flags.DEFINE_bool(
    "skip_malformed", False, "Leave out lines that are no passage."
  )
  launch_flags.define_devices()
  launch_flags.define_process()


def main(argv) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected argument {argv[1]!r}.")
  f = flags.FLAGS
  jax_setup.configure(threads=f.threads, cache=f.cache, devices=f.devices)
  from anysearch_jax import types
  from anysearch_jax.host import platforms
  from launch import databases
  from retrieval import passages

  try:
    postgres = databases.postgres_client()
    server = postgres.server.Server(
      f.postgres, password=databases.password(f.password_variable)
    )
    corpus = passages.prepare(
      f.corpus, f.output, skip_malformed=f.skip_malformed
    )
    encoder = None
    if f.encoder:
      from retrieval.encoder import encoder as encoder_lib

      encoder = encoder_lib.Encoder.load(
        f.encoder, devices=platforms.accelerators()
      )
    line = progress.Line(len(corpus), unit="passage", clock=time.monotonic)
    postgres.table.build(
      server,
      f.table,
      corpus,
      encoder=encoder,
      k1=f.k1,
      b=f.b,
      language=f.language,
      vectors=f.vectors,
      fields=f.fields,
      on_rows=lambda done, of: line.tick(done),
    )
    print(f"{server.name}: table {f.table} of {len(corpus)} passages")
    server.close()
  except (ValueError, types.RetrievalError) as error:
    sys.exit(f"launch.build_postgres: {error}")


if __name__ == "__main__":
  define_flags()
  launch_flags.run(main, resumes=True)
