"""The SGLang engine against recorded exchanges with a real server.

`test_sglang_real` recorded them with SGLang 0.5.23 on a CPU. If the engine now
sends a different request, the recording has no answer to it.
"""

from __future__ import annotations

import functools
import json
import pathlib

import httpx2
import numpy as np
import pytest
import sglang_chains

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.host import loop
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import hf
from anysearch_jax.rollout.sglang import engine as sglang
from anysearch_jax.rollout.sglang import reply as sglang_reply
from anysearch_jax.rollout.sglang import server as sglang_server
from bench import random_models

_DATA = pathlib.Path(__file__).parents[1] / "golden" / "sglang"
_VOCAB, _WIDTH = 151_936, 64  # Of the recorded model.
# Ids of the model's tokenizer (Qwen2.5's).
_IDS = {"x": 87, "<": 27, "/": 14, "se": 325, "arch": 1113, ">": 29, "y": 88}
_IDS |= {"</": 522, "answer": 9217, ">\n\n": 1339, "z": 89, " end": 835}
_IDS |= {"q": 80, "<|im_end|>": 151_645}


class _Tokenizer:
  end_of_turn_ids = frozenset([151_643, 151_645])

  def encode(self, text):
    return [_IDS[text]]

  def decode(self, ids):
    texts = {i: text for text, i in _IDS.items() if i < 151_643}
    return "".join(texts.get(i, "") for i in ids)


@pytest.fixture
def replay(monkeypatch, tmp_path):
  """Returns a function that makes an engine over the answers in a file."""
  engines = []

  def start(name):
    left = _exchanges(name)

    def answer(request):
      body = json.loads(request.content or b"{}")
      asked = {k: v for k, v in body.items() if k not in ("rid", "model_path")}
      found = next(
        each
        for each in left
        if (each["method"], each["path"], each["body"])
        == (request.method, request.url.path, asked)
      )
      left.remove(found)
      reply = found["reply"]
      content = reply if isinstance(reply, str) else json.dumps(reply)
      return httpx2.Response(found["status"], content=content)

    monkeypatch.setattr(
      sglang_server.httpx2,
      "AsyncClient",
      functools.partial(
        httpx2.AsyncClient, transport=httpx2.MockTransport(answer)
      ),
    )
    monkeypatch.setattr(sglang.secrets, "token_hex", lambda size: "recorded")
    engines.append(
      sglang.SglangEngine(
        _policy(tmp_path),
        config=config_lib.SglangConfig(weights=str(tmp_path)),
        sampling=config_lib.SamplingConfig(),
      )
    )
    return engines[-1]

  yield start
  for engine in engines:
    engine.close()


def test_turns_end_as_they_did_over_the_wire(replay):
  engine = replay("turns")
  assert engine.max_context == 1017
  sglang_chains.check_turns(
    sglang_chains.turns(engine, _Tokenizer()),
    _Tokenizer(),
    width=_WIDTH,
    vocab_size=_VOCAB,
  )
  assert engine.counters["sampled_tokens"] == 5 + 3 + 2 + 12
  assert engine.counters["dropped_tokens"] == 0


def test_a_server_that_lost_its_weights_gets_them_again(replay):
  engine = replay("restart")
  sglang_chains.check_turns(
    sglang_chains.turns(engine, _Tokenizer()),
    _Tokenizer(),
    width=_WIDTH,
    vocab_size=_VOCAB,
  )
  assert engine.counters["server_catching_up"] == 1
  assert engine.counters["failovers"] == 1
  # It names other weights, and is left out.
  assert engine.scores((5, 6, 7)) == {}


def test_errors_quote_the_recorded_server(replay):
  engine = replay("refusals")
  (server,) = engine._servers
  for body, message in sglang_chains.REFUSED:
    with pytest.raises(types.EngineError, match=message):
      loop.run(server.generate(body))
  with pytest.raises(types.EngineError, match="400: Failed to get weights"):
    loop.run(
      server.load(sglang_server.Weights(pathlib.Path("/nowhere"), "other", 30))
    )


def test_tokens_on_both_sides_of_an_update_have_their_own_version():
  body, reply = _generated("update")[0]
  found = sglang_reply.read(
    reply,
    prompt=len(body["input_ids"]),
    most=120,
    vocab_size=_VOCAB,
    versions={"recorded.0-0": 0, "recorded.1-1": 1},
  )
  assert len(found.ids) == len(found.logps) == len(found.versions) == 120
  assert list(found.ids) == reply["output_ids"]
  (before, _) = reply["meta_info"]["weight_versions"]
  assert 0 < before["end"] < 120
  expected = np.arange(120) >= before["end"]
  np.testing.assert_array_equal(found.versions, expected)
  assert max(found.logps) < 0


def test_abort_is_recognised_in_a_recorded_reply():
  (body, reply), _ = _generated("abort")
  with pytest.raises(types.EngineError, match="was aborted: Aborted"):
    sglang_reply.read(
      reply,
      prompt=len(body["input_ids"]),
      most=120,
      vocab_size=_VOCAB,
      versions={"recorded.0-0": 0},
    )


def _exchanges(name):
  return json.loads((_DATA / f"{name}.json").read_text())


def _generated(name):
  """Returns the bodies and replies of turns."""
  return [
    (each["body"], each["reply"])
    for each in _exchanges(name)
    if each["path"] == "/generate"
  ]


def _policy(folder):
  """Returns a policy with the recorded vocabulary; its weights are not used."""
  a = architecture_lib.Architecture(
    family="qwen2",
    vocab_size=_VOCAB,
    d_model=2,
    layers=1,
    heads=1,
    kv_heads=1,
    head_dim=2,
    mlp_dim=2,
    qkv_bias=True,
  )
  config = architecture_lib.to_hf(a, dtype="float32", eos_token_id=[151_645])
  (folder / "config.json").write_text(json.dumps(config))
  return hf.Policy(random_models.params(a), a, _Tokenizer(), folder)
