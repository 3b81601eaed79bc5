"""The in-process engine: sampling, prompt sharing, memory, requests."""

from __future__ import annotations

import asyncio
import dataclasses

import jax
import numpy as np
import pytest
import random_models
import small_engine

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.environment import protocol
from anysearch_jax.policy import experts, sharding
from anysearch_jax.rollout.jax_engine import kv_store

_A, _engine = small_engine.A, small_engine.engine
_play, _prompt = small_engine.play, small_engine.prompt
_ALL = [(q, s) for q in range(4) for s in range(5)]
# As many pages as the default has, so that nothing is compiled again.
_PAGES = small_engine.CONFIG.slots * small_engine.CONFIG.max_context


@pytest.fixture(scope="module")
def params():
  return small_engine.params()


@pytest.fixture(scope="module")
def first(params):
  """An engine that has played `_ALL`."""
  engine = _engine(params)
  engine.found = _play(engine, _ALL)
  return engine


@pytest.fixture(scope="module")
def played(first):
  return first.found


def _alike(found, played):
  """Checks that turns have the same tokens, with log-probs to 1e-5."""
  for key, (_, generations) in found.items():
    for one, other in zip(generations, played[key][1], strict=True):
      assert one.token_ids == other.token_ids
      np.testing.assert_allclose(one.logps, other.logps, atol=1e-5)


def test_results_do_not_depend_on_order_slots_or_concurrent_episodes(
  params, played
):
  sizes = kv_store.decode._cache_size(), kv_store.prefill._cache_size()
  rng = np.random.default_rng(0)
  shuffled = [_ALL[i] for i in rng.permutation(len(_ALL))]
  few = _engine(params, slots=5, kv_tokens=_PAGES)
  assert _play(few, shuffled, delay=rng) == played
  assert _play(_engine(params), [(2, 3)])[2, 3] == played[2, 3]
  # Nothing was compiled again.
  assert sizes == (
    kv_store.decode._cache_size(),
    kv_store.prefill._cache_size(),
  )


def test_samples_of_a_group_differ_and_seeds_differ(params, played):
  texts = {played[0, s][1][0].token_ids for s in range(5)}
  assert len(texts) > 1
  assert _play(_engine(params, seed=8), _ALL[:3]) != {
    key: played[key] for key in _ALL[:3]
  }


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


def test_prompts_share_their_common_prefix(params, played):
  engine = _engine(params)
  group = [(0, sample) for sample in range(5)]
  assert _play(engine, group) == {key: played[key] for key in group}
  # All 18 tokens but the last, including the half-filled last page.
  assert engine.counters["shared_tokens"] == 4 * 18
  assert engine.counters["discarded_tokens"] == 0
  common = tuple(range(8, 22))
  requests = [
    types.GenerateRequest(
      types.Address(0, q, 0), 0, (*common, 30 + q, *range(22, 28)), 4, ()
    )
    for q in range(4)
  ]
  engine = _engine(params)
  together = _generate(engine, *requests)
  assert engine.counters["shared_tokens"] == 3 * 12
  # Released prompts can be shared until their pages are allocated again.
  assert _generate(engine, requests[0]) == together[:1]
  assert engine.counters["shared_tokens"] == 3 * 12 + 20
  engine = _engine(params)
  assert _generate(engine, requests[1]) == together[1:2]
  assert engine.counters["shared_tokens"] == 0


def test_new_weights_do_not_reuse_cached_prompts(params):
  engine = _engine(params)
  _play(engine, [(0, 0)])
  half = jax.tree.map(lambda p: 0.5 * p, params)
  engine.set_params(half, 1)
  new = _play(engine, [(0, 0)])
  assert engine.counters["shared_tokens"] == 0
  fresh = _engine(params)
  fresh.set_params(half, 1)
  assert new == _play(fresh, [(0, 0)])


def test_preempted_episodes_sample_the_same_tokens(params, played):
  # There is room for one and a half contexts; the episodes need about five.
  engine = _engine(params, slots=20, kv_tokens=228)
  found = _play(engine, _ALL)
  assert engine.counters["preemptions"] > 0
  # Prefill and decode round differently, but not enough to change a draw.
  _alike(found, played)
  # All pages are free again.
  assert engine.pages == (0, 57) and len(engine._memory) == 0


def test_more_sizes_of_calls_agree_to_rounding(params, first):
  engine = _engine(params, lanes=(2, 8))
  _alike(_play(engine, _ALL), first.found)
  offered = engine.counters["lanes_offered"]
  assert offered < first.counters["lanes_offered"]


@pytest.mark.parametrize(
  "axes",
  [
    {"data": 4, "tensor": 2},
    pytest.param({"tensor": 2}, marks=pytest.mark.slow),
    pytest.param({"data": 2}, marks=pytest.mark.slow),
  ],
)
def test_mesh_samples_the_same_as_one_device(params, played, axes):
  mesh = sharding.mesh(**axes)
  placed = jax.device_put(params, sharding.shardings(_A, mesh))
  engine = _engine(placed, mesh=mesh, slots=20)
  compiled = kv_store.prefill._cache_size(), kv_store.decode._cache_size()
  _alike(_play(engine, _ALL[:10]), played)
  assert (compiled[0] + 1, compiled[1] + 1) == (
    kv_store.prefill._cache_size(),
    kv_store.decode._cache_size(),
  )


