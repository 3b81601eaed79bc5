"""The dialect of vLLM servers: requests, replies, loads, and servers that die.

What the engine does over servers of either kind is tested in `test_servers` and
the files beside it.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import io
import json
import math
import pathlib
import time

import fake_sglang
import fake_vllm
import hypothesis
import numpy as np
import policy_scores
import pytest
import random_models
import sglang_engines as engines
import small_policy
from hypothesis import strategies as st
from waits import wait_for

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.host import loop
from anysearch_jax.policy import hf
from anysearch_jax.rollout.servers import fleet as fleet_lib
from anysearch_jax.rollout.servers import server as server_lib
from anysearch_jax.rollout.servers import vllm
from anysearch_jax.rollout.servers import weights as weights_lib

serve = engines.serve
SAID = fake_sglang.ids("b", "<end>")
GENERATE, LOAD = fake_vllm.GENERATE, "/collective_rpc"
_GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "vllm"
ADAPTERS = {"max_lora_rank": 8, "target_modules": None}


@pytest.fixture
def start(serve):
  """Starts fake vLLM servers and an engine over them."""
  return functools.partial(
    serve, fake=fake_vllm.Server, dialect=vllm.VllmServer
  )


def _changed(**values):
  """Changes the only choice of a right reply."""

  def change(reply):
    (choice,) = reply["choices"]
    return reply | {"choices": [choice | values]}

  return change


def _logprobs(*logps, token=engines.SPACE):
  content = [{"token_id": token, "logprob": logp} for logp in logps]
  return {"logprobs": {"content": content}}


def test_every_setting_of_a_request_is_sent(start):
  sampling = config_lib.SamplingConfig(temperature=0.5, top_p=0.9, top_k=3)
  engine, server = start(SAID, sampling=sampling)
  generation = engines.turn(engine, most=7)
  assert (generation.text, generation.versions) == ("b", (0, 0))
  (body,) = server.bodies(GENERATE)
  seed = body["sampling_params"].pop("seed")
  assert 0 <= seed < 2**56
  assert body == {
    "token_ids": list(engines.PROMPT),
    "cache_salt": server.version,
    "sampling_params": {
      "max_tokens": 7,
      "temperature": 0.5,
      "top_p": 0.9,
      "top_k": 3,
      "min_p": 0.0,
      "repetition_penalty": 1.0,
      "frequency_penalty": 0.0,
      "presence_penalty": 0.0,
      "ignore_eos": False,
      "stop": ["</search>", "</answer>"],
      "stop_token_ids": [fake_sglang.END],
      "skip_special_tokens": False,
      "logprobs": 0,
    },
  }
  engines.turn(engine, most=7, sample=1)
  assert server.bodies(GENERATE)[-1]["sampling_params"]["seed"] != seed


@pytest.mark.parametrize(
  ("fault", "message"),
  [
    ((200, "<html>"), "'<html>', expected a JSON object"),
    ((200, "{}"), "choices None, expected one of type list"),
    ((400, '{"error": {"message": "too long"}}'), "HTTP 400: too long"),
    (lambda reply: reply | {"choices": []}, "0 choices, expected one"),
    (lambda reply: reply | {"choices": [7]}, "finish_reason None"),
    (lambda reply: reply | {"usage": None}, "usage None"),
    (
      lambda reply: reply | {"usage": {"prompt_tokens": 6}},
      "prompt of 6 tokens, expected the 5 sent",
    ),
    # Of the choice.
    ({"finish_reason": None}, "finish_reason None, expected one of type str"),
    ({"finish_reason": "abort"}, "The request was aborted"),
    ({"token_ids": None}, "token_ids None"),
    ({"token_ids": [14, 14, 14]}, "token_ids that differ"),
    ({"logprobs": None}, "logprobs None"),
    ({"logprobs": {"content": [7] * 4}}, "token_id None"),
    (_logprobs(*[-1.0] * 4, token=1.5), "1.5, expected one of type int"),
    (
      _logprobs(*[-1.0] * 4, token=20) | {"token_ids": [20] * 4},
      "ids below 20",
    ),
    (
      _logprobs(*[-1.0] * 5) | {"token_ids": [14] * 5},
      "5 sampled tokens, expected 1 to 4",
    ),
    (_logprobs() | {"token_ids": []}, "0 sampled tokens, expected 1 to 4"),
    (_logprobs(-1.0, 0.5, -1.0, -1.0), "log-probability 0.5"),
    (_logprobs(-1.0, "-1", -1.0, -1.0), "log-probability '-1'"),
    # vLLM sends -9999 for what is not finite.
    (_logprobs(-1.0, -9999.0, -1.0, -1.0), "log-probability -inf of token 14"),
    (_logprobs(-1.0, math.nan, -1.0, -1.0), "log-probability nan"),
    ({"weight_versions": None}, "weight_versions None"),
    ({"weight_versions": [1]}, "version None"),
  ],
)
def test_invalid_reply_is_an_error(start, fault, message):
  engine, server = start()
  if isinstance(fault, dict):
    fault = _changed(**fault)
  server.faults[GENERATE] = [fault]
  with pytest.raises(types.EngineError, match=message) as raised:
    engines.turn(engine, most=4)
  assert server.url in str(raised.value)
  assert engine.counters["sampled_tokens"] == 0
  assert len(engines.turn(engine, most=4).token_ids) == 4


def test_a_span_without_end_takes_no_memory(start):
  engine, server = start()
  spans = [{"version": server.version, "start": 0, "end": 10**15}]
  server.faults[GENERATE] = [_changed(weight_versions=spans)]
  with pytest.raises(types.EngineError, match="spans in order over 4 tokens"):
    engines.turn(engine, most=4)


_TURN = server_lib.Turn(
  request=engines.request(most=2, context=(1, 2, 3)),
  sampled=weights_lib.Sampled("w", 9),
  sampling=config_lib.SamplingConfig(),
  seed=1,
  end_of_turn_ids=frozenset({0}),
  architecture=engines.policy().architecture,
)
_CHOICE = {
  "finish_reason": "length",
  "token_ids": [4, 5],
  "weight_versions": [{"version": "w", "start": 0, "end": 2}],
  "logprobs": {
    "content": [
      {"token_id": 4, "logprob": -1.0},
      {"token_id": 5, "logprob": -2.0},
    ]
  },
}
_values = st.recursive(
  st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
  lambda inner: (
    st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=2)
  ),
  max_leaves=6,
)


@hypothesis.given(st.sampled_from(sorted(_CHOICE)), _values)
def test_changed_value_is_an_error_or_has_no_effect(name, value):
  reply = {
    "usage": {"prompt_tokens": 3},
    "choices": [_CHOICE | {name: value}],
  }
  try:
    found = vllm.read_turn(reply, _TURN, {"w": 9})
  except types.EngineError:
    return
  assert found.versions == (9, 9)
  assert (found.ids, found.logps) == ((4, 5), (-1.0, -2.0))


def _recorded(name, version):
  """Returns a reply of a real vLLM 0.32.0, and the turn that it answers.

  Fields that are null, and other likely tokens, are left out of the file.
  """
  recorded = json.loads((_GOLDEN / "replies.json").read_text())[name]
  body = recorded["body"]
  adapter = None
  if model := body.get("model"):
    adapter = weights_lib.Adapter(model, pathlib.Path("adapter"))
  request = engines.request(
    context=body["token_ids"], most=body["sampling_params"]["max_tokens"]
  )
  return recorded["reply"], _TURN._replace(
    request=request, sampled=weights_lib.Sampled(version, 0, adapter)
  )


def test_recorded_replies_are_read():
  reply, turn = _recorded("turn", "w.0-0")
  read = vllm.read_turn(reply, turn, {"w.0-0": 0})
  assert len(read.ids) == len(read.logps) == 4 and max(read.logps) < 0
  assert read.versions == (0,) * 4
  reply, turn = _recorded("update", "w.0-0")
  read = vllm.read_turn(reply, turn, {"w.0-0": 0, "w.1-1": 1})
  assert read.versions == (0,) * 12 + (1,) * 138
  reply, turn = _recorded("adapter", "w.1-1")
  assert vllm.read_turn(reply, turn, {"w.1-1": 7}).versions == (7,) * 4
  reply, turn = _recorded("scores", "w.0-0")
  scores = vllm.read_scores(reply, turn.request.token_ids, turn.sampled)
  assert len(scores) == 4 and max(scores) < 0
  message = _recorded("missing", "")[0]["error"]["message"]
  lost = weights_lib.Adapter("w.9-9", pathlib.Path("adapter"))
  assert weights_lib.Sampled("w", 0, lost).is_refused_by(Exception(message))


def test_weights_are_loaded_under_a_hidden_name_while_requests_wait(start):
  engine, server = start(SAID)
  first = len(server.asked)
  engine.set_params(engines.policy().params, 3)
  asked = [each for each in server.asked[first:] if each[0] != "/weight_info"]
  assert [path for path, _ in asked] == [
    "/pause?mode=keep",
    "/update_weight_version",
    LOAD,
    "/update_weight_version",
    "/reset_prefix_cache",
    "/resume",
  ]
  names = [
    body["new_version"] for body in server.bodies("/update_weight_version")
  ]
  run = weights_lib.run_of(names[-1])
  assert names[-2:] == [weights_lib.hidden_name(run), f"{run}.1-3"]
  assert engines.turn(engine).versions == (3, 3)
  scores = engine.scores(engines.PROMPT)[server.url]
  np.testing.assert_allclose(
    scores, policy_scores.log_probs(engines.policy(), engines.PROMPT), atol=0.03
  )


def test_a_turn_that_outlives_an_update_has_the_versions_of_both(start):
  engine, server = start()

  async def update_meanwhile():
    server.hold_at = 5
    turn = asyncio.create_task(engine.generate(engines.request(most=20)))
    await asyncio.to_thread(
      server.wait_until,
      lambda: any(len(r.versions) == 5 for r in server.running.values()),
    )
    await asyncio.to_thread(engine.set_params, engines.policy().params, 4)
    return await turn

  generation = asyncio.run(update_meanwhile())
  assert generation.versions == (0,) * 5 + (4,) * 15
  # Prefixes of the old weights could not be removed, but are not used.
  engines.turn(engine)
  assert engine.counters["shared_tokens"] == 0


@pytest.mark.parametrize(
  ("lost", "size", "message"),
  [
    ("config.json", 0, "has no config.json"),
    ("model.safetensors", 0, "safetensors"),
    ("model.safetensors", 900, "not a whole safetensors file"),
  ],
)
def test_a_folder_that_would_end_the_server_is_not_sent(
  start, monkeypatch, lost, size, message
):
  engine, server = start(SAID)
  right = hf.save

  def lose(folder, *arguments, **settings):
    right(folder, *arguments, **settings)
    content = (folder / lost).read_bytes()
    (folder / lost).unlink()
    if size:
      (folder / lost).write_bytes(content[:size])

  monkeypatch.setattr(hf, "save", lose)
  with pytest.raises(types.EngineError, match=message):
    engine.set_params(engines.policy().params, 1)
  assert len(server.bodies(LOAD)) == 1 and not server.died
  assert engines.turn(engine).versions == (0, 0)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_tied_head_is_not_loaded_on_a_cpu(start, monkeypatch, device):
  """vLLM would keep the old one."""
  monkeypatch.setattr(
    _Changed, "changes", ("device_config", {"device": device})
  )
  a = small_policy.qwen3(fake_sglang.VOCAB)
  tied = hf.Policy(random_models.params(a), a, fake_sglang.tokenizer())
  if device == "cuda":
    engine, _ = start(SAID, start=tied, fake=_Changed)
    assert engines.turn(engine).versions == (0, 0)
    return
  with pytest.raises(types.EngineError, match="keeps the old output head"):
    start(SAID, start=tied, fake=_Changed)


def test_no_reply_of_a_load_that_broke_off_counts(start):
  engine, server = start(SAID, wait=60)
  server.faults[LOAD] = [(500, "EngineCore encountered an issue")]
  seen = []
  answer = server._generate_tokens
  server._answers[GENERATE] = lambda body: (
    seen.append(server.version) or answer(body)
  )
  engine.set_params(engines.policy().params, 1)
  assert engine.counters["server_down"] == 1
  assert engines.turn(engine).versions == (1, 1)
  assert all(name.endswith(("-1", ".hidden")) for name in seen)
  assert len(server.bodies(LOAD)) == 3


def test_a_server_that_dies_of_a_load_gets_the_weights_when_it_is_back(
  start, caplog
):
  engine, server, other = start(SAID, count=2, wait=60)
  right = server._update_weights_from_disk

  def die(body):
    server._update_weights_from_disk = right
    server.needs(False, "an end in the middle of a load")

  server._update_weights_from_disk = die
  engine.set_params(engines.policy().params, 1)
  assert engine.counters["server_down"] == 1
  assert "Does the server's host see" in caplog.text
  assert engines.turn(engine).server == other.url
  server.restart()
  wait_for(lambda: engine._fleet.members[0].is_up)
  assert server.version == other.version
  assert engines.turn(engine, question=1).versions == (1, 1)


def test_a_server_that_loads_is_asked_for_its_health_alone(start, monkeypatch):
  """It names its weights only once it has loaded."""
  monkeypatch.setattr(fleet_lib, "_LOADING_SECONDS", 0.2)
  engine, server = start(SAID)
  server.faults[LOAD] = [lambda value: time.sleep(1.0) or value]
  engine.set_params(engines.policy().params, 1)
  paths = [path for path, _ in server.asked]
  begin = len(paths) - paths[::-1].index(LOAD)
  end = paths.index("/update_weight_version", begin)
  assert {*paths[begin:end]} == {"/health"}
  assert not engine.counters["server_down"]


def test_a_turn_leaves_a_server_whose_engine_died(start):
  engine, first, second = start(SAID, count=2, wait=60)
  first.faults[GENERATE] = [(500, "EngineCore encountered an issue")] * 2
  generation = engines.turn(engine)
  assert (generation.server, generation.versions) == (second.url, (0, 0))
  assert engine.counters["failovers"] == 1


def test_turns_have_the_version_of_the_adapter_that_they_name(start):
  engine, server = start(SAID, flags=ADAPTERS, start=engines.adapted(), wait=20)
  assert engine.adapts
  for version in (1, 2):
    engine.set_params(engines.adapted(version).params, version)
    assert engines.turn(engine).versions == (version, version)
    body = server.bodies(GENERATE)[-1]
    assert body["model"].endswith(f"-{version}")
    np.testing.assert_allclose(
      engine.scores(engines.PROMPT)[server.url],
      policy_scores.log_probs(engines.adapted(version), engines.PROMPT),
      atol=0.03,
    )
  assert len(server.bodies(LOAD)) == 1
  # One that the server has lost is loaded again.
  server.adapters.clear()
  assert engines.turn(engine).versions == (2, 2)
  # A reply of another model does not count.
  server.faults[GENERATE] = [lambda reply: reply | {"model": "policy"}] * 9
  with pytest.raises(types.EngineError, match="'policy', expected the adapter"):
    engines.turn(engine)


def test_an_adapter_that_changes_nothing_stops_the_run(start):
  engine, server = start(
    SAID, flags=ADAPTERS, start=engines.adapted(1), wait=20
  )
  server.serves_base = True
  with pytest.raises(types.EngineError, match="it samples its base"):
    engine.scores(engines.PROMPT)


def test_memory_is_away_until_a_turn_and_weights_precede_the_cache(start):
  engine, server = start(SAID, colocated=True, wait=20)
  assert server.away == {"weights", "kv_cache"}
  assert engines.turn(engine).versions == (0, 0)
  first = len(server.asked)
  engine.free_cache()
  assert server.away and server.version.endswith(".released")
  engine.set_params(engines.policy().params, 1)
  assert engines.turn(engine).versions == (1, 1)
  asked = [each for each, _ in server.asked[first:] if each != "/weight_info"]
  named = "/update_weight_version"
  assert asked == [
    *("/pause?mode=abort", "/reset_prefix_cache", named, "/sleep?level=2"),
    *("/pause?mode=keep", "/wake_up?tags=weights", named, LOAD, named),
    *("/wake_up?tags=kv_cache", "/reset_prefix_cache", "/resume", GENERATE),
  ]
  assert not server.died and not engine.counters["server_down"]


@pytest.mark.parametrize(
  ("group", "values", "message"),
  [
    ("model_config", {"logprobs_mode": "raw_logprobs"}, "--logprobs-mode=proc"),
    ("model_config", {"max_model_len": None}, "max_model_len None"),
    ("model_config", {"enable_sleep_mode": False}, "--enable-sleep-mode"),
    ("parallel_config", {"data_parallel_size": 2}, "data_parallel_size 2"),
    ("parallel_config", {"_api_process_count": 2}, "start several servers"),
    ("aux_output_config", {}, "--enable-return-routed-experts"),
  ],
)
def test_a_server_that_lacks_something_is_refused(
  start, monkeypatch, group, values, message
):
  monkeypatch.setattr(_Changed, "changes", (group, values))
  with pytest.raises(types.EngineError, match=message):
    start(colocated=True, records=True, start=_mixture(), fake=_Changed)


class _Changed(fake_vllm.Server):
  """A server with other settings, or fewer routes."""

  changes: tuple = ()

  def __init__(self, *arguments, **settings):
    super().__init__(*arguments, **settings)
    if self.changes:
      group, values = self.changes
      group_before = self.settings.get(group, {})
      self.settings[group] = group_before | values if values else {}


@pytest.mark.parametrize(
  ("route", "message"),
  [
    (GENERATE, "--enable-scale-out"),
    ("/weight_info", "HTTP 404: Not Found Is it a vLLM server.*serve_vllm.sh"),
    ("/openapi.json", "HTTP 404: Not Found Is it a vLLM server"),
    ("/server_info", "HTTP 404: Not Found Is it a vLLM server"),
  ],
)
def test_a_server_without_a_route_is_refused(start, route, message):
  class Fewer(fake_vllm.Server):
    def __init__(self, *arguments, **settings):
      super().__init__(*arguments, **settings)
      self.routes.remove(route)

  with pytest.raises(types.EngineError, match=message):
    start(fake=Fewer)


@pytest.mark.parametrize(
  ("lora", "routes", "reason"),
  [
    (None, True, "without --enable-lora"),
    (ADAPTERS, False, "without VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
    ({"max_lora_rank": 1}, True, "its --max-lora-rank is 1, the run's rank 2"),
    (ADAPTERS | {"target_modules": ["q_proj"]}, True, "lack v_proj"),
    (ADAPTERS | {"target_modules": ["q_proj", "v_proj"]}, True, ""),
    (ADAPTERS, True, ""),
  ],
)
def test_adapters_that_a_server_cannot_load_are_refused(
  start, lora, routes, reason
):
  engine, _ = start()
  server = engine._fleet.members[0].server
  server.info = server.info | {
    "lora_config": lora,
    "routes": ["/v1/load_lora_adapter"] * routes,
  }
  found = server.adapter_refusal(2, ("q", "v"))
  assert found.endswith(reason) and bool(found) == bool(reason)


@pytest.mark.parametrize(("rank", "flag"), [(1, "8"), (8, "8"), (33, "64")])
def test_a_rank_that_servers_do_not_take_is_rounded_up(rank, flag):
  flags = vllm.adapter_flags(rank, ("q", "v"))
  assert flags[:3] == ["--enable-lora", "--max-lora-rank", flag]
  assert flags[-2:] == ["q_proj", "v_proj"]


def _mixture():
  """Returns a policy with experts and the fake servers' tokenizer."""
  a = random_models.architecture("qwen3-moe", vocab_size=fake_sglang.VOCAB)
  return hf.Policy(random_models.params(a), a, fake_sglang.tokenizer())


