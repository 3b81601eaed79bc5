"""A small policy of any model family that searches and answers at random.

Its weights are random, except for a habit: at the start of a turn the policy
opens a search or an answer, writes a word, and closes one of the two tags. A
rehearsal of a run therefore has searches, answers, searches beyond the budget
and turns without an action, as a real run does.
"""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from anysearch_jax.environment import prompts, protocol
from anysearch_jax.policy import (
  architecture,
  decoder,
  hf,
  table,
  tensor_files,
  tokenizer,
)

_SIZES = {
  "hidden_size": 32,
  "intermediate_size": 64,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "max_position_embeddings": 4096,
  # With tied embeddings the head could not map a token to its successor.
  "tie_word_embeddings": False,
}
_HEAD_DIM = 8
_WORDS = ("film", "war", "city", "river", "king")
_TURNS = tuple(
  f"<{tag}>{word}</{tag}>" for tag in ("search", "answer") for word in _WORDS
)
# Logit margin of a habit over the rest of the vocabulary together, in nats.
_HABIT = 5.0


def make(
  shape: Mapping[str, Any],
  tokenizer_folder: pathlib.Path,
  output: pathlib.Path,
  *,
  seed: int = 0,
) -> None:
  """Writes the policy as a Hugging Face folder, atomically.

  Args:
    shape: config.json of a real policy of the family; its sizes are reduced.
    tokenizer_folder: folder with the tokenizer of the same family.
    output: the folder to write.
    seed: of the weights.

  Raises:
    ValueError: the shape or the tokenizer is not supported.
  """
  codec = tokenizer.Tokenizer.from_folder(tokenizer_folder)
  config = dict(shape) | _SIZES
  if "head_dim" in config:
    config["head_dim"] = _HEAD_DIM
  if "layer_types" in config:
    config["layer_types"] = config["layer_types"][: _SIZES["num_hidden_layers"]]
  a = architecture.from_hf(config)
  params = jax.tree.map(np.array, decoder.initialize(a, seed))
  rng = np.random.default_rng(seed)
  embedding = rng.standard_normal((a.vocab_size, a.d_model), np.float32)
  params["embed"] = embedding
  # The final norm rescales a hidden state to this length.
  length = a.d_model**0.5
  strength = (np.log(a.vocab_size) + _HABIT) / length
  for now, after in sorted(set(habits(codec))):
    here = embedding[now] / np.linalg.norm(embedding[now])
    params["head"][after] += strength * here
  with hf.appears_whole(output) as folder:
    for path in sorted(tokenizer_folder.iterdir()):
      if path.is_file() and "token" in path.name:
        shutil.copyfile(path, folder / path.name)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensor_files.save(folder, params, table.rows(a))


def habits(codec: tokenizer.Tokenizer) -> Iterable[tuple[int, int]]:
  """Yields pairs of a token and a token that habitually follows it."""
  lines = prompts.PROMPTS["paper"]
  before = (
    protocol.observation(()),
    protocol.budget_line(1, 0),
    lines.over_budget,
    lines.no_action,
  )
  starts = {codec.encode(text)[-1] for text in before}
  starts.add(codec.render("?")[1][-1])
  for turn in _TURNS:
    ids = codec.encode(turn)
    yield from ((start, ids[0]) for start in starts)
    yield from zip(ids, ids[1:])
