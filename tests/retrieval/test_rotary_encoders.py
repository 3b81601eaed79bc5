"""ModernBERT and Nomic encoders: parity with torch."""

from __future__ import annotations

import functools
import json
import types

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import published_encoders as published
import pytest
import safetensors.numpy
import tokenizers
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers, processors, trainers

from retrieval.encoder import encoder as encoder_lib
from retrieval.encoder import modernbert, nomic

FAMILIES = {"modernbert": modernbert, "nomic": nomic}
# Class of the model, and settings of its configuration.
CASES = {
  "modernbert": ("ModernBertForMaskedLM", {"local_attention": 10}),
  "modernbert-biases": (
    "ModernBertModel",
    {
      "norm_bias": True,
      "attention_bias": True,
      "mlp_bias": True,
      "norm_eps": 1e-3,
      "local_attention": 7,
      "layer_types": [
        "sliding_attention",
        "full_attention",
        "sliding_attention",
      ],
      "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 900.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
      },
    },
  ),
  "modernbert-older": (
    "ModernBertForMaskedLM",
    {
      k: v
      for k, v in published.MODERNBERT.items()
      if k not in ("model_type", *published.SIZES)
    },
  ),
  "nomic": (
    "NomicBertModel",
    {"rope_parameters": {"rope_type": "default", "rope_theta": 70.0}},
  ),
  "nomic-published": (
    "NomicBertModel",
    {
      "layer_norm_eps": 1e-6,
      "rope_parameters": {"rope_type": "default", "rope_theta": 70.0},
    },
  ),
}
FILE = "model.safetensors"
CONFIGS = {
  "modernbert-older": published.MODERNBERT,
  "nomic-published": published.NOMIC,
}
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TEXTS = ["", "Éire  naïve\n\t日本 👩‍🚀", "many words " * 9]


def save_tokenizer(folder):
  """Saves a tokenizer of ModernBERT's kind: BPE of bytes, NFC, a template."""
  inner = tokenizers.Tokenizer(models.BPE())
  inner.normalizer = normalizers.NFC()
  inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  inner.train_from_iterator(
    TEXTS,
    trainers.BpeTrainer(
      vocab_size=290,
      special_tokens=SPECIAL,
      initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
      show_progress=False,
    ),
  )
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
    model = model_class(
      model_class.config_class(
        **published.SIZES
        | {"bos_token_id": 2, "eos_token_id": 3, "sep_token_id": 3}
        | settings
        | {"attn_implementation": "eager"}
      )
    ).eval()
    with torch.no_grad():
      for name, x in model.named_parameters():
        # Large enough that a wrong mask, position or layout is seen.
        scale = 0.2 if x.ndim == 1 else x.shape[1] ** -0.5
        x.normal_(0, scale).add_(x.ndim == 1 and name.endswith("weight"))
    model.save_pretrained(folder)
    if case in CONFIGS:
      (folder / "config.json").write_text(json.dumps(CONFIGS[case]))
    save_tokenizer(folder)
    family = FAMILIES[case.partition("-")[0]]
    a = family.from_hf(json.loads((folder / "config.json").read_text()))
    return types.SimpleNamespace(
      folder=folder,
      torch=getattr(model, "model", model),
      family=family,
      a=a,
      forward=jax.jit(functools.partial(family.forward, a=a)),
      load=functools.cache(functools.partial(load, folder, family, a)),
    )

  return made


def load(folder, family, a, dtype=jnp.float32):
  alone = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  return family.load(folder, a, sharding=alone, dtype=dtype)


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
  ids = np.random.default_rng(1).integers(0, 300, (5, 40))
  theirs, visible = torchs(torch, made.torch, ids, lengths)
  ours = made.forward(made.load(), ids=ids.astype(np.int32), lengths=lengths)
  assert np.abs(np.asarray(ours)[visible] - theirs).max() <= 5e-6
  # The states are not degenerate: tokens differ.
  assert theirs.std(0).min() > 0.05


def test_published_names_are_those_of_the_saved_files(make):
  names = {
    case: set(safetensors.numpy.load_file(make(case).folder / FILE))
    for case in ("modernbert", "modernbert-biases", "nomic")
  }
  assert {"head.dense.weight", "decoder.bias"} < names["modernbert"]
  assert "model.layers.1.attn_norm.weight" in names["modernbert"]
  assert "layers.1.attn_norm.weight" in names["modernbert-biases"]
  assert "encoder.layers.0.mlp.fc11.weight" in names["nomic"]
  assert "emb_ln.weight" in names["nomic"]


@pytest.mark.parametrize("case", ["modernbert", "nomic"])
@hypothesis.given(length=st.integers(1, 24), seed=st.integers(0, 99))
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


@pytest.mark.parametrize("case", ["modernbert-older", "nomic-published"])
def test_a_folder_is_an_encoder(torch, make, case):
  made = make(case)
  encoder = encoder_lib.Encoder.load(made.folder, max_tokens=16)
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
  rough = encoder_lib.Encoder.load(
    made.folder, max_tokens=16, dtype=jnp.bfloat16
  )
  assert ((rough.queries(TEXTS) * theirs).sum(1) > 0.99).all()
  identity = json.loads(json.dumps(encoder.identity()))
  assert identity == encoder.identity()
  assert encoder_lib.Encoder.like(identity).identity() == identity


def test_a_text_has_as_many_tokens_as_the_model_was_trained_with(make):
  with pytest.raises(ValueError, match="max_tokens: found 257, but .* 256"):
    encoder_lib.Encoder.load(make("nomic-published").folder, max_tokens=257)
