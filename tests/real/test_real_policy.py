"""A real model as we read and compute it, against transformers and torch."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import transformers

from anysearch_jax.policy import tokenizer as tokenizer_lib

pairs = pytest.importorskip(
  "pairs", reason="oracle tests need torch==2.13.0 (the extra [oracles])"
)

pytestmark = [pytest.mark.real, pytest.mark.slow]


@pytest.fixture(scope="module")
def codec(policy_folder):
  return tokenizer_lib.Tokenizer.from_folder(policy_folder)


@pytest.fixture(scope="module")
def their_tokenizer(model_file):
  return transformers.AutoTokenizer.from_pretrained(
    model_file.parent, gguf_file=model_file.name
  )


@pytest.fixture(scope="module")
def tokens(codec, chats):
  """Four rows of as many tokens as the shortest of their texts has."""
  texts = [
    "\n\n".join(codec.render(question, system)[0] for system, question in part)
    for part in (chats[:3], chats[3:6], chats[5:8], chats[7:])
  ]
  rows = [codec.encode(text) for text in texts]
  length = min(len(row) for row in rows)
  assert length >= 200
  return np.array([row[:length] for row in rows], np.int32)


def test_the_weights_are_those_that_transformers_reads(pair, policy_folder):
  ours = safetensors.numpy.load_file(policy_folder / "model.safetensors")
  theirs = {name: x.numpy() for name, x in pair.model.state_dict().items()}
  assert theirs.keys() - ours.keys() == {"lm_head.weight"}  # It is tied.
  for name, array in ours.items():
    np.testing.assert_array_equal(array, theirs[name], err_msg=name)
  assert sum(array.size for array in ours.values()) > 134e6


def test_chats_and_ids_are_those_of_transformers(codec, their_tokenizer, chats):
  for system, question in chats:
    messages = [
      {"role": "system", "content": system},
      {"role": "user", "content": question},
    ]
    text, ids = codec.render(question, system)
    expected = their_tokenizer.apply_chat_template(
      messages, add_generation_prompt=True, tokenize=False
    )
    assert text == expected and text.count("<|im_start|>") == 3
    assert ids == their_tokenizer.encode(text, add_special_tokens=False)
    assert codec.end_of_turn_id == their_tokenizer.eos_token_id


def test_logits_are_those_of_transformers(pair, tokens):
  ours, theirs = pair.ours(tokens), pair.theirs(tokens)
  # Measured: 1.2e-4, where the largest logit is 42.
  np.testing.assert_allclose(ours, theirs, atol=5e-4)
  np.testing.assert_array_equal(ours.argmax(-1), theirs.argmax(-1))


def test_bfloat16_is_as_near_to_float32_as_that_of_torch(pair, tokens, torch):
  exact = next_logps(pair.ours(tokens), tokens)
  ours = next_logps(pair.ours(tokens, dtype=jnp.bfloat16), tokens)
  theirs = next_logps(pair.theirs(tokens, dtype=torch.bfloat16), tokens)
  # Measured: .029 nats on average, torch .036.
  our_error = np.abs(ours - exact).mean()
  assert our_error < 1.2 * np.abs(theirs - exact).mean()
  assert our_error < 0.05


def next_logps(logits, tokens):
  """Returns the log-probability of each token but the first, `[B, T - 1]`."""
  logps = pairs.log_softmax(logits)[:, :-1]
  return np.take_along_axis(logps, tokens[:, 1:, None], -1)[..., 0]
