"""Valid and invalid replies of SGLang servers."""

from __future__ import annotations

import base64
import math

import fake_sglang
import hypothesis
import numpy as np
import pytest
import random_models
import sglang_engines as engines
from hypothesis import strategies as st

from anysearch_jax import types
from anysearch_jax.policy import hf
from anysearch_jax.rollout.servers import sglang

serve = engines.serve


def _logprobs(*values):
  pairs = [[value, engines.SPACE, None] for value in values]
  return {"output_token_logprobs": pairs}


@pytest.mark.parametrize(
  ("fault", "message"),
  [
    ((200, "<html>"), "'<html>', expected a JSON object"),
    ((200, "{}"), "meta_info None, expected one of type dict"),
    (
      (400, '{"error": {"message": "too long"}}'),
      "/generate: HTTP 400: too long",
    ),
    ((500, "Internal Server Error"), "HTTP 500: Internal Server Error"),
    ((401, ""), "HTTP 401: no reason given"),
    # Of the meta information.
    ({"finish_reason": None}, "finish_reason None, expected one of type dict"),
    ({"finish_reason": {"type": "abort", "message": "full"}}, "aborted: full"),
    ({"completion_tokens": 2}, "log-probabilities, expected 2"),
    ({"completion_tokens": "4"}, "'4', expected one of type int"),
    (
      _logprobs(*[-1.0] * 5) | {"completion_tokens": 5},
      "5 sampled tokens, expected 1 to 4",
    ),
    (
      _logprobs() | {"completion_tokens": 0},
      "0 sampled tokens, expected 1 to 4",
    ),
    ({"prompt_tokens": 6}, "prompt of 6 tokens, expected the 5 sent"),
    ({"output_token_logprobs": None}, "output_token_logprobs None"),
    ({"output_token_logprobs": [-1.0] * 4}, "-1.0 for a token"),
    ({"output_token_logprobs": [[-1.0, 20]] * 4}, "ids below 20"),
    ({"output_token_logprobs": [[-1.0, 1.5]] * 4}, "1.5. for a token"),
    ({"output_token_logprobs": [[-1.0, 1]] * 4}, "output_ids that differ"),
    (_logprobs(-1.0, -1.0, -1.0), "3 log-probabilities, expected 4"),
    (_logprobs(-1.0, math.nan, -1.0, -1.0), "log-probability nan of token"),
    (_logprobs(-1.0, 0.5, -1.0, -1.0), "log-probability 0.5"),
    (_logprobs("-1", -1.0, -1.0, -1.0), "log-probability '-1'"),
    ({"weight_versions": None}, "weight_versions None"),
    ({"weight_versions": {}}, "weight_versions {}, expected one of type list"),
    ({"weight_versions": [1]}, "version None"),
    (engines.spans(("", 0, 3)), "expected spans in order over 4 tokens"),
    (engines.spans(("", 0, 2), ("", 3, 4)), "expected spans in order"),
    (engines.spans(), "expected spans in order"),
  ],
)
def test_invalid_reply_is_an_error(serve, fault, message):
  engine, server = serve()
  if isinstance(fault, dict):
    fault = engines.changed(**fault)
  server.faults["/generate"] = [fault]
  with pytest.raises(types.EngineError, match=message) as raised:
    engines.turn(engine, most=4)
  assert server.url in str(raised.value)
  assert engine.counters["sampled_tokens"] == 0
  # The request was sent once, and the server remains usable.
  assert len(server.bodies("/generate")) == 1
  assert len(engines.turn(engine, most=4).token_ids) == 4


def test_a_turn_cut_short_for_no_known_reason_is_an_error(serve):
  said = fake_sglang.ids("b", "b", "b")
  engine, server = serve(said)
  meta = {"finish_reason": {"type": "stop", "matched": 12}}

  def shorten(reply):
    sampled = reply["meta_info"]["output_token_logprobs"][:3]
    name = reply["meta_info"]["weight_version"]
    short = {
      "completion_tokens": 3,
      "output_token_logprobs": sampled,
      "weight_versions": [{"version": name, "start": 0, "end": 3}],
    }
    return engines.changed(**meta, **short)(reply | {"output_ids": list(said)})

  server.faults["/generate"] = [shorten]
  with pytest.raises(
    types.EngineError, match="3 of 4 tokens for .*12.*expected a stop text"
  ):
    engines.turn(engine, most=4)


