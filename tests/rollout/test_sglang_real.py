"""The engines over HTTP against a running SGLang server; skipped without one.

A server with a small model and float32 weights is enough, also on a CPU:

    python -m tests.support.sglang_chains MODEL_DIR TOKENIZER_DIR
    python -m sglang.launch_server --model-path MODEL_DIR --dtype float32 ...
    ANYSEARCH_SGLANG_URL=http://127.0.0.1:30000 pytest \\
        tests/rollout/test_sglang_real.py

The first command makes a model with random weights and a real tokenizer. No
other process may use the server meanwhile. With ANYSEARCH_SGLANG_RECORD=1 the
test records the exchanges in `tests/golden/sglang` again.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import pathlib

import httpx2
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sglang_chains

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.environment import protocol
from anysearch_jax.host import loop
from anysearch_jax.policy import decoder, hf
from anysearch_jax.rollout import completions
from anysearch_jax.rollout.sglang import engine as sglang
from anysearch_jax.rollout.sglang import server as sglang_server

_URL = os.environ.get("ANYSEARCH_SGLANG_URL", "")
_DATA = pathlib.Path(__file__).parents[1] / "golden" / "sglang"
_KEPT = ("version", "weight_version", "context_length", "max_req_input_len")
if not _URL:
  pytest.skip(
    "no SGLang server; set ANYSEARCH_SGLANG_URL to one that was started as "
    "tests/rollout/test_sglang_real.py says",
    allow_module_level=True,
  )


@pytest.fixture(scope="module")
def policy():
  """The policy in the server's model folder."""
  info = httpx2.get(f"{_URL}/model_info", trust_env=False).json()
  return hf.load(info["tokenizer_path"])


@pytest.fixture(scope="module")
def random_params(policy):
  """Two different sets of weights, whose distributions are far from flat."""

  def make(seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
      lambda p: p + 0.1 * jnp.asarray(rng.normal(size=p.shape), p.dtype),
      policy.params,
    )

  return make(1), make(2)


@pytest.fixture
def make_engine(policy):
  engines = []

  def make(params, *, temperature=1.0, dtype=jnp.float32, **config):
    engines.append(
      sglang.SglangEngine(
        policy._replace(params=params),
        config=config_lib.SglangConfig(**{"urls": (_URL,)} | config),
        sampling=config_lib.SamplingConfig(temperature=temperature),
        dtype=dtype,
      )
    )
    return engines[-1]

  yield make
  for engine in engines:
    engine.close()


@pytest.fixture
def recorded(monkeypatch, request):
  """Records the HTTP exchanges of a test in a file."""
  exchanges = []
  ask = sglang_server.Server._ask

  async def record(self, method, path, body, deadline):
    sent = []

    def noted():
      sent.append(body())
      return sent[-1]

    response = await ask(self, method, path, body and noted, deadline)
    exchanges.append(
      _exchange(method, path, sent[-1] if sent else None, response)
    )
    return response

  monkeypatch.setattr(sglang_server.Server, "_ask", record)
  monkeypatch.setattr(sglang.secrets, "token_hex", lambda size: "recorded")
  yield exchanges
  if os.environ.get("ANYSEARCH_SGLANG_RECORD"):
    _DATA.mkdir(parents=True, exist_ok=True)
    text = json.dumps(exchanges, indent=1, ensure_ascii=False)
    (_DATA / f"{request.param}.json").write_text(text + "\n")


@pytest.mark.parametrize("recorded", ["turns"], indirect=True)
def test_turns_end_at_their_stop_text(policy, make_engine, recorded):
  engine = make_engine(sglang_chains.params(policy))
  sglang_chains.check_turns(
    sglang_chains.turns(engine, policy.tokenizer),
    policy.tokenizer,
    width=policy.architecture.d_model,
    vocab_size=policy.architecture.vocab_size,
  )


def test_log_probs_equal_ours_at_the_sampling_temperature(
  policy, make_engine, random_params
):
  context = _context(policy)
  for temperature in (1.0, 0.7):
    engine = make_engine(random_params[0], temperature=temperature)
    for generation in _sample(engine, context, samples=4, most=20):
      row = (*context, *generation.token_ids)
      ours = _ours(policy, random_params[0], row, temperature)
      np.testing.assert_allclose(
        generation.logps, ours[len(context) - 1 :], atol=1e-3
      )
      assert set(generation.versions) == {0}


@pytest.mark.parametrize("recorded", ["update"], indirect=True)
def test_a_turn_that_outlives_an_update_has_the_versions_of_both(
  policy, make_engine, random_params, recorded
):
  first, second = random_params
  engine, context = make_engine(first), _context(policy)
  generation = _update_meanwhile(engine, second, context)
  assert sorted(generation.versions) == list(generation.versions)
  assert set(generation.versions) == {0, 1}
  of_first = generation.versions.count(0)
  row = (*context, *generation.token_ids)
  ours = _ours(policy, first, row)[len(context) - 1 :]
  np.testing.assert_allclose(
    generation.logps[:of_first], ours[:of_first], atol=1e-3
  )
  # The new weights do not reuse prefixes that the old weights cached.
  engine.counters.clear()
  (next_turn,) = _sample(engine, row, samples=1, most=5)
  assert engine.counters["shared_tokens"] == 0
  ours = _ours(policy, second, (*row, *next_turn.token_ids))
  np.testing.assert_allclose(next_turn.logps, ours[len(row) - 1 :], atol=1e-3)


