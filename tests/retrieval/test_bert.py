"""The BERT encoder: configuration, weights, and parity with torch."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from bench import random_encoders
from retrieval.encoder import bert
from retrieval.encoder import pooling as pooling_lib

# Heads as the real ones have them, fewer layers.
CASES = {
  "bert-base": {"num_hidden_layers": 2},
  "e5-small": {"num_hidden_layers": 3},
  "minilm": {"num_hidden_layers": 2, "layer_norm_eps": 1e-5},
}
CONFIG = {
  "model_type": "bert",
  "vocab_size": 100,
  "hidden_size": 64,
  "num_hidden_layers": 2,
  "num_attention_heads": 2,
  "intermediate_size": 96,
}
TINY = {name: CONFIG[name] for name in CONFIG if name != "model_type"} | {
  "vocab_size": 4096
}
WEIGHTS = "model.safetensors"
forward = jax.jit(bert.forward, static_argnums=1)


def load(folder, a, dtype=jnp.float32, devices=1):
  mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:devices]), ("data",))
  whole = jax.sharding.NamedSharding(mesh, jax.P())
  return bert.load(folder, a, sharding=whole, dtype=dtype)


def random_texts(a, lengths):
  """Draws ids `[B, T]`, also at padding."""
  rng = np.random.default_rng(1)
  lengths = np.asarray(lengths, np.int32)
  ids = rng.integers(0, a.vocab_size, (len(lengths), lengths.max()))
  return ids.astype(np.int32), lengths


@pytest.fixture
def tiny(tmp_path):
  """A folder and its architecture."""
  folder = tmp_path / "model"
  return folder, random_encoders.make("minilm", folder, **TINY)


def change_weights(folder, change):
  tensors = safetensors.numpy.load_file(folder / WEIGHTS)
  change(tensors)
  safetensors.numpy.save_file(tensors, folder / WEIGHTS)


@pytest.mark.parametrize("case", CASES)
def test_hidden_states_equal_torchs(torch, tmp_path, case):
  import transformers

  a = random_encoders.make(case, tmp_path, **CASES[case])
  ids, lengths = random_texts(a, [33, 1, 40, 17, 2])
  model = transformers.BertModel.from_pretrained(
    tmp_path, dtype=torch.float32, add_pooling_layer=False
  ).eval()
  visible = np.arange(ids.shape[1]) < lengths[:, None]
  with torch.no_grad():
    theirs = model(
      input_ids=torch.from_numpy(ids).long(),
      attention_mask=torch.from_numpy(visible).long(),
    ).last_hidden_state.numpy()[visible]
  params = load(tmp_path, a)
  ours = forward(params, a, ids, lengths)
  ours = np.asarray(ours)[visible]
  assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max()
  # The states are not degenerate: tokens differ.
  assert theirs.std(0).min() > 0.05


def test_padding_values_change_no_bit(tiny):
  folder, a = tiny
  params = load(folder, a)
  ids, lengths = random_texts(a, [9, 24, 1])
  visible = np.arange(24) < lengths[:, None]
  other = np.where(visible, ids, (ids + 1) % a.vocab_size)
  first, second = (
    np.asarray(forward(params, a, x, lengths))[visible] for x in (ids, other)
  )
  np.testing.assert_array_equal(first, second)


def test_longer_padding_changes_no_more_than_rounding(tiny):
  folder, a = tiny
  params = load(folder, a)
  ids, lengths = random_texts(a, [9, 12])
  short = forward(params, a, ids, lengths)
  longer = forward(params, a, np.pad(ids, ((0, 0), (0, 20))), lengths)
  np.testing.assert_allclose(short[0, :9], longer[0, :9], atol=1e-5)


def test_bfloat16_is_near(tiny):
  folder, a = tiny
  ids, lengths = random_texts(a, [30, 30])
  exact = forward(load(folder, a), a, ids, lengths)
  rough = forward(load(folder, a, jnp.bfloat16), a, ids, lengths)
  assert rough.dtype == jnp.bfloat16
  exact, rough = np.asarray(exact), np.asarray(rough, np.float32)
  assert 0 < np.abs(exact - rough).max() < 0.05 * np.abs(exact).max()


def test_rows_over_eight_devices_are_those_of_one(tiny):
  folder, a = tiny
  ids, lengths = random_texts(a, range(5, 21))
  alone = forward(load(folder, a), a, ids, lengths)
  params = load(folder, a, devices=8)
  assert all(p.sharding.is_fully_replicated for p in jax.tree.leaves(params))
  cut = jax.sharding.NamedSharding(
    jax.tree.leaves(params)[0].sharding.mesh, jax.P("data")
  )
  spread = forward(params, a, *jax.device_put((ids, lengths), cut))
  assert spread.sharding.shard_shape(spread.shape)[0] == 2
  visible = np.arange(ids.shape[1]) < lengths[:, None]
  np.testing.assert_allclose(
    np.asarray(alone)[visible], np.asarray(spread)[visible], atol=1e-5
  )


@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken"])
def test_pooled_vectors_are_unit_vectors_of_the_tokens_that_count(pooling):
  rng = np.random.default_rng(2)
  hidden = rng.normal(size=(3, 5, 8)).astype(np.float32)
  lengths = np.array([5, 1, 3])
  found = pooling_lib.pool(hidden, lengths, pooling)
  for row, length in enumerate(lengths):
    start = length - 1 if pooling == "lasttoken" else 0
    tokens = hidden[row, start : 1 if pooling == "cls" else length]
    mean = np.sum(tokens.astype(np.float64), 0)
    np.testing.assert_allclose(
      found[row], mean / np.linalg.norm(mean), atol=1e-6
    )


def test_empty_text_has_finite_numbers():
  hidden = np.zeros((1, 4, 8), np.float32)
  found = pooling_lib.pool(hidden, np.zeros(1, int), "mean")
  np.testing.assert_array_equal(found, 0)


def test_a_configuration_gives_its_sizes():
  assert bert.from_hf(CONFIG) == bert.Architecture(
    vocab_size=100,
    d_model=64,
    layers=2,
    heads=2,
    mlp_dim=96,
    positions=512,
    token_types=2,
    norm_eps=1e-12,
  )
  said = {
    "max_position_embeddings": 40,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
    "position_embedding_type": "absolute",
    "hidden_act": "gelu",
    "pruned_heads": {},
    "is_decoder": False,
    "hidden_dropout_prob": 0.1,
  }
  a = bert.from_hf(CONFIG | said)
  assert (a.positions, a.token_types, a.norm_eps) == (40, 1, 1e-5)


@pytest.mark.parametrize(
  ("change", "sentence"),
  [
    ({"model_type": "deberta"}, "model_type 'deberta' is not supported"),
    ({"model_type": None}, "model_type None is not supported; expected 'bert'"),
    (
      {"model_type": "roberta", "pad_token_id": None},
      "pad_token_id is None, expected a token's id",
    ),
    ({"hidden_act": "gelu_new"}, "hidden_act 'gelu_new' is not supported"),
    (
      {"position_embedding_type": "relative_key"},
      "position_embedding_type 'relative_key' is not",
    ),
    ({"is_decoder": True}, "is_decoder True is not"),
    ({"quantization_config": {"bits": 8}}, "quantization_config .* is not"),
    ({"pruned_heads": {"0": [1]}}, "pruned_heads .* is not"),
    # Jina's models say that they are BERT's.
    (
      {"auto_map": {"AutoModel": "modeling_bert.JinaBert"}},
      "auto_map .* is not",
    ),
    ({"feed_forward_type": "geglu"}, "unknown key 'feed_forward_type'"),
    ({"is_causal": True}, "is_causal True is not supported; expected False"),
    ({"pooling": "cls"}, "pooling 'cls' is not supported; expected 'average'"),
    ({"vocab_size": None}, "vocab_size is None, expected a positive"),
    ({"num_hidden_layers": 0}, "num_hidden_layers is 0, expected a positive"),
    ({"hidden_size": True}, "hidden_size is True, expected a positive"),
    ({"num_attention_heads": "2"}, "num_attention_heads is '2', expected"),
    ({"num_attention_heads": 3}, "hidden_size 64 is not divisible by 3"),
    ({"layer_norm_eps": 0}, "layer_norm_eps is 0, expected a positive number"),
  ],
)
def test_unsupported_option_is_refused_by_name(change, sentence):
  with pytest.raises(ValueError, match=f"config.json: {sentence}"):
    bert.from_hf(CONFIG | change)


@pytest.mark.parametrize(
  "said",
  [
    # The keys of E5 and BGE, of multilingual BERT, and of Contriever.
    {
      "_name_or_path": "intfloat/e5-base",
      "architectures": ["BertModel"],
      "attention_probs_dropout_prob": 0.1,
      "classifier_dropout": None,
      "gradient_checkpointing": False,
      "hidden_act": "gelu",
      "id2label": {"0": "LABEL_0"},
      "initializer_range": 0.02,
      "label2id": {"LABEL_0": 0},
      "pad_token_id": 0,
      "position_embedding_type": "absolute",
      "torch_dtype": "float32",
      "transformers_version": "4.29.0.dev0",
      "use_cache": True,
    },
    {
      "architectures": ["BertForMaskedLM"],
      "directionality": "bidi",
      "pooler_fc_size": 768,
      "pooler_num_attention_heads": 12,
      "pooler_num_fc_layers": 3,
      "pooler_size_per_head": 128,
      "pooler_type": "first_token_transform",
    },
    {"architectures": ["Contriever"], "pooling": "average"},
  ],
)
def test_harmless_keys_of_published_encoders_are_ignored(said):
  assert bert.from_hf(CONFIG | said) == bert.from_hf(CONFIG)


def test_a_missing_size_is_refused_by_name():
  config = {k: v for k, v in CONFIG.items() if k != "intermediate_size"}
  with pytest.raises(ValueError, match="intermediate_size is 'missing'"):
    bert.from_hf(config)


def test_names_may_have_a_prefix_a_pooler_and_buffers(tiny, tmp_path):
  folder, a = tiny
  plain = load(folder, a)
  random_encoders.make("minilm", tmp_path / "other", prefix="bert.", **TINY)

  def add(tensors):
    assert all(name.startswith("bert.") for name in tensors)
    tensors["bert.pooler.dense.weight"] = np.zeros((64, 64), np.float32)
    tensors["bert.pooler.dense.bias"] = np.zeros(64, np.float32)
    tensors["bert.embeddings.position_ids"] = np.arange(512)[None]

  change_weights(tmp_path / "other", add)
  named = load(tmp_path / "other", a)
  jax.tree.map(np.testing.assert_array_equal, plain, named)


@pytest.mark.parametrize(
  ("change", "sentence"),
  [
    (
      lambda t: t.pop("encoder.layer.1.attention.self.key.bias"),
      "lacks tensor 'encoder.layer.1.attention.self.key.bias'",
    ),
    (
      lambda t: t.update({"cls.predictions.bias": np.zeros(2, np.float32)}),
      "unknown tensor 'cls.predictions.bias'",
    ),
    (
      lambda t: t.update(
        {"embeddings.LayerNorm.weight": np.zeros(65, np.float32)}
      ),
      r"'embeddings.LayerNorm.weight' has shape \(65,\), expected \(64,\)",
    ),
    (
      lambda t: t.update(
        {"embeddings.LayerNorm.weight": np.zeros(64, np.int8)}
      ),
      "'embeddings.LayerNorm.weight' is of type I8",
    ),
  ],
)
def test_weights_of_another_model_are_refused_by_name(
  tiny, nothing_loads, change, sentence
):
  folder, a = tiny
  change_weights(folder, change)
  with pytest.raises(ValueError, match=sentence):
    load(folder, a)


def test_the_folder_s_own_configuration_is_read(tiny):
  folder, a = tiny
  config = json.loads((folder / "config.json").read_text())
  assert bert.from_hf(config) == a