def test_experts_of_each_token_are_sent_once_in_an_episode(start):
  engine, server = start(
    fake_sglang.ids("a", "</search>"), start=_mixture(), records=True
  )
  context = engines.PROMPT
  starts = []
  for turn in range(3):
    made = engines.turn(engine, turn=turn, context=context)
    params = server.bodies(GENERATE)[-1]["sampling_params"]
    starts.append(params["routed_experts_prompt_start"])
    context += made.token_ids
    np.testing.assert_array_equal(
      made.experts, fake_sglang.routed(context[:-1])
    )
    context += fake_sglang.ids("b", "c")
  assert starts == [0, 6, 10]


def _file(values):
  file = io.BytesIO()
  np.save(file, values, allow_pickle=True)
  return base64.b64encode(file.getvalue()).decode()


def _huge():
  """Returns a file whose header claims a terabyte."""
  file = io.BytesIO()
  header = {"descr": "|u1", "fortran_order": False, "shape": (10**6, 10**6)}
  np.lib.format.write_array_header_1_0(file, header)
  return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize(
  "value",
  [
    *(None, 7, "", "?", "QUJD", _huge()),
    _file(np.full((8, 2, 2), 0, np.uint8)),
    _file(np.full((8, 2, 2), 9, np.uint8)),
    _file(fake_sglang.routed([1] * 7)),
    _file(np.array([{"an": "object"}])),
    _file(np.ones((8, 2, 2))),
  ],
  ids=[f"case {number}" for number in range(11)],
)
def test_experts_that_cannot_be_right_are_an_error(start, value):
  engine, _ = start(
    fake_sglang.ids("a", "a", "a", "<end>"),
    start=_mixture(),
    records=True,
    faults={GENERATE: [_changed(routed_experts=value)]},
  )
  with pytest.raises(types.EngineError, match="routed_experts"):
    engines.turn(engine, most=4)


