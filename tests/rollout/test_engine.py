"""The in-process engine: sampling, prompt sharing and memory."""

from __future__ import annotations

import asyncio

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_engine

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.environment import protocol
from anysearch_jax.policy import decoder, sharding
from anysearch_jax.rollout.jax_engine import kv_store

_A, _engine = small_engine.A, small_engine.engine
_play, _prompt = small_engine.play, small_engine.prompt


@pytest.fixture(scope="module")
def params():
  return small_engine.params()


_ALL = [(q, s) for q in range(4) for s in range(5)]


@pytest.fixture(scope="module")
def played(params):
  return _play(_engine(params), _ALL)


def test_results_do_not_depend_on_order_slots_or_concurrent_episodes(
  params, played
):
  rng = np.random.default_rng(0)
  shuffled = [_ALL[i] for i in rng.permutation(len(_ALL))]
  assert _play(_engine(params, slots=5), shuffled, delay=rng) == played
  assert _play(_engine(params), [(2, 3)])[2, 3] == played[2, 3]


def test_samples_of_a_group_differ_and_seeds_differ(params, played):
  texts = {played[0, s][1][0].token_ids for s in range(5)}
  assert len(texts) > 1
  other = _play(_engine(params, seed=8), _ALL)
  assert other != played


def test_sampled_log_probabilities_equal_those_of_a_full_forward(
  params, played
):
  """Cached turns and shared prompts agree with one full forward to 1e-5."""
  for context, generations in played.values():
    at, placed = len(_prompt(0)), []
    for generation in generations:
      placed.append((at, generation))
      at += len(generation.token_ids) + len(small_engine.ENVIRONMENT)
    small_engine.assert_scored(params, context, placed)


def test_a_prompt_is_prefilled_once_for_its_group(params):
  engine = _engine(params)
  _play(engine, [(0, s) for s in range(5)])
  # All 18 tokens but the last, including the half-filled last page.
  assert engine.counters["shared_tokens"] == 4 * 18
  once = _engine(params)
  _play(once, [(0, 0)])
  again = engine.counters["prefilled_tokens"], once.counters["prefilled_tokens"]
  assert again[0] == 5 * again[1] - 4 * 18


def test_prompts_share_their_common_prefix(params):
  engine = _engine(params)

  async def turn(question, prompt):
    request = types.GenerateRequest(
      types.Address(0, question, 0), 0, prompt, 4, protocol.STOPS
    )
    return await engine.generate(request)

  common = tuple(range(8, 22))
  prompts = [(*common, 30 + q, *range(22, 28)) for q in range(4)]

  async def run():
    together = await asyncio.gather(*(turn(*x) for x in enumerate(prompts)))
    shared = engine.counters["shared_tokens"]
    for question in range(4):
      engine.release(types.Address(0, question, 0))
    # Released prompts can be shared until their pages are allocated again.
    later = await turn(0, prompts[0])
    engine.release(types.Address(0, 0, 0))
    return together, shared, later

  together, shared, later = asyncio.run(run())
  assert shared == 3 * 12
  assert engine.counters["shared_tokens"] == 3 * 12 + 20
  assert later == together[0]
  alone = _engine(params)
  engine = alone
  assert asyncio.run(turn(1, prompts[1])) == together[1]
  assert alone.counters["shared_tokens"] == 0


def test_new_weights_do_not_reuse_cached_prompts(params):
  engine = _engine(params)
  _play(engine, [(0, 0)])
  engine.set_params(jax.tree.map(lambda p: 0.5 * p, params), 1)
  new = _play(engine, [(0, 0)])
  assert engine.counters["shared_tokens"] == 0
  fresh = _engine(jax.tree.map(lambda p: 0.5 * p, params), version=1)
  assert new == _play(fresh, [(0, 0)])


def test_preempted_episodes_sample_the_same_tokens(params, played):
  # There is room for one and a half contexts; the episodes need about five.
  engine = _engine(params, slots=20, kv_tokens=228)
  found = _play(engine, _ALL)
  assert engine.counters["preemptions"] > 0
  for key, (context, generations) in found.items():
    expected_context, expected = played[key]
    # Prefill and decode round differently, but not enough to change a draw.
    assert context == expected_context
    for one, other in zip(generations, expected, strict=True):
      np.testing.assert_allclose(one.logps, other.logps, atol=1e-5)
  # All pages are free again.
  assert len(engine._memory) == 0
  assert engine._memory._pools[0].free == 57


