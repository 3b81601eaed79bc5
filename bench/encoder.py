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
    self._tokenizer.no_padding()
    self.rows = 32

  def vectors(self, texts: Sequence[str]) -> np.ndarray:
    torch = self._torch
    found = self._tokenizer.encode_batch_fast(texts)
    tokens = [encoding.ids for encoding in found]
    order = sorted(range(len(tokens)), key=lambda i: -len(tokens[i]))
    out = np.empty((len(tokens), self._model.config.hidden_size), np.float32)
    with torch.inference_mode():
      for start in range(0, len(order), self.rows):
        some = order[start : start + self.rows]
        longest = len(tokens[some[0]])
        ids = np.zeros((len(some), longest), np.int64)
        mask = np.zeros_like(ids)
        for row, i in enumerate(some):
          ids[row, : len(tokens[i])] = tokens[i]
          mask[row, : len(tokens[i])] = 1
        mask = torch.from_numpy(mask)
        hidden = self._model(
          input_ids=torch.from_numpy(ids), attention_mask=mask
        ).last_hidden_state
        mask = mask[..., None]
        mean = (hidden * mask).sum(1) / mask.sum(1)
        out[some] = torch.nn.functional.normalize(mean).numpy()
    return out


def main() -> dict[str, dict[str, object]]:
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
  theirs.rows = _fastest_rows(theirs, texts[:_TRIAL_TEXTS])
  said = ours.identity()
  print(
    f"{f.case}: {said['layers']} layers of {said['d_model']}; "
    f"{torch.get_num_threads()} threads; torch "
    f"in batches of {theirs.rows}; vectors apart by {apart:.1e} at most"
  )
  compare = functools.partial(
    _compare,
    harness.Table("texts a second", "ours", "torch", "ratio", "CPU ratio"),
    f.pairs,
  )
  numbers = {
    "passages": compare(
      "passages",
      len(texts),
      lambda: ours.passages(texts),
      lambda: theirs.vectors(texts),
    )
  }
  for size in map(int, f.queries):
    queries = random_encoders.texts(max(size, 64), seed=1, mean=12)
    batches = [queries[i : i + size] for i in range(0, len(queries), size)]
    name = f"queries by {size}"
    numbers[name] = compare(
      name,
      len(queries),
      functools.partial(_each, ours.queries, batches),
      functools.partial(_each, theirs.vectors, batches),
    )
  return numbers


def _fastest_rows(encoder: TorchEncoder, texts: Sequence[str]) -> int:
  """Returns the batch size of torch that encodes `texts` fastest."""
  trials: dict[int, float] = {}
  for encoder.rows in _TRIALS:
    trials[encoder.rows] = harness.seconds(lambda: encoder.vectors(texts))
  return min(_TRIALS, key=lambda rows: trials[rows])


def _compare(
  table: harness.Table,
  pairs: int,
  name: str,
  count: int,
  ours: Callable[[], object],
  theirs: Callable[[], object],
) -> dict[str, object]:
  """Times both sides in turns and prints a row."""
  sides = {"ours": ours, "torch": theirs}
  harness.timed_in_turns(sides, rounds=1)
  found = harness.timed_in_turns(sides, rounds=pairs)
  wall = found.ratio("seconds", "torch", "ours")
  cpu = found.ratio("cpu", "torch", "ours")
  speeds = {side: count / found.medians(side)["seconds"] for side in sides}
  table.row(name, *speeds.values(), f"  {wall}", f"  {cpu}")
  return speeds | {
    "ratio": wall.median,
    "ratios": found.ratios("seconds", "torch", "ours"),
    "cpu_ratio": cpu.median,
  }


def _each(
  vectors: Callable[[Sequence[str]], object], batches: Sequence[Sequence[str]]
) -> None:
  for batch in batches:
    vectors(batch)


if __name__ == "__main__":
  flags.DEFINE_enum(
    "case", "minilm", ["minilm", "e5-small", "bert-base"], "Shape of the model."
  )
  flags.DEFINE_integer("passages", 512, "Texts of a measurement.")
  flags.DEFINE_list("queries", ["1", "64"], "Queries at a time.")
  flags.DEFINE_integer("pairs", 5, "Measurements of either side.")
  flags.DEFINE_integer("threads", 0, "Cores and threads; 0: all.")
  harness.run(main)
