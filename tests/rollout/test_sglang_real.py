"""The engines over HTTP against a real SGLang server: recorded, or running.

Without a server, the engine meets the exchanges in `tests/golden/sglang`, which
SGLang 0.5.23 gave on a CPU. If the engine now sends a different request, the
recording has no answer to it. A server with a small model and float32 weights
is enough, also on a CPU:

    python tests/support/sglang_chains.py MODEL_DIR TOKENIZER_DIR
    python -m sglang.launch_server --model-path MODEL_DIR --dtype float32 \\
        --tool-call-parser qwen25 ...  (and `sglang.adapter_flags`)
    ANYSEARCH_SGLANG_URL=http://127.0.0.1:30000 pytest \\
        tests/rollout/test_sglang_real.py

The first command makes a model with random weights and a real tokenizer. No
other process may use the server meanwhile. With ANYSEARCH_SGLANG_RECORD=1 the
exchanges are recorded again.
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
import random_models
import scripted
import sglang_chains
import small_policy

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.agent import agent as agent_lib
from anysearch_jax.environment import protocol
from anysearch_jax.host import loop
from anysearch_jax.policy import decoder, hf, hf_architecture, lora
from anysearch_jax.rollout import (
  chat_completions,
  completions,
  endpoints,
  plain_text,
)
from anysearch_jax.rollout.servers import engine as servers_engine
from anysearch_jax.rollout.servers import server as server_lib
from anysearch_jax.rollout.servers import sglang
from anysearch_jax.rollout.servers import weights as weights_lib

_URL = os.environ.get("ANYSEARCH_SGLANG_URL", "")
_DATA = pathlib.Path(__file__).parents[1] / "golden" / "sglang"
_KEPT = ("version", "weight_version", "context_length", "max_req_input_len")
_VOCAB, _WIDTH = 151_936, 64  # Of the model.
# Ids of the model's tokenizer (Qwen2.5's).
_IDS = {"x": 87, "<": 27, "/": 14, "se": 325, "arch": 1113, ">": 29, "y": 88}
_IDS |= {"</": 522, "answer": 9217, ">\n\n": 1339, "z": 89, " end": 835}
_IDS |= {"q": 80, "<|im_end|>": 151_645}

running = pytest.mark.skipif(
  not _URL, reason="no SGLang server; set ANYSEARCH_SGLANG_URL as said above"
)


class _Tokenizer:
  end_of_turn_ids = frozenset([151_643, 151_645])

  def encode(self, text):
    return [_IDS[text]]

  def decode(self, ids):
    texts = {i: text for text, i in _IDS.items() if i < 151_643}
    return "".join(texts.get(i, "") for i in ids)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
  """The policy in the server's model folder, or one with its vocabulary."""
  if _URL:
    info = httpx2.get(f"{_URL}/model_info", trust_env=False).json()
    return hf.load(info["tokenizer_path"])
  folder = tmp_path_factory.mktemp("policy")
  a = small_policy.architecture(
    _VOCAB, d_model=2, heads=1, head_dim=2, mlp_dim=2
  )
  config = hf_architecture.to_hf(a, dtype="float32", eos_token_id=[151_645])
  (folder / "config.json").write_text(json.dumps(config))
  return hf.Policy(random_models.params(a), a, _Tokenizer(), folder)


@pytest.fixture
def start(policy, monkeypatch, tmp_path):
  """Returns a function that makes an engine; its exchanges are in a file.

  A running server's are written there, others are read.
  """
  engines, noted = [], []
  monkeypatch.setattr(
    servers_engine.secrets, "token_hex", lambda size: "recorded"
  )

  def make(name="", params=None, temperature=1.0):
    if _URL:
      noted.append((name, []))
      hook = functools.partial(_note, noted[-1][1])
      network = {"event_hooks": {"response": [hook]}}
      config = config_lib.ServersConfig(urls=(_URL,))
      params = sglang_chains.params(policy) if params is None else params
    else:
      answer = functools.partial(_replayed, _exchanges(name))
      network = {"transport": httpx2.MockTransport(answer)}
      config = config_lib.ServersConfig(weights=str(tmp_path))
    client = functools.partial(httpx2.AsyncClient, **network)
    with monkeypatch.context() as patch:
      patch.setattr(server_lib.httpx2, "AsyncClient", client)
      engines.append(
        servers_engine.ServersEngine(
          policy if params is None else policy._replace(params=params),
          dialect=sglang.SglangServer,
          config=config,
          sampling=config_lib.SamplingConfig(temperature=temperature),
          dtype=jnp.float32,
        )
      )
    return engines[-1]

  yield make
  for engine in engines:
    engine.close()
  for name, exchanges in noted:
    if name and os.environ.get("ANYSEARCH_SGLANG_RECORD"):
      text = json.dumps(exchanges, indent=1, ensure_ascii=False)
      (_DATA / f"{name}.json").write_text(text + "\n")


