"""A model that generates known texts, and checks of them, for two tests.

As a command it makes a model to start a server on, of random weights and with
the tokenizer of another folder:

    python tests/support/sglang_chains.py MODEL TOKENIZER
"""

from __future__ import annotations

import asyncio
import math
import pathlib
import shutil
import sys

import jax
import numpy as np

from anysearch_jax import types
from anysearch_jax.environment import protocol

# What is said after the first text of each: stops in more tokens than they
# encode to, with an end that overhangs, in one token more; the end of a turn.
CHAINS = {
  "spelled": ("x", "<", "/", "se", "arch", ">"),
  "overhanging": ("y", "</", "answer", ">\n\n"),
  "ended": ("z", " end", "<|im_end|>"),
  "endless": ("q", "q"),
}
# Why each turn of 12 tokens ends, and its text.
ENDS = {
  "spelled": (types.Finish.STOP, "</search>"),
  "overhanging": (types.Finish.STOP, "</answer>"),
  "ended": (types.Finish.END_OF_TURN, " end"),
  "endless": (types.Finish.LENGTH, "q" * 12),
}
# A call of the tool `search`, after the end of a chat's prompt.
CALL = (
  *("\n", "<tool_call>", "\n\n", '{"', "name", '":', ' "', "search", '",', '"'),
  *("arguments", '":{"', "query", '":"', "lease", '"}', "}\n", "</tool_call>"),
  "<|im_end|>",
)
# Of the token that follows; a hidden state has one value, the root of its size.
SURE = 2.5


# What a server refuses, and how it says so; its errors have two shapes.
REFUSED = [
  ({"input_ids": [1], "sampling_params": {"max_new_tokens": 1e9}}, "HTTP 400"),
  (
    {"input_ids": [1], "sampling_params": {"max_new_tokens": 100_000}},
    "exceeds the model's maximum context length",
  ),
  (
    {"input_ids": [1], "sampling_params": {"max_new_tokens": "x"}},
    "invalid type",
  ),
]


def turns(engine, tokenizer):
  """Generates a turn of each chain."""
  return [
    asyncio.run(
      engine.generate(
        request(tokenizer.encode(chain[0]), 12, stop=protocol.STOPS)
      )
    )
    for chain in CHAINS.values()
  ]


def check_turns(generations, tokenizer, *, width, vocab_size):
  """Asserts that each turn is its chain, up to the end that names the chain."""
  others = (vocab_size - 1) * math.exp(-SURE * math.sqrt(width))
  for chain, generation in zip(CHAINS, generations, strict=True):
    said = [tokenizer.encode(text) for text in CHAINS[chain][1:]]
    said *= 12 if chain == "endless" else 1
    assert (generation.finish, generation.text) == ENDS[chain]
    assert generation.token_ids == tuple(i for (i,) in said)
    assert generation.versions == (0,) * len(said)
    # The server's float32 sum of many small terms is not exact.
    np.testing.assert_allclose(generation.logps, -math.log1p(others), atol=1e-4)


def request(context, most, *, sample=0, stop=("never said",)):
  return types.GenerateRequest(
    types.Address(0, 0, sample), 0, tuple(context), most, stop
  )


def params(policy, *chains):
  """Returns weights that predict each next token of a chain with certainty.

  `chains` are those of `CHAINS` if none is given.
  """
  params = jax.tree.map(np.zeros_like, policy.params)
  params["norm"] = np.ones_like(params["norm"])
  for name in ("attention_norm", "mlp_norm"):
    params["layers"][name] = np.ones_like(params["layers"][name])
  place = 0
  for chain in chains or CHAINS.values():
    tokens = [policy.tokenizer.encode(text) for text in chain]
    for (token,), (after,) in zip(tokens, tokens[1:], strict=False):
      params["embed"][token, place] = 1.0
      params["head"][after, place] = SURE
      place += 1
  return params


def _make(model, tokenizer):
  import random_models

  random_models.make(
    "qwen2",
    model,
    vocab_size=151_936,
    hidden_size=64,
    intermediate_size=96,
    max_position_embeddings=1024,
    eos_token_id=[151_645, 151_643],
  )
  for path in model.glob("*token*"):
    path.unlink()
  for path in tokenizer.glob("*token*.json"):
    shutil.copy(path, model)


if __name__ == "__main__":
  _make(*map(pathlib.Path, sys.argv[1:]))
