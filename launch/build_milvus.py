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
import time

from absl import app, flags

from launch import flags as launch_flags
from launch import jax_setup, progress


def define_flags() -> None:
  """Defines the command's flags; importing the module defines none."""
  flags.DEFINE_string("corpus", None, "JSON lines.", required=True)
  flags.DEFINE_string("milvus", None, "File or address.", required=True)
  flags.DEFINE_string("output", None, "Folder for offsets.", required=True)
  flags.DEFINE_string("collection", "passages", "Name of the collection.")
  flags.DEFINE_string("encoder", None, "Hugging Face folder of the encoder.")
  flags.DEFINE_string("language", "english", "As of launch.build_index.")
  flags.DEFINE_list("fields", [], "Other fields of the rows, for filters.")
  flags.DEFINE_float("k1", 0.9, "BM25's saturation.", 0)
  flags.DEFINE_float("b", 0.4, "BM25's length normalisation.", 0, 1)
  flags.DEFINE_string(
    "vectors", "FLAT", "Milvus's index of vectors: FLAT is exact."
  )
  flags.DEFINE_string(
    "token_variable", None, "Environment variable with the server's token."
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
  from anysearch_jax.host import platforms
  from anysearch_jax.host.http import calls
  from launch import databases
  from retrieval import passages

  try:
    milvus = databases.milvus_client()
    token = ""
    if f.token_variable:
      token = calls.secret_in(f.token_variable, "the token of Milvus")
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
    client = milvus.connect(f.milvus, token=token)
    milvus.build(
      client,
      f.collection,
      corpus,
      encoder=encoder,
      k1=f.k1,
      b=f.b,
      language=f.language,
      vectors=f.vectors,
      fields=f.fields,
      on_rows=lambda done, of: line.tick(done),
    )
    print(f"{f.milvus}: collection {f.collection} of {len(corpus)} passages")
    client.close()
  except ValueError as error:
    sys.exit(f"launch.build_milvus: {error}")


if __name__ == "__main__":
  define_flags()
  launch_flags.run(main, resumes=True)
