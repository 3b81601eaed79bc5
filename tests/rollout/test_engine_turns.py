"""The in-process engine: turns that end by a stop, a limit or a failure."""

from __future__ import annotations

import asyncio
import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_engine

from anysearch_jax import types
from anysearch_jax.environment import protocol
from anysearch_jax.policy import decoder
from anysearch_jax.rollout.jax_engine import kv_store

_engine, _play = small_engine.engine, small_engine.play
_episode, _prompt = small_engine.episode, small_engine.prompt


@pytest.fixture(scope="module")
def params():
  return small_engine.params()


def _forced(tokens, *, max_tokens=20):
  """Returns a turn of a policy that samples exactly `tokens`.

  Each token's embedding is a unit vector; the head maps it to the next token.
  """
  size = len(small_engine.TEXTS)
  a = dataclasses.replace(
    small_engine.A, d_model=size, tied=False, qk_norm=False, family="llama"
  )
  fresh = decoder.initialize(a, 0)
  params = jax.tree.map(jnp.zeros_like, fresh)
  params["embed"] = jnp.eye(size)
  params["norm"] = jnp.ones(size)
  head = np.zeros((size, size), np.float32)
  for token, following in zip((39, *tokens), tokens, strict=False):
    head[following, token] = 100.0
  params["head"] = jnp.asarray(head)
  engine = _engine(params, architecture=a, seed=0)
  request = types.GenerateRequest(
    types.Address(0, 0, 0), 0, (8, 39), max_tokens, protocol.STOPS
  )
  return asyncio.run(engine.generate(request))


@pytest.mark.parametrize(
  ("tokens", "kept", "text", "finish"),
  [
    # The stop text as one token.
    ((20, 2, 21), (20, 2), "w12</search>", "stop"),
    # The stop text in several tokens; the first ">" after "</search" ends it.
    ((20, 3, 4, 5, 21), (20, 3, 4, 5), "w12</search>", "stop"),
    # A completing token that continues is kept whole; the text is cut.
    ((3, 7, 6, 21), (3, 7, 6), "</answer>", "stop"),
    # A ">" that completes nothing does not end the turn.
    ((20, 5, 2), (20, 5, 2), "w12></search>", "stop"),
    # The end-of-turn token is kept but adds no text.
    ((20, 21, 1), (20, 21, 1), "w12w13", "end_of_turn"),
  ],
)
def test_stops_on_decoded_text(tokens, kept, text, finish):
  generation = _forced(tokens)
  assert generation.token_ids == kept
  assert generation.text == text
  assert generation.finish == finish
  np.testing.assert_allclose(generation.logps, 0.0, atol=1e-5)


def test_a_turn_ends_at_its_limit():
  generation = _forced((20, 21, 22, 23, 24, 25, 26), max_tokens=5)
  assert generation.token_ids == (20, 21, 22, 23, 24)
  assert generation.finish is types.Finish.LENGTH


def test_a_context_that_does_not_fit_is_an_engine_error(params):
  engine = _engine(params)
  request = types.GenerateRequest(
    types.Address(0, 0, 0), 0, (9,) * 158, 4, protocol.STOPS
  )
  with pytest.raises(types.EngineError, match="max_context"):
    asyncio.run(engine.generate(request))


def test_cancelled_episode_leaves_no_state(params):
  engine = _engine(params)

  async def run():
    running = [asyncio.create_task(_episode(engine, 0, s)) for s in range(5)]
    await asyncio.sleep(0.02)
    for sample, task in enumerate(running[:3]):
      task.cancel()
      engine.release(types.Address(0, 0, sample))
    return await asyncio.gather(*running[3:])

  expected = _play(_engine(params), [(0, 3), (0, 4)])
  assert asyncio.run(run()) == [expected[0, 3], expected[0, 4]]
  assert len(engine._memory) == 0


def test_no_call_outlives_its_event_loop(params):
  engine = _engine(params)
  under_way = 0
  decode = kv_store.decode

  async def run():
    tasks = [asyncio.create_task(_episode(engine, 0, s)) for s in range(5)]
    await asyncio.sleep(0.02)
    for sample, task in enumerate(tasks):
      task.cancel()
      engine.release(types.Address(0, 0, sample))

  class Counted:
    def __getattr__(self, name):
      return getattr(decode, name)

    def __call__(self, *args, **kwargs):
      nonlocal under_way
      under_way += 1
      found = jax.block_until_ready(decode(*args, **kwargs))
      time.sleep(0.05)
      under_way -= 1
      return found

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(kv_store, "decode", Counted())
    asyncio.run(run())
    assert under_way == 0
  expected = _play(_engine(params), [(0, 3)])
  assert _play(engine, [(0, 3)]) == expected


def test_engine_sleeps_while_all_slots_search(params):
  engine = _engine(params, slots=2)
  looks = 0
  admit = engine._admit

  def counted():
    nonlocal looks
    looks += 1
    admit()

  engine._admit = counted

  async def run():
    tasks = []
    for sample in range(4):
      request = types.GenerateRequest(
        types.Address(0, 0, sample), 0, _prompt(0), 3, protocol.STOPS
      )
      tasks.append(asyncio.create_task(engine.generate(request)))
    await asyncio.gather(*tasks[:2])
    before = looks
    # Both episodes hold their slots while they search.
    await asyncio.sleep(0.3)
    waited = looks - before
    for sample in range(2):
      engine.release(types.Address(0, 0, sample))
    await asyncio.wait_for(asyncio.gather(*tasks), 60)
    return waited

  assert asyncio.run(run()) < 5


def test_weights_switch_between_episodes_only(params):
  engine = _engine(params)

  async def run():
    address = types.Address(0, 0, 0)
    request = types.GenerateRequest(address, 0, _prompt(0), 4, protocol.STOPS)
    first = await engine.generate(request)
    with pytest.raises(RuntimeError, match="release them"):
      engine.set_params(params, 1)
    engine.release(address)
    engine.set_params(params, 1)
    again = await engine.generate(request)
    engine.release(address)
    return first, again

  first, again = asyncio.run(run())
  assert (set(first.versions), set(again.versions)) == ({0}, {1})
  assert first.token_ids == again.token_ids


def test_bug_is_raised_in_all_waiters(params, monkeypatch):
  engine = _engine(params)
  monkeypatch.setattr(engine._device, "_put", lambda *arrays: 1 / 0)
  request = types.GenerateRequest(
    types.Address(0, 0, 0), 0, _prompt(0), 4, protocol.STOPS
  )
  with pytest.raises(ZeroDivisionError):
    asyncio.run(asyncio.wait_for(engine.generate(request), 60))


@pytest.mark.parametrize(
  "changes",
  [
    {"lanes": ()},
    {"lanes": (8, 4)},
    {"kv_tokens": 100},
    {"attention": "triton"},
    {"attention": "flash"},
  ],
)
def test_impossible_shapes_are_refused(params, changes):
  with pytest.raises(ValueError, match="engine"):
    _engine(params, **changes)
