"""Language models behind retrievers: engine turns and server calls."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json

import fake_openai
import pytest
import scripted
import small_run

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.generative_retrieval import text_model
from anysearch_jax.rollout.jax_engine import engine as engine_lib

ADDRESS = types.Address(3, 5, 1, variant=7)
KEY = "s3cret-of-the-model"


def model(engine, codec=scripted.CODEC, *, stop=("</answer>",), **values):
  made = text_model.EngineModel(config_lib.TextModelConfig(**values), stop=stop)
  made.attach(engine, codec)
  return made


def complete(asked, prompt="say", address=ADDRESS, turn=2):
  return asyncio.run(asked.complete(prompt, address=address, turn=turn))


def test_engine_reply_has_an_address_of_its_own():
  engine = scripted.Engine(lambda request: "said</answer>and more")
  asked = model(engine, max_tokens=40)
  assert complete(asked, "say <|end|>") == "said"
  (request,) = engine.requests
  # Control tokens in passages are neutralised in the prompt.
  _, ids = scripted.CODEC.render("say <\u200b|end|>")
  assert request.token_ids == tuple(ids)
  assert (request.max_tokens, request.stop) == (40, ("</answer>",))
  episodes = {ADDRESS._replace(variant=v) for v in range(100)}
  assert request.address not in episodes
  assert request.turn not in range(1000)
  # The episode is released first, so that it holds no slot while it waits.
  assert engine.released == [ADDRESS, request.address]
  assert asked.counters == {
    "calls": 1,
    "input_tokens": len(ids),
    "output_tokens": len("said</answer>"),
  }


def test_slow_engine_fails_the_call_and_is_released():
  engine = scripted.Engine(lambda request: "late", seconds=lambda: 30.0)
  with pytest.raises(types.EngineError, match=r"within 0.01 seconds"):
    complete(model(engine, deadline=0.01))
  assert engine.released[-1] == engine.requests[0].address


def test_second_calls_do_not_deadlock_on_slots():
  """Two slots, two episodes that search, and a second call of each."""
  parts = small_run.parts()
  policy, config = parts["policy"], small_run.CONFIG.engine
  engine = engine_lib.JaxEngine(
    policy,
    config=dataclasses.replace(config, slots=2),
    sampling=config_lib.SamplingConfig(),
    seed=0,
  )
  asked = model(
    engine,
    policy.tokenizer,
    stop=("</search>", "</answer>"),
    max_tokens=8,
    deadline=120.0,
  )

  async def episode(question):
    address = types.Address(0, question, 0)
    _, ids = policy.tokenizer.render(f"budget {question} question ?")
    said = []
    try:
      for turn in range(3):
        request = types.GenerateRequest(
          address, turn, tuple(ids), 6, ("</search>", "</answer>")
        )
        ids += (await engine.generate(request)).token_ids
        held.add(address)
        while len(held) < 2:  # Both slots are taken before the first search.
          await asyncio.sleep(0)
        said.append(await asked.complete("found", address=address, turn=turn))
    finally:
      engine.release(address)
    return ids, said

  async def play(*questions):
    return await asyncio.gather(*map(episode, questions))

  held = set()
  together = asyncio.run(play(1, 2))
  # The result does not depend on concurrent episodes.
  assert together == asyncio.run(play(2, 1))[::-1]
  assert together[0][1] != together[1][1]
  engine.set_params(policy.params, 1)  # Raises if a slot is still held.


def endpoint(url, **values):
  values = {"name": "m", "deadline": 20.0} | values
  c = config_lib.TextModelConfig(**values)
  return contextlib.closing(text_model.EndpointModel(url, c))


def said(text, **more):
  return {"choices": [{"message": {"role": "assistant", "content": text}}]} | (
    more
  )


@pytest.mark.parametrize("path", ["/", "/chat/completions"])
def test_server_request_carries_the_api_key(path, monkeypatch):
  monkeypatch.setenv("MODEL_KEY", KEY)
  usage = {"prompt_tokens": 11, "completion_tokens": 4}
  with (
    fake_openai.served(said("hi \ud83d", usage=usage)) as server,
    endpoint(
      server.url + path,
      key_variable="MODEL_KEY",
      temperature=0.7,
      top_p=0.9,
      max_tokens=33,
    ) as asked,
  ):
    # Unpaired surrogates are replaced: no tokenizer can encode them.
    assert complete(asked, "say ü") == "hi ?"
    complete(asked, "say ü")
    complete(asked, "say ü", turn=3)
    complete(asked, "say ü", address=ADDRESS._replace(variant=0))
    where, headers, body = server.asked[0]
    assert where == "/v1/chat/completions"
    assert headers["Authorization"] == f"Bearer {KEY}"
    seeds = [each[2].pop("seed") for each in server.asked]
    assert body == {
      "model": "m",
      "messages": [{"role": "user", "content": "say ü"}],
      "temperature": 0.7,
      "top_p": 0.9,
      "max_tokens": 33,
    }
    # A function of the address, without the part that only separates episodes.
    assert seeds[0] == seeds[1] == seeds[3] != seeds[2]
    assert asked.counters == {
      "calls": 4,
      "input_tokens": 44,
      "output_tokens": 16,
    }
    assert KEY not in json.dumps(asked.identity())


@pytest.mark.parametrize(
  ("status", "reply", "sentence"),
  [
    (401, {"error": {"message": f"bad key {KEY}"}}, "HTTP 401: bad key ..."),
    (200, said(None), "expected a text at choices"),
  ],
)
def test_invalid_reply_fails_with_a_message(
  status, reply, sentence, monkeypatch
):
  monkeypatch.setenv("MODEL_KEY", KEY)
  with (
    fake_openai.served(reply, status) as server,
    endpoint(server.url, key_variable="MODEL_KEY") as asked,
    pytest.raises(types.RetrievalError) as raised,
  ):
    complete(asked)
  assert sentence in str(raised.value)
  assert KEY not in str(raised.value)
