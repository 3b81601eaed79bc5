"""What the commands that fill a database share: their flags and inputs."""

from __future__ import annotations

import time
from typing import Any

from absl import flags

from launch import flags as launch_flags
from launch import progress


def define_flags() -> None:
  """Defines the flags of the corpus, the words, the encoder and the process."""
  flags.DEFINE_string("corpus", None, "JSON lines.", required=True)
  flags.DEFINE_string("output", None, "Folder for offsets.", required=True)
  flags.DEFINE_string("encoder", None, "Hugging Face folder of the encoder.")
  flags.DEFINE_string("language", "english", "As of launch.build_index.")
  flags.DEFINE_list("fields", [], "Other fields of the rows, for filters.")
  flags.DEFINE_float("k1", 0.9, "BM25's saturation.", 0)
  flags.DEFINE_float("b", 0.4, "BM25's length normalisation.", 0, 1)
  flags.DEFINE_bool(
    "skip_malformed", False, "Leave out lines that are no passage."
  )
  launch_flags.define_devices()
  launch_flags.define_process()


def inputs(f: flags.FlagValues) -> tuple[Any, dict[str, Any]]:
  """Returns the corpus, and the other arguments of `build` of a database.

  Args:
    f: the flags of `define_flags`, and `vectors`; JAX is configured.

  Raises:
    ValueError: the corpus or the encoder cannot be read.
  """
  from anysearch_jax.host import platforms
  from retrieval import passages

  corpus = passages.prepare(f.corpus, f.output, skip_malformed=f.skip_malformed)
  encoder = None
  if f.encoder:
    from retrieval.encoder import encoder as encoder_lib

    encoder = encoder_lib.Encoder.load(
      f.encoder, devices=platforms.accelerators()
    )
  line = progress.Line(len(corpus), unit="passage", clock=time.monotonic)
  return corpus, {
    "encoder": encoder,
    "k1": f.k1,
    "b": f.b,
    "language": f.language,
    "vectors": f.vectors,
    "fields": f.fields,
    "on_rows": lambda done, of: line.tick(done),
  }
