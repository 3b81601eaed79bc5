r"""Builds a collection of Milvus over a corpus of passages.

    python -m launch.build_milvus --corpus=wiki-18.jsonl.gz \
        --milvus=passages.db --output=indexes/milvus
    python -m launch.build_milvus --corpus=wiki-18.jsonl.gz \
        --milvus=http://127.0.0.1:19530 --encoder=models/e5-base-v2 \
        --output=indexes/milvus

A file that ends in .db is Milvus Lite in this process; an address is a server
or a cluster. The collection has an index of words (BM25), and with --encoder
also one of vectors. --output is a folder for the line offsets of the corpus.

If the command is stopped, running it again resumes. A run searches the
collection with --config.retrieval.kind=milvus; see docs/databases.md.
"""

from __future__ import annotations

import sys

from absl import app, flags

from launch import database_builds, jax_setup
from launch import flags as launch_flags


def define_flags() -> None:
  """Defines the command's flags; importing the module defines none."""
  database_builds.define_flags()
  flags.DEFINE_string("milvus", None, "File or address.", required=True)
  flags.DEFINE_string("collection", "passages", "Name of the collection.")
  flags.DEFINE_string(
    "vectors", "FLAT", "Milvus's index of vectors: FLAT is exact."
  )
  flags.DEFINE_string(
    "token_variable", None, "Environment variable with the server's token."
  )


def main(argv) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected argument {argv[1]!r}.")
  f = flags.FLAGS
  jax_setup.configure(threads=f.threads, cache=f.cache, devices=f.devices)
  from anysearch_jax.host.http import calls
  from launch import databases

  try:
    milvus = databases.milvus_client()
    token = ""
    if f.token_variable:
      token = calls.secret_in(f.token_variable, "the token of Milvus")
    corpus, more = database_builds.inputs(f)
    client = milvus.collection.connect(f.milvus, token=token)
    milvus.collection.build(client, f.collection, corpus, **more)
    print(f"{f.milvus}: collection {f.collection} of {len(corpus)} passages")
    client.close()
  except ValueError as error:
    sys.exit(f"launch.build_milvus: {error}")


if __name__ == "__main__":
  define_flags()
  launch_flags.run(main, resumes=True)
