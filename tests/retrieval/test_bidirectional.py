"""BERT's family and ModernBERT: configuration, weights, parity with torch."""

from __future__ import annotations

import functools
import json
import types

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_encoders
import tokenizers
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers, processors, trainers

from anysearch_jax.retrieval.encoder import bidirectional
from anysearch_jax.retrieval.encoder import encoder as encoder_lib
from anysearch_jax.retrieval.encoder import models as models_lib

SIZES = {
  **{"vocab_size": 300, "hidden_size": 48, "num_hidden_layers": 3},
  **{"num_attention_heads": 3, "intermediate_size": 40, "pad_token_id": 0},
}
BERT = SIZES | {"model_type": "bert"}
# The keys of answerdotai/ModernBERT-base and of models made from it.
MODERNBERT = SIZES | {
  **{"model_type": "modernbert", "architectures": ["ModernBertForMaskedLM"]},
  **{"attention_bias": False, "attention_dropout": 0.0},
  **{"classifier_activation": "gelu", "classifier_bias": False},
  **{"classifier_dropout": 0.0, "classifier_pooling": "mean"},
  **{"cls_token_id": 2, "decoder_bias": True, "embedding_dropout": 0.0},
  **{"deterministic_flash_attn": False, "gradient_checkpointing": False},
  **{"global_attn_every_n_layers": 2, "global_rope_theta": 5000.0},
  **{"hidden_activation": "gelu", "layer_norm_eps": 1e-05},
  **{"initializer_cutoff_factor": 2.0, "initializer_range": 0.02},
  **{"local_attention": 10, "local_rope_theta": 30.0},
  **{"max_position_embeddings": 512, "mlp_bias": False, "mlp_dropout": 0.0},
  **{"norm_bias": False, "norm_eps": 1e-05},
  **{"position_embedding_type": "absolute", "reference_compile": False},
  **{"repad_logits_with_grad": False, "sparse_pred_ignore_index": -100},
  **{"sparse_prediction": False, "tie_word_embeddings": True},
  **{"torch_dtype": "float32", "transformers_version": "4.48.0"},
}
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
ROPE = {"full_attention": {"rope_type": "default", "rope_theta": 900.0}}
SLIDING = {"rope_type": "default", "rope_theta": 20.0}
# Class of the model, and settings of its configuration.
CASES = {
  "bert": ("BertModel", {}),
  "roberta": (
    "XLMRobertaModel",
    {"pad_token_id": 1, "type_vocab_size": 1, "max_position_embeddings": 66},
  ),
  "modernbert": ("ModernBertForMaskedLM", {"local_attention": 10}),
  "modernbert-biases": (
    "ModernBertModel",
    {
      **{"norm_bias": True, "attention_bias": True, "mlp_bias": True},
      **{"norm_eps": 1e-3, "local_attention": 7, "layer_types": LAYERS},
      "rope_parameters": ROPE | {"sliding_attention": SLIDING},
    },
  ),
  "modernbert-older": (
    "ModernBertForMaskedLM",
    {k: v for k, v in MODERNBERT.items() if k not in ("model_type", *SIZES)},
  ),
}
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TEXTS = ["", "Éire  naïve\n\t日本 👩‍🚀", "many words " * 9]


def save_tokenizer(folder):
  """Saves a tokenizer of ModernBERT's kind: BPE of bytes, NFC, a template."""
  inner = tokenizers.Tokenizer(models.BPE())
  inner.normalizer = normalizers.NFC()
  inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  alphabet = pre_tokenizers.ByteLevel.alphabet()
  how = {"special_tokens": SPECIAL, "initial_alphabet": alphabet}
  trainer = trainers.BpeTrainer(vocab_size=290, **how, show_progress=False)
  inner.train_from_iterator(TEXTS, trainer)
  inner.add_tokens([tokenizers.AddedToken("  ", normalized=True)])
  inner.post_processor = processors.TemplateProcessing(
    single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
  )
  inner.enable_padding(pad_id=0)
  inner.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def make(torch, tmp_path_factory):
  """Makes the folder and the torch model of a case, once."""
  import transformers

  @functools.cache
  def made(case):
    folder = tmp_path_factory.mktemp("models") / f"tiny-{case}"
    kind, settings = CASES[case]
    model_class = getattr(transformers, kind)
    torch.manual_seed(1)
    tokens = {"bos_token_id": 2, "eos_token_id": 3, "sep_token_id": 3}
    values = SIZES | tokens | settings | {"attn_implementation": "eager"}
    model = model_class(model_class.config_class(**values)).eval()
    with torch.no_grad():
      for name, x in model.named_parameters():
        # Large enough that a wrong mask, position or layout is seen.
        scale = 0.2 if x.ndim == 1 else x.shape[1] ** -0.5
        x.normal_(0, scale).add_(x.ndim == 1 and name.endswith("weight"))
    model.save_pretrained(folder)
    if case == "modernbert-older":
      (folder / "config.json").write_text(json.dumps(MODERNBERT))
    save_tokenizer(folder)
    config = json.loads((folder / "config.json").read_text())
    a = bidirectional.from_hf(config)
    return types.SimpleNamespace(
      folder=folder,
      torch=getattr(model, "model", model),
      a=a,
      forward=jax.jit(functools.partial(bidirectional.forward, a=a)),
      load=functools.cache(functools.partial(load, folder, a)),
    )

  return made


