"""Cross-encoders and XLM-RoBERTa: parity with torch on random weights."""

from __future__ import annotations

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_rerankers as small

from bench import random_encoders
from retrieval.encoder import batched, cross_encoder
from retrieval.encoder import encoder as encoder_lib

# (query, passage): of several lengths, empty, and two that are cut.
QUERIES = random_encoders.texts(4, seed=5, mean=8)
PASSAGES = ["", *random_encoders.texts(5, seed=6, mean=40)]
PAIRS = [
  *((query, text) for query in QUERIES for text in PASSAGES),
  (QUERIES[0], random_encoders.texts(1, seed=7, mean=400)[0]),
  tuple(random_encoders.texts(2, seed=8, mean=200)),
]


@pytest.mark.parametrize("labels", [1, 2])
@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_scores_equal_torchs(torch, tmp_path, family, labels):
  import transformers

  small.classifier(tmp_path, family, labels=labels)
  ours = cross_encoder.CrossEncoder.load(tmp_path, max_tokens=64)
  tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
  model = transformers.AutoModelForSequenceClassification.from_pretrained(
    tmp_path, dtype=torch.float32
  ).eval()
  batch = tokenizer(
    [query for query, _ in PAIRS],
    [text for _, text in PAIRS],
    padding=True,
    truncation=True,
    max_length=64,
    return_tensors="pt",
  )
  with torch.no_grad():
    logits = model(**batch).logits.numpy()
  theirs = logits[:, 0] if labels == 1 else logits[:, 1] - logits[:, 0]
  found = ours.scores(PAIRS)
  assert np.abs(found - theirs).max() <= 1e-5 * np.abs(theirs).max()
  # The scores are of the pairs: they differ by query and by passage.
  each = theirs[: len(QUERIES) * len(PASSAGES)].reshape(len(QUERIES), -1)
  assert each.std(0).min() > 0.01 and each.std(1).min() > 0.01


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  folder = tmp_path_factory.mktemp("reranker") / "tiny"
  small.classifier(folder, "bert", labels=1)
  return folder


def test_a_score_depends_on_its_pair_alone(folder):
  model = cross_encoder.CrossEncoder.load(folder, max_tokens=64)
  together = model.scores(PAIRS)
  assert together.shape == (len(PAIRS),)
  alone = np.concatenate([model.scores([pair]) for pair in PAIRS[:6]])
  np.testing.assert_array_equal(alone, together[:6])
  backwards = model.scores(PAIRS[::-1])[::-1]
  np.testing.assert_array_equal(backwards, together)
  # One program for each row length.
  assert model.programs() <= 64 // 8 + 4
  model.compile()
  compiled = model.programs()
  model.scores(PAIRS)
  assert model.programs() == compiled
  assert model.scores([]).shape == (0,)


def test_long_texts_need_few_programs():
  on_cpu = batched.shapes(jax.devices()[:1], 512, None)._replace(fine=32)
  lengths = [on_cpu.length(n) for n in range(1, 513)]
  assert sorted(set(lengths)) == [
    *(4, 8, 12, 16, 20, 24, 28, 32),
    *(40, 48, 56, 64, 80, 96, 112, 128),
    *(160, 192, 224, 256, 320, 384, 448, 512),
  ]
  assert all(found >= n for n, found in enumerate(lengths, start=1))
  longest = batched.shapes(jax.devices()[:1], 8192, None)
  assert len({longest.length(n) for n in range(1, 8193)}) < 60


def test_token_types_divide_query_and_passage(folder):
  model = cross_encoder.CrossEncoder.load(folder)
  words = random_encoders.words()[:6]
  one = model.scores([(" ".join(words[:2]), " ".join(words[2:]))])
  other = model.scores([(" ".join(words[:4]), " ".join(words[4:]))])
  assert abs(float(one[0]) - float(other[0])) > 1e-3


def test_bfloat16_is_near_and_of_another_identity(folder):
  exact = cross_encoder.CrossEncoder.load(folder)
  rough = cross_encoder.CrossEncoder.load(folder, dtype=jnp.bfloat16)
  gap = np.abs(exact.scores(PAIRS[:8]) - rough.scores(PAIRS[:8])).max()
  assert 0 < gap < 0.2
  assert exact.identity() != rough.identity()
  assert json.loads(json.dumps(exact.identity())) == exact.identity()


def test_the_identity_has_what_the_weights_do_not_say(folder, tmp_path):
  own = shutil.copytree(folder, tmp_path / "own")
  config = json.loads((own / "config.json").read_text())
  change = {"layer_norm_eps": 0.1}
  (own / "config.json").write_text(json.dumps(config | change))
  one, other = map(cross_encoder.CrossEncoder.load, (folder, own))
  assert (one.scores(PAIRS[:2]) != other.scores(PAIRS[:2])).all()
  assert one.identity() != other.identity()


@pytest.mark.parametrize(
  ("change", "sentence"),
  [
    ({"architectures": ["BertModel"]}, "'BertModel' has no scores"),
    ({"id2label": {"0": "a", "1": "b", "2": "c"}}, "3 labels; expected one"),
    ({"id2label": {"0": "a", "1": "b"}}, "classifier.weight' has shape"),
    ({"model_type": "deberta"}, "model_type 'deberta' is not supported"),
  ],
)
def test_another_model_is_refused(folder, tmp_path, change, sentence):
  own = shutil.copytree(folder, tmp_path / "own")
  config = json.loads((own / "config.json").read_text())
  (own / "config.json").write_text(json.dumps(config | change))
  with pytest.raises(ValueError, match=sentence):
    cross_encoder.CrossEncoder.load(own)


@pytest.mark.parametrize("length", [600, 5])
def test_a_length_that_cannot_be_is_refused(folder, length):
  with pytest.raises(
    ValueError, match=f"max_tokens: found {length} .* 6 to 512"
  ):
    cross_encoder.CrossEncoder.load(folder, max_tokens=length)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_vectors_of_xlm_roberta_equal_torchs(torch, tmp_path, pooling):
  import transformers

  small.roberta(tmp_path)
  encoder = encoder_lib.Encoder.load(
    tmp_path, pooling=pooling, query_prefix="query: ", max_tokens=64
  )
  tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
  model = transformers.XLMRobertaModel.from_pretrained(
    tmp_path, dtype=torch.float32, add_pooling_layer=False
  ).eval()
  texts = [text for pair in PAIRS[:8] for text in pair]
  batch = tokenizer(
    ["query: " + text for text in texts],
    padding=True,
    truncation=True,
    max_length=64,
    return_tensors="pt",
  )
  with torch.no_grad():
    hidden = model(**batch).last_hidden_state
  mask = batch["attention_mask"][..., None]
  x = hidden[:, 0] if pooling == "cls" else (hidden * mask).sum(1) / mask.sum(1)
  theirs = torch.nn.functional.normalize(x).numpy()
  np.testing.assert_allclose(encoder.queries(texts), theirs, atol=2e-6)
  # 66 positions, of which XLM-RoBERTa's texts can use 64.
  with pytest.raises(ValueError, match="found 65, .* has only 64 positions"):
    encoder_lib.Encoder.load(tmp_path, max_tokens=65)