def _meta(*spans):
  """Returns the meta_info of a reply of two tokens to a prompt of three."""
  return {
    "finish_reason": {"type": "length"},
    "completion_tokens": 2,
    "prompt_tokens": 3,
    "cached_tokens": 0,
    "weight_version": "w",
    "weight_versions": [
      {"version": name, "start": start, "end": end}
      for name, start, end in spans
    ],
    "output_token_logprobs": [[-1.0, 4, None], [-2.0, 5, None]],
  }


_READ = {"prompt": 3, "max_tokens": 2, "vocab_size": 6}


def test_weights_that_come_back_are_an_error():
  known = {"first": 3, "second": 4}
  spans = ("first", 0, 1), ("second", 1, 2)
  found = sglang.read_turn(
    {"meta_info": _meta(*spans)}, versions=known, **_READ
  )
  assert found.versions == (3, 4)
  spans = ("second", 0, 1), ("first", 1, 2)
  with pytest.raises(types.EngineError, match="spans in order"):
    sglang.read_turn({"meta_info": _meta(*spans)}, versions=known, **_READ)


_values = st.recursive(
  st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
  lambda inner: (
    st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=2)
  ),
  max_leaves=6,
)


@hypothesis.given(st.sampled_from(sorted(_meta())), _values)
def test_changed_value_is_an_error_or_has_no_effect(name, value):
  meta = _meta(("w", 0, 2)) | {name: value}
  try:
    found = sglang.read_turn({"meta_info": meta}, versions={"w": 9}, **_READ)
  except types.EngineError:
    return
  assert found.versions == (9, 9)
  if name != "output_token_logprobs":
    assert (found.ids, found.logps) == ((4, 5), (-1.0, -2.0))


@pytest.fixture
def mixture():
  """A policy with experts and the fake servers' tokenizer."""
  a = random_models.architecture("qwen3-moe", vocab_size=fake_sglang.VOCAB)
  return hf.Policy(random_models.params(a), a, fake_sglang.tokenizer())


def test_experts_of_each_token_are_sent_once_in_an_episode(serve, mixture):
  engine, server = serve(
    fake_sglang.ids("a", "</search>"), start=mixture, records=True
  )
  context, starts = engines.PROMPT, []
  for turn in range(3):
    made = engines.turn(engine, turn=turn, context=context)
    starts.append(server.bodies("/generate")[-1]["routed_experts_start_len"])
    context += made.token_ids
    assert made.experts.dtype == np.uint8
    np.testing.assert_array_equal(
      made.experts, fake_sglang.routed(context[:-1])
    )
    context += fake_sglang.ids("b", "c")
  assert starts == [0, 6, 10]
  # Of another context, or a released episode, nothing is known.
  for other in (context[1:], context):
    engines.turn(engine, context=other)
    body = server.bodies("/generate")[-1]
    assert body["routed_experts_start_len"] == 0
    engine.release(types.Address(0, 0, 0))


@pytest.mark.parametrize(
  "value",
  [
    None,
    "?",
    7,
    "",
    *(np.full((n, 2, 2), i, "<i4") for n, i in ((8, 0), (7, 9))),
  ],
  ids=str,
)
def test_experts_that_cannot_be_right_are_an_error(serve, mixture, value):
  if isinstance(value, np.ndarray):
    value = base64.b64encode(value).decode()
  fault = engines.changed(routed_experts=value)
  engine, _ = serve(
    fake_sglang.ids("a", "a", "a", "<end>"),
    start=mixture,
    records=True,
    faults={"/generate": [fault]},
  )
  with pytest.raises(types.EngineError, match="routed_experts"):
    engines.turn(engine, most=4)


def test_a_server_that_returns_no_experts_is_refused(monkeypatch, mixture):
  with fake_sglang.Server() as server:
    server.routed = False
    with pytest.raises(types.EngineError, match="enable-return-routed-experts"):
      engines.connect(urls=(server.url,), start=mixture, records=True)