def _asked(request):
  """Returns the body of a request, without machine-specific values."""
  body = json.loads(request.content or b"{}")
  return {k: v for k, v in body.items() if k not in ("rid", "model_path")}


async def _note(exchanges, response):
  content, path = await response.aread(), response.request.url.path
  try:
    reply = json.loads(content)
  except ValueError:
    reply = content.decode()
  if path in ("/model_info", "/server_info"):
    reply = {key: reply[key] for key in _KEPT if key in reply}
  exchanges.append(
    {
      "method": response.request.method,
      "path": path,
      "body": _asked(response.request),
      "status": response.status_code,
      "reply": reply,
    }
  )


def _replayed(left, request):
  asked = (request.method, request.url.path, _asked(request))
  equal = [
    each
    for each in left
    if (each["method"], each["path"], each["body"]) == asked
  ]
  assert equal, f"The recording has no answer to {asked}."
  found = equal[0]
  # How often a client looks at a server is its own choice.
  if request.method != "GET" or len(equal) > 1:
    left.remove(found)
  reply = found["reply"]
  content = reply if isinstance(reply, str) else json.dumps(reply)
  return httpx2.Response(found["status"], content=content)


def _exchanges(name):
  return json.loads((_DATA / f"{name}.json").read_text())


def _check_turns(engine, policy):
  sglang_chains.check_turns(
    sglang_chains.turns(engine, policy.tokenizer),
    policy.tokenizer,
    width=_WIDTH,
    vocab_size=_VOCAB,
  )


def test_turns_end_at_their_stop_text(policy, start):
  engine = start("turns")
  assert engine.max_context == 1017
  _check_turns(engine, policy)
  assert engine.counters["sampled_tokens"] == 5 + 3 + 2 + 12
  assert engine.counters["dropped_tokens"] == 0


def test_errors_quote_the_server(policy, start):
  engine = start("refusals")
  server = engine._fleet.members[0].server
  for body, message in sglang_chains.REFUSED:
    with pytest.raises(types.EngineError, match=message):
      loop.run(server.post("/generate", body))
  with pytest.raises(types.EngineError, match="400: Failed to get weights"):
    loop.run(
      server.load(weights_lib.Weights(pathlib.Path("/nowhere"), "other", 30))
    )
  _check_turns(engine, policy)


def test_a_server_with_other_weights_gets_the_present_ones(policy, start):
  engine = start("restart")
  _rename_weights()
  _check_turns(engine, policy)
  assert engine.counters["server_down"] == 1
  assert engine.counters["failovers"] == 1
  _rename_weights()
  # It names other weights, and is left out.
  assert engine.scores((5, 6, 7)) == {}


def test_a_server_lends_its_memory_until_a_turn(policy, start):
  engine = start("lending")
  engine.free_cache()
  _check_turns(engine, policy)
  assert not engine.counters["server_down"]
  # It said that it had released memory, although this one, on a CPU, cannot.
  server = engine._fleet.members[0].server
  server._lends = True
  with pytest.raises(types.EngineError, match="with --enable-memory-saver"):
    loop.run(server.ready())


def _rename_weights():
  """Makes a running server name its weights as if it had been restarted."""
  if _URL:
    httpx2.post(
      f"{_URL}/update_weight_version",
      json={"new_version": "default"},
      trust_env=False,
    ).raise_for_status()


