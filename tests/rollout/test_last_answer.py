"""A model that gives no answer is asked once more, with what it found."""

from __future__ import annotations

import contextlib

import chat_endpoint
import pytest
import scripted
from chat_endpoint import Message

from anysearch_jax import budgets, types
from anysearch_jax import config as config_lib
from anysearch_jax.agent import agent as agent_lib
from anysearch_jax.rollout import chat_completions, plain_text

PLAIN = plain_text.PlainText()
LEASE = types.Passage("1", "Lease", "It ends in June 2027.")
QUESTION = "When does the lease end?"
LAST = "Answer the question from the passages"


@contextlib.contextmanager
def asked(behaviour, *, mode, budget=1, faults=(), **limits):
  """Yields the reply to a question, and the server."""
  config = config_lib.EpisodeConfig(
    prompts=f"documents_{mode}",
    turn_deadline=10.0,
    **({"max_generated": 600, "max_context": 6000} | limits),
  )
  with chat_endpoint.served(behaviour, faults=faults) as server:
    engine = chat_completions.ChatEngine(
      server.url,
      PLAIN,
      mode=mode,
      model="scripted",
      sampling=config_lib.SamplingConfig(),
      deadline=10.0,
      concurrency=1,
    )
    retriever = scripted.Retriever({"lease end": [LEASE]})
    with agent_lib.Agent(
      engine, PLAIN, retriever, config=config, slots=1
    ) as agent:
      yield agent.ask(QUESTION, budget=budget), server
    engine.close()


def searching(reply, *, mode):
  """Returns a model that searches once, and then replies something."""

  def say(body):
    messages = body["messages"]
    if messages[0]["content"].startswith(LAST):
      return Message("June 2027 [1]")
    if len(messages) > 1:
      return Message(reply)
    if mode == "tools":
      return Message(None, (chat_endpoint.search("lease end"),))
    return Message("<search>lease end</search>")

  return say


@pytest.mark.parametrize("mode", ["tools", "tags"])
@pytest.mark.parametrize("reply", ["", "<search>lease end</search>", None])
def test_the_last_request_has_the_question_and_the_passages(mode, reply):
  with asked(searching(reply, mode=mode), mode=mode) as (answered, server):
    assert answered.answer.startswith("June 2027")
    assert [passage.id for _, passage in answered.citations] == ["1"]
  (message,) = server.asked[-1]["messages"]
  assert message["role"] == "user"
  assert message["content"].startswith(LAST)
  assert "It ends in June 2027." in message["content"]
  assert message["content"].endswith(f"Question: {QUESTION}")
  assert "tools" not in server.asked[-1]
  last_requests = [
    body
    for body in server.asked
    if body["messages"][0]["content"].startswith(LAST)
  ]
  assert len(last_requests) == 1


def test_an_answer_in_the_form_that_was_asked_for_is_the_answer():
  say = searching("<answer>June</answer>", mode="tags")
  with asked(say, mode="tags") as (answered, server):
    assert answered.answer == "June"
  assert len(server.asked) == 2


def test_a_model_that_says_nothing_gives_no_answer():
  with asked("empty", mode="tags") as (answered, server):
    assert answered.answer is None
    assert "asked for that alone" in answered.reason
  assert server.asked[-1]["messages"][0]["content"].startswith(LAST)


@pytest.mark.parametrize("mode", ["tools", "tags"])
def test_without_a_search_the_model_answers_from_memory(mode):
  def know(body):
    (message,) = body["messages"]
    assert "from what you know" in message["content"]
    assert "passages" not in message["content"]
    answer = "June" if mode == "tools" else "<answer>June</answer>"
    return Message(answer)

  with asked(know, mode=mode, budget=0) as (answered, _):
    assert (answered.answer, answered.searches) == ("June", 0)


def test_tokens_of_the_budget_hold_for_the_last_answer_too():
  say = searching("words " * 40, mode="tags")
  budget = budgets.Budget(searches=1, tokens=60)
  with asked(say, mode="tags", budget=budget) as (answered, server):
    assert answered.tokens <= 60
  for body in server.asked:
    assert body["max_tokens"] <= 60


@pytest.mark.parametrize(
  ("reply", "is_answer"),
  [
    ("It ends in June 2027 [1].", True),
    ("<think>so</think>It ends in June 2027 [1].", True),
    ("<think>so", False),
    ("<think>so</think>", False),
    ("<search>rent</search>", False),
    ('{"name": "search", "arguments": {"query": "rent"}}', False),
    ("", False),
  ],
)
def test_text_without_tags_is_the_answer_where_no_search_is_left(
  reply, is_answer
):
  with asked(searching(reply, mode="tags"), mode="tags") as (answered, server):
    assert answered.answer
  assert (len(server.asked) == 2) == is_answer
