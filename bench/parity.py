"""Compares the decoder with transformers numerically, family by family.

    python -m bench.parity [--hf=DIR] [--tokens=288]

For small random models of every supported kind, or for the model in DIR, it
prints the differences of logits and log-probabilities over the whole
vocabulary: the largest and the mean in float32; the mean if both sides compute
in bfloat16; the mean of each side in bfloat16 from transformers in float32; and
(random models only) the largest difference of a gradient, relative to its
tensor's largest value. Both sides hold the model in memory, in float32.
"""

from __future__ import annotations

import pathlib
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING

from absl import flags

from bench import harness
from launch import jax_setup

if TYPE_CHECKING:
  import numpy as np

  from bench import pairs

_COLUMNS = (
  "max |dlogit|",
  "mean",
  "max |dlogp|",
  "mean",
  "bf16 |dlogp|",
  "ours-fp32",
  "theirs-fp32",
  "max rel dgrad",
)
# The bounds that the tests check for the random models.
_BOUNDS = ("1e-04", "", "5e-05", "", "5e-02", "", "", "3e-05")


def main() -> dict[str, list[float]]:
  f = flags.FLAGS
  jax_setup.configure(threads=f.threads, cache=".jax_cache")
  out = {}
  table = harness.Table("", *_COLUMNS, first=20)
  for name, numbers in _real(f.hf, f.tokens) if f.hf else _random(f.tokens):
    table.row(name, *(f"{number:.1e}" for number in numbers))
    out[name] = [float(number) for number in numbers]
  table.row("bounds", *_BOUNDS)
  return out


def _random(length: int) -> Iterator[tuple[str, list[float]]]:
  from bench import pairs, random_models

  for case in random_models.CASES:
    with tempfile.TemporaryDirectory() as folder:
      pair = pairs.Pair.random(case, pathlib.Path(folder))
    tokens = random_models.random_tokens((4, length))
    gradients = [
      abs(ours - theirs).max() / abs(theirs).max()
      for _, ours, theirs in pair.gradients(tokens[:2, :49])
    ]
    yield case, [*_forward(pair, tokens), max(gradients)]


def _real(folder: str, length: int) -> Iterator[tuple[str, list[float]]]:
  import torch
  import transformers

  from anysearch_jax.policy import hf
  from bench import pairs, random_models

  model = transformers.AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.float32
  )
  policy = hf.load(folder)
  tokens = random_models.random_tokens((1, length), policy.tokenizer.vocab_size)
  pair = pairs.Pair(model.eval(), policy)
  yield pathlib.Path(folder).name, _forward(pair, tokens)


def _forward(pair: pairs.Pair, tokens: np.ndarray) -> list[float]:
  """Returns all columns except the gradients."""
  import jax.numpy as jnp
  import torch

  from bench import pairs

  ours, theirs = pair.ours(tokens), pair.theirs(tokens)
  logit = abs(ours - theirs)
  ours_logp, logp, ours_half, half = map(
    pairs.log_softmax,
    (
      ours,
      theirs,
      pair.ours(tokens, dtype=jnp.bfloat16),
      pair.theirs(tokens, dtype=torch.bfloat16),
    ),
  )
  return [
    logit.max(),
    logit.mean(),
    abs(ours_logp - logp).max(),
    abs(ours_logp - logp).mean(),
    abs(ours_half - half).mean(),
    abs(ours_half - logp).mean(),
    abs(half - logp).mean(),
  ]


if __name__ == "__main__":
  flags.DEFINE_string("hf", "", "Folder of a real model to compare.")
  flags.DEFINE_integer("tokens", 288, "Length of the compared rows.")
  flags.DEFINE_integer("threads", 0, "CPU threads; 0 is all.")
  harness.run(main)
