"""The critic: its values against torch, and its step on a mesh."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_policy

from anysearch_jax import config as config_lib
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import decoder, hf, lora, sharding, table
from anysearch_jax.policy import parameters as weights
from anysearch_jax.training import batching, optimizers, ppo, train_step
from bench import random_models

BATCH = config_lib.BatchConfig(
  row_lengths=(32,), micro_batch_tokens=256, max_micro_batches=3
)
OBJECTIVE = config_lib.ObjectiveConfig(kl_coefficient=0.05)
CRITIC = config_lib.CriticConfig(value_clip=0.2)
KEEP = optimizers.Pair(small_policy.KEEP, small_policy.KEEP)


@pytest.mark.parametrize("case", ["qwen2", "qwen3-tied", "llama"])
def test_values_equal_a_token_classifier(case, tmp_path):
  torch = pytest.importorskip(
    "torch", reason="oracle tests need torch==2.13.0 (the extra [test])"
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


def batch(seed=0, trajectories=40):
  """Returns packed off-policy trajectories with a critic's values."""
  rng = np.random.default_rng(seed)
  examples = []
  for _ in range(trajectories):
    size = int(rng.integers(4, 33))
    mask = rng.random(size) < 0.7
    mask[:2] = False, True
    examples.append(
      batching.Example(
        token_ids=rng.integers(0, 61, size).astype(np.int32),
        weights=(mask / mask.sum() / trajectories).astype(np.float32),
        logps=(mask * rng.normal(-4, 0.5, size)).astype(np.float32),
        advantage=float(rng.normal()),
      )
    )
  packed = batching.pack(examples, config=BATCH, multiple=8)
  return tuple(
    rows._replace(
      old_value=rng.normal(size=rows.weight.shape).astype(np.float32),
      returns=rng.normal(size=rows.weight.shape).astype(np.float32),
    )
    for rows in packed
  )


def stepped(a, trained, base, critic, *, layout=None):
  """Returns state and metrics after one step, and the critic's values."""
  compute = decoder.Compute(layout=layout, attention_chunk=8, logprob_chunk=8)
  shardings = None
  if layout is not None:
    shardings = train_step.shardings(a, KEEP, layout.mesh)
    base = jax.device_put(
      base, sharding.shardings(a.without_lora(), layout.mesh)
    )
    trained, critic = jax.device_put(
      (trained, critic), (shardings.params, shardings.critic)
    )
  loss = ppo.with_critic(
    train_step.grpo_loss(a, OBJECTIVE, temperature=0.8, compute=compute),
    a,
    CRITIC,
    compute=compute,
  )
  rows = batch()
  value = ppo.Estimator(a, CRITIC, temperature=0.8, compute=compute).value
  (values,) = value(critic, base, rows)
  step = train_step.make(loss, KEEP, shardings)
  state = train_step.init(trained, KEEP, shardings, critic=critic)
  state, metrics = step(state, base, rows)
  return state, metrics, np.where(rows[0].segment_ids > 0, values, 0)


CASES = {
  "all": ("llama", 0, (1, 4, 2, False)),
  "adapters": ("qwen2", 2, (2, 2, 2, True)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_mesh_and_one_device_give_the_same_values_and_gradients(name, capfd):
  case, rank, mesh = CASES[name]
  a = random_models.architecture(case, vocab_size=64, num_hidden_layers=5)
  base = random_models.params(a)
  trained = base
  if rank:
    adapters = architecture_lib.Lora(rank, 4.0, ("q", "v", "o", "down"))
    a = dataclasses.replace(a, lora=adapters)
    trained = small_policy.noisy(lora.initialize(a, 0), 1)
  critic = small_policy.noisy(ppo.initialize(trained, a), 2)
  *axes, sequence = mesh
  layout = sharding.Layout(
    sharding.mesh(**dict(zip(sharding.AXES, axes, strict=True))), sequence
  )
  one, cut = (
    stepped(a, trained, base, critic, layout=on) for on in (None, layout)
  )
  np.testing.assert_allclose(cut[2], one[2], rtol=0, atol=1e-5)
  assert np.abs(one[2]).max() > 0.5
  for metric, value in one[1].items():
    np.testing.assert_allclose(
      cut[1][metric], value, rtol=2e-5, atol=1e-6, err_msg=metric
    )
  assert one[1]["value/clip_fraction"] > 0
  gradients = one[0].opt_state.policy.trace, one[0].opt_state.critic.trace
  found = cut[0].opt_state.policy.trace, cut[0].opt_state.critic.trace
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(
      x, y, rtol=0, atol=1e-5 * np.abs(y).max()
    ),
    found,
    gradients,
  )
  assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(gradients))
  wanted = train_step.shardings(a, KEEP, layout.mesh)
  for x, where in zip(jax.tree.leaves(cut[0]), jax.tree.leaves(wanted)):
    assert x.sharding.is_equivalent_to(where, x.ndim)
  assert "full rematerialization" not in capfd.readouterr().err


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
