"""The engine over OpenAI's text completions, against a fake server."""

from __future__ import annotations

import asyncio
import contextlib
import json

import fake_openai
import hypothesis
import numpy as np
import pytest
import scripted
from fake_openai import completion
from hypothesis import strategies as st

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.agent import agent as agent_lib
from anysearch_jax.rollout import completions, plain_text

PLAIN = plain_text.PlainText()
STOP = ("</search>", "</answer>")
KEY = "s3cret-of-the-model"
ADDRESS = types.Address(3, 5, 1, variant=7)


@contextlib.contextmanager
def engine_at(url, codec=PLAIN, **values):
  sampling = config_lib.SamplingConfig(**values.pop("sampling", {}))
  values = {"model": "m", "deadline": 20.0, "concurrency": 4} | values
  made = completions.CompletionsEngine(url, codec, sampling=sampling, **values)
  try:
    yield made
  finally:
    made.close()


def generate(engine, prompt="Who?", *, max_tokens=50, stop=STOP, turn=2):
  ids = tuple(PLAIN.encode(prompt))
  request = types.GenerateRequest(ADDRESS, turn, ids, max_tokens, stop)
  return asyncio.run(engine.generate(request))


def turn(reply, **kwargs):
  """Returns the turn that a server's reply gives."""
  with fake_openai.served(reply) as server, engine_at(server.url) as engine:
    return generate(engine, **kwargs)


def test_request_carries_prompt_limits_key_and_seed(monkeypatch):
  monkeypatch.setenv("MODEL_KEY", KEY)
  sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": 20}
  with (
    fake_openai.served(completion("yes")) as server,
    engine_at(
      server.url, key_variable="MODEL_KEY", sampling=sampling
    ) as engine,
  ):
    for number in (2, 2, 3):
      generate(engine, "Who wrote “Emma”? <|im_end|>", turn=number)
    where, headers, body = server.asked[0]
    seeds = [asked[2].pop("seed") for asked in server.asked]
  assert where == "/v1/completions"
  assert headers["Authorization"] == f"Bearer {KEY}"
  assert body == {
    "model": "m",
    "prompt": "Who wrote “Emma”? <|im_end|>",
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 50,
    "stop": list(STOP),
    **sampling,
  }
  assert seeds[0] == seeds[1] != seeds[2]
  assert engine.counters == {
    "requests": 3,
    "prompt_tokens": 27,
    "sampled_tokens": 15,
  }


@pytest.mark.parametrize(
  ("reply", "text", "finish"),
  [
    # vLLM and SGLang name the stop text that they removed.
    (completion("<search> a ", stop_reason="</search>"), "<search> a </search>",
     types.Finish.STOP),
    (completion("<answer> b", matched_stop="</answer>"), "<answer> b</answer>",
     types.Finish.STOP),
    # They also say that the model ended the turn, even with an open tag.
    (completion("<search> a", stop_reason=None), "<search> a",
     types.Finish.END_OF_TURN),
    (completion("<search> a", matched_stop=151645), "<search> a",
     types.Finish.END_OF_TURN),
    # Others say nothing: the tag that is open tells.
    (completion("<think> x </think> <search> a "),
     "<think> x </think> <search> a </search>", types.Finish.STOP),
    (completion("no <search>, so <answer> b"), "no <search>, so <answer> b"
     "</answer>", types.Finish.STOP),
    (completion("I do not know."), "I do not know.", types.Finish.END_OF_TURN),
    (completion(""), "", types.Finish.END_OF_TURN),
    (completion("I <|begin_query|>emma"), "I <|begin_query|>emma<|end_query|>",
     types.Finish.STOP),
    # Some keep the stop text, or go on after it.
    (completion("<search> a </search>"), "<search> a </search>",
     types.Finish.STOP),
    (completion("<search> a </search> <information>", "length"),
     "<search> a </search>", types.Finish.STOP),
    (completion("<search> a", "length"), "<search> a", types.Finish.LENGTH),
  ],
)  # fmt: skip
def test_stop_text_is_restored(reply, text, finish):
  found = turn(reply, stop=(*STOP, "<|end_query|>"))
  assert (found.text, found.finish) == (text, finish)
  assert PLAIN.decode(found.token_ids) == text
  assert set(found.logps) == {0.0} and set(found.versions) == {0}
  assert len(found.logps) == len(found.versions) == len(found.token_ids)


def test_local_count_limits_a_turn():
  found = turn(completion("x" * 100), max_tokens=5)
  assert (found.text, found.finish) == ("x" * 20, types.Finish.LENGTH)
  assert len(found.token_ids) == 5


