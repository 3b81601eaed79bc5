"""Policies of random shapes and options against transformers."""

from __future__ import annotations

import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_models

pairs = pytest.importorskip(
  "pairs", reason="oracle tests need torch==2.13.0 (the extra [oracles])"
)

COUNT = 200
FAMILIES = ("qwen2", "qwen3", "llama", "smollm3", "olmo3", "gemma3-tied")
# Their bfloat16 products in torch need rows of a multiple of 16 bytes.
WITH_EXPERTS = ("qwen3-moe", "gpt-oss")


def drawn(case: str, rng: np.random.Generator) -> dict[str, Any]:
  """Returns random valid settings of a family."""

  def pick(*values):
    return values[rng.integers(len(values))]

  layers, kv, group = pick(1, 2, 3), pick(1, 2, 3), pick(1, 2, 3)
  head_dim, windowed = pick(8, 16, 24, 32), int(rng.integers(1, 30))
  theta = pick(1e4, 5e5, 1e6)
  rope = {"rope_theta": theta} | pick(
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": pick(2.0, 8.0)},
    {
      **{"rope_type": "yarn", "factor": pick(2.0, 32.0)},
      "original_max_position_embeddings": pick(8, 16),
    },
  )
  sizes = {
    "vocab_size": int(rng.integers(random_models.TOKENS, 90)),
    "hidden_size": kv * group * pick(8, 16),
    "intermediate_size": pick(16, 24, 40),
    "num_hidden_layers": layers,
    "num_attention_heads": kv * group,
    "num_key_value_heads": kv,
    "rms_norm_eps": pick(1e-6, 1e-5, 1e-3),
    "tie_word_embeddings": pick(False, True),
    "rope_parameters": rope,
  }
  if case == "qwen2":
    return sizes
  sizes |= {"head_dim": head_dim, "attention_bias": pick(False, True)}
  experts = int(rng.integers(2, 9))
  active = int(rng.integers(1, experts + 1))
  kinds = [pick("sliding_attention", "full_attention") for _ in range(layers)]
  windows = {"layer_types": kinds, "sliding_window": windowed}
  both = {
    "full_attention": rope,
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
  }
  return sizes | {
    "llama": {"mlp_bias": pick(False, True)},
    "smollm3": {"no_rope_layers": [pick(0, 1) for _ in range(layers)]},
    "olmo3": windows | {"rope_parameters": both},
    "gemma3-tied": windows
    | {"rope_parameters": both, "query_pre_attn_scalar": pick(8, 20, 64)},
    "qwen3-moe": {
      **{"num_experts": experts, "num_experts_per_tok": active},
      "moe_intermediate_size": pick(8, 16, 24),
      "norm_topk_prob": pick(False, True),
    },
    "gpt-oss": windows
    | {
      **{"num_local_experts": experts, "num_experts_per_tok": active},
      "tie_word_embeddings": False,
    },
  }.get(case, {})


@pytest.mark.slow
@pytest.mark.parametrize("case", [*FAMILIES, *WITH_EXPERTS])
def test_random_shapes_equal_transformers(case, tmp_path, torch):
  """In bfloat16, ours are no further from float32 than those in torch."""
  gaps: list[tuple[float, float]] = []
  for i in range(COUNT):
    rng = np.random.default_rng([7, i])
    sizes, tokens = drawn(case, rng), rng.integers(0, 61, (1, 40))
    pair = pairs.Pair.random(case, tmp_path / "policy", **sizes)
    ours, theirs = pair.ours(tokens), pair.theirs(tokens)
    bound = 1e-5 * np.abs(theirs).max()
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=bound, err_msg=sizes)
    exact = pairs.log_softmax(ours)
    rounded = (
      pair.ours(tokens, dtype=jnp.bfloat16),
      pair.theirs(tokens, dtype=torch.bfloat16),
    )
    gaps.append(
      tuple(np.abs(pairs.log_softmax(x) - exact).mean() for x in rounded)
    )
    shutil.rmtree(tmp_path / "policy")
    jax.clear_caches()
  our_gap, their_gap = np.mean(gaps, 0)
  assert len(gaps) == COUNT and our_gap < 1.1 * their_gap
