"""The agent: events, replies, many callers."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import os
import threading

import pytest
import scripted
from scripted import CODEC, answer, search
from scripted_agent import ANSWERED, CONFIG, EMMA, Held, make
from waits import wait_for

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.agent import agent as agent_lib
from anysearch_jax.agent import events
from anysearch_jax.environment import prompts
from anysearch_jax.policy import tokenizer
from anysearch_jax.world import world, world_tokenizer


def test_events_come_in_order_and_end_with_the_reply():
  with make() as agent:
    told = list(agent.stream("Who wrote Emma?", budget=2))
  assert told[:-1] == [
    *(events.Budget(0, 2), events.Thinking("look")),
    *(events.Searching(1, "emma"), events.Found(1, (EMMA,))),
    *(events.Budget(1, 2), events.Thinking("known")),
  ]
  assert isinstance(told[-1], events.Answer) and told[-1].text == "Jane"
  reply = told[-1].reply
  assert (reply.reason, reply.outcome) == ("", types.Outcome.ANSWERED)
  assert reply.searches == 1 and reply.documents == ((EMMA,),)
  assert reply.tokens == len("".join(ANSWERED))
  assert reply.trajectory.question.text == "Who wrote Emma?"


@pytest.mark.parametrize(
  ("given", "outcome", "reason"),
  [
    ({"script": ["nothing", "again", "no"]}, "invalid", "answer"),
    (
      {"retriever": scripted.Retriever(error=types.RetrievalError("Down."))},
      "failed",
      "Down.",
    ),
  ],
)
def test_episode_without_an_answer_says_why(given, outcome, reason):
  with make(**given) as agent:
    reply = agent.ask("Who?", budget=1)
  assert reply.answer is None
  assert reply.outcome == outcome and reason in reply.reason


def test_many_questions_have_replies_by_question_and_budget():
  def script(request):
    asked = CODEC.decode(request.token_ids)
    return answer("a" if "first" in asked else "b")

  with make(script) as agent:
    replies = agent.ask_many(["first", "second"], budgets=[0, 1, 3])
    assert len(agent.ask_many("first", budgets=[0])) == 1
    assert len(agent.ask_many("first", budgets=0)[0]) == 1
  answers = [[reply.answer for reply in row] for row in replies]
  assert answers == [["a"] * 3, ["b"] * 3]
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


def test_caller_is_told_in_the_agents_thread_and_may_end_the_episode():
  told, threads = [], set()

  def tell(event):
    told.append(event)
    threads.add(threading.current_thread().name)

  def enough(event):
    if isinstance(event, events.Searching):
      raise ZeroDivisionError

  retriever = scripted.Retriever({"emma": [EMMA]})
  with make(retriever=retriever) as agent:
    with pytest.raises(ZeroDivisionError):
      asyncio.run(agent.ask_async("Who?", budget=1, tell=enough))
    assert not retriever.requests and len(agent.engine.released) == 1
    reply = asyncio.run(agent.ask_async("Who?", budget=1, tell=tell))
    expected = list(agent.stream("Who?", budget=1))
  assert told[:-1] == expected[:-1]
  assert told[-1] == events.Answer(reply) and threads == {"event loop"}


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
  found = [event for event in told if isinstance(event, events.Found)]
  assert found == [events.Found(1, (EMMA,)), events.Found(2, ())]


def test_known_question_keeps_its_id_and_corpus():
  known = types.Question("q7", "Who wrote Emma?", ("Jane",), "books")
  with make(examples=[known], corpus="all") as agent:
    assert agent.examples == (known,)
    reply = agent.ask(" Who wrote Emma? ", budget=1)
    other = agent.ask("Who?", budget=1)
  assert reply.trajectory.question == known
  assert other.trajectory.question.corpus == "all"


async def test_long_question_does_not_hold_up_the_others():
  searched = threading.Event()

  class Slow(scripted.Codec):
    def render(self, *texts):
      assert searched.wait(60), "The loop stood still."
      return super().render(*texts)

  config = dataclasses.replace(CONFIG, max_context=50_000)
  with make(codec=Slow(), config=config) as agent:
    asking = asyncio.ensure_future(agent.ask_async("Who? " * 4000, budget=1))
    await asyncio.sleep(0.1)
    await agent.search_async("emma", k=1)
    searched.set()
    await asking


def test_half_a_surrogate_pair_is_asked():
  with make() as agent:
    assert agent.ask("Who? \ud800", budget=1).answer == "Jane"
    assert agent.refusal("Who? \ud800") is None


def test_a_policy_of_the_world_is_not_asked_in_english():
  made = world.World(0)
  codec = tokenizer.Tokenizer(world_tokenizer.build_tokenizer(made))
  questions = made.evaluation_questions(5)
  with make(codec=codec, examples=questions) as agent:
    for question in questions:
      assert agent.refusal(question.text) is None
      one_wrong = question.text.replace("?", "IBM ?")
      assert "no word for 'IBM', so" in agent.refusal(one_wrong)
    said = agent.refusal("Who founded the city ?")
    assert "no word for 'Who', 'the', 'city'" in said
    assert repr(questions[0].text) in said


def test_tokenizers_of_models_know_every_word(real_tokenizer):
  with make(codec=real_tokenizer) as agent:
    for text in ("cafe\u0301 \ufb01ne?", "</s> <|im_end|> <search>", "🙂"):
      assert agent.refusal(text) is None


def test_bug_of_an_engine_is_raised_to_the_caller():
  def script(request):
    raise ZeroDivisionError("bug")

  with make(script) as agent:
    with pytest.raises(ZeroDivisionError):
      agent.ask("Who?", budget=1)
    with pytest.raises(ZeroDivisionError):
      list(agent.stream("Who?", budget=1))


def test_closed_stream_and_cancelled_caller_release_their_episodes():
  engine = Held()

  async def cancelled(agent):
    asking = asyncio.ensure_future(agent.ask_async("Who?", budget=1))
    await asyncio.to_thread(engine.started.wait, 10)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
      await asking

  with make(engine=engine) as agent:
    asyncio.run(cancelled(agent))
    wait_for(lambda: engine.released)
    told = agent.stream("Who?", budget=1)
    assert next(told) == events.Budget(0, 1)
    told.close()
    wait_for(lambda: len(engine.released) == 2)
    engine.go.set()
    assert agent.ask("Who?", budget=1).answer == "Jane"


def test_closing_cancels_what_runs_and_refuses_what_comes():
  engine, closed = Held(), []
  agent = make(engine=engine, close=lambda: closed.append(1))
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    asking = pool.submit(agent.ask, "Who?", budget=1)
    engine.started.wait(10)
    agent.close()
    with pytest.raises(agent_lib.ClosedError):
      asking.result(10)
  agent.close()
  assert closed == [1] and len(engine.released) == 1
  with pytest.raises(RuntimeError, match="closed"):
    agent.ask("Who?", budget=1)


def test_closing_does_not_look_like_a_cancelled_task_of_the_caller():
  async def asked(agent, call):
    asking = asyncio.ensure_future(call)
    await asyncio.sleep(0.1)
    await asyncio.to_thread(agent.close)
    with pytest.raises(agent_lib.ClosedError):
      await asking

  async def streamed(agent):
    async for _ in agent.stream_async("Who?", budget=1):
      pass

  agent = make(engine=Held())
  asyncio.run(asked(agent, agent.ask_async("Who?", budget=1)))
  agent = make(engine=Held())
  asyncio.run(asked(agent, streamed(agent)))
  agent = make(retriever=scripted.Retriever(seconds=30))
  asyncio.run(asked(agent, agent.search_async("emma", k=1)))


def test_stream_that_was_not_begun_costs_nothing():
  with make([answer("Jane")]) as agent:
    agent.stream("Who?", budget=1).close()
    agent.stream("Who?", budget=1)
    agent.ask("Who?", budget=0)
    assert len(agent.engine.requests) == 1


@pytest.mark.filterwarnings("ignore:os.fork")
def test_forked_process_is_refused_and_may_leave_the_context():
  with make() as agent:
    child = os.fork()
    if not child:
      code = 1
      try:
        with agent:
          agent.ask("Who?", budget=1)
      except agent_lib.ClosedError:
        code = 0
      finally:
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert agent.ask("Who?", budget=1).answer == "Jane"


@pytest.mark.parametrize("answers", [True, False])
def test_deadline_asks_for_the_answer(answers):
  """The first turn never ends; the turn after the line may be answered."""

  class Slow(scripted.Engine):
    async def generate(self, request):
      asked = CODEC.decode(request.token_ids)
      landed = asked.endswith(prompts.PROMPTS["paper"].over_budget)
      if not (landed and answers):
        await asyncio.sleep(60)
      return scripted.turn(request, answer("Jane"))

  with make(engine=Slow(())) as agent:
    reply = agent.ask("Who?", budget=1, deadline=1.0 if answers else 0.2)
  assert reply.seconds < 30
  assert reply.answer == ("Jane" if answers else None)
  assert reply.outcome == ("answered" if answers else "truncated")


@pytest.mark.parametrize(
  "field, wrong",
  [
    *(("question", " "), ("budget", -1), ("budget", 1.5), ("budget", True)),
    *(("seed", -1), ("deadline", 0), ("deadline", float("inf"))),
    *(("max_tokens", 0), ("question", None)),
    ("sampling", config_lib.SamplingConfig(temperature=-1)),
  ],
)
def test_argument_out_of_range_is_named(field, wrong):
  given = {"question": "Who?", "budget": 1} | {field: wrong}
  question = given.pop("question")
  with make() as agent:
    for ask in (agent.ask, agent.stream):
      with pytest.raises(ValueError, match=rf"{field}(\.\w+)?: found"):
        ask(question, **given)


def test_tokens_are_limited_by_the_caller_and_leave_room_for_the_answer():
  episode = dataclasses.replace(CONFIG, answer_room=100)
  line = prompts.PROMPTS["paper"].over_budget

  def script(request):
    landed = CODEC.decode(request.token_ids).endswith(line)
    return answer("J") if landed else "x" * 999

  most = 2 * len(answer("J")) + 2 * len(line)
  with make(script, config=episode) as agent:
    reply = agent.ask("Who?", budget=1, max_tokens=most)
  assert reply.answer == "J" and reply.tokens <= most


def test_question_without_a_place_before_its_deadline_is_refused():
  engine = Held()
  with make(engine=engine, slots=1) as agent:
    first = agent.stream("Who?", budget=1)
    next(first)
    engine.started.wait(10)
    with pytest.raises(agent_lib.BusyError, match="1 places"):
      agent.ask("Who?", budget=1, deadline=0.05)
    engine.go.set()
    assert list(first)[-1].text == "Jane"
    assert agent.ask("Who?", budget=1, deadline=60).answer == "Jane"