@pytest.mark.parametrize("recorded", ["refusals"], indirect=True)
def test_errors_quote_the_server(policy, make_engine, recorded):
  engine = make_engine(sglang_chains.params(policy))
  (server,) = engine._servers
  for body, message in sglang_chains.REFUSED:
    with pytest.raises(types.EngineError, match=message):
      loop.run(server.generate(body))
  with pytest.raises(types.EngineError, match="Failed to get weights iterator"):
    loop.run(
      server.load(sglang_server.Weights(pathlib.Path("/nowhere"), "other", 30))
    )
  assert len(sglang_chains.turns(engine, policy.tokenizer)) == len(
    sglang_chains.CHAINS
  )


@pytest.mark.parametrize("recorded", ["restart"], indirect=True)
def test_a_server_with_other_weights_gets_the_present_ones(
  policy, make_engine, recorded
):
  engine = make_engine(sglang_chains.params(policy))
  _post("/update_weight_version", {"new_version": "default"})
  sglang_chains.check_turns(
    sglang_chains.turns(engine, policy.tokenizer),
    policy.tokenizer,
    width=policy.architecture.d_model,
    vocab_size=policy.architecture.vocab_size,
  )
  assert engine.counters["server_catching_up"] == 1
  _post("/update_weight_version", {"new_version": "default"})
  # It names other weights, and is left out.
  assert engine.scores((5, 6, 7)) == {}


@pytest.mark.parametrize("local", [True, False])
def test_text_completions_of_the_server_end_alike(policy, make_engine, local):
  make_engine(sglang_chains.params(policy))  # Loads the weights.
  listed = httpx2.get(f"{_URL}/v1/models", trust_env=False).json()
  codec = policy.tokenizer if local else completions.PlainText()
  engine = completions.CompletionsEngine(
    f"{_URL}/v1",
    codec,
    model=listed["data"][0]["id"],
    sampling=config_lib.SamplingConfig(),
    deadline=60.0,
    concurrency=4,
  )

  async def run():
    await engine.probe()
    found = [
      await engine.generate(
        sglang_chains.request(codec.encode(chain[0]), 12, stop=protocol.STOPS)
      )
      for chain in sglang_chains.CHAINS.values()
    ]
    with pytest.raises(types.EngineError, match="HTTP 400"):
      await engine.generate(sglang_chains.request(codec.encode("q"), 100_000))
    return found

  found = asyncio.run(run())
  engine.close()
  assert [(g.finish, g.text) for g in found] == [*sglang_chains.ENDS.values()]


def _sample(engine, context, *, samples, most):
  async def run():
    return await asyncio.gather(
      *(
        engine.generate(sglang_chains.request(context, most, sample=i))
        for i in range(samples)
      )
    )

  return asyncio.run(run())


def _update_meanwhile(engine, params, context):
  """Returns a turn during which version 1 of the weights is set."""

  async def run():
    turn = asyncio.create_task(
      engine.generate(sglang_chains.request(context, 120))
    )
    await asyncio.sleep(0.5)
    await asyncio.to_thread(engine.set_params, params, 1)
    return await turn

  return asyncio.run(run())


def _context(policy):
  return tuple(policy.tokenizer.encode("Who wrote the song of the sea, and?"))


def _ours(policy, params, row, temperature=1.0):
  """Returns log-probabilities of all tokens but the first, by our decoder."""
  tokens = np.asarray([row])
  positions = np.arange(len(row))[None]
  row_of = _compiled(policy.architecture)
  logits = row_of(params, tokens, positions, np.ones_like(tokens))[0]
  logps = jax.nn.log_softmax(logits / temperature)
  return np.asarray(logps[np.arange(len(row) - 1), tokens[0, 1:]])


@functools.cache
def _compiled(architecture):
  def run(params, *row):
    hidden = decoder.forward(
      params, architecture, *row, compute=decoder.Compute(jnp.float32)
    )
    return decoder.logits(params, hidden)

  return jax.jit(run)


def _post(path, body):
  response = httpx2.post(_URL + path, json=body, trust_env=False, timeout=120)
  assert response.status_code == 200, response.text


def _exchange(method, path, body, response):
  """Returns an exchange to replay in tests, without machine-specific values."""
  try:
    reply = response.json()
  except ValueError:
    reply = response.text
  if path in ("/model_info", "/server_info"):
    reply = {key: reply[key] for key in _KEPT if key in reply}
  body = {
    key: value
    for key, value in (body or {}).items()
    if key not in ("rid", "model_path")
  }
  return {
    "method": method,
    "path": path,
    "body": body,
    "status": response.status_code,
    "reply": reply,
  }
