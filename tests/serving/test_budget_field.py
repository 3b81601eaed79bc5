"""The field `budget` of requests: caps in several units, over HTTP."""

from __future__ import annotations

import dataclasses

import openai
import pytest
from served_agent import SERVED, served

from anysearch_jax import budgets

CHAT = {"messages": [{"role": "user", "content": "Who?"}]}


@pytest.fixture(scope="module")
def client():
  with served() as (url, _):
    yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def test_budget_of_several_units_holds_and_is_told(client):
  asked = {"model": "tiny", "messages": CHAT["messages"]}
  both = client.chat.completions.create(
    **asked, extra_body={"budget": "searches=1,tokens=900,seconds=30"}
  )
  told = both.choices[0].anysearch
  assert told["budget"] == 1 and told["outcome"] == "answered"
  assert told["caps"] == {"tokens": 900, "seconds": 30}
  few = client.chat.completions.create(
    **asked, extra_body={"budget": "tokens=20"}
  )
  assert few.choices[0].anysearch["budget"] == 2
  assert few.usage.completion_tokens <= 20


def test_budget_of_dollars_needs_prices(client):
  body = CHAT | {"budget": "dollars=0.02"}
  with pytest.raises(openai.BadRequestError, match="has no prices"):
    client.post("/chat/completions", body=body, cast_to=object)
  priced = dataclasses.replace(SERVED, prices=budgets.Prices(search=10.0))
  with served(served=priced) as (url, _):
    one = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    for dollars, searches in ((0.02, 1), (0.002, 0)):
      found = one.chat.completions.create(
        model="tiny",
        messages=CHAT["messages"],
        extra_body={"budget": f"dollars={dollars}"},
      )
      assert found.choices[0].anysearch["searches"] == searches


@pytest.mark.parametrize(
  "fields",
  [
    {"budget": 3},
    {"budget": "tokens=many"},
    {"budget": "searches=6"},
    {"budget": "searches=1", "max_tool_calls": 2},
  ],
)
def test_budget_that_cannot_be_honoured_is_refused(client, fields):
  with pytest.raises(openai.BadRequestError) as refused:
    client.post("/chat/completions", body=CHAT | fields, cast_to=object)
  assert refused.value.body["param"] == "budget"
  assert "expected" in refused.value.body["message"]
