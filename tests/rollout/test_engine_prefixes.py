"""The in-process engine: contexts that do not extend the cached one."""

from __future__ import annotations

import asyncio

import hypothesis
import pytest
import small_engine
from hypothesis import strategies as st

from anysearch_jax import types
from anysearch_jax.environment import protocol

_engine = small_engine.engine
_PAGE = small_engine.CONFIG.page


@pytest.fixture(scope="module")
def params():
  return small_engine.params()


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
      params,
      [*context, *generation.token_ids],
      [(len(context), generation)],
    )


_START = tuple(range(8, 38))


@pytest.mark.parametrize(
  "edited",
  [
    pytest.param((*_START[:10], 30, *_START[11:], 20, 21), id="a token"),
    pytest.param((*_START[:8], *_START[17:], 20, 21), id="a stretch cut out"),
    pytest.param((39, *_START, 20, 21), id="the first token"),
    pytest.param(_START[:9], id="shorter"),
    pytest.param(_START[:-1], id="shorter by one"),
    pytest.param(_START, id="the same"),
    pytest.param((9,), id="one token"),
  ],
)
def test_edited_context_is_sampled_as_in_a_new_engine(params, edited):
  engine = _engine(params)
  contexts = [_START, edited, (*edited, 11, 12, 13)]
  found = _take_turns(engine, contexts)
  _assert_scored(params, contexts, found)

  async def anew():
    return await _turn(_engine(params), 1, edited)

  assert found[1].token_ids == asyncio.run(anew()).token_ids


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
@hypothesis.settings(max_examples=25)
def test_any_history_scores_as_one_full_forward(params, long_lived, contexts):
  _assert_scored(params, contexts, _take_turns(long_lived, contexts))


def test_common_prefix_is_not_prefilled_again(params):
  engine = _engine(params)
  first = _START
  # The contexts differ in the second token of the fifth page.
  second = (*first[: 4 * _PAGE + 1], 39, *first[4 * _PAGE + 2 :])
  one, two = _take_turns(engine, [first, second])
  del two
  cached = len(first) - 1 + len(one.token_ids)
  assert engine.counters["reused_tokens"] == 4 * _PAGE
  assert engine.counters["discarded_tokens"] == cached - 4 * _PAGE
  assert engine.counters["prefilled_tokens"] == (
    len(first) - 1 + len(second) - 1 - 4 * _PAGE
  )
  assert engine.counters["shared_tokens"] == 0
  assert engine._memory._pools[0].free == 12 * 38


def test_context_that_extends_the_cache_discards_nothing(params):
  engine = _engine(params)
  small_engine.play(engine, [(0, s) for s in range(3)])
  assert engine.counters["discarded_tokens"] == 0
  assert engine.counters["reused_tokens"] > 0


def test_edited_prompt_leaves_other_sharers_intact(params):
  engine = _engine(params)
  edited = (*_START[:6], 39, *_START[7:], 20)

  async def run():
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
    return [_START, _START, *contexts], [*both, *after]

  contexts, found = asyncio.run(run())
  _assert_scored(params, contexts, found)
  assert engine._memory._pools[0].free == 12 * 38


def test_two_turns_of_an_episode_at_once_are_refused(params):
  engine = _engine(params)

  async def run():
    first = asyncio.create_task(_turn(engine, 0, _START))
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="Turn 0 .* is being sampled; wait"):
      await _turn(engine, 1, _START)
    return await first

  _assert_scored(params, [_START], [asyncio.run(run())])


def test_turn_after_a_cancelled_one_is_sampled_from_scratch(params):
  engine = _engine(params)

  async def run():
    first = asyncio.create_task(_turn(engine, 0, _START, max_tokens=60))
    await asyncio.sleep(0.02)
    first.cancel()
    await asyncio.sleep(0)
    return await _turn(engine, 0, _START[:20])

  _assert_scored(params, [_START[:20]], [asyncio.run(run())])