def load(folder, a, dtype=jnp.float32):
  alone = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  return bidirectional.load(folder, a, sharding=alone, dtype=dtype)


def torchs(torch, model, ids, lengths):
  visible = np.arange(ids.shape[1]) < np.asarray(lengths)[:, None]
  with torch.no_grad():
    hidden = model(
      input_ids=torch.tensor(ids), attention_mask=torch.tensor(visible).long()
    ).last_hidden_state
  return hidden.numpy()[visible], visible


@pytest.mark.parametrize("case", CASES)
def test_hidden_states_equal_torchs(torch, make, case):
  made = make(case)
  # Longer than a window, than both of its sides, and one token.
  lengths = np.array([33, 1, 40, 9, 12], np.int32)
  ids = np.random.default_rng(1).integers(2, 300, (5, 40))
  theirs, visible = torchs(torch, made.torch, ids, lengths)
  ours = made.forward(made.load(), ids=ids.astype(np.int32), lengths=lengths)
  assert np.abs(np.asarray(ours)[visible] - theirs).max() <= 5e-6
  # The states are not degenerate: tokens differ.
  assert theirs.std(0).min() > 0.05


@pytest.mark.parametrize("case", ["modernbert", "bert"])
@hypothesis.given(length=st.integers(1, 24), seed=st.integers(0, 99))
@hypothesis.settings(max_examples=10, deadline=None)
def test_padding_changes_no_vector(make, case, length, seed):
  made = make(case)
  rng = np.random.default_rng(seed)
  ids = rng.integers(0, 300, (2, 24)).astype(np.int32)
  ids[1, :length] = ids[0, :length]
  lengths = np.array([length, length], np.int32)
  hidden = functools.partial(made.forward, made.load(), lengths=lengths)
  one, other = np.asarray(hidden(ids=ids))[:, :length]
  np.testing.assert_array_equal(one, other)
  longer = np.asarray(hidden(ids=np.pad(ids, ((0, 0), (0, 8)))))
  np.testing.assert_allclose(one, longer[0, :length], atol=5e-6)


@pytest.mark.parametrize("case", ["modernbert-older", "roberta"])
def test_a_folder_is_an_encoder(torch, make, case):
  made = make(case)
  encoder = encoder_lib.Encoder(made.folder, max_tokens=16)
  assert encoder.settings.pooling == "mean"
  inner = tokenizers.Tokenizer.from_file(str(made.folder / "tokenizer.json"))
  inner.no_padding()
  inner.enable_truncation(16)
  rows = [encoding.ids for encoding in inner.encode_batch(TEXTS)]
  assert len(rows[0]) == 2 and len(rows[-1]) == 16
  theirs = []
  for row in rows:
    hidden, _ = torchs(torch, made.torch, np.array([row]), [len(row)])
    theirs.append(hidden.mean(0) / np.linalg.norm(hidden.mean(0)))
  np.testing.assert_allclose(encoder.queries(TEXTS), theirs, atol=2e-6)
  np.testing.assert_array_equal(
    encoder.queries(TEXTS[1:2]), encoder.queries(TEXTS)[1:2]
  )
  identity = json.loads(json.dumps(encoder.identity()))
  assert encoder_lib.Encoder.like(identity).identity() == encoder.identity()


# Pooling.


@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken"])
def test_pooled_vectors_are_unit_vectors_of_the_tokens_that_count(pooling):
  rng = np.random.default_rng(2)
  hidden = rng.normal(size=(3, 5, 8)).astype(np.float32)
  lengths = np.array([5, 1, 3])
  found = models_lib.pool(hidden, lengths, pooling)
  nothing = models_lib.pool(hidden, 0 * lengths, "mean")
  np.testing.assert_array_equal(nothing, 0)
  for row, length in enumerate(lengths):
    start = length - 1 if pooling == "lasttoken" else 0
    tokens = hidden[row, start : 1 if pooling == "cls" else length]
    mean = np.sum(tokens.astype(np.float64), 0)
    np.testing.assert_allclose(
      found[row], mean / np.linalg.norm(mean), atol=1e-6
    )


# Configurations.


# Keys of E5 and BGE, of multilingual BERT, and of Contriever.
PUBLISHED = """
  _name_or_path attention_probs_dropout_prob classifier_dropout
  gradient_checkpointing id2label initializer_range label2id torch_dtype
  transformers_version use_cache directionality pooler_fc_size
  pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head
  pooler_type
""".split()


def test_harmless_keys_of_published_encoders_are_ignored():
  said = dict.fromkeys(PUBLISHED, 0.1) | {
    **{"architectures": ["Contriever"], "hidden_act": "gelu"},
    **{"pooling": "average", "position_embedding_type": "absolute"},
    **{"pruned_heads": {}, "is_decoder": False},
  }
  a = bidirectional.from_hf(BERT | said)
  assert a == bidirectional.from_hf(BERT)
  assert (a.positions, a.token_types, a.norm_eps) == (512, 2, 1e-12)


