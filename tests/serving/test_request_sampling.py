"""Temperature, top-p and stop texts of a request, by the official client."""

from __future__ import annotations

import openai
import pytest
import scripted
from scripted import answer
from served_agent import SERVED, served

from anysearch_jax import config as config_lib
from anysearch_jax.serving import fields

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Who?"}]}


def drawn(ask, served_as=SERVED):
  """Returns how the engine was asked to draw, and the answer to `ask`."""
  engine = scripted.Engine(lambda _: answer("Jane Austen, 1815"))
  with served(engine=engine, served=served_as) as (url, _):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    found = ask(client)
  (request,) = engine.requests
  return (request.temperature, request.top_p, request.top_k), found


@pytest.mark.parametrize(
  "asked, expected",
  [
    ({}, (None, None, None)),
    ({"temperature": 1, "top_p": 1.0}, (None, None, None)),
    ({"temperature": 0}, (0.0, 1.0, 0)),
    ({"temperature": 0.3, "top_p": 0.5}, (0.3, 0.5, 0)),
  ],
)
def test_both_apis_pass_a_requests_own_sampling_to_the_engine(asked, expected):
  by_chat, _ = drawn(lambda c: c.chat.completions.create(**CHAT, **asked))
  by_response, response = drawn(
    lambda c: c.responses.create(model="tiny", input="Who?", **asked)
  )
  assert by_chat == by_response == expected
  assert response.temperature == asked.get("temperature", 1)
  assert response.top_p == asked.get("top_p", 1)


def test_what_a_request_does_not_name_is_the_services():
  own = config_lib.SamplingConfig(temperature=0.7, top_p=0.9, top_k=5)
  served_as = fields.Served("tiny", sampling=own)
  found, response = drawn(
    lambda c: c.responses.create(model="tiny", input="Who?", top_p=0.5),
    served_as,
  )
  assert found == (0.7, 0.5, 5)
  assert (response.temperature, response.top_p) == (0.7, 0.5)


@pytest.mark.parametrize(
  "stop, expected",
  [
    (",", "Jane Austen"),
    ([" 18", "Aus"], "Jane "),
    (["?"], "Jane Austen, 1815"),
    (["Jane"], ""),
  ],
)
def test_answer_is_cut_before_the_first_stop_text(stop, expected):
  _, chat = drawn(lambda c: c.chat.completions.create(**CHAT, stop=stop))
  assert chat.choices[0].message.content == expected
  _, chunks = drawn(
    lambda c: list(c.chat.completions.create(**CHAT, stop=stop, stream=True))
  )
  deltas = [chunk.choices[0].delta.content or "" for chunk in chunks]
  assert "".join(deltas) == expected
  _, response = drawn(
    lambda c: c.responses.create(
      model="tiny", input="Who?", extra_body={"stop": stop}
    )
  )
  assert response.output_text == expected
  assert response.output[-1].type == "message"
