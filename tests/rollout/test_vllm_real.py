"""The engine over a real vLLM server on this machine's CPU.

    ANYSEARCH_VLLM_PYTHON=VENV/bin/python pytest -m slow \\
        tests/rollout/test_vllm_real.py tests/launch/test_node.py

A server starts within a minute. The tests ran with vLLM 0.32.0.
"""

from __future__ import annotations

import asyncio
import pathlib
import threading

import fake_sglang
import jax.numpy as jnp
import numpy as np
import policy_scores
import pytest
import real_vllm
import sglang_chains
import small_policy

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.environment import protocol
from anysearch_jax.host import loop
from anysearch_jax.policy import hf, lora
from anysearch_jax.rollout.servers import engine as servers_engine
from anysearch_jax.rollout.servers import server as server_lib
from anysearch_jax.rollout.servers import vllm
from anysearch_jax.rollout.servers import weights as weights_lib

pytestmark = [real_vllm.running, pytest.mark.slow]
CONTEXT = fake_sglang.ids("a", "b", "c", "a", "b") * 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  folder = tmp_path_factory.mktemp("policy") / "policy"
  hf.save(folder, real_vllm.policy(), dtype=jnp.float32)
  return folder


@pytest.fixture(scope="module")
def server(folder):
  log = folder.with_name("server.log")
  with real_vllm.Server(
    folder, log, "--dtype=float32", "--block-size=32", LORA="4"
  ) as server:
    yield server


@pytest.fixture
def connect(server, tmp_path):
  """Makes engines over the server, and closes them."""
  engines = []

  def make(policy=None, *, url=server.url, temperature=1.0, **settings):
    engine = servers_engine.ServersEngine(
      policy or real_vllm.policy(),
      dialect=vllm.VllmServer,
      config=config_lib.ServersConfig(
        urls=(url,), weights=str(tmp_path), wait=240.0, retries=1
      ),
      sampling=config_lib.SamplingConfig(temperature=temperature),
      **{"dtype": jnp.float32} | settings,
    )
    engines.append(engine)
    return engine

  yield make
  for engine in engines:
    engine.close()


def _sample(engine, *, context=CONTEXT, most=60, sample=0):
  request = sglang_chains.request(context, most, sample=sample)
  return asyncio.run(engine.generate(request))


def _ours(policy, row, temperature=1.0):
  """Returns the log-probabilities of a row's tokens but the first."""
  head = policy.params["head"] / temperature
  scaled = policy._replace(params=policy.params | {"head": head})
  return np.array(policy_scores.log_probs(scaled, row))


def _close(what, found, expected, limit):
  gap = np.abs(np.subtract(found, expected))
  print(f"{what}: {gap.mean():.1e} on average, {gap.max():.1e} at most")
  assert gap.max() < limit


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_and_scores_equal_ours(connect, temperature):
  engine = connect(temperature=temperature)
  assert engine.max_context == 512
  policy = real_vllm.policy()
  for sample in range(3):
    said = _sample(engine, sample=sample)
    row = (*CONTEXT, *said.token_ids)
    ours = _ours(policy, row, temperature)[len(CONTEXT) - 1 :]
    _close(f"turn at {temperature}", said.logps, ours, 1e-4)
  (scores,) = engine.scores(row).values()
  _close("scores", scores, _ours(policy, row), 1e-4)
  # Samples of a question share its prefix.
  assert engine.counters["shared_tokens"] >= 2 * 128


def test_equal_seeds_give_equal_tokens(connect):
  engine = connect()
  first, second, other = (_sample(engine, sample=s) for s in (0, 0, 1))
  assert (first.token_ids, first.logps) == (second.token_ids, second.logps)
  assert first.token_ids != other.token_ids


def test_turns_end_at_their_stop_text(connect):
  """Also if it is spelled by more tokens than it encodes to."""
  chains = {
    "</search>": ("a", "<", "/", "se", "arch", ">"),
    "</answer>": ("b", "</", "answer", ">\n"),
    "c": ("search", "c", "<end>"),
  }
  policy = real_vllm.policy()
  engine = connect(
    policy._replace(params=sglang_chains.params(policy, *chains.values()))
  )
  for text, chain in chains.items():
    request = sglang_chains.request(
      fake_sglang.ids(chain[0]), 12, stop=protocol.STOPS
    )
    generation = asyncio.run(engine.generate(request))
    assert (generation.text, generation.token_ids) == (
      text,
      fake_sglang.ids(*chain[1:]),
    )
  assert engine.counters["dropped_tokens"] == 0


