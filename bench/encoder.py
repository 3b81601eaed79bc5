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
import json
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence

import numpy as np
from absl import flags

from launch import flags as launch_flags
from launch import jax_setup

_CASE = flags.DEFINE_enum(
  "case", "minilm", ["minilm", "e5-small", "bert-base"], "Shape of the model."
)
_PASSAGES = flags.DEFINE_integer("passages", 512, "Texts of a measurement.")
_QUERIES = flags.DEFINE_list("queries", ["1", "64"], "Queries at a time.")
_PAIRS = flags.DEFINE_integer("pairs", 5, "Measurements of either side.")
_THREADS = flags.DEFINE_integer("threads", 0, "Cores and threads; 0: all.")
_JSON = flags.DEFINE_string("json", None, "File for the numbers.")
_TRIALS = (8, 16, 32, 64)


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


def main(argv) -> None:
  del argv
  cores = sorted(os.sched_getaffinity(0))
  if _THREADS.value:
    cores = cores[: _THREADS.value]
    os.sched_setaffinity(0, cores)  # JAX takes its thread count from this.
  jax_setup.configure(threads=0, cache=".jax_cache")
  import torch

  from bench import random_encoders
  from retrieval.encoder import encoder as encoder_lib

  torch.set_num_threads(len(cores))
  with tempfile.TemporaryDirectory() as root:
    folder = pathlib.Path(root) / _CASE.value
    random_encoders.make(_CASE.value, folder, vocab_size=30522)
    ours = encoder_lib.Encoder.load(folder, query_prefix="", passage_prefix="")
    theirs = TorchEncoder(folder, ours.settings.max_tokens)
  texts = random_encoders.texts(_PASSAGES.value)
  apart = np.abs(ours.passages(texts) - theirs.vectors(texts)).max()
  trials = {}
  for theirs.rows in _TRIALS:
    trials[theirs.rows] = measure(lambda: theirs.vectors(texts[:128]))[0]
  theirs.rows = min(trials, key=trials.get)
  print(
    f"{_CASE.value}: {ours.architecture.layers} layers of "
    f"{ours.architecture.d_model}; {torch.get_num_threads()} threads; torch "
    f"in batches of {theirs.rows}; vectors apart by {apart:.1e} at most"
  )
  print(
    f"{'texts a second':<24}{'ours':>9}{'torch':>9}{'ratio':>8}"
    f"{'of each pair':>16}{'CPU ratio':>11}"
  )
  numbers = {
    "passages": compare(
      "passages",
      len(texts),
      lambda: ours.passages(texts),
      lambda: theirs.vectors(texts),
    )
  }
  for size in map(int, _QUERIES.value):
    queries = random_encoders.texts(max(size, 64), seed=1, mean=12)
    batches = [queries[i : i + size] for i in range(0, len(queries), size)]
    name = f"queries by {size}"
    numbers[name] = compare(
      name,
      len(queries),
      functools.partial(each, ours.queries, batches),
      functools.partial(each, theirs.vectors, batches),
    )
  if _JSON.value:
    pathlib.Path(_JSON.value).write_text(json.dumps(numbers, indent=2) + "\n")


def compare(
  name: str,
  count: int,
  ours: Callable[[], object],
  theirs: Callable[[], object],
) -> dict[str, object]:
  """Times both sides in turns and prints a line."""
  ours(), theirs()
  pairs = [(measure(ours), measure(theirs)) for _ in range(_PAIRS.value)]
  wall = [b[0] / a[0] for a, b in pairs]
  numbers = {
    "ours": count / statistics.median(a[0] for a, _ in pairs),
    "torch": count / statistics.median(b[0] for _, b in pairs),
    "ratio": statistics.median(wall),
    "ratios": wall,
    "cpu_ratio": statistics.median(b[1] / a[1] for a, b in pairs),
  }
  spread = f"{min(wall):.2f} to {max(wall):.2f}"
  print(
    f"{name:<24}{numbers['ours']:>9.1f}{numbers['torch']:>9.1f}"
    f"{numbers['ratio']:>7.2f}x{spread:>16}{numbers['cpu_ratio']:>10.2f}x",
    flush=True,
  )
  return numbers


def each(vectors: Callable, batches: Sequence[Sequence[str]]) -> None:
  for batch in batches:
    vectors(batch)


def measure(call: Callable[[], object]) -> tuple[float, float]:
  """Returns the wall-clock seconds and the CPU seconds of a call."""
  started, used = time.perf_counter(), time.process_time()
  call()
  return time.perf_counter() - started, time.process_time() - used


if __name__ == "__main__":
  launch_flags.run(main)
