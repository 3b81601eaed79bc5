"""Turns of the SGLang engine: requests to servers and their replies."""

from __future__ import annotations

import asyncio
import dataclasses
import socket

import fake_sglang
import pytest
import sglang_engines as engines

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.rollout.sglang import server as sglang_server

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
  engine, _ = serve(ids)
  generation = engines.turn(engine, most=8)
  assert generation == types.Generation(
    ids,
    tuple(map(fake_sglang.logp, range(len(ids)))),
    text,
    finish,
    (0,) * len(ids),
  )
  assert engine.counters["sampled_tokens"] == len(ids)
  assert engine.counters["dropped_tokens"] == 0


@pytest.mark.parametrize("end", [("</search>",), ("<", "/", "search", ">\n")])
def test_what_a_server_samples_after_the_end_is_dropped(serve, end):
  said = fake_sglang.ids("b", *end)
  engine, server = serve(said)
  engines.overrun(server)
  generation = engines.turn(engine, most=12)
  assert generation.token_ids == said
  assert len(generation.logps) == len(generation.versions) == len(said)
  assert generation.finish is types.Finish.STOP
  assert engine.counters["dropped_tokens"] == 12 - len(said)


def test_every_setting_of_a_request_is_sent(serve):
  sampling = config_lib.SamplingConfig(temperature=0.5, top_p=0.9, top_k=0)
  engine, server = serve(fake_sglang.ids("<end>"), sampling=sampling)
  engines.turn(engine, most=7)
  engines.turn(engine, most=7)
  first, second = server.bodies("/generate")
  assert first["rid"] != second["rid"]
  assert first["input_ids"] == list(engines.PROMPT)
  assert first["return_logprob"] is True
  assert first["logprob_start_len"] == -1
  assert first["sampling_params"] == {
    "max_new_tokens": 7,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": -1,
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


def test_top_k_is_sent_unchanged(serve):
  sampling = config_lib.SamplingConfig(temperature=0.0, top_k=3)
  engine, server = serve(fake_sglang.ids("<end>"), sampling=sampling)
  engines.turn(engine)
  assert server.bodies("/generate")[0]["sampling_params"]["top_k"] == 3


@pytest.mark.parametrize("token", [-1, fake_sglang.VOCAB, 10**9])
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


def test_samples_of_a_question_share_a_server_and_questions_are_spread(serve):
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

  async def play_all():
    await asyncio.gather(*(play(q, s) for q in range(4) for s in range(3)))

  asyncio.run(play_all())
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


def test_rollouts_each_have_their_own_event_loop(serve):
  engine, server = serve(fake_sglang.ids("b", "<end>"))
  first, second = engines.turn(engine), engines.turn(engine)
  assert first == second
  assert len(server.bodies("/generate")) == 2


def test_retry_after_a_broken_connection_has_a_new_request_id(serve):
  engine, server = serve(fake_sglang.ids("b", "<end>"))
  server.faults["/generate"] = ["die", (503, "")]
  engine._servers[0]._retries = 2
  assert engines.turn(engine).text == "b"
  rids = [body["rid"] for body in server.bodies("/generate")]
  assert len(set(rids)) == 3
  assert engine.counters["retries"] == 2
  # The server may still be working on the unanswered requests.
  server.wait_until(lambda: len(server.bodies("/abort_request")) == 2, 5)
  aborted = {body["rid"] for body in server.bodies("/abort_request")}
  assert aborted == set(rids[:2])


def test_a_server_that_dies_between_turns_is_an_error(serve):
  engine, server = serve(fake_sglang.ids("<end>"))
  engines.turn(engine)
  server.__exit__()
  with pytest.raises(types.EngineError, match="Is an SGLang server running"):
    engines.turn(engine)


def test_a_server_that_hangs_is_an_error_after_the_deadline(serve):
  engine, server = serve(faults={"/generate": ["hang"]})
  engine._config = dataclasses.replace(engine._config, deadline=0.2)
  with pytest.raises(types.EngineError, match="no turn within 0.2 seconds"):
    engines.turn(engine)
  (rid,) = [body["rid"] for body in server.bodies("/generate")]
  server.wait_until(lambda: server.bodies("/abort_request"), 5)
  assert server.bodies("/abort_request") == [{"rid": rid}]


def test_cancelled_turn_is_aborted_on_its_server(serve):
  engine, server = serve(seconds=0.05)

  async def give_up():
    turn = asyncio.create_task(engine.generate(engines.request(most=50)))
    await asyncio.to_thread(server.wait_until, lambda: server.running)
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
      await turn

  asyncio.run(give_up())
  server.wait_until(lambda: not server.running, 1)


def test_closing_sends_the_aborts_that_are_due(serve):
  engine, server = serve(seconds=0.05)

  async def run_into_a_timeout():
    async with asyncio.timeout(0.1):
      await engine.generate(engines.request(most=50))

  with pytest.raises(TimeoutError):
    asyncio.run(run_into_a_timeout())
  engine.close()
  assert len(server.bodies("/abort_request")) == 1


def test_a_server_that_was_left_paused_is_continued(serve):
  _, server = serve()
  server.answer("/pause_generation", {"mode": "in_place"})
  engine, _ = serve(fake_sglang.ids("<end>"), urls=(server.url,))
  assert len(engines.turn(engine, most=3).token_ids) == 3


@pytest.mark.parametrize(
  ("faults", "message"),
  [
    ({"/health": [(503, "")] * 2}, "/health: tried 2 times, .* HTTP 503"),
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


def test_missing_server_error_names_url_and_remedy():
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(
      types.EngineError, match=rf"{url}.*ConnectError.*launch/serve_sglang.sh"
    ):
      engines.connect(urls=(url,))


@pytest.mark.parametrize("urls", [(), ("localhost:30000",), ("",)])
def test_urls_are_checked(urls):
  with pytest.raises(ValueError, match="sglang.urls: found"):
    engines.connect(urls=urls)


def test_server_key_is_sent_and_must_be_set(serve, monkeypatch):
  monkeypatch.delenv("SOME_KEY", raising=False)
  with pytest.raises(ValueError, match="SOME_KEY is not set"):
    engines.connect(api_key_variable="SOME_KEY")
  monkeypatch.setenv("SOME_KEY", "abc")
  config = config_lib.SglangConfig(api_key_variable="SOME_KEY")
  client, _ = sglang_server.connect(config, {})
  assert client.headers["Authorization"] == "Bearer abc"
