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

from absl import app, flags

from launch import database_builds, jax_setup
from launch import flags as launch_flags


def define_flags() -> None:
  """Defines the command's flags; importing the module defines none."""
  database_builds.define_flags()
  flags.DEFINE_string(
    "postgres", None, "Address without a password.", required=True
  )
  flags.DEFINE_string("table", "passages", "Name of the table.")
  flags.DEFINE_enum(
    "vectors", "flat", ["flat", "hnsw"], "How vectors are searched."
  )
  flags.DEFINE_string(
    "password_variable", "", "Environment variable with the password."
  )


def main(argv) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected argument {argv[1]!r}.")
  f = flags.FLAGS
  jax_setup.configure(threads=f.threads, cache=f.cache, devices=f.devices)
  from anysearch_jax import types
  from launch import databases

  try:
    postgres = databases.postgres_client()
    server = postgres.server.Server(
      f.postgres, password=databases.password(f.password_variable)
    )
    corpus, more = database_builds.inputs(f)
    postgres.table.build(server, f.table, corpus, **more)
    print(f"{server.name}: table {f.table} of {len(corpus)} passages")
    server.close()
  except (ValueError, types.RetrievalError) as error:
    sys.exit(f"launch.build_postgres: {error}")


if __name__ == "__main__":
  define_flags()
  launch_flags.run(main, resumes=True)
