"""The agent: events, replies, many callers."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import threading
import time

import pytest
import scripted
from scripted import CODEC, answer, search
from scripted_agent import ANSWERED, CONFIG, EMMA, make

from anysearch_jax import types
from anysearch_jax.agent import agent as agent_lib
from anysearch_jax.agent import events


def test_reply_has_answer_searches_documents_and_tokens():
  with make() as agent:
    reply = agent.ask("Who wrote Emma?", budget=2)
  assert reply.answer == "Jane" and reply.reason == ""
  assert reply.outcome is types.Outcome.ANSWERED
  assert reply.searches == 1 and reply.documents == ((EMMA,),)
  assert reply.tokens == len("".join(ANSWERED))
  assert reply.trajectory.question.text == "Who wrote Emma?"


def test_events_come_in_order_and_end_with_the_reply():
  with make() as agent:
    told = list(agent.stream("Who wrote Emma?", budget=2))
  assert told[:-1] == [
    events.Budget(0, 2),
    events.Thinking("look"),
    events.Searching(1, "emma"),
    events.Found(1, (EMMA,)),
    events.Budget(1, 2),
    events.Thinking("known"),
  ]
  assert isinstance(told[-1], events.Answer) and told[-1].text == "Jane"


def test_episode_without_an_answer_says_why():
  with make(["nothing", "again", "no"]) as agent:
    reply = agent.ask("Who?", budget=0)
  assert reply.answer is None
  assert reply.outcome is types.Outcome.INVALID and "answer" in reply.reason


def test_unavailable_retriever_is_a_reason_and_no_exception():
  broken = scripted.Retriever(error=types.RetrievalError("It is down."))
  with make(retriever=broken) as agent:
    reply = agent.ask("Who?", budget=1)
  assert reply.answer is None and reply.outcome is types.Outcome.FAILED
  assert "It is down." in reply.reason


def test_many_questions_have_replies_by_question_and_budget():
  def script(request):
    asked = CODEC.decode(request.token_ids)
    return answer("a" if "first" in asked else "b")

  with make(script) as agent:
    replies = agent.ask_many(["first", "second"], budgets=[0, 1, 3])
  assert [[reply.answer for reply in row] for row in replies] == [
    ["a"] * 3,
    ["b"] * 3,
  ]
  assert [r.trajectory.budget for r in replies[0]] == [0, 1, 3]


def test_threads_and_event_loops_share_one_agent():
  engine = scripted.Engine(ANSWERED, seconds=lambda: 0.01)

  async def both(agent):
    asking = [agent.ask_async(f"Who {i}?", budget=1) for i in range(8)]
    return [reply.answer for reply in await asyncio.gather(*asking)]

  with make(engine=engine) as agent:
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
      asked = [pool.submit(agent.ask, f"Who {i}?", budget=1) for i in range(8)]
      looped = pool.submit(lambda: asyncio.run(both(agent)))
      assert [f.result().answer for f in asked] == ["Jane"] * 8
      assert looped.result() == ["Jane"] * 8
  assert 1 < engine.most <= 4  # Slots.
  assert len(engine.released) == 16


def test_caller_is_told_the_events_in_the_agents_thread():
  told, threads = [], set()

  def tell(event):
    told.append(event)
    threads.add(threading.current_thread().name)

  with make() as agent:
    reply = asyncio.run(agent.ask_async("Who?", budget=1, tell=tell))
    expected = list(agent.stream("Who?", budget=1))
  assert told[:-1] == expected[:-1]
  assert told[-1] == events.Answer(reply) and threads == {"event loop"}


def test_exception_of_a_listener_ends_the_episode_before_the_search():
  class EnoughError(Exception):
    pass

  def tell(event):
    if isinstance(event, events.Searching):
      raise EnoughError

  retriever = scripted.Retriever()
  with make(retriever=retriever) as agent:
    with pytest.raises(EnoughError):
      asyncio.run(agent.ask_async("Who?", budget=1, tell=tell))
    assert not retriever.requests and len(agent.engine.released) == 1


@pytest.mark.parametrize("kept", [0, 100])
def test_passages_without_room_are_not_among_the_documents(kept):
  """The second observation has no room; with room for an answer, it lands."""
  long = types.Passage("8", "Long", "x" * 3000)
  retriever = scripted.Retriever({"emma": [EMMA], "long": [long]})
  script = (search("emma"), search("long"), answer("Jane"))
  episode = dataclasses.replace(CONFIG, max_context=3000, answer_room=kept)
  with make(script, retriever=retriever, config=episode) as agent:
    told = list(agent.stream("Who?", budget=3))
  reply = told[-1].reply
  assert (reply.answer == "Jane") == bool(kept)
  assert reply.searches == 2 and reply.documents == ((EMMA,), ())
  assert [[d.id for d in found] for found in reply.trajectory.documents] == [
    ["7"],
    [],
  ]
  found = [event for event in told if isinstance(event, events.Found)]
  assert found == [events.Found(1, (EMMA,)), events.Found(2, ())]


def test_known_question_keeps_its_id_and_corpus():
  known = types.Question("q7", "Who wrote Emma?", ("Jane",), "books")
  with make(known=[known], corpus="all") as agent:
    assert agent.examples == (known,)
    reply = agent.ask(" Who wrote Emma? ", budget=1)
    other = agent.ask("Who?", budget=1)
  assert reply.trajectory.question == known
  assert other.trajectory.question.corpus == "all"


def test_long_question_does_not_hold_up_the_others():
  class Slow(scripted.Codec):
    def render(self, content):
      time.sleep(1)
      return super().render(content)

  async def searched(agent):
    asking = asyncio.ensure_future(agent.ask_async(question, budget=1))
    await asyncio.sleep(0.1)
    async with asyncio.timeout(0.7):
      await agent.search_async("emma", k=1)
    await asking

  question = "Who? " * 4000

  agent = agent_lib.Agent(
    scripted.Engine(ANSWERED),
    Slow(),
    scripted.Retriever({"emma": [EMMA]}),
    config=dataclasses.replace(CONFIG, max_context=50_000),
    slots=4,
  )
  with agent:
    asyncio.run(searched(agent))


def test_half_a_surrogate_pair_is_asked_and_is_an_unknown_word():
  with make() as agent:
    assert agent.ask("Who? \ud800", budget=1).answer == "Jane"
    assert agent.unknown_words("Who? \ud800") == ["\ud800"]


def test_bug_of_an_engine_is_raised_to_the_caller():
  def script(request):
    raise ZeroDivisionError("bug")

  with make(script) as agent:
    with pytest.raises(ZeroDivisionError):
      agent.ask("Who?", budget=1)
    with pytest.raises(ZeroDivisionError):
      list(agent.stream("Who?", budget=1))
