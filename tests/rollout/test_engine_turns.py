"""The in-process engine: ends of turns, contexts, failures, its device."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import threading
import traceback
import weakref

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_engine
from hypothesis import strategies as st

from anysearch_jax import types
from anysearch_jax.environment import protocol
from anysearch_jax.policy import decoder
from anysearch_jax.rollout.jax_engine import kv_store

_engine, _play = small_engine.engine, small_engine.play
_episode, _prompt = small_engine.episode, small_engine.prompt


@pytest.fixture(scope="module")
def params():
  return small_engine.params()


def _forced(tokens):
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
    types.Address(0, 0, 0), 0, (8, 39), 6, protocol.STOPS
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
    # Six tokens are the limit.
    (range(20, 29), tuple(range(20, 26)), "w12w13w14w15w16w17", "length"),
  ],
)
def test_stops_on_decoded_text(tokens, kept, text, finish):
  generation = _forced(tokens)
  assert generation.token_ids == kept
  assert generation.text == text
  assert generation.finish == finish
  np.testing.assert_allclose(generation.logps, 0.0, atol=1e-5)


async def _turn(engine, turn, context, *, sample=0, max_tokens=6):
  request = types.GenerateRequest(
    types.Address(0, 0, sample),
    turn,
    tuple(context),
    max_tokens,
    protocol.STOPS,
  )
  async with asyncio.timeout(60):
    return await engine.generate(request)


def _take_turns(engine, contexts):
  """Samples the turns of an episode one after the other; returns them."""

  async def run():
    out = [await _turn(engine, *each) for each in enumerate(contexts)]
    engine.release(types.Address(0, 0, 0))
    return out

  return asyncio.run(run())


def _assert_scored(params, contexts, generations):
  for context, generation in zip(contexts, generations, strict=True):
    small_engine.assert_scored(
      params, [*context, *generation.token_ids], [(len(context), generation)]
    )


_START = tuple(range(8, 38))


@st.composite
def _histories(draw):
  """Draws contexts, each a prefix of the last one followed by other tokens."""
  token = st.integers(8, 39)
  some = st.lists(token, min_size=1, max_size=20).map(tuple)
  contexts = [draw(some)]
  for _ in range(draw(st.integers(1, 4))):
    last = contexts[-1]
    kept = last[: draw(st.integers(0, len(last)))]
    contexts.append((kept + draw(some))[:100])
  return contexts


@pytest.fixture(scope="module")
def long_lived(params):
  """An engine whose pages contain the data of earlier episodes."""
  return _engine(params, slots=2)


@hypothesis.given(_histories())
@hypothesis.settings(max_examples=12)
def test_any_history_scores_as_one_full_forward(params, long_lived, contexts):
  _assert_scored(params, contexts, _take_turns(long_lived, contexts))


def test_common_prefix_is_not_prefilled_again(params):
  engine = _engine(params)
  first = _START
  # The contexts differ in the second token of the fifth page.
  second = (
    *first[: 4 * small_engine.CONFIG.page + 1],
    39,
    *first[4 * small_engine.CONFIG.page + 2 :],
  )
  one, two = _take_turns(engine, [first, second])
  del two
  cached = len(first) - 1 + len(one.token_ids)
  assert engine.counters["reused_tokens"] == 4 * small_engine.CONFIG.page
  assert (
    engine.counters["discarded_tokens"] == cached - 4 * small_engine.CONFIG.page
  )
  assert engine.counters["prefilled_tokens"] == (
    len(first) - 1 + len(second) - 1 - 4 * small_engine.CONFIG.page
  )
  assert engine.counters["shared_tokens"] == 0
  assert engine.pages[0] == 0


async def test_edited_prompt_leaves_other_sharers_intact(params):
  engine = _engine(params)
  edited = (*_START[:6], 39, *_START[7:], 20)
  both = await asyncio.gather(
    *(_turn(engine, 0, _START, sample=s) for s in range(2))
  )
  assert engine.counters["shared_tokens"] == len(_START) - 1
  longer = (*_START, *both[0].token_ids, 20)
  contexts = [edited, longer, _START]
  # The third episode begins with the original prompt.
  after = await asyncio.gather(
    *(
      _turn(engine, min(2 - s, 1), context, sample=s)
      for s, context in zip((1, 0, 2), contexts)
    )
  )
  for sample in range(3):
    engine.release(types.Address(0, 0, sample))
  contexts = [_START, _START, *contexts]
  _assert_scored(params, contexts, [*both, *after])
  assert engine.pages[0] == 0


async def test_two_turns_of_an_episode_and_full_contexts_are_refused(params):
  engine = _engine(params)
  with pytest.raises(types.EngineError, match="max_context"):
    await _turn(engine, 0, (9,) * 158)
  first = asyncio.create_task(_turn(engine, 0, _START))
  await asyncio.sleep(0)
  with pytest.raises(RuntimeError, match="Turn 0 .* is being sampled; wait"):
    await _turn(engine, 1, _START)
  _assert_scored(params, [_START], [await first])


async def test_turn_after_a_cancelled_one_is_sampled_from_scratch(params):
  engine = _engine(params)
  first = asyncio.create_task(_turn(engine, 0, _START, max_tokens=60))
  await asyncio.sleep(0.02)
  first.cancel()
  await asyncio.sleep(0)
  found = await _turn(engine, 0, _START[:20])
  _assert_scored(params, [_START[:20]], [found])


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


async def test_weights_switch_between_episodes_only(params):
  engine = _engine(params)
  address = types.Address(0, 0, 0)
  request = types.GenerateRequest(address, 0, _prompt(0), 4, protocol.STOPS)
  first = await engine.generate(request)
  with pytest.raises(RuntimeError, match="release them before version 1"):
    engine.set_params(params, 1)
  with pytest.raises(RuntimeError, match="release them before the cache is"):
    engine.free_cache()
  engine.release(address)
  engine.set_params(params, 1)
  again = await engine.generate(request)
  engine.release(address)
  assert (set(first.versions), set(again.versions)) == ({0}, {1})
  assert first.token_ids == again.token_ids


def _ask_many(engine, count):
  """Returns the turn of each of `count` requests, or its exception."""

  def request(sample):
    address = types.Address(0, 0, sample)
    return types.GenerateRequest(address, 0, _prompt(0), 20, ())

  async def run():
    return await asyncio.wait_for(
      asyncio.gather(
        *(engine.generate(request(sample)) for sample in range(count)),
        return_exceptions=True,
      ),
      60,
    )

  return asyncio.run(run())


def test_bug_is_raised_in_all_waiters_as_an_exception_of_each(
  params, monkeypatch
):
  engine = _engine(params)
  monkeypatch.setattr(engine._device, "_put", lambda *arrays: 1 / 0)
  errors = _ask_many(engine, 3)
  assert [type(error) for error in errors] == [ZeroDivisionError] * 3
  assert len(set(map(id, errors))) == 3
  depths = {len(traceback.extract_tb(error.__traceback__)) for error in errors}
  assert len(depths) == 1


def test_turn_that_cannot_be_decoded_ends_alone(params, monkeypatch):
  expected = _ask_many(_engine(params), 3)
  engine = _engine(params)
  decode = engine._tokenizer.decode

  def failing(ids):
    if ids == expected[1].token_ids:
      raise UnicodeError("no text")
    return decode(ids)

  monkeypatch.setattr(engine._tokenizer, "decode", failing)
  turns = _ask_many(engine, 3)
  assert isinstance(turns[1], UnicodeError)
  assert [turns[0], turns[2]] == [expected[0], expected[2]]


@pytest.mark.parametrize(
  "changes",
  [
    {"lanes": ()},
    {"lanes": (8, 4)},
    {"kv_tokens": 100},
    {"attention": "mosaic"},
    {"attention": "flash"},
  ],
)
def test_impossible_shapes_are_refused(params, changes):
  with pytest.raises(ValueError, match="engine"):
    _engine(params, **changes)


def test_deleted_engine_leaves_no_thread():
  before = set(threading.enumerate())
  engine = _engine(small_engine.params())
  (thread,) = set(threading.enumerate()) - before
  del engine
  gc.collect()
  thread.join(10)
  assert not thread.is_alive()


def test_old_weights_are_gone_before_new_ones_are_made(monkeypatch):
  engine = _engine(small_engine.params())
  layers = engine._device._params["layers"]
  old = [weakref.ref(x) for x in jax.tree.leaves(layers)]
  del layers
  alive = []
  prepare = kv_store.Model.prepare

  def watched(self, params, a):
    alive.append(sum(x() is not None for x in old))
    return prepare(self, params, a)

  monkeypatch.setattr(kv_store.Model, "prepare", watched)
  engine.set_params(small_engine.params(), 1)
  assert old and alive == [0]


def test_a_freed_cache_is_allocated_again_with_the_same_results():
  engine = _engine(small_engine.params())
  assert engine.free_cache() == 0  # No call has needed it.
  order = [(question, sample) for question in range(2) for sample in range(3)]
  first = _play(engine, order)
  # 12 slots of 38 pages and the padding page, of 4 tokens; keys and values of
  # two layers with two heads of 8 float32 numbers.
  assert engine.free_cache() == (12 * 38 + 1) * 4 * 2 * 2 * 2 * 8 * 4
  assert engine.free_cache() == 0
  assert _play(engine, order) == first


def test_calls_compile_once_wherever_the_weights_were():
  programs = kv_store.prefill, kv_store.decode
  before = [program._cache_size() for program in programs]
  # No other engine has these shapes, and these weights are on no mesh.
  engine = _engine(small_engine.params(), slots=11, decode_steps=3)
  order = [(question, sample) for question in range(2) for sample in range(3)]
  for _ in range(2):
    _play(engine, order)
  after = [program._cache_size() for program in programs]
  assert [a - b for a, b in zip(after, before, strict=True)] == [1, 1]


def test_an_error_of_one_listener_reaches_its_own_turn_only(params):
  """As that of a client that hung up, whose event loop is closed."""
  engine = _engine(params, seed=3)

  def gone(tokens):
    raise RuntimeError("Event loop is closed")

  def request(index, on_tokens=None):
    address = types.Address(0, index, 0)
    return types.GenerateRequest(
      address, 0, (8, 39), 6, protocol.STOPS, on_tokens=on_tokens
    )

  async def play():
    requests = [request(i, gone if i == 1 else None) for i in range(4)]
    return await asyncio.gather(
      *map(engine.generate, requests), return_exceptions=True
    )

  async def alone(index):
    return await engine.generate(request(index))

  replies = asyncio.run(play())
  assert isinstance(replies[1], RuntimeError)
  for index in range(4):
    engine.release(types.Address(0, index, 0))
  for index in (0, 2, 3):
    expected = asyncio.run(alone(index))
    assert replies[index].token_ids == expected.token_ids
