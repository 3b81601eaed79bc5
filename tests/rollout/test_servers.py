"""Turns of the SGLang engine, its weights, and servers that die and recover."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import time

import fake_sglang
import jax
import pytest
import sglang_engines as engines
from waits import wait_for

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.host import loop
from anysearch_jax.rollout.servers import fleet as fleet_lib
from anysearch_jax.rollout.servers import server as server_lib
from anysearch_jax.rollout.servers import sglang
from anysearch_jax.rollout.servers import weights as weights_lib

serve = engines.serve


@pytest.mark.parametrize(
  ("said", "finish", "text"),
  [
    (("b", "</search>"), types.Finish.STOP, "b</search>"),
    (("</", "search", ">"), types.Finish.STOP, "</search>"),
    # In more tokens than the server searches for a stop text.
    (("<", "/", "se", "arch", ">"), types.Finish.STOP, "</search>"),
    # The token is kept whole if it continues after the stop text.
    (("b", "</", "answer", ">\n"), types.Finish.STOP, "b</answer>"),
    (("b", "<end>"), types.Finish.END_OF_TURN, "b"),
    (("<end>",), types.Finish.END_OF_TURN, ""),
    (("</", "search") + (" ",) * 6, types.Finish.LENGTH, "</search" + " " * 6),
  ],
)
def test_turn_ends_at_its_stop_text(serve, said, finish, text):
  ids = fake_sglang.ids(*said)
  engine, server = serve(ids)
  generation = engines.turn(engine, most=8)
  assert generation == types.Generation(
    ids,
    tuple(map(fake_sglang.logp, range(len(ids)))),
    text,
    finish,
    (0,) * len(ids),
    server.url,
  )
  assert engine.counters["sampled_tokens"] == len(ids)
  assert engine.counters["dropped_tokens"] == 0


@pytest.mark.parametrize("end", [("</search>",), ("<", "/", "search", ">\n")])
def test_what_a_server_samples_after_the_end_is_dropped(serve, end):
  said = fake_sglang.ids("b", *end)
  engine, server = serve(said)
  engines.overrun(server)
  server.faults["/generate"] = [engines.spans(("", 0, 7), ("", 7, 12))]
  generation = engines.turn(engine, most=12)
  assert generation.token_ids == said
  assert len(generation.logps) == len(said)
  assert generation.versions == (0,) * len(said)
  assert generation.finish is types.Finish.STOP
  assert engine.counters["dropped_tokens"] == 12 - len(said)


def test_every_setting_of_a_request_is_sent(serve):
  sampling = config_lib.SamplingConfig(temperature=0.5, top_p=0.9, top_k=3)
  engine, server = serve(fake_sglang.ids("<end>"), sampling=sampling)
  engines.turn(engine, most=7)
  engines.turn(engine, most=7)
  first, second = server.bodies("/generate")
  seed = first["sampling_params"].pop("sampling_seed")
  assert seed == second["sampling_params"]["sampling_seed"]
  engines.turn(engine, most=7, sample=1)
  other = server.bodies("/generate")[-1]["sampling_params"]["sampling_seed"]
  assert seed != other
  assert first["input_ids"] == list(engines.PROMPT)
  assert first["return_logprob"] is True
  assert first["logprob_start_len"] == -1
  assert first["sampling_params"] == {
    "max_new_tokens": 7,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 3,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "ignore_eos": False,
    "stop": ["</search>", "</answer>"],
    "stop_regex": ["</search>", "</answer>"],
    "stop_token_ids": [fake_sglang.END],
    "skip_special_tokens": False,
    "no_stop_trim": True,
  }


@pytest.mark.parametrize("token", [-1, fake_sglang.VOCAB])
def test_an_id_out_of_the_vocabulary_is_never_sent(serve, token):
  engine, server = serve()
  with pytest.raises(ValueError, match=rf"token {token} .*\[0, 20\)"):
    engines.turn(engine, context=(1, token))
  with pytest.raises(ValueError, match=f"token {token}"):
    engine.scores((1, token))
  assert not server.bodies("/generate")


def test_max_tokens_is_capped_by_the_context(serve):
  engine, server = serve()
  assert engine.max_context == fake_sglang.CONTEXT - 7
  full = (engines.SPACE,) * (engine.max_context - 3)
  generation = engines.turn(engine, context=full, most=9)
  assert len(generation.token_ids) == 3
  assert generation.finish is types.Finish.LENGTH
  with pytest.raises(types.EngineError, match="no room.*--context-length"):
    engines.turn(engine, context=full + (engines.SPACE,) * 3)


async def test_samples_of_a_question_share_a_server_and_questions_are_spread(
  serve,
):
  engine, *servers = serve(fake_sglang.ids("b", "</search>"), count=2)

  async def play(question, sample):
    context = engines.PROMPT
    for turn in range(2):
      generation = await engine.generate(
        engines.request(
          question=question, sample=sample, context=context, turn=turn
        )
      )
      context = (*context, *generation.token_ids, question)
    engine.release(types.Address(0, question, sample))

  await asyncio.gather(*(play(q, s) for q in range(4) for s in range(3)))
  lengths = [len(server.bodies("/generate")) for server in servers]
  assert lengths == [12, 12]
  for place, server in enumerate(servers):
    last = {body["input_ids"][-1] for body in server.bodies("/generate")}
    assert last - {engines.PROMPT[-1]} == {place, place + 2}
  cached = engine.counters["shared_tokens"]
  assert cached >= 2 * 2 * 5 * (len(engines.PROMPT) - 1)
  contexts = 12 * len(engines.PROMPT) + 12 * (len(engines.PROMPT) + 3)
  assert engine.counters["prefilled_tokens"] == contexts - cached
  assert engine.counters["requests"] == 24


def test_a_request_is_sent_again_after_a_broken_connection(serve):
  engine, server = serve(fake_sglang.ids("b", "<end>"))
  server.faults["/generate"] = ["die", (503, "")]
  engine._fleet.members[0].server._retries = 2
  assert engines.turn(engine).text == "b"
  assert len(server.bodies("/generate")) == 3
  assert engine.counters["retries"] == 2


def test_a_server_that_hangs_is_an_error_after_the_deadline(serve):
  engine, server = serve(faults={"/generate": ["hang"]})
  engine._config = dataclasses.replace(engine._config, deadline=0.2)
  with pytest.raises(types.EngineError, match="no turn within 0.2 seconds"):
    engines.turn(engine)


def test_a_turn_that_nobody_waits_for_closes_its_connection(serve):
  """On which a server aborts it."""
  engine, server = serve(seconds=0.05)

  async def run_into_a_timeout():
    async with asyncio.timeout(0.1):
      await engine.generate(engines.request(most=50))

  with pytest.raises(TimeoutError):
    asyncio.run(run_into_a_timeout())
  wait_for(lambda: not server.running)


def test_a_server_that_was_left_paused_is_continued(serve):
  _, server = serve()
  server.answer("/pause_generation", {"mode": "in_place"})
  engine, _ = serve(fake_sglang.ids("<end>"), urls=(server.url,))
  assert len(engines.turn(engine, most=3).token_ids) == 3


@pytest.mark.parametrize(
  ("faults", "message"),
  [
    ({"/health": [(503, "")] * 9}, "/health: tried 2 times, .* HTTP 503"),
    ({"/model_info": ["hang"]}, "/model_info: no answer within 0.5 seconds"),
    ({"/model_info": [(401, "Unauthorized")]}, "HTTP 401: Unauthorized"),
    (
      {"/server_info": [(200, "{}")]},
      "found max_req_input_len None in its server_info",
    ),
  ],
)
def test_a_server_that_cannot_be_used_is_refused(serve, faults, message):
  with pytest.raises(types.EngineError, match=message):
    serve(faults=faults, deadline=0.5)


def test_servers_of_a_quantised_policy_get_no_plain_weights(serve, tmp_path):
  text = '{"quantization_config": {"quant_method": "mxfp4"}}'
  (tmp_path / "config.json").write_text(text)
  with pytest.raises(types.EngineError, match="found quantised weights, exp"):
    serve(start=engines.policy()._replace(source=tmp_path))


@pytest.mark.parametrize("urls", [(), ("localhost:30000",), ("",)])
def test_urls_are_checked(urls):
  with pytest.raises(ValueError, match="servers.urls: found"):
    engines.connect(urls=urls)


def test_server_key_is_sent_and_must_be_set(serve, monkeypatch):
  monkeypatch.delenv("SOME_KEY", raising=False)
  with pytest.raises(ValueError, match="SOME_KEY is not set"):
    engines.connect(api_key_variable="SOME_KEY")
  monkeypatch.setenv("SOME_KEY", "abc")
  config = config_lib.ServersConfig(api_key_variable="SOME_KEY")
  client, _ = server_lib.connect(sglang.SglangServer, config, {})
  assert client.headers["Authorization"] == "Bearer abc"


def test_all_servers_load_weights_and_the_last_folder_remains(serve):
  engine, *servers = serve(fake_sglang.ids("<end>"), count=2)
  before = list(engine.scores(engines.PROMPT).values())
  changed = jax.tree.map(lambda p: p + 1, engines.policy().params)
  engine.set_params(changed, 7)
  after = list(engine.scores(engines.PROMPT).values())
  assert before[0] == before[1] != after[0] == after[1]
  assert engines.turn(engine).versions == (7,)
  for server in servers:
    assert server.version.endswith("-7")
    assert server.last_paused == "in_place"
  # The last folder remains for servers that come back; older ones are removed.
  folder = weights_lib.folder("", [s.url for s in servers])
  assert [str(path) for path in folder.iterdir()] == [
    servers[0].bodies("/update_weights_from_disk")[-1]["model_path"]
  ]
  engine.close()
  assert not folder.exists()


def _meanwhile(engine, server, *call):
  """Returns a turn of 20 tokens, of which 5 were sampled before the call."""

  async def run():
    server.hold_at = 5
    turn = asyncio.create_task(engine.generate(engines.request(most=20)))
    await asyncio.to_thread(
      server.wait_until,
      lambda: any(len(r.versions) == 5 for r in server.running.values()),
    )
    await asyncio.to_thread(*call)
    return await turn

  return asyncio.run(run())


def test_a_turn_that_outlives_an_update_has_the_versions_of_both(serve):
  engine, server = serve()
  update = (engine.set_params, engines.policy().params, 4)
  generation = _meanwhile(engine, server, *update)
  assert generation.versions == (0,) * 5 + (4,) * 15
  # Prefixes of the old weights could not be flushed, but are not used.
  engines.turn(engine)
  assert engine.counters["shared_tokens"] == 0


def test_failed_update_names_the_server_and_what_each_serves(serve):
  engine, good, bad = serve(fake_sglang.ids("<end>"), count=2)
  old = bad.version
  bad.faults["/update_weights_from_disk"] = [
    (400, '{"success": false, "message": "No space left"}')
  ]
  with pytest.raises(types.EngineError) as raised:
    engine.set_params(engines.policy().params, 1)
  text = str(raised.value)
  assert f"{bad.url}/update_weights_from_disk: HTTP 400: No space left" in text
  assert f"{good.url} serves {good.version!r}" in text
  assert f"{bad.url} serves {old!r}" in text
  # Only replies with the old weights count, from the server that has them.
  for question in (0, 1):
    assert engines.turn(engine, question=question).versions == (0,)
  engine.set_params(engines.policy().params, 1)
  assert engines.turn(engine, question=0).versions == (1,)
  assert engines.turn(engine, question=1).versions == (1,)


@pytest.mark.parametrize(
  ("path", "fault"),
  [
    ("/pause_generation", "hang"),
    ("/update_weights_from_disk", "die"),
    ("/update_weights_from_disk", (500, "oops")),
  ],
)
def test_server_is_resumed_after_any_update_failure(serve, path, fault):
  engine, server = serve(fake_sglang.ids("<end>"), wait=60)
  patient = engine._config
  engine._config = dataclasses.replace(patient, deadline=0.3)
  engine._fleet.members[0].server._patience = 0.3
  server.faults[path] = [fault] * 2
  asked = len(server.bodies("/continue_generation"))
  if isinstance(fault, str):  # The server counts as unavailable and is retried.
    engine.set_params(engines.policy().params, 1)
    assert engine.counters["server_down"] >= 1
    version = 1
  else:
    with pytest.raises(types.EngineError, match="did not reach every server"):
      engine.set_params(engines.policy().params, 1)
    folder = weights_lib.folder("", [server.url])
    assert not folder.exists()
    version = 0
  assert len(server.bodies("/continue_generation")) > asked
  engine._config = patient
  assert engines.turn(engine).versions == (version,)


def test_server_that_keeps_its_old_weights_is_detected(serve):
  engine, server = serve()
  right = server._update_weights_from_disk

  def pretend(body):
    return right(body | {"weight_version": server.version})

  server._update_weights_from_disk = pretend
  with pytest.raises(
    types.EngineError, match=r"serves '.*-0', expected '.*-1'"
  ):
    engine.set_params(engines.policy().params, 1)


SAID = fake_sglang.ids("b", "<end>")


def _is(engine, place, state):
  return lambda: engine._fleet.members[place].is_up is state


def test_a_turn_goes_to_another_server_while_its_own_is_down(serve, caplog):
  engine, first, second = serve(SAID, count=2)
  first.kill()
  for question in range(4):
    assert engines.turn(engine, question=question).text == "b"
  assert not first.bodies("/generate")
  assert len(second.bodies("/generate")) == 4
  # After the outage is known, later turns of its questions skip the server.
  assert engine.counters["failovers"] == 1
  assert engine.counters["server_down"] == 1
  assert f"Server {first.url} is down; 1 of 2" in caplog.text


def test_turn_of_a_dead_server_is_sampled_again_as_a_whole(serve):
  engine, first, second = serve(count=2)
  generation = _meanwhile(engine, first, first.kill)
  assert len(generation.token_ids) == 20
  assert generation.versions == (0,) * 20
  (asked,) = second.bodies("/generate")
  assert asked["input_ids"] == list(engines.PROMPT)
  assert engine.counters["sampled_tokens"] == 20


def test_a_server_that_restarts_while_it_is_handed_weights_gets_them_again(
  serve,
):
  engine, server = serve(SAID, wait=60)
  restarted = {"weight_version": "default"}
  server.faults["/model_info"] = [None, lambda reply: restarted]
  engine.set_params(engines.policy().params, 1)
  assert engine.counters["server_down"] == 1
  assert engines.turn(engine).versions == (1, 1)


async def test_turns_wait_for_a_server_that_gets_the_present_weights_first(
  serve, caplog
):
  engine, server = serve(SAID, wait=60)
  engine.set_params(engines.policy().params, 3)
  server.kill()
  before = len(server.asked)
  turns = [
    asyncio.create_task(engine.generate(engines.request(question=q)))
    for q in range(3)
  ]
  await asyncio.to_thread(wait_for, _is(engine, 0, False))
  await asyncio.to_thread(wait_for, lambda: engine.counters["waits"] == 3)
  server.restart()
  found = await asyncio.gather(*turns)
  asked = server.asked[before:]
  assert [g.versions for g in found] == [(3, 3)] * 3
  assert server.version.endswith("-3")
  paths = [path for path, _ in asked]
  update = paths.index("/update_weights_from_disk")
  assert paths.index("/generate") > update
  assert "/health" in paths[:update]
  assert engine.counters["server_down"] == 1
  assert engine.counters["failovers"] == 3
  assert "turns wait for one, up to 60 seconds (servers.wait)" in caplog.text
  assert "is up; 1 of 1 are up." in caplog.text


def test_weights_reach_a_server_that_was_down_when_they_were_new(serve):
  engine, first, second = serve(SAID, count=2, wait=60)
  first.kill()
  engine.set_params(engines.policy().params, 5)
  assert second.version.endswith("-5")
  assert engines.turn(engine, question=0).versions == (5, 5)
  first.restart()
  wait_for(_is(engine, 0, True))
  assert first.version == second.version
  # The first question stays where its prefix is.
  assert engines.turn(engine, question=0).server == second.url
  assert engines.turn(engine, question=1) == dataclasses.replace(
    engines.turn(engine, question=0), server=first.url
  )


def test_error_without_servers_states_bound_and_reasons(serve):
  engine, *servers = serve(SAID, count=2, wait=0.1)
  for server in servers:
    server.kill()
  with pytest.raises(types.EngineError) as raised:
    engines.turn(engine)
  said = str(raised.value)
  assert "No server is up for 0.1 seconds (servers.wait)" in said
  assert all(f"{server.url} is " in said for server in servers)
  assert "Does SGLang run there" in said
  # The bound applies to the outage, not to each turn.
  engine._fleet.wait = 3600.0
  engine._fleet.all_down_since -= 3601.0
  with pytest.raises(types.EngineError, match="for 3600 seconds"):
    engines.turn(engine)


@pytest.mark.parametrize(
  ("fault", "met"),
  [("die", "RemoteProtocolError"), ((429, "busy"), "HTTP 429: busy")],
)
def test_turn_that_no_server_answers_fails(serve, fault, met):
  """The turn may itself crash servers: each one is healthy when it is asked."""
  engine, server = serve(SAID, wait=60)
  server.faults["/generate"] = [fault] * 99
  with pytest.raises(types.EngineError, match=f"tried 2 times, .* met {met}"):
    engines.turn(engine)
  asked = fleet_lib._MOVES + 1
  assert len(server.bodies("/generate")) == 2 * asked
  assert engine.counters["failovers"] == asked - 1
  server.faults.clear()
  assert engines.turn(engine).text == "b"


def test_turns_move_from_a_machine_that_left_the_network(serve, monkeypatch):
  """Connections stay open, but no request is answered."""
  monkeypatch.setattr(fleet_lib, "_CHECK_SECONDS", 0.01)
  engine, first, second = serve(SAID, count=2)
  # From here on, health checks are not answered either.
  engine._fleet.members[0].server._patience = 0.1
  first.faults["/generate"] = ["hang"]
  first.faults["/model_info"] = first.faults["/health"] = ["hang"] * 9999
  assert engines.turn(engine, question=0).text == "b"
  assert len(second.bodies("/generate")) == 1
  assert engine.counters["server_down"] == 1


def test_a_frozen_server_costs_a_hand_over_seconds_once(serve, monkeypatch):
  """It accepts connections and never answers, like a stopped process."""
  monkeypatch.setattr(fleet_lib, "_ANSWER_SECONDS", 4.0)
  engine, first, second = serve(SAID, count=2, wait=60)
  engine._fleet.members[0].server._patience = 12.0
  first.faults = collections.defaultdict(lambda: ["hang"] * 99)
  began = time.monotonic()
  for version in (1, 2, 3):
    assert engine.scores(engines.PROMPT).keys() == {second.url}
    engine.set_params(engines.policy().params, version)
  assert time.monotonic() - began < 11.0  # Thrice is 12.
  assert engine.counters["server_down"] == 1
  first.faults.default_factory = list
  first.faults.clear()
  wait_for(_is(engine, 0, True))
  assert first.version == second.version
  assert engine.scores(engines.PROMPT).keys() == {first.url, second.url}


@pytest.mark.parametrize("stops", [False, True])
def test_a_server_that_loads_is_awaited_while_it_answers(
  serve, monkeypatch, caplog, stops
):
  """A stopped process holds the others for less than `servers.deadline`."""
  monkeypatch.setattr(fleet_lib, "_LOADING_SECONDS", 0.2)
  engine, first, second = serve(SAID, count=2, wait=60)
  engine._config = dataclasses.replace(engine._config, deadline=600.0)
  engine._fleet.members[0].server._patience = 0.5
  first.faults["/update_weights_from_disk"] = [
    "hang" if stops else lambda value: time.sleep(1.0) or value
  ]
  if stops:
    first.faults["/model_info"] = [None] + ["hang"] * 9999
  began = time.monotonic()
  engine.set_params(engines.policy().params, 1)
  assert time.monotonic() - began < 30
  assert f"Waits for {first.url}, which still loads weights." in caplog.text
  assert engine.counters["server_down"] == stops
  assert (first.version == second.version) != stops


def test_server_that_does_not_load_the_weights_is_not_used(serve):
  engine, server = serve(SAID, wait=60)
  server.kill()
  server.faults["/update_weights_from_disk"] = [
    (400, '{"success": false, "message": "No space left"}')
  ]
  server.restart()
  before = len(server.bodies("/generate"))
  assert engines.turn(engine).versions == (0, 0)
  # One reply came from the weights of the server's folder and did not count.
  assert len(server.bodies("/generate")) <= before + 2


def test_a_server_that_comes_back_smaller_stays_down(serve, monkeypatch):
  engine, server = serve(SAID, wait=0.5)
  server.kill()
  monkeypatch.setattr(fake_sglang, "CONTEXT", 40)

  async def run():
    turn = asyncio.create_task(engine.generate(engines.request()))
    await asyncio.to_thread(wait_for, _is(engine, 0, False))
    server.restart()
    await turn

  with pytest.raises(
    types.EngineError, match="came back with contexts of 33 tokens, expected 57"
  ):
    asyncio.run(run())


def test_servers_of_another_run_are_not_used(serve):
  engine, first, _ = serve(SAID, count=2)
  other, _ = serve(urls=(first.url,))
  theirs = first.version
  with pytest.raises(types.EngineError, match="did another run hand weights"):
    engines.turn(engine, question=0)
  loop.run(engine._fleet._check_member(engine._fleet.members[0]))
  loop.run(engine._fleet._check_member(engine._fleet.members[0]))
  assert _is(engine, 0, False)()
  assert first.version == theirs
  # Its questions go to the other server.
  assert engines.turn(engine, question=0).versions == (0, 0)


def test_bug_in_a_health_check_is_raised(serve, monkeypatch):
  engine, server = serve(SAID, wait=3600)

  async def broken(self, member):
    raise ZeroDivisionError("a bug")

  monkeypatch.setattr(fleet_lib.Fleet, "_check_member", broken)
  server.kill()
  with pytest.raises(ZeroDivisionError):
    engines.turn(engine)
  loop.run(engine._fleet.stop())
