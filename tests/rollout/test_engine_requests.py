"""The in-process engine: requests with settings and stop texts of their own."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
import small_engine

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.environment import protocol

_SETTINGS = (
  {},
  {"temperature": 0.0},
  {"temperature": 0.5},
  {"top_k": 3},
  {"temperature": 2.0, "top_p": 0.7},
)


@pytest.fixture(scope="module")
def params():
  return small_engine.params()


def _request(sample, *, most=20, stop=protocol.STOPS, **settings):
  return types.GenerateRequest(
    types.Address(0, sample, sample),
    0,
    small_engine.prompt(sample),
    most,
    stop,
    **settings,
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


@pytest.fixture(scope="module")
def mixed(params):
  """The turns of one engine whose requests have different settings."""
  requests = [_request(i, **each) for i, each in enumerate(_SETTINGS)]
  return _generate(small_engine.engine(params), *requests)


@pytest.mark.parametrize("i", range(len(_SETTINGS)))
def test_a_request_samples_as_an_engine_with_its_settings(params, mixed, i):
  engine = small_engine.engine(
    params, sampling=config_lib.SamplingConfig(**_SETTINGS[i])
  )
  (alone,) = _generate(engine, _request(i))
  assert mixed[i].token_ids == alone.token_ids
  assert mixed[i].logps == alone.logps


def test_settings_that_are_not_named_are_those_of_the_engine(params):
  config = config_lib.SamplingConfig(temperature=0.5, top_k=3)
  hot = small_engine.engine(params, sampling=config)
  (found,) = _generate(hot, _request(2, temperature=1.0))
  cold = small_engine.engine(params)
  (expected,) = _generate(cold, _request(2, top_k=3))
  assert found == expected


@pytest.mark.parametrize(
  ("name", "value"),
  [
    ("temperature", -0.1),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("top_p", 0.0),
    ("top_p", 1.5),
    ("top_k", -1),
  ],
)
def test_a_setting_out_of_its_range_is_refused(params, name, value):
  engine = small_engine.engine(params)
  with pytest.raises(ValueError, match=rf"sampling\.{name}: found {value}"):
    _generate(engine, _request(0, **{name: value}))


def test_requests_end_at_their_own_stop_texts(params):
  """A request's stop texts change nothing for those that run beside it."""
  never = ("never said",)
  endless = [_request(i, stop=never) for i in range(4)]
  free = _generate(small_engine.engine(params), *endless)
  word = small_engine.TEXTS[free[0].token_ids[7]]
  assert len(free[0].token_ids) > 8
  found = _generate(
    small_engine.engine(params), _request(0, stop=(word, "x y")), *endless[1:]
  )
  first = free[0].token_ids.index(free[0].token_ids[7])
  assert found[0].token_ids == free[0].token_ids[: first + 1]
  assert found[0].logps == free[0].logps[: first + 1]
  assert found[0].text.endswith(word)
  assert found[0].finish is types.Finish.STOP
  assert found[1:] == free[1:]


def test_more_sets_of_stop_texts_than_bits_change_no_text(params):
  wide = small_engine.engine(params, lanes=(40,), slots=40)
  requests = [
    types.GenerateRequest(
      types.Address(0, 0, i),
      0,
      small_engine.prompt(0),
      12,
      (f"w{i} never", "w3"),
    )
    for i in range(40)
  ]
  found = _generate(wide, *requests)
  alike = [dataclasses.replace(r, stop=("w3",)) for r in requests]
  assert found == _generate(
    small_engine.engine(params, lanes=(40,), slots=40), *alike
  )


def test_no_stop_text_leaves_the_limit_and_the_end_of_the_turn(params):
  engine = small_engine.engine(params)
  found = _generate(engine, *(_request(i, most=6, stop=()) for i in range(3)))
  for generation in found:
    ended = generation.token_ids[-1] == 1
    assert ended == (generation.finish is types.Finish.END_OF_TURN)
    assert ended or len(generation.token_ids) == 6


def test_an_empty_stop_text_is_refused(params):
  engine = small_engine.engine(params)
  with pytest.raises(ValueError, match="stop: found"):
    _generate(engine, _request(0, stop=("x", "")))