def test_an_update_in_a_turn_has_exact_spans_and_leaves_no_prefix(connect):
  first = real_vllm.endless(real_vllm.policy(1))
  second = real_vllm.endless(real_vllm.policy(2))
  engine = connect(first)

  async def update_meanwhile():
    request = sglang_chains.request(CONTEXT, 350)
    turn = asyncio.create_task(engine.generate(request))
    await asyncio.sleep(0.5)
    await asyncio.to_thread(engine.set_params, second.params, 1)
    return await turn

  said = asyncio.run(update_meanwhile())
  assert sorted(said.versions) == list(said.versions)
  assert set(said.versions) == {0, 1}
  boundary = said.versions.count(0)
  row = (*CONTEXT, *said.token_ids)
  ours = _ours(first, row)[len(CONTEXT) - 1 :]
  print(f"{boundary} tokens of the old weights, {350 - boundary} of the new")
  _close("before", said.logps[:boundary], ours[:boundary], 1e-4)
  gap = np.abs(np.subtract(said.logps, ours))[boundary:]
  assert gap[0] > 1e-3 and np.median(gap) > 0.05
  # A prefix that the old weights made is not used.
  engine.counters.clear()
  later = _sample(engine, context=row[:-9], most=5)
  assert engine.counters["shared_tokens"] == 0
  ours = _ours(second, (*row[:-9], *later.token_ids))
  _close("after", later.logps, ours[len(row) - 10 :], 1e-4)


def _adapted(version):
  """Returns a policy with adapters, random ones from version 1 on."""
  bare = real_vllm.policy()
  config = config_lib.LoraConfig(rank=4, alpha=8.0)
  a = lora.attach(bare.architecture, config)
  new = lora.initialize(a, 0)
  if version:
    new = small_policy.noisy(new, version)
  return bare._replace(params=lora.combine(bare.params, new), architecture=a)


def _peft(torch, base, adapter, row):
  """Returns the log-probabilities of PEFT, for a folder of ours."""
  peft = pytest.importorskip(
    "peft", reason="adapter tests need peft==0.21.2 (the extra [oracles])"
  )
  import transformers

  model = transformers.AutoModelForCausalLM.from_pretrained(
    base, dtype=torch.float32
  )
  ids = torch.tensor([row])
  with torch.no_grad():
    logits = peft.PeftModel.from_pretrained(model, adapter).eval()(ids).logits
  logps = torch.log_softmax(logits[0, :-1], dim=-1)
  return logps.gather(1, ids[0, 1:, None])[:, 0].numpy()


def test_log_probs_of_adapters_equal_ours_and_peft(connect, folder, torch):
  engine = connect(_adapted(0))
  assert engine.adapts
  for version in (0, 1, 2):
    if version:
      engine.set_params(_adapted(version).params, version)
    said = _sample(engine, sample=version)
    assert set(said.versions) == {version}
    row = (*CONTEXT, *said.token_ids)
    ours = _ours(_adapted(version), row)
    _close(f"turn {version}", said.logps, ours[len(CONTEXT) - 1 :], 1e-3)
    (scores,) = engine.scores(row).values()
    _close(f"scores {version}", scores, ours, 1e-3)
    base = _ours(real_vllm.policy(), row)
    assert (np.abs(base - ours).max() > 0.1) == (version > 0)
    adapter = engine._handed_over[-1].adapter.path
    theirs = _peft(torch, folder, adapter, row)
    _close(f"PEFT {version}", scores, theirs, 1e-3)
  client = engine._fleet.members[0].server
  assert len(loop.run(client.loaded_adapters())) == 2
  # It loses them, and gets them again.
  for name in loop.run(client.loaded_adapters()):
    loop.run(client.unload_adapter(name))
  with pytest.raises(types.EngineError, match="404.*does not exist"):
    loop.run(client.score_once(CONTEXT, engine._handed_over[-1]))
  assert set(_sample(engine).versions) == {2}
  # A reply of the base does not count.
  ask = client._generate
  client._generate = lambda body: ask(
    {name: value for name, value in body.items() if name != "model"}
  )
  assert engine.scores(CONTEXT) == {}