def _read(name):
  """Reads the first turn of a recording; returns it and the server's reply."""
  found = next(e for e in _exchanges(name) if e["path"] == "/generate")
  reply = found["reply"]
  return reply, functools.partial(
    sglang.read_turn,
    reply,
    prompt=len(found["body"]["input_ids"]),
    max_tokens=120,
    vocab_size=_VOCAB,
    versions={"recorded.0-0": 0, "recorded.1-1": 1},
  )


def test_tokens_on_both_sides_of_an_update_have_their_own_version():
  reply, read = _read("update")
  found = read()
  assert len(found.ids) == len(found.logps) == len(found.versions) == 120
  assert list(found.ids) == reply["output_ids"]
  (before, _) = reply["meta_info"]["weight_versions"]
  assert 0 < before["end"] < 120
  expected = np.arange(120) >= before["end"]
  np.testing.assert_array_equal(found.versions, expected)
  assert max(found.logps) < 0


def test_abort_is_recognised_in_a_recorded_reply():
  _, read = _read("abort")
  with pytest.raises(types.EngineError, match="was aborted: Aborted"):
    read()


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


@running
def test_log_probs_equal_ours_at_the_sampling_temperature(
  policy, start, random_params
):
  context = _context(policy)
  for temperature in (1.0, 0.7):
    engine = start(params=random_params[0], temperature=temperature)
    for generation in _sample(engine, context, samples=4, most=20):
      row = (*context, *generation.token_ids)
      ours = _ours(policy, random_params[0], row, temperature)
      np.testing.assert_allclose(
        generation.logps, ours[len(context) - 1 :], atol=1e-3
      )
      assert set(generation.versions) == {0}


@running
def test_a_turn_that_outlives_an_update_has_the_versions_of_both(
  policy, start, random_params
):
  first, second = random_params
  engine, context = start("update", first), _context(policy)

  async def update_meanwhile():
    request = sglang_chains.request(context, 120)
    turn = asyncio.create_task(engine.generate(request))
    await asyncio.sleep(0.5)
    await asyncio.to_thread(engine.set_params, second, 1)
    return await turn

  generation = asyncio.run(update_meanwhile())
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


@running
def test_log_probs_of_adapters_equal_ours(policy, random_params, tmp_path):
  info = httpx2.get(f"{_URL}/server_info", trust_env=False).json()
  config = config_lib.LoraConfig(rank=4, alpha=8.0)
  if sglang.adapter_refusal(info, config.rank, config.targets):
    pytest.skip("The server was started without `sglang.adapter_flags`.")
  a = lora.attach(policy.architecture, config)
  new = lora.initialize(a, 0)

  def adapted(version):
    rng = np.random.default_rng(version)
    trained = jax.tree.map(
      lambda p: p + rng.normal(0, 0.1, p.shape).astype(np.float32), new
    )
    params = lora.combine(random_params[0], trained if version else new)
    return policy._replace(params=params, architecture=a)

  engine = servers_engine.ServersEngine(
    adapted(0),
    dialect=sglang.SglangServer,
    config=config_lib.ServersConfig(urls=(_URL,), weights=str(tmp_path)),
    sampling=config_lib.SamplingConfig(),
    dtype=jnp.float32,
  )
  assert engine.adapts
  server, context = engine._fleet.members[0].server, _context(policy)
  spent = [engine.counters["handover_bytes"], engine.counters["handover_ms"]]
  for version in (0, 1, 2):
    if version:
      engine.counters.clear()
      engine.set_params(adapted(version).params, version)
      spent += [engine.counters[f"handover_{x}"] for x in ("bytes", "ms")]
    own = adapted(version)
    for sample, said in enumerate(_sample(engine, context, samples=2, most=20)):
      engine.release(types.Address(0, 0, sample))
      assert set(said.versions) == {version}
      row = (*context, *said.token_ids)
      ours = _ours(own, own.params, row)
      _close(f"turn {version}", said.logps, ours[len(context) - 1 :])
      _close(f"scores {version}", engine.scores(row)[_URL], ours)
      base = _ours(policy, random_params[0], row)
      assert (np.abs(base - ours).max() > 0.1) == (version > 0)
  # An episode goes on as it began while the server holds its adapter.
  (first,) = _sample(engine, context, samples=1, most=5)
  engine.set_params(adapted(3).params, 3)
  row = (*context, *first.token_ids)
  (second,) = _sample(engine, row, samples=1, most=5)
  assert set(second.versions) == {2}
  own = adapted(2)
  ours = _ours(own, own.params, (*row, *second.token_ids))
  _close("kept", second.logps, ours[len(row) - 1 :])
  assert len(loop.run(server.loaded_adapters())) == 2
  # It loses them, and gets them again.
  for name in loop.run(server.loaded_adapters()):
    loop.run(server.post("/unload_lora_adapter", {"lora_name": name}))
  (third,) = _sample(engine, row, samples=1, most=5)
  assert set(third.versions) in ({2}, {3})
  own = adapted(third.versions[0])
  ours = _ours(own, own.params, (*row, *third.token_ids))
  _close("again", third.logps, ours[len(row) - 1 :])
  print("bytes, ms:", spent)
  # A server that leaves out the adapter of a request would be noticed.
  ask = server._generate
  server._generate = lambda body: ask(body | {"lora_path": None})
  with pytest.raises(types.EngineError, match="it samples its base"):
    engine.scores(row)
  engine.close()


