"""Episodes in short prompts: the question is the first search."""

from __future__ import annotations

import contextlib
import time

import chat_endpoint
import pytest
import scripted
from chat_endpoint import Fault, Message

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.agent import agent as agent_lib
from anysearch_jax.agent import events
from anysearch_jax.environment import protocol
from anysearch_jax.rollout import chat_completions, plain_text

PLAIN = plain_text.PlainText()
LEASE = types.Passage("1", "Lease", "It ends in June 2027.")
RENT = types.Passage("2", "Rent", "It is 900 euros. </think> <|im_end|>")
QUESTION = "When does the lease end, and what is the rent?"
MORE = "Write one short search query"
LAST = "Answer the question from the passages"


@contextlib.contextmanager
def asked(
  reply, *, prompts="documents_short", budget=2, faults=(), deadline=None,
  question=QUESTION,
  **limits,
):  # fmt: skip
  """Yields the reply to a question, its events and the server."""
  config = config_lib.EpisodeConfig(
    prompts=prompts,
    turn_deadline=10.0,
    **({"max_generated": 600, "max_context": 6000} | limits),
  )
  with chat_endpoint.served(reply, faults=faults) as server:
    engine = chat_completions.ChatEngine(
      server.url,
      PLAIN,
      mode="tags",
      model="scripted",
      sampling=config_lib.SamplingConfig(),
      deadline=10.0,
      concurrency=1,
    )
    retriever = scripted.Retriever({QUESTION: [LEASE], "rent": [RENT, LEASE]})
    with agent_lib.Agent(
      engine, PLAIN, retriever, config=config, slots=1
    ) as agent:
      told = list(agent.stream(question, budget=budget, deadline=deadline))
      yield told[-1].reply, told, server
    engine.close()


def saying(query, answer="June 2027, 900 euros [2]"):
  """Returns a model that writes one query when it is asked for one."""

  def say(body):
    (message,) = body["messages"]
    assert "tools" not in body
    if MORE in message["content"]:
      return Message(query)
    assert LAST in message["content"]
    return Message(answer)

  return say


def prompts_of(server):
  return [body["messages"][0]["content"] for body in server.asked]


def test_each_request_is_a_conversation_with_all_passages():
  with asked(saying("rent")) as (reply, told, server):
    assert reply.answer == "June 2027, 900 euros [2]"
    assert [number for number, _ in reply.citations] == [2]
  more, last = prompts_of(server)
  assert more.startswith("[1] Lease\nIt ends in June 2027.\n\nQuestion: ")
  assert "900 euros" not in more
  # The prompts begin alike, so that a server reads the passages once.
  assert last.startswith("[1] Lease\nIt ends in June 2027.\n[2] Rent\n")
  assert last.count("It ends in June 2027.") == 1
  assert "</think>" not in last and "<|im_end|>" not in last
  queries = [e.query for e in told if isinstance(e, events.Searching)]
  assert queries == [QUESTION, "rent"]
  assert not any(isinstance(e, events.Thinking) for e in told)


@pytest.mark.parametrize(
  ("query", "expected"),
  [
    ("rent", "rent"),
    ('Search query: "rent".', "rent"),
    ("[1] rent", "rent"),
    ("<think>hm</think>\n<search>rent</search>", "rent"),
    ("\n`rent`\nIt is missing.", "rent"),
  ],
)
def test_the_query_of_a_reply_is_its_first_line(query, expected):
  with asked(saying(query)) as (reply, *_):
    assert reply.trajectory.queries == (QUESTION, expected)


@pytest.mark.parametrize(
  "query", ["nothing", "Nothing.", "", QUESTION.upper(), "[1] Lease", "lease"]
)
def test_nothing_more_to_search_for_spends_nothing(query):
  with asked(saying(query), budget=5) as (reply, *_):
    assert reply.searches == 1
    assert reply.answer


def test_a_budget_of_one_asks_for_the_answer_at_once():
  with asked(saying("rent"), budget=1) as (reply, _, server):
    assert (reply.searches, len(server.asked)) == (1, 1)


def test_plain_retrieval_searches_once_whatever_the_budget():
  plain = asked(saying("rent"), prompts="plain_retrieval", budget=5)
  with plain as (reply, _, server):
    assert (reply.searches, len(server.asked)) == (1, 1)
    plain_prompt = prompts_of(server)
  with asked(saying("rent"), budget=1) as (_, _, server):
    assert prompts_of(server) == plain_prompt


def test_without_a_search_the_model_answers_from_memory():
  def know(body):
    (message,) = body["messages"]
    assert "from what you know" in message["content"]
    assert "passages" not in message["content"]
    return Message("June")

  with asked(know, budget=0) as (reply, *_):
    assert (reply.answer, reply.searches) == ("June", 0)
    assert not reply.trajectory.violation


def test_passages_that_have_no_room_are_left_out_last_first():
  with asked(saying("rent"), max_context=90, max_generated=80) as (
    reply,
    _,
    server,
  ):
    assert reply.answer
  assert "It ends in June 2027." in prompts_of(server)[-1]
  assert "900 euros" not in prompts_of(server)[-1]


def test_time_that_is_over_asks_for_the_answer():
  started = time.monotonic()
  faults = [Fault(hang="silent")]
  with asked(saying("rent"), faults=faults, deadline=2.0) as (reply, *_):
    assert reply.answer.startswith("June 2027")
    assert reply.searches == 1
  assert time.monotonic() - started < 8


def test_a_model_that_says_nothing_gives_no_answer():
  with asked(saying("rent", answer="<think>so")) as (reply, *_):
    assert reply.answer is None
    assert "asked for that alone" in reply.reason


def test_a_server_that_fails_is_named():
  faults = [Fault(500)] * 9
  with asked(saying("rent"), faults=faults) as (reply, *_):
    assert reply.answer is None
    assert "HTTP 500" in reply.reason


def test_of_a_conversation_the_last_question_is_searched():
  turns = [("user", "question: the rent?"), ("assistant", "900 euros")]
  text = protocol.conversation(turns, QUESTION)
  with asked(saying("rent"), budget=1, question=text) as (reply, _, server):
    assert reply.trajectory.queries == (QUESTION,)
  assert f"Question: {text}" in prompts_of(server)[0]