@pytest.mark.parametrize(
  ("reply", "status", "sentence"),
  [
    ({"error": {"message": f"bad key {KEY}"}}, 401, "HTTP 401: bad key ..."),
    ({"error": {"message": "no model m"}}, 404, "no model m"),
    (b"oops", 500, "HTTP 500"),
    (b"<html>", 200, "expected JSON"),
    ({"choices": []}, 200, "expected a text at choices"),
    ({"choices": [{"message": {}}]}, 200, "expected a text at choices"),
    (completion(None), 200, "expected a text at choices"),
    (completion("x", "content_filter"), 200, "finish_reason"),
    (completion("", "length"), 200, "empty text"),
  ],
)
def test_invalid_reply_is_an_engine_error(reply, status, sentence, monkeypatch):
  monkeypatch.setenv("MODEL_KEY", KEY)
  with (
    fake_openai.served(reply, status) as server,
    engine_at(server.url, key_variable="MODEL_KEY") as engine,
    pytest.raises(types.EngineError) as raised,
  ):
    generate(engine)
  assert sentence in str(raised.value) and KEY not in str(raised.value)


def test_unreachable_server_fails_within_the_deadline():
  with (
    engine_at("http://127.0.0.1:9/v1", deadline=1.0) as engine,
    pytest.raises(types.EngineError, match="OpenAI's completions run there"),
  ):
    asyncio.run(engine.probe())


@pytest.mark.parametrize(
  ("url", "values", "sentence"),
  [
    ("http://user:word@host/v1", {}, "url is invalid"),
    ("http://host/v1", {"model": ""}, "name of a model"),
    ("http://host/v1", {"key_variable": "NO_KEY"}, "NO_KEY is not set"),
  ],
)
def test_invalid_settings_are_rejected(url, values, sentence, monkeypatch):
  monkeypatch.delenv("NO_KEY", raising=False)
  with pytest.raises(ValueError, match=sentence) as raised:
    with engine_at(url, **values):
      pass
  assert "word" not in str(raised.value)


def said(body):
  """Plays a model that searches once, and asks for more if it may not."""
  assert "<|im_end|>" not in body["prompt"]
  found = "A novel by Jane Austen." in body["prompt"]
  text = "<answer> Jane" if found else "<think> look </think> <search> emma "
  return 200, completion(text)


def test_episode_is_one_text_that_grows():
  passage = types.Passage("7", "Emma", "A novel by Jane Austen. <|im_end|>")
  retriever = scripted.Retriever({"emma": [passage]})
  with (
    fake_openai.served(said) as server,
    engine_at(server.url) as engine,
    agent_lib.Agent(
      engine,
      PLAIN,
      retriever,
      config=config_lib.EpisodeConfig(max_generated=500, max_context=5000),
      slots=2,
    ) as agent,
  ):
    reply = agent.ask("Who wrote Emma <|im_end|>?", budget=1)
    refused = agent.ask("Who wrote Persuasion?", budget=0)
  assert reply.answer == "Jane" and reply.searches == 1
  assert refused.searches == 0 and refused.outcome is types.Outcome.INVALID
  first, second = (asked[2]["prompt"] for asked in server.asked[:2])
  assert second.startswith(first + "<think> look </think> <search> emma ")
  json.dumps(reply.trajectory.logps.tolist(), allow_nan=False)


def test_server_tokenizes_a_transcript_to_the_same_ids(real_tokenizer):
  codec = real_tokenizer
  _, ids = codec.render("Who wrote “Emma”?\n\n  東京 <search> x </search>")
  ids += codec.encode("<think> é\n\n</think>") + [codec.end_of_turn_id]
  text = codec.transcript(ids)
  # A server adds BOS to a text if the model's tokenizer does.
  assert codec.hf.backend_tokenizer.encode(text).ids == ids


@hypothesis.given(st.lists(st.text(), max_size=5))
def test_decoding_gives_what_was_encoded(texts):
  ids = [i for text in texts for i in PLAIN.encode(text)]
  assert PLAIN.decode(ids) == PLAIN.transcript(ids) == "".join(texts)
  assert np.array(ids, np.int32).tolist() == ids
  assert PLAIN.end_of_turn_id not in ids


def test_a_token_is_four_ascii_characters_or_one_other():
  text = "The company was founded in 1946."
  assert len(PLAIN.encode(text)) == len(text) // 4
  assert len(PLAIN.encode("東京で")) == 3
  assert PLAIN.decode([PLAIN.end_of_turn_id]) == ""
