"""An agent's limits: deadlines, tokens, places, and ranges of arguments."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
import scripted
from scripted import CODEC, answer
from scripted_agent import ANSWERED, CONFIG, Held, make

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.agent import agent as agent_lib
from anysearch_jax.environment import prompts


def test_deadline_asks_for_the_answer_and_gets_one():
  """The first turn never ends; the turn after the line is answered."""

  class Slow(scripted.Engine):
    async def generate(self, request):
      asked = CODEC.decode(request.token_ids)
      if not asked.endswith(prompts.PROMPTS["paper"].over_budget):
        await asyncio.sleep(60)
      return scripted.turn(request, answer("Jane"))

  with make(engine=Slow(())) as agent:
    reply = agent.ask("Who?", budget=1, deadline=1.0)
  assert reply.answer == "Jane" and reply.seconds < 30


def test_deadline_ends_a_policy_that_never_answers():
  engine = scripted.Engine(ANSWERED, seconds=lambda: 60)
  with make(engine=engine) as agent:
    reply = agent.ask("Who?", budget=1, deadline=0.2)
  assert reply.outcome is types.Outcome.TRUNCATED
  assert reply.answer is None and "answer" in reply.reason
  assert reply.seconds < 30


@pytest.mark.parametrize(
  "field, wrong",
  [
    ("question", " "),
    ("budget", -1),
    ("budget", 1.5),
    ("budget", True),
    ("seed", -1),
    ("deadline", 0),
    ("max_tokens", 0),
    ("deadline", float("inf")),
    ("sampling", config_lib.SamplingConfig(temperature=-1)),
  ],
)
def test_argument_out_of_range_is_named(field, wrong):
  given = {"question": "Who?", "budget": 1} | {field: wrong}
  with make() as agent:
    for ask in (agent.ask, agent.stream):
      with pytest.raises(ValueError, match=rf"{field}(\.\w+)?: found"):
        ask(
          given["question"], **{k: given[k] for k in given if k != "question"}
        )


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
