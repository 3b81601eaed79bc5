"""The encoder: vectors of any texts, independent of the rest of a call."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_encoders
import tokenizers

from anysearch_jax import types
from anysearch_jax.retrieval.encoder import encoder as encoder_lib
from anysearch_jax.retrieval.index import building, opening
from anysearch_jax.retrieval.index import search as index_search

# Texts of several lengths; one is cut.
TEXTS = [
  *("bada", "", "Hello, WORLD!  é 中文 ñ"),
  *random_encoders.texts(3, mean=12),
  *random_encoders.texts(1, seed=1, mean=60),
  *random_encoders.texts(1, seed=2, mean=300),
]


folder = random_encoders.folder
own = random_encoders.own
write = random_encoders.write


@pytest.fixture(scope="module")
def encoder(folder):
  return encoder_lib.Encoder(folder)


def test_vectors_are_those_of_torch_and_its_tokenizer(torch, tmp_path):
  import transformers

  folder = tmp_path / "e5-small-v2"  # Prefixes follow from the name.
  small = {"hidden_size": 384, "num_attention_heads": 12}  # Of E5's.
  random_encoders.make(folder, num_hidden_layers=2, **small)
  encoder = encoder_lib.Encoder(folder)
  tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
  model = transformers.AutoModel.from_pretrained(
    folder, dtype=torch.float32, add_pooling_layer=False
  ).eval()

  def theirs(prefix):
    out = []
    for text in TEXTS:
      row = tokenizer(
        prefix + text, truncation=True, max_length=256, return_tensors="pt"
      )
      with torch.no_grad():
        mean = model(**row).last_hidden_state[0].mean(0)
      out.append((mean / mean.norm()).numpy())
    return np.stack(out)

  for ours, prefix in (
    (encoder.queries(TEXTS), "query: "),
    (encoder.passages(TEXTS), "passage: "),
  ):
    expected = theirs(prefix)
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(ours, axis=1), 1, atol=1e-6)
    # The vectors are not degenerate: no two are alike.
    apart = np.abs(expected[:, None] - expected).max(-1)
    assert apart[~np.eye(len(TEXTS), dtype=bool)].min() > 1e-3


@pytest.mark.parametrize("side", ["queries", "passages"])
def test_a_vector_depends_on_its_text_alone_to_the_last_bit(encoder, side):
  vectors = getattr(encoder, side)
  together = vectors(TEXTS)
  alone = np.concatenate([vectors([text]) for text in TEXTS])
  np.testing.assert_array_equal(together, alone)
  rng = np.random.default_rng(0)
  for _ in range(5):
    order = rng.integers(0, len(TEXTS), 40)
    some = vectors([TEXTS[i] for i in order])
    np.testing.assert_array_equal(some, together[order])


def test_each_shape_of_call_compiles_once(folder):
  encoder = encoder_lib.Encoder(folder)
  words = random_encoders.words()
  texts = [" ".join(words[:n]) for n in (3, 29, 29, 30, 120, 500)]
  encoder.passages(texts)
  # 3 with two special tokens, 29 beside 30, 120, and what is cut.
  assert len(encoder._model._programs) == 4
  encoder.passages(texts[::-1] * 20)
  encoder.passages(texts[:1])
  assert len(encoder._model._programs) == 4
  for text in texts:
    encoder.queries([text])
  compiled = len(encoder._model._programs)
  assert compiled <= 8
  encoder.queries(texts * 9)
  assert len(encoder._model._programs) == compiled


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_search_after_opening_compiles_nothing(
  folder, tmp_path, dtype, caplog
):
  """Of an index, as a pipeline and a service open it."""
  words = random_encoders.words()
  texts = [" ".join(words[: n % 90 + 1]) for n in range(20)]
  source = tmp_path / "passages.jsonl"
  lines = ({"id": str(i), "contents": f"T\n{x}"} for i, x in enumerate(texts))
  source.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
  settings = building.Settings("flat", dtype=dtype)
  encoder = encoder_lib.Encoder(folder)
  building.build(source, tmp_path / "index", settings, encoder=encoder)
  retriever = index_search.LocalRetriever(
    opening.open_index(tmp_path / "index")
  )
  queries = [" ".join(words[:n]) for n in (*range(1, 130, 3), 700)]
  asked = [types.SearchRequest(query, k) for query in queries for k in (1, 3)]
  jax.config.update("jax_log_compiles", True)  # Of all threads.
  try:
    found = asyncio.run(retriever.search_many(asked))
    assert asyncio.run(retriever.search(asked[0])) == found[0]
    assert "Compiling" not in caplog.text
    jax.jit(lambda x: x + len(found))(1.0)
    assert "Compiling" in caplog.text
  finally:
    jax.config.update("jax_log_compiles", False)


def test_threads_get_the_same_vectors(folder):
  encoder = encoder_lib.Encoder(folder)
  expected = encoder_lib.Encoder(folder).queries(TEXTS)
  found = {}

  def ask(name):
    order = np.random.default_rng(name).permutation(len(TEXTS))
    vectors = encoder.queries([TEXTS[i] for i in order])
    found[name] = vectors[np.argsort(order)]

  threads = [threading.Thread(target=ask, args=[i]) for i in range(6)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert len(found) == 6
  for vectors in found.values():
    np.testing.assert_array_equal(vectors, expected)


ODD = [
  *("", " \n\t ", "\x00", "a\x00b", "\ud800 half of a pair", "\udfff"),
  *("[CLS] [SEP] [PAD]", "\U0001f600" * 300, "a" * 1_000_000, "ba " * 350_000),
]


def test_any_text_has_a_unit_vector(encoder):
  vectors = encoder.queries(["bada", *ODD])
  assert np.isfinite(vectors).all()
  np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
  np.testing.assert_array_equal(vectors[:1], encoder.queries(["bada"]))
  assert encoder.queries([]).shape == (0, 64)


def test_more_devices_change_no_more_than_rounding(encoder, folder):
  other = encoder_lib.Encoder(folder, devices=jax.devices())
  for ours, theirs in (
    (encoder.passages(TEXTS), other.passages(TEXTS)),
    (encoder.queries(TEXTS[:1]), other.queries(TEXTS[:1])),
  ):
    np.testing.assert_allclose(theirs, ours, atol=1e-6)


def test_bfloat16_is_near_and_of_another_identity(encoder, folder):
  rough = encoder_lib.Encoder(folder, dtype=jnp.bfloat16)
  ours, exact = rough.queries(TEXTS), encoder.queries(TEXTS)
  assert ours.dtype == np.float32
  assert 1e-5 < np.abs(ours - exact).max() < 0.02
  assert rough.identity() != encoder.identity()


def test_an_identity_is_json_and_says_what_changes_vectors(encoder, own):
  identity = encoder.identity()
  assert json.loads(json.dumps(identity)) == identity
  assert identity["pooling"] == "mean" and identity["max_tokens"] == 256
  moved = encoder_lib.Encoder(own).identity()
  assert {k for k in moved if moved[k] != identity[k]} == {"folder"}
  for setting, name in (
    ({"pooling": "cls"}, "pooling"),
    ({"query_prefix": "q "}, "query_prefix"),
    ({"max_tokens": 100}, "max_tokens"),
  ):
    other = encoder_lib.Encoder(own, **setting).identity()
    assert {k for k in moved if moved[k] != other[k]} == {name}
  with random_encoders.tensors(own) as tensors:
    tensors["embeddings.word_embeddings.weight"][7, 7] += 1
  other = encoder_lib.Encoder(own).identity()
  assert {k for k in moved if moved[k] != other[k]} == {"weights_sha256"}


def test_an_encoder_is_loaded_again_by_its_identity(folder, tmp_path):
  first = encoder_lib.Encoder(
    folder, pooling="cls", query_prefix="bada ", max_tokens=64
  )
  # Whatever its name would say now.
  moved = shutil.copytree(folder, tmp_path / "e5-tiny")
  again = encoder_lib.Encoder.like(first.identity(), moved)
  assert again.settings == first.settings
  np.testing.assert_array_equal(again.queries(TEXTS), first.queries(TEXTS))


def test_numbers_that_are_not_finite_are_refused(own):
  with random_encoders.tensors(own) as tensors:
    tensors["encoder.layer.0.output.dense.bias"][3] = np.nan
  encoder = encoder_lib.Encoder(own)
  with pytest.raises(ValueError, match="numbers that are not finite"):
    encoder.queries(["bada"])


@pytest.mark.parametrize(
  ("options", "sentence"),
  [
    ({"pooling": "max"}, "pooling: found 'max', expected one of mean, cls"),
    ({"max_tokens": 513}, "max_tokens: found 513, but .* only 512 positions"),
    ({"max_tokens": 0}, "adds 2 special tokens .* fewer than max_tokens, 0"),
    ({"max_tokens": 2}, "adds 2 special tokens .* fewer than max_tokens, 2"),
  ],
)
def test_invalid_settings_are_refused(folder, nothing_loads, options, sentence):
  with pytest.raises(ValueError, match=sentence):
    encoder_lib.Encoder(folder, **options)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d\nsize 9\n"


@pytest.mark.parametrize(
  ("name", "content", "sentence"),
  [
    ("config.json", None, "own: no config.json; expected a Hugging Face fol"),
    ("tokenizer.json", None, "own: no tokenizer.json; load the tokenizer once"),
    ("model.safetensors", None, "model.safetensors: no such file"),
    ("config.json", '{"a": ', "config.json: .*copy it again"),
    ("tokenizer.json", '{"a": ', "tokenizer.json: .*copy it again"),
    ("modules.json", '{"a": ', "modules.json: .*copy it again"),
    ("tokenizer.json", POINTER, "tokenizer.json: is a pointer of git-lfs"),
    ("model.safetensors", POINTER, "rs: is a pointer of git-lfs, .* lfs pull"),
  ],
)
def test_a_missing_or_damaged_file_is_refused_by_name(
  own, nothing_loads, name, content, sentence
):
  if content is None:
    (own / name).unlink()
  else:
    (own / name).write_text(content)
  with pytest.raises(ValueError, match=sentence):
    encoder_lib.Encoder(own)


def test_a_tokenizer_of_another_model_is_refused(tmp_path, nothing_loads):
  few, tokens = tmp_path / "few", len(random_encoders.vocabulary())
  random_encoders.make(few, vocab_size=tokens - 1)
  with pytest.raises(ValueError, match="2886 tokens, .* 2885 rows"):
    encoder_lib.Encoder(few)
  path = few / "tokenizer.json"
  write(path, json.loads(path.read_text()) | {"post_processor": None})
  config = few / "config.json"
  write(config, json.loads(config.read_text()) | {"vocab_size": 2886})
  with pytest.raises(ValueError, match="adds 0 special tokens to a text"):
    encoder_lib.Encoder(few)


def test_the_tokenizer_s_own_padding_and_cutting_are_left_out(encoder, own):
  path = str(own / "tokenizer.json")
  tokenizer = tokenizers.Tokenizer.from_file(path)
  tokenizer.enable_padding(length=40)
  tokenizer.enable_truncation(12)
  tokenizer.save(path)
  other = encoder_lib.Encoder(own)
  np.testing.assert_array_equal(other.queries(TEXTS), encoder.queries(TEXTS))
