"""Encoders that are decoders (Qwen3-Embedding): parity with torch."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import random_models
import safetensors.numpy
import tokenizers
from tokenizers import processors

from anysearch_jax.retrieval.encoder import encoder as encoder_lib

TEXTS = ["w5", "w1 w2 w3", " ".join(f"w{i % 50}" for i in range(90)), ""]
PREFIX = "w7 w8 "


@pytest.fixture(scope="module")
def made(torch, tmp_path_factory):
  """Returns a torch model without a head, and its folder as published.

  The tokenizer appends the end of a text, and tensors have no prefix.
  """
  folder = tmp_path_factory.mktemp("qwen3") / "Qwen3-Embedding-tiny"
  model = random_models.make("qwen3-tied", folder)
  tensors = safetensors.numpy.load_file(folder / "model.safetensors")
  safetensors.numpy.save_file(
    {name.removeprefix("model."): x for name, x in tensors.items()},
    folder / "model.safetensors",
    metadata={"format": "pt"},
  )
  inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
  end = inner.token_to_id("<eos>")
  inner.post_processor = processors.TemplateProcessing(
    single="$A <eos>", special_tokens=[("<eos>", end)]
  )
  inner.save(str(folder / "tokenizer.json"))
  return model.model, folder, end


def tokens_of(folder, texts, most):
  inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
  inner.enable_truncation(most)
  return [inner.encode(text).ids for text in texts]


def last_token_vectors(torch, model, rows, *, side):
  """Computes Qwen's own `last_token_pool` over padded rows."""
  longest = max(map(len, rows))
  ids = np.full((len(rows), longest), random_models.TOKENS - 1)
  mask = np.zeros_like(ids)
  for row, some in enumerate(rows):
    start = longest - len(some) if side == "left" else 0
    at = slice(start, start + len(some))
    ids[row, at], mask[row, at] = some, 1
  mask = torch.tensor(mask)
  with torch.no_grad():
    hidden = model(torch.tensor(ids), attention_mask=mask).last_hidden_state
  if side == "left":
    x = hidden[:, -1]
  else:
    x = hidden[torch.arange(len(rows)), mask.sum(1) - 1]
  return torch.nn.functional.normalize(x).numpy()


@pytest.mark.parametrize("side", ["left", "right"])
def test_vectors_equal_torchs_for_either_padding(torch, made, side):
  model, folder, end = made
  encoder = encoder_lib.Encoder(folder, query_prefix=PREFIX, max_tokens=64)
  assert encoder.settings.pooling == "lasttoken"
  for ours, prefix in (
    (encoder.queries(TEXTS), PREFIX),
    (encoder.passages(TEXTS), ""),
  ):
    rows = tokens_of(folder, [prefix + text for text in TEXTS], 64)
    assert {row[-1] for row in rows} == {end} and max(map(len, rows)) == 64
    theirs = last_token_vectors(torch, model, rows, side=side)
    np.testing.assert_allclose(ours, theirs, atol=2e-6)
  alone = np.concatenate([encoder.queries([text]) for text in TEXTS])
  np.testing.assert_array_equal(encoder.queries(TEXTS), alone)
  identity = json.loads(json.dumps(encoder.identity()))
  assert encoder_lib.Encoder.like(identity).identity() == encoder.identity()


def test_the_usual_instruction_is_qwens(made):
  _, folder, _ = made
  settings = encoder_lib.Encoder(folder).settings
  assert settings.query_prefix == (
    "Instruct: Given a web search query, retrieve relevant passages that "
    "answer the query\nQuery:"
  )
  assert settings.passage_prefix == ""


def test_a_tokenizer_that_ends_no_text_is_helped(torch, made, tmp_path):
  """A plain Qwen3 tokenizer adds nothing; config.json names the end."""
  model, folder, end = made
  own = shutil.copytree(folder, tmp_path / "own")
  inner = tokenizers.Tokenizer.from_file(str(own / "tokenizer.json"))
  inner.post_processor = processors.Sequence([])
  inner.save(str(own / "tokenizer.json"))
  config = json.loads((own / "config.json").read_text())
  (own / "config.json").write_text(
    json.dumps(config | {"eos_token_id": end, "architectures": ["Qwen3Model"]})
  )
  encoder = encoder_lib.Encoder(own, query_prefix="", max_tokens=32)
  rows = [row + [end] for row in tokens_of(own, TEXTS, 31)]
  theirs = last_token_vectors(torch, model, rows, side="right")
  np.testing.assert_allclose(encoder.queries(TEXTS), theirs, atol=2e-6)
  del config["eos_token_id"]
  (own / "config.json").write_text(json.dumps(config))
  with pytest.raises(ValueError, match="adds 0 special tokens"):
    encoder_lib.Encoder(own)


def test_a_folder_says_how_long_its_texts_are(made, tmp_path):
  _, folder, _ = made
  own = shutil.copytree(folder, tmp_path / "own")
  path = own / "sentence_bert_config.json"
  for said, expected in ((48, 48), (9999, 512), (None, 256)):
    path.write_text(json.dumps({"max_seq_length": said}))
    assert encoder_lib.Encoder(own).settings.max_tokens == expected