def _close(what, found, expected):
  gap = np.abs(np.subtract(found, expected))
  print(f"{what}: {gap.mean():.1e} on average, {gap.max():.1e} at most")
  assert gap.max() < 1e-3


@running
@pytest.mark.parametrize("local", [True, False])
def test_text_completions_of_the_server_end_alike(policy, start, local):
  start()  # Loads the weights.
  listed = httpx2.get(f"{_URL}/v1/models", trust_env=False).json()
  codec = policy.tokenizer if local else plain_text.PlainText()
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


@running
def test_chat_model_of_the_server_calls_the_tool(policy, start, monkeypatch):
  start(params=sglang_chains.params(policy, sglang_chains.CALL))
  monkeypatch.setattr(chat_completions, "_PROBE_TOKENS", 64)
  model = endpoints.Endpoint(f"{_URL}/v1")
  defaults = endpoints.default_config()
  opened = endpoints.open_endpoint(
    model,
    episode=defaults.episode,
    sampling=defaults.sampling,
    concurrency=defaults.engine.slots,
  )
  assert (opened.prompts, opened.why) == (
    *("documents_tools", "it called the tool"),
  )
  config = config_lib.EpisodeConfig(
    prompts=opened.prompts, max_generated=80, answered_bad_turns=0
  )
  passages = scripted.Retriever()
  with agent_lib.Agent(
    opened.engine, opened.codec, passages, config=config, slots=1
  ) as agent:
    streamed = [*agent.stream("When?", budget=1)][-1].reply
    whole = agent.ask("When?", budget=1)
  opened.engine.close()
  for reply in (streamed, whole):
    assert reply.trajectory.queries == ("lease",)
    # It is offered no tool at the end, and writes its call as a text.
    assert reply.answer is None and reply.reason
  assert opened.engine.counters["sampled_tokens"] == 5 * 18


def _sample(engine, context, *, samples, most):
  async def run():
    return await asyncio.gather(
      *(
        engine.generate(sglang_chains.request(context, most, sample=i))
        for i in range(samples)
      )
    )

  return asyncio.run(run())


def _context(policy):
  return tuple(policy.tokenizer.encode("Who wrote the song of the sea, and?"))


def _ours(policy, params, row, temperature=1.0):
  """Returns log-probabilities of all tokens but the first, by our decoder."""
  tokens = np.asarray([row])
  hidden = decoder.forward(
    params,
    policy.architecture,
    tokens,
    np.arange(len(row))[None],
    np.ones_like(tokens),
    compute=decoder.Compute(jnp.float32),
  )
  logits = decoder.logits(params, hidden)[0]
  logps = jax.nn.log_softmax(logits / temperature)
  return np.asarray(logps[np.arange(len(row) - 1), tokens[0, 1:]])
