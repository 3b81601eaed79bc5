"""The critic: its values against torch, and its gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_models
import small_policy

from anysearch_jax import config as config_lib
from anysearch_jax.policy import hf, lora, table
from anysearch_jax.policy import parameters as weights
from anysearch_jax.training import ppo


@pytest.mark.parametrize("case", ["qwen2", "qwen3-tied"])
def test_values_equal_a_token_classifier(case, tmp_path):
  torch = pytest.importorskip(
    "torch", reason="oracle tests need torch==2.13.0 (the extra [oracles])"
  )
  import transformers

  random_models.make(case, tmp_path)
  policy = hf.load(tmp_path)
  critic = ppo.initialize(policy.params, policy.architecture)
  head = np.random.default_rng(0).normal(size=critic["value"].shape)
  row = random_models.one_segment(random_models.random_tokens((2, 40)))

  def ours(head):
    return jax.jit(ppo.values, static_argnums=2)(
      critic | {"value": np.float32(head)}, None, policy.architecture, *row
    )

  assert not np.asarray(ours(critic["value"])).any()
  model = transformers.AutoModelForTokenClassification.from_pretrained(
    tmp_path, num_labels=1
  ).eval()
  with torch.no_grad():
    model.score.weight.copy_(torch.tensor(head)[None])
    model.score.bias.zero_()
    theirs = model(torch.tensor(row[0])).logits[..., 0].numpy()
  assert np.abs(theirs).max() > 1
  np.testing.assert_allclose(ours(head), theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("case", ["qwen2", "qwen3-tied"])
def test_new_critic_has_the_arrays_of_its_table(case, rank):
  config = config_lib.LoraConfig(rank=rank, targets=("q", "down"))
  a = lora.attach(random_models.architecture(case), config)
  trained = lora.initialize(a, 0) if rank else random_models.params(a)
  critic = ppo.initialize(trained, a)
  rows = table.critic_rows(a)
  assert jax.tree.map(np.shape, critic) == weights.tree(rows, lambda r: r.shape)
  # Everything that the policy trains except its LM head.
  names = {row.name for row in table.trainable_rows(a)} - {"lm_head.weight"}
  assert {row.name for row in rows} == names | {"score.weight"}


def test_the_gradient_of_a_value_is_its_slope():
  a = random_models.architecture("qwen3-tied")
  critic = small_policy.noisy(ppo.initialize(random_models.params(a), a), 3)
  row = random_models.one_segment(random_models.random_tokens((1, 12)))
  at = jax.jit(lambda c: ppo.values(c, None, a, *row)[0, -1])
  direction = small_policy.noisy(jax.tree.map(np.zeros_like, critic), 4)
  slope = jax.tree.map(jnp.vdot, jax.jit(jax.grad(at))(critic), direction)
  ends = [
    float(at(jax.tree.map(lambda c, d, s=s: c + s * d, critic, direction)))
    for s in (1e-2, -1e-2)
  ]
  np.testing.assert_allclose(
    sum(jax.tree.leaves(slope)), (ends[0] - ends[1]) / 2e-2, rtol=1e-2
  )