def test_more_sizes_of_calls_agree_to_rounding(params, played):
  engine = _engine(params, lanes=(2, 4, 8))
  found = _play(engine, _ALL)
  offered = engine.counters["lanes_offered"]
  for key, (_, generations) in found.items():
    for one, other in zip(generations, played[key][1], strict=True):
      assert one.token_ids == other.token_ids
      np.testing.assert_allclose(one.logps, other.logps, atol=1e-5)
  fixed = _engine(params)
  _play(fixed, _ALL)
  assert offered < fixed.counters["lanes_offered"]


@pytest.mark.parametrize(
  "axes",
  [
    pytest.param({"tensor": 2}, marks=pytest.mark.slow),
    pytest.param({"data": 2}, marks=pytest.mark.slow),
    {"data": 4, "tensor": 2},
  ],
)
def test_mesh_samples_the_same_as_one_device(params, played, axes):
  mesh = sharding.mesh(**axes)
  placed = jax.device_put(params, sharding.shardings(_A, mesh))
  engine = _engine(placed, mesh=mesh, slots=20)
  compiled = kv_store.prefill._cache_size(), kv_store.decode._cache_size()
  for key, (_, generations) in _play(engine, _ALL).items():
    for one, other in zip(generations, played[key][1], strict=True):
      assert one.token_ids == other.token_ids
      np.testing.assert_allclose(one.logps, other.logps, atol=1e-5)
  assert (compiled[0] + 1, compiled[1] + 1) == (
    kv_store.prefill._cache_size(),
    kv_store.decode._cache_size(),
  )


def test_prompts_with_a_common_prefix_are_spread_over_all_devices(params):
  mesh = sharding.mesh(data=2)
  placed = jax.device_put(params, sharding.shardings(_A, mesh))
  engine = _engine(placed, mesh=mesh, slots=20)
  alike = tuple(range(8, 24))

  async def turn(question):
    request = types.GenerateRequest(
      types.Address(0, question, 0), 0, (*alike, question), 4, protocol.STOPS
    )
    return await engine.generate(request)

  async def run():
    await asyncio.gather(*map(turn, range(20)))
    rows = [engine._memory.get(types.Address(0, q, 0)) for q in range(20)]
    for question in range(20):
      engine.release(types.Address(0, question, 0))
    return [sum(row.shard == part for row in rows) for part in range(2)]

  # Each shard has room for ten whole contexts.
  assert asyncio.run(run()) == [10, 10]
  assert engine.counters["preemptions"] == 0
  assert engine.counters["shared_tokens"] >= 18 * 16


def test_long_context_is_not_starved_by_short_ones(params):
  """Later, shorter contexts must not take the pages that it waits for."""
  engine = _engine(params, slots=20, kv_tokens=304)
  order = []

  async def episode(question, length):
    address = types.Address(0, question, 0)
    prompt = tuple(8 + (question + i) % 20 for i in range(length))
    request = types.GenerateRequest(address, 0, prompt, 6, protocol.STOPS)
    await engine.generate(request)
    engine.release(address)
    order.append(question)

  async def run():
    await asyncio.gather(
      *(episode(q, 130 if q == 19 else 8) for q in range(150))
    )

  asyncio.run(run())
  assert order.index(19) < 60


def test_nothing_is_compiled_again(params, played):
  del played
  sizes = kv_store.decode._cache_size(), kv_store.prefill._cache_size()
  _play(_engine(params), _ALL[::-1])
  assert sizes == (
    kv_store.decode._cache_size(),
    kv_store.prefill._cache_size(),
  )


def test_greedy_takes_the_most_likely_token(params):
  greedy = config_lib.SamplingConfig(temperature=0.0)
  context, (generation, *_) = _play(_engine(params, sampling=greedy), [(0, 0)])[
    0, 0
  ]
  n = len(_prompt(0)) + len(generation.token_ids)
  tokens = jnp.asarray([context[:n]])
  hidden = decoder.forward(
    params, _A, tokens, jnp.arange(n)[None], jnp.ones_like(tokens)
  )
  best = jnp.argmax(decoder.logits(params, hidden)[0], -1)
  start = len(_prompt(0)) - 1
  assert tuple(best[start : n - 1].tolist()) == generation.token_ids