def _scored(**values):
  return lambda reply: reply | values


@pytest.mark.parametrize(
  ("fault", "is_refused"),
  [
    (_scored(prompt_logprobs=None), True),
    (_scored(prompt_logprobs=[None]), True),
    (_scored(prompt_logprobs=[None, *[{"0": {"logprob": -1.0}}] * 4]), True),
    (_changed(weight_versions=[{"version": "x", "start": 0, "end": 1}]), True),
    (_scored(), False),
  ],
)
def test_scores_of_other_tokens_or_weights_do_not_count(
  start, fault, is_refused
):
  engine, server = start()
  server.faults[GENERATE] = [fault]
  assert (engine.scores(engines.PROMPT) == {}) == is_refused
  assert engine.counters["unscored"] == is_refused


def test_a_turn_is_cut_to_the_context_before_it_is_sent(start):
  engine, server = start()
  assert engine.max_context == fake_sglang.CONTEXT
  full = (engines.SPACE,) * (fake_sglang.CONTEXT - 3)
  generation = engines.turn(engine, context=full, most=9)
  assert generation.finish is types.Finish.LENGTH
  assert len(generation.token_ids) == 3
  sent = len(server.bodies(GENERATE))
  with pytest.raises(types.EngineError, match="no room.*--max-model-len"):
    engines.turn(engine, context=full + (engines.SPACE,) * 3)
  assert len(server.bodies(GENERATE)) == sent


def test_a_slow_server_has_a_deadline_for_every_control_request(start):
  engine, server = start(SAID)
  client = engine._fleet.members[0].server
  client._patience = 0.2
  for call in (
    functools.partial(client.pause, aborts=False),
    client.resume,
    client.flush_cache,
    client.release_memory,
    functools.partial(client.restore_memory, weights=True, cache=True),
    functools.partial(client.rename, "x"),
    functools.partial(client.unload_adapter, "x"),
    client.alive,
  ):
    server.faults.clear()
    server.faults.default_factory = lambda: ["hang"]
    with pytest.raises(server_lib.UnansweredError, match="within 0.2 seconds"):
      loop.run(call())
  server.faults.clear()
  server.faults.default_factory = list
