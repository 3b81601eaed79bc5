"""Experts against a sum over tokens and choices, written out in NumPy."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_models

from anysearch_jax.policy import experts, sharding, table

E, K, D, F = 8, 3, 16, 12


def silu(x, slope=1.0):
  return x / (1 + np.exp(-slope * x))


def hidden(row, w, e):
  if w.bias is None:
    return silu(row @ w.gate[e]) * (row @ w.up[e])
  gate, up = np.einsum("d,cdf->cf", row, w.gate[e]) + w.bias[e]
  return silu(np.minimum(gate, 7), 1.702) * (np.clip(up, -7, 7) + 1)


def expected(x, w, kept, chosen):
  y = np.zeros_like(x)
  for n, row in enumerate(x):
    for share, e in zip(kept[n], chosen[n], strict=True):
      if 0 <= e < len(w.gate):
        y[n] += share * (hidden(row, w, e) @ w.down[e])
  return y


def case(tokens, *, seed=0, chosen=None, among=E, clamped=False):
  rng = np.random.default_rng(seed)
  w = experts.Weights(
    rng.standard_normal((E, D, F)) / D**0.5,
    rng.standard_normal((E, D, F)) / D**0.5,
    rng.standard_normal((E, F, D)) / F**0.5,
  )
  x = rng.standard_normal((tokens, D))
  if clamped:
    both = 20 * np.stack([w.gate, w.up], axis=1)  # Most are beyond 7.
    w = experts.Weights(both, None, w.down, rng.standard_normal((E, 2, F)))
  if chosen is None:
    chosen = rng.permuted(np.tile(np.arange(among), (tokens, 1)), axis=1)[:, :K]
  kept = rng.uniform(0.1, 1.0, (tokens, K))
  as32 = functools.partial(jnp.asarray, dtype=jnp.float32)
  ours = as32(x), jax.tree.map(as32, w), as32(kept), jnp.asarray(chosen)
  return ours, expected(x, w, kept, chosen)


@pytest.fixture
def small_blocks(monkeypatch):
  monkeypatch.setattr(experts, "_FEW", 0)
  monkeypatch.setattr(experts, "_BLOCK", 4)
  monkeypatch.setattr(experts, "_BLOCKS", 2)


def assert_same(found, wanted):
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(
      a, b, rtol=1e-4, atol=2e-5 * np.abs(b).max()
    ),
    *(found, wanted),
  )


CLAMPED = pytest.mark.parametrize("clamped", [False, True])


@pytest.mark.parametrize("tokens", [1, 5, experts._FEW, experts._FEW + 1, 700])
@CLAMPED
def test_the_sum_over_chosen_experts(tokens, clamped):
  ours, wanted = case(tokens, clamped=clamped)
  found = jax.jit(experts.apply)(*ours)
  np.testing.assert_allclose(found, wanted, atol=5e-4 if clamped else 2e-5)


def test_random_choices_in_small_blocks(small_blocks):
  apply = jax.jit(experts.apply)
  for seed in range(20):
    tokens = int(np.random.default_rng(seed).integers(1, 40))
    ours, wanted = case(tokens, seed=seed, among=K + seed % (E - K + 1))
    np.testing.assert_allclose(apply(*ours), wanted, atol=2e-5)


def test_every_token_may_choose_the_same_experts(small_blocks):
  ours, wanted = case(50, chosen=np.tile([6, 0, 3], (50, 1)))
  np.testing.assert_allclose(experts.apply(*ours), wanted, atol=2e-5)


def test_choices_of_other_devices_count_as_nothing(small_blocks):
  chosen = np.tile([[-2, 1, 7], [-1, 8, 9]], (9, 1))
  ours, wanted = case(18, chosen=chosen)
  assert not wanted[1].any() and wanted[0].any()
  np.testing.assert_allclose(experts.apply(*ours), wanted, atol=2e-5)
  dense = experts._dense(*ours)
  np.testing.assert_allclose(dense, wanted, atol=2e-5)


@CLAMPED
def test_the_grouped_product_of_tpus_computes_the_same(small_blocks, clamped):
  """XLA computes it on a CPU too, by every expert."""
  (x, w, _, _), _ = case(24, clamped=clamped)
  owner, sizes = jnp.array([0, 2, 2, 5, 7, 7]), jnp.array([4, 0, 8, 0, 0, 4, 0])
  sizes = jnp.append(sizes, 8)

  def both(f, x, w):
    y, pull = jax.vjp(lambda x, w: f(x, w), x, w)
    return y, pull(jnp.cos(y))

  looped = both(lambda x, w: experts._blocks(x, w, owner, sizes), x, w)
  grouped = both(lambda x, w: experts._grouped(x, w, owner, sizes), x, w)
  assert_same(looped, grouped)


@CLAMPED
def test_few_and_many_tokens_have_the_same_gradients(
  monkeypatch, small_blocks, clamped
):
  ours, _ = case(30, clamped=clamped)

  def gradients(few):
    monkeypatch.setattr(experts, "_FEW", few)
    return jax.grad(
      lambda x, w, kept: jnp.sum(jnp.sin(experts.apply(x, w, kept, ours[3]))),
      argnums=(0, 1, 2),
    )(*ours[:3])

  assert_same(gradients(0), gradients(1000))


def test_shares_of_the_chosen_experts():
  a = random_models.architecture("qwen3-moe")
  a = dataclasses.replace(a, experts=4, active=2)
  shares = jnp.array([[0.1, 0.4, 0.2, 0.3]])
  kept, chosen = experts.route(shares, a)
  assert chosen.tolist() == [[1, 3]]
  np.testing.assert_allclose(kept, [[4 / 7, 3 / 7]], rtol=1e-6)
  kept, _ = experts.route(shares, dataclasses.replace(a, renormalized=False))
  np.testing.assert_allclose(kept, [[0.4, 0.3]], rtol=1e-6)


def test_experts_of_gpt_oss_are_those_of_transformers(torch):
  from transformers.models.gpt_oss import modeling_gpt_oss as theirs

  (x, w, kept, chosen), wanted = case(30, clamped=True)
  config = random_models.config(
    *("gpt-oss",), hidden_size=D, intermediate_size=F, num_local_experts=E
  )
  module = theirs.GptOssExperts(config)
  both = np.moveaxis(w.gate, 1, 3).reshape(E, D, 2 * F)
  bias = np.swapaxes(w.bias, 1, 2).reshape(E, 2 * F)
  given = (both, bias, w.down, np.zeros((E, D)))
  with torch.no_grad():
    for parameter, value in zip(module.parameters(), given, strict=True):
      parameter.copy_(torch.tensor(np.array(value)))
    inputs = (torch.tensor(np.array(each)) for each in (x, chosen, kept))
    x, chosen, kept = inputs
    found = module(x, chosen.long(), kept)
  np.testing.assert_allclose(found, wanted, atol=5e-4)


def test_a_layer_of_gpt_oss_may_have_two_experts():
  """As many as it has matrices that share a tensor, gate and up."""
  two, six = (
    random_models.architecture("gpt-oss", num_local_experts=count)
    for count in (2, 6)
  )
  shapes = [
    [row.file_shape[1:] for row in table.base_rows(a)] for a in (two, six)
  ]
  assert shapes[0] == shapes[1]


def test_load_and_balance_of_a_table_by_hand():
  shares = jnp.array([[[0.5, 0.3, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4]]])
  chosen = jnp.array([[[0, 1], [3, 2]]])
  both = experts.load(shares, chosen, jnp.array([[True, True]]))
  np.testing.assert_allclose(both[0], [0.25] * 4)
  np.testing.assert_allclose(both[1], [0.3, 0.25, 0.25, 0.2], rtol=1e-6)
  np.testing.assert_allclose(experts.balance(both[None]), 1.0, rtol=1e-6)
  # Padding counts for nothing.
  one = experts.load(shares, chosen, jnp.array([[True, False]]))
  np.testing.assert_allclose(one, [[0.5, 0.5, 0, 0], shares[0, 0]])
  # 4 (.5 x .5 + .5 x .3) and 1 in the two layers.
  layers = jnp.stack([one, both])
  np.testing.assert_allclose(experts.balance(layers), 1.3, rtol=1e-6)


def test_balance_is_that_of_transformers_over_the_choices(torch):
  from transformers.models.qwen3_moe import modeling_qwen3_moe as theirs

  logits = np.random.default_rng(1).standard_normal((1, 50, E))
  shares = jax.nn.softmax(jnp.asarray(logits, jnp.float32))
  _, chosen = jax.lax.top_k(shares, K)
  loads = experts.load(shares, chosen, jnp.ones((1, 50), bool))
  wanted = theirs.load_balancing_loss_func(
    (torch.tensor(logits[0]),), num_experts=E, top_k=K
  )
  # Theirs counts every choice of a token, ours their mean.
  np.testing.assert_allclose(K * experts.balance(loads[None]), wanted, 1e-5)


@pytest.mark.parametrize(
  "axes",
  [
    {"expert": 8},
    {"fsdp": 2, "expert": 4},
    {"data": 2, "expert": 2, "tensor": 2},
    {"expert": 2, "context": 2, "tensor": 2},
    {"fsdp": 4, "tensor": 2},
  ],
)
@CLAMPED
def test_a_mesh_gives_the_sum_and_gradients_of_one_device(
  axes, small_blocks, clamped
):
  (x, w, kept, chosen), wanted = case(8 * 6, clamped=clamped)
  layout = sharding.Layout(sharding.mesh(**axes))

  def result(x, w, kept, layout):
    y = experts.apply(x, w, kept, chosen.reshape(8, 6, K), layout)
    return jnp.sum(jnp.sin(y)), y

  run = jax.value_and_grad(result, argnums=(0, 1, 2), has_aux=True)
  run = jax.jit(run, static_argnums=3)
  given = x.reshape(8, 6, D), w, kept.reshape(8, 6, K)
  (_, y), gradients = run(*given, layout)
  atol = 5e-4 if clamped else 2e-5
  np.testing.assert_allclose(y.reshape(-1, D), wanted, atol=atol)
  (_, _), alone = run(*given, None)
  assert_same(gradients, alone)