def test_experts_sample_the_same_on_a_mesh(monkeypatch):
  monkeypatch.setattr(experts, "_FEW", 0)
  monkeypatch.setattr(experts, "_BLOCK", 4)
  a = dataclasses.replace(_A, experts=6, active=2)
  params = random_models.params(a)
  played = _play(_engine(params, architecture=a), _ALL[:10])
  mesh = sharding.mesh(data=4, tensor=2)
  placed = jax.device_put(params, sharding.shardings(a, mesh))
  engine = _engine(placed, architecture=a, mesh=mesh, slots=20)
  _alike(_play(engine, _ALL[:10]), played)


@pytest.mark.parametrize(
  "window", [pytest.param(0, marks=pytest.mark.slow), 10]
)
def test_float8_cache_samples_the_same_in_any_order_and_on_a_mesh(
  params, window
):
  a = dataclasses.replace(_A, window=window, windowed=(0,) if window else ())
  how = {"architecture": a, "kv_dtype": "float8"}
  played = _play(_engine(params, **how), _ALL)
  few = _engine(params, slots=5, kv_tokens=_PAGES, **how)
  assert _play(few, _ALL[::-1], delay=np.random.default_rng(0)) == played
  mesh = sharding.mesh(data=4, tensor=2)
  placed = jax.device_put(params, sharding.shardings(_A, mesh))
  cut = _engine(placed, mesh=mesh, slots=20, **how)
  _alike(_play(cut, _ALL[:10]), played)
  # Numbers are rounded to 1/16, of log-probabilities around -3.
  gaps = []
  for context, (first, *_) in played.values():
    ids = np.asarray(first.token_ids)
    at = len(_prompt(0)) - 1 + np.arange(len(ids))
    exact = np.asarray(small_engine.log_probs(params, context, a))[at, ids]
    gaps.extend(first.logps - exact)
  assert 1e-4 < np.abs(gaps).mean() < 0.02


async def test_long_context_is_not_starved_by_short_ones(params):
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

  await asyncio.gather(*(episode(q, 130 if q == 19 else 8) for q in range(100)))
  assert order.index(19) < 60


def test_greedy_takes_the_most_likely_token(params):
  greedy = config_lib.SamplingConfig(temperature=0.0)
  context, (generation, *_) = _play(_engine(params, sampling=greedy), [(0, 0)])[
    0, 0
  ]
  best = small_engine.log_probs(params, context).argmax(-1)
  start = len(_prompt(0)) - 1
  end = start + len(generation.token_ids)
  assert tuple(best[start:end].tolist()) == generation.token_ids


# Requests with settings and stop texts of their own.

_SETTINGS = (
  {},
  {"temperature": 0.0},
  {"temperature": 0.5},
  {"top_k": 3},
  {"temperature": 2.0, "top_p": 0.7},
)


def _request(sample, *, most=20, stop=protocol.STOPS, **settings):
  address = types.Address(0, sample, sample)
  return types.GenerateRequest(
    address, 0, _prompt(sample), most, stop, **settings
  )


def _generate(engine, *requests):
  """Returns the generations of requests that are played at the same time."""

  async def run():
    try:
      return await asyncio.gather(*map(engine.generate, requests))
    finally:
      for request in requests:
        engine.release(request.address)

  return asyncio.run(run())


def test_a_request_samples_as_an_engine_with_its_settings(params):
  requests = [_request(i, **each) for i, each in enumerate(_SETTINGS)]
  mixed = _generate(_engine(params), *requests)
  for i, settings in enumerate(_SETTINGS):
    sampling = config_lib.SamplingConfig(**settings)
    (alone,) = _generate(_engine(params, sampling=sampling), _request(i))
    assert mixed[i] == alone
  # Settings that are not named are those of the engine.
  config = config_lib.SamplingConfig(temperature=0.5, top_k=3)
  hot = _engine(params, sampling=config)
  (found,) = _generate(hot, _request(2, temperature=1.0))
  (expected,) = _generate(_engine(params), _request(2, top_k=3))
  assert found == expected


@pytest.mark.parametrize(
  ("settings", "sentence"),
  [
    ({"temperature": -0.1}, r"sampling\.temperature: found -0.1"),
    ({"temperature": float("nan")}, r"sampling\.temperature: found nan"),
    ({"top_p": 0.0}, r"sampling\.top_p: found 0.0"),
    ({"top_k": -1}, r"sampling\.top_k: found -1"),
    ({"stop": ("x", "")}, "stop: found"),
  ],
)
def test_a_setting_out_of_its_range_is_refused(params, settings, sentence):
  with pytest.raises(ValueError, match=sentence):
    _generate(_engine(params), _request(0, **settings))


def test_requests_end_at_their_own_stop_texts(params):
  """A request's stop texts change nothing for those that run beside it."""
  endless = [_request(i, stop=("never said",)) for i in range(4)]
  free = _generate(_engine(params), *endless)
  word = small_engine.TEXTS[free[0].token_ids[7]]
  assert len(free[0].token_ids) > 8
  found = _generate(
    _engine(params), _request(0, stop=(word, "x y")), *endless[1:]
  )
  end = free[0].token_ids.index(free[0].token_ids[7]) + 1
  assert found[0].token_ids == free[0].token_ids[:end]
  assert found[0].logps == free[0].logps[:end]
  assert found[0].text.endswith(word)
  assert found[0].finish is types.Finish.STOP
  assert found[1:] == free[1:]


def test_no_stop_text_leaves_the_limit_and_the_end_of_the_turn(params):
  for generation in _generate(
    _engine(params), *(_request(i, most=6, stop=()) for i in range(3))
  ):
    ended = generation.token_ids[-1] == 1
    assert ended == (generation.finish is types.Finish.END_OF_TURN)
    assert ended or len(generation.token_ids) == 6