def test_sizes_that_a_file_omits_are_those_of_transformers():
  kept = ("model_type", *SIZES)
  a = bidirectional.from_hf({key: MODERNBERT[key] for key in kept})
  assert (a.positions, a.window, a.norm_eps) == (8192, 128, 1e-5)
  assert (a.global_theta, a.local_theta) == (160_000, 10_000)
  assert a.windowed == (False, True, True)


def test_newer_names_of_settings_come_before_older_ones():
  types_ = ["full_attention"] * 2 + ["sliding_attention"]
  a = bidirectional.from_hf(
    MODERNBERT | {"rope_parameters": ROPE, "layer_types": types_}
  )
  assert (a.global_theta, a.local_theta) == (900, 30)
  assert a.windowed == (False, False, True)


BERT_REFUSES = (
  (
    {"model_type": "roberta", "pad_token_id": None},
    "pad_token_id is None, expected a token's id",
  ),
  ({"hidden_act": "gelu_new"}, "hidden_act 'gelu_new' is not supported"),
  (
    {"position_embedding_type": "relative_key"},
    "position_embedding_type 'relative_key' is not",
  ),
  # Jina's models say that they are BERT's.
  ({"auto_map": {"AutoModel": "modeling_bert.JinaBert"}}, "auto_map .* is not"),
  ({"pooling": "cls"}, "pooling 'cls' is not supported; expected 'average'"),
  ({"hidden_size": True}, "hidden_size is True, expected a positive"),
  ({"num_attention_heads": 5}, "hidden_size 48 is not divisible by 5"),
  ({"layer_norm_eps": 0}, "layer_norm_eps is 0, expected a positive number"),
  ({"intermediate_size": ...}, "intermediate_size is missing, expected a"),
)
MODERNBERT_REFUSES = (
  ({"rope_scaling": {"type": "linear"}}, "rope_scaling .* is not supported"),
  ({"rope_parameters": {"rope_theta": 1e4}}, "unknown key 'rope_theta'"),
  (
    {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
    "rope_type 'yarn' is not supported",
  ),
  (
    {"rope_parameters": {"sliding_attention": {"factor": 2.0}}},
    "unknown key 'factor'",
  ),
  ({"rope_parameters": [1]}, r"rope_parameters is \[1\], expected an object"),
  ({"local_rope_theta": None}, "local_rope_theta is None, expected a posit"),
  ({"layer_types": ["full_attention"]}, "layer_types is .* of 3 layers"),
  ({"mlp_bias": None}, "mlp_bias is None, expected true or false"),
  ({"num_attention_heads": 16}, "hidden_size 48 .* 16 .* of an even width"),
)


@pytest.mark.parametrize(
  ("config", "change", "sentence"),
  [(BERT, *row) for row in BERT_REFUSES]
  + [(MODERNBERT, *row) for row in MODERNBERT_REFUSES],
)
def test_an_unsupported_option_is_refused_by_name(config, change, sentence):
  hf = {k: v for k, v in (config | change).items() if v is not ...}
  with pytest.raises(ValueError, match=f"config.json: {sentence}"):
    bidirectional.from_hf(hf)


@pytest.mark.parametrize("kind", ["deberta-v2", "nomic_bert", None, []])
def test_another_family_is_refused_by_name(tmp_path, kind):
  (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
  with pytest.raises(ValueError, match="model_type .* expected one of 'bert',"):
    encoder_lib.Encoder(tmp_path)


# Weights.

TINY = {"num_hidden_layers": 2, "vocab_size": 4096}


@pytest.fixture
def tiny(tmp_path):
  """A folder and its architecture."""
  folder = tmp_path / "model"
  return folder, random_encoders.make(folder, **TINY)


def test_names_may_have_a_prefix_a_pooler_and_buffers(tiny, tmp_path):
  folder, a = tiny
  plain = load(folder, a)
  random_encoders.make(tmp_path / "other", prefix="bert.", **TINY)
  with random_encoders.tensors(tmp_path / "other") as tensors:
    assert all(name.startswith("bert.") for name in tensors)
    tensors["bert.pooler.dense.weight"] = np.zeros((64, 64), np.float32)
    tensors["bert.pooler.dense.bias"] = np.zeros(64, np.float32)
    tensors["bert.embeddings.position_ids"] = np.arange(512)[None]
  named = load(tmp_path / "other", a)
  jax.tree.map(np.testing.assert_array_equal, plain, named)


def test_weights_of_another_model_are_refused_by_name(tiny, nothing_loads):
  """`tensor_files` refuses them, which has tests of its own."""
  folder, a = tiny
  name = "encoder.layer.1.attention.self.key.bias"
  with random_encoders.tensors(folder) as tensors:
    del tensors[name]
  with pytest.raises(ValueError, match=f"lacks tensor {name!r}"):
    load(folder, a)
