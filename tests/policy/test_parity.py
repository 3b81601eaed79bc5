"""The decoder against transformers for every family and kind of weights."""

from __future__ import annotations

import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
import random_models
import transformers

from anysearch_jax.policy import decoder, experts, hf, table
from anysearch_jax.policy import parameters as weights

pairs = pytest.importorskip(
  "pairs", reason="oracle tests need torch==2.13.0 (the extra [oracles])"
)

ROWS, TOKENS = 4, 288


@pytest.fixture(params=random_models.CASES)
def pair(request, make_pair):
  return make_pair(request.param)


FAMILIES = ("qwen2", "qwen3", "qwen3-moe", "llama", "smollm3", "olmo3")


@pytest.fixture(params=[*FAMILIES, "gemma3-tied", "gpt-oss"])
def family(request, make_pair):
  """How rows are laid out does not depend on biases and tied heads."""
  return make_pair(request.param)


@pytest.fixture
def tokens():
  return random_models.random_tokens((ROWS, TOKENS))


def assert_parity(ours, theirs, *, positions):
  """Checks agreement within float32 rounding at `positions` or more."""
  assert ours.shape == theirs.shape
  assert ours[..., 0].size >= positions
  assert np.abs(theirs).max() > 1  # Otherwise the tolerance is meaningless.
  np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
  np.testing.assert_allclose(
    pairs.log_softmax(ours), pairs.log_softmax(theirs), rtol=0, atol=5e-5
  )


def test_logits_equal_transformers(pair, tokens):
  assert_parity(pair.ours(tokens), pair.theirs(tokens), positions=1000)


@pytest.mark.parametrize("case", ["qwen3", "olmo3", "gemma3-tied"])
def test_initial_scales_of_norms_are_those_of_transformers(case):
  prefix, _ = random_models.CASES[case]
  make = getattr(transformers, prefix + "ForCausalLM")
  theirs = make(random_models.config(case)).state_dict()
  a = random_models.architecture(case)
  rows = [row for row in table.rows(a) if row.init is None]
  ours = decoder.initialize(a, 0)
  assert len(rows) >= 5
  for name, row, i in weights.tensors(rows):
    scale = row.to_file(weights.layer_slice(ours, row, i))
    np.testing.assert_array_equal(scale, theirs[name], err_msg=name)


def test_left_padded_rows_equal_transformers(family, tokens):
  pads = np.array([0, 1, 40, 100])
  positions = np.arange(TOKENS) - pads[:, None]
  real = positions >= 0
  positions = np.maximum(positions, 0)
  ours = family.ours(tokens, positions, real.astype(np.int32))
  theirs = family.theirs(
    tokens, attention_mask=real.astype(np.int64), position_ids=positions
  )
  assert np.isfinite(ours).all()
  assert_parity(ours[real], theirs[real], positions=1000)


def test_packed_segments_equal_separate_rows(family, tokens):
  positions, segments = np.zeros_like(tokens), np.zeros_like(tokens)
  stretches = [
    *((0, 0, 120), (0, 120, 288)),
    *((1, 0, 1), (1, 1, 2), (1, 2, 288)),
    (2, 0, 280),  # Followed by padding.
    *((3, 0, 48), (3, 48, 96), (3, 100, 280)),  # Padding in between too.
  ]
  for segment, (row, start, end) in enumerate(stretches, start=1):
    positions[row, start:end] = np.arange(end - start)
    segments[row, start:end] = segment
  ours = family.ours(tokens, positions, segments)
  assert np.isfinite(ours).all()
  theirs = [
    family.theirs(tokens[row : row + 1, start:end])[0]
    for row, start, end in stretches
  ]
  assert_parity(
    np.concatenate([ours[row, a:b] for row, a, b in stretches]),
    np.concatenate(theirs),
    positions=1000,
  )


def test_in_bfloat16_log_probs_are_near_those_of_transformers(
  torch, family, tokens
):
  ours = family.ours(tokens, dtype=jnp.bfloat16)
  theirs = family.theirs(tokens, dtype=torch.bfloat16)
  assert (ours != family.ours(tokens)).any()
  difference = pairs.log_softmax(ours) - pairs.log_softmax(theirs)
  assert difference[..., 0].size >= 1000
  assert np.abs(difference).mean() <= 0.05


def assert_same_gradients(pair, **options):
  sequence = random_models.random_tokens((2, 49))
  found = list(pair.gradients(sequence, **options))
  scales = {name: np.abs(theirs).max() for name, _, theirs in found}
  for name, ours, theirs in found:
    # Softmax ignores what all keys have in common: parts of the gradient of
    # their bias, of the size of those of their matrix, cancel to nearly 0.
    scale = scales[name.replace("k_proj.bias", "k_proj.weight")]
    assert scale > 0 or ".experts." in name  # No token may have chosen it.
    np.testing.assert_allclose(
      ours, theirs, rtol=0, atol=3e-5 * scale, err_msg=name
    )


@pytest.mark.parametrize(
  "case",
  [
    *("qwen2", "qwen3-tied", "llama-biased", "smollm3", "qwen3-moe"),
    *("olmo3", "gemma3-tied", "gpt-oss"),
    pytest.param("qwen3-biased", marks=pytest.mark.slow),
    pytest.param("llama-tied", marks=pytest.mark.slow),
  ],
)
def test_gradients_equal_autograd(make_pair, case):
  # A tied embedding has gradients from both the lookup and the head.
  assert_same_gradients(make_pair(case))


@pytest.mark.parametrize("case", ["qwen3-moe", "gpt-oss"])
def test_gradients_of_sorted_tokens_equal_autograd(
  make_pair, monkeypatch, case
):
  monkeypatch.setattr(experts, "_FEW", 0)
  monkeypatch.setattr(experts, "_BLOCK", 8)
  monkeypatch.setattr(experts, "_BLOCKS", 4)
  compute = decoder.Compute(attention_chunk=12)
  assert_same_gradients(make_pair(case, num_experts=7), compute=compute)


def test_gradients_equal_autograd_through_recomputed_layers(make_pair):
  # Deep enough that the layers run in a loop instead of being unrolled.
  deep = make_pair("qwen2-tied", num_hidden_layers=5)
  compute = decoder.Compute(remat="full", logprob_chunk=16)
  assert_same_gradients(deep, compute=compute)


@pytest.mark.parametrize("case", ["llama", "qwen3-yarn"])
def test_rows_reach_far_beyond_the_original_context(make_pair, case):
  """Otherwise parity would not show that RoPE scaling is applied."""
  a = make_pair(case).policy.architecture
  assert a.rope_scaling.original_max_position_embeddings * 8 < TOKENS


def test_shipped_policy_gives_the_same_logits_in_transformers(torch):
  folder = pathlib.Path(__file__).parents[2] / "configs/graded_world_policy"
  model = transformers.AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.float32
  ).eval()
  shipped = pairs.Pair(model, hf.load(folder))
  tokens = random_models.random_tokens(
    (ROWS, TOKENS), shipped.policy.tokenizer.vocab_size
  )
  theirs = shipped.theirs(tokens)
  assert np.abs(theirs).max() > 10  # Trained, unlike the others.
  np.testing.assert_allclose(shipped.ours(tokens), theirs, rtol=0, atol=1e-4)