def test_a_server_answers_release_and_wake_up(connect):
  """On a CPU it keeps its memory."""
  engine = connect()
  engine.free_cache()
  client = engine._fleet.members[0].server
  assert loop.run(client.version()).endswith(".released")
  said = _sample(engine)
  ours = _ours(real_vllm.policy(), (*CONTEXT, *said.token_ids))
  _close("after a loan", said.logps, ours[len(CONTEXT) - 1 :], 1e-4)
  assert not engine.counters["server_down"]
  client._lends = True
  with pytest.raises(types.EngineError, match="--enable-sleep-mode"):
    loop.run(client.ready())


def test_a_request_that_nobody_waits_for_is_aborted(connect, server):
  engine = connect(real_vllm.endless(real_vllm.policy()))

  async def leave():
    async with asyncio.timeout(0.2):
      await engine.generate(sglang_chains.request(CONTEXT, 350))

  with pytest.raises(TimeoutError):
    asyncio.run(leave())
  client = engine._fleet.members[0].server
  # The cache empties only once no request holds a part of it.
  loop.run(client.flush_cache())


def test_servers_in_bfloat16_are_near_the_trainer(folder, connect, tmp_path):
  with real_vllm.Server(
    folder, tmp_path / "server.log", "--dtype=bfloat16"
  ) as server:
    engine = connect(url=server.url, dtype=jnp.bfloat16)
    assert not engine.adapts
    policy = real_vllm.policy()
    for sample in range(3):
      said = _sample(engine, sample=sample)
      row = (*CONTEXT, *said.token_ids)
      ours = _ours(policy, row)[len(CONTEXT) - 1 :]
      _close("bfloat16 beside float32", said.logps, ours, 0.3)


def test_a_server_that_fails_or_dies_of_a_load_comes_back(
  folder, connect, tmp_path, monkeypatch
):
  log = tmp_path / "server.log"
  with real_vllm.Server(folder, log, "--dtype=float32") as server:
    engine = connect(url=server.url)
    client = engine._fleet.members[0].server

    def load(path):
      loop.run(client.load(weights_lib.Weights(path, "w.1-0", 60)))

    def check(version, policy):
      said = _sample(engine)
      assert set(said.versions) == {version}
      ours = _ours(policy, (*CONTEXT, *said.token_ids))
      _close("turn", said.logps, ours[len(CONTEXT) - 1 :], 1e-4)

    with pytest.raises(types.EngineError, match="no config.json"):
      load(pathlib.Path("/nowhere"))
    assert not engine.counters["server_down"]
    check(0, real_vllm.policy())
    # Half of a file: it names its weights, and dies of the first turn.
    broken = tmp_path / "broken"
    hf.save(broken, real_vllm.policy(2), dtype=jnp.float32)
    file = broken / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(types.EngineError, match="not a whole safetensors"):
      load(broken)
    for folder, name in ((broken, "half"), (pathlib.Path("/nowhere"), "none")):
      with monkeypatch.context() as patch:
        patch.setattr(vllm, "folder_refusal", lambda path, on_cpu: "")
        with pytest.raises(server_lib.UnansweredError, match="Does the serv"):
          load(folder)
      check(0, real_vllm.policy())
      print(f"{name} of a folder: started {server.starts} times")
    assert server.starts == 3
    # It is killed while it loads.
    ask = client.ask

    async def kill(method, path, *arguments, **settings):
      if path != "/collective_rpc":
        return await ask(method, path, *arguments, **settings)
      client.ask = ask
      killer = threading.Timer(0.005, server.kill)
      killer.start()
      try:
        return await ask(method, path, *arguments, **settings)
      finally:
        killer.join()

    client.ask = kill
    engine.set_params(real_vllm.policy(3).params, 1)
    check(1, real_vllm.policy(3))
    assert server.starts == 4
    assert engine.counters["server_down"] == 3
