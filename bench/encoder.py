"""Compares the encoder's passages per second with torch transformers.

    python -m bench.encoder [--case=minilm] [--passages=512] [--pairs=5]

Both sides have the same random model of a real shape, the same texts of about
100 words and the same threads; times include tokenizing. The torch side does
what a careful user would do: it sorts texts by length, pads batches to their
longest text, uses inference mode and the batch size that is fastest in a trial.
The sides are measured in turns, first passages, then queries of about 12 words
in batches of --queries. Prints medians, the ratio of each pair, and the ratio
of CPU times, which depend less on other work on the machine.
"""

from __future__ import annotations

import functools
import os
import pathlib
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from absl import flags

from bench import harness
from launch import jax_setup

_TRIALS = (8, 16, 32, 64)
_TRIAL_TEXTS = 128


class TorchEncoder:
  """The same folder in transformers, pooled by mean."""

  def __init__(self, folder: pathlib.Path, max_tokens: int):
    import tokenizers
    import torch
    import transformers

    self._torch = torch
    self._model = transformers.AutoModel.from_pretrained(
      folder, dtype=torch.float32, add_pooling_layer=False
    ).eval()
    self._tokenizer = tokenizers.Tokenizer.from_file(
      str(folder / "tokenizer.json")
    )
    self._tokenizer.enable_truncation(max_tokens)
    self.rows = 32

  def vectors(self, texts: Sequence[str]) -> np.ndarray:
    torch = self._torch
    order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
    out = np.empty((len(texts), self._model.config.hidden_size), np.float32)
    self._tokenizer.enable_padding()
    with torch.inference_mode():
      for start in range(0, len(order), self.rows):
        some = order[start : start + self.rows]
        found = self._tokenizer.encode_batch([texts[i] for i in some])
        mask = torch.tensor([encoding.attention_mask for encoding in found])
        ids = torch.tensor([encoding.ids for encoding in found])
        hidden = self._model(
          input_ids=ids, attention_mask=mask
        ).last_hidden_state
        mask = mask[..., None]
        mean = (hidden * mask).sum(1) / mask.sum(1)
        out[some] = torch.nn.functional.normalize(mean).numpy()
    return out


def main() -> dict[str, dict[str, float]]:
  f = flags.FLAGS
  cores = sorted(os.sched_getaffinity(0))
  if f.threads:
    cores = cores[: f.threads]
    os.sched_setaffinity(0, cores)  # JAX takes its thread count from this.
  jax_setup.configure(threads=0, cache=".jax_cache")
  import torch

  from bench import random_encoders
  from retrieval.encoder import encoder as encoder_lib

  torch.set_num_threads(len(cores))
  with tempfile.TemporaryDirectory() as root:
    folder = pathlib.Path(root) / f.case
    random_encoders.make(f.case, folder, vocab_size=30522)
    ours = encoder_lib.Encoder.load(folder, query_prefix="", passage_prefix="")
    theirs = TorchEncoder(folder, ours.settings.max_tokens)
  texts = random_encoders.texts(f.passages)
  apart = np.abs(ours.passages(texts) - theirs.vectors(texts)).max()
  trials: dict[int, float] = {}
  for rows in _TRIALS:
    theirs.rows = rows
    some = texts[:_TRIAL_TEXTS]
    trials[rows] = harness.seconds(functools.partial(theirs.vectors, some))
  theirs.rows = min(_TRIALS, key=lambda rows: trials[rows])
  said = ours.identity()
  print(
    f"{f.case}: {said['layers']} layers of {said['d_model']}; {len(cores)} "
    f"threads; torch in batches of {theirs.rows}; vectors apart by {apart:.1e} "
    "at most"
  )
  measured: list[tuple[str, Any, list[list[str]]]]
  measured = [("passages", ours.passages, [texts])]
  for size in map(int, f.queries):
    queries = random_encoders.texts(max(size, 64), seed=1, mean=12)
    parts = [queries[i : i + size] for i in range(0, len(queries), size)]
    measured.append((f"queries by {size}", ours.queries, parts))
  columns = ("texts a second", "ours", "torch", "ratio", "CPU ratio")
  table = harness.Table(*columns)
  out: dict[str, dict[str, float]] = {}
  for name, encode, parts in measured:
    sides = {
      "ours": functools.partial(_each, encode, parts),
      "torch": functools.partial(_each, theirs.vectors, parts),
    }
    harness.timed_in_turns(sides, rounds=1)
    found = harness.timed_in_turns(sides, rounds=f.pairs)
    wall = found.ratio("seconds", "torch", "ours")
    cpu = found.ratio("cpu", "torch", "ours")
    count = sum(map(len, parts))
    speeds = {side: count / found.medians(side)["seconds"] for side in sides}
    table.row(name, *speeds.values(), f"  {wall}", f"  {cpu}")
    out[name] = speeds | {"ratio": wall.median, "cpu_ratio": cpu.median}
  return out


def _each(vectors: Callable[..., object], parts: list[list[str]]) -> None:
  for part in parts:
    vectors(part)


if __name__ == "__main__":
  flags.DEFINE_enum(
    "case", "minilm", ["minilm", "e5-small", "bert-base"], "Shape of the model."
  )
  flags.DEFINE_integer("passages", 512, "Texts of a measurement.")
  flags.DEFINE_list("queries", ["1", "64"], "Queries at a time.")
  flags.DEFINE_integer("pairs", 5, "Measurements of either side.")
  flags.DEFINE_integer("threads", 0, "Cores and threads; 0: all.")
  harness.run(main)
