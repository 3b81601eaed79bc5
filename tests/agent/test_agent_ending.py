"""What ends an agent's episodes: callers that leave, closing, forks."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os

import pytest
import scripted
from scripted import answer
from scripted_agent import Held, make, wait_for

from anysearch_jax.agent import agent as agent_lib
from anysearch_jax.agent import events


def test_closing_a_stream_releases_the_episode():
  engine = Held()
  with make(engine=engine) as agent:
    told = agent.stream("Who?", budget=1)
    assert next(told) == events.Budget(0, 1)
    engine.started.wait(10)
    told.close()
    wait_for(lambda: engine.released)
    engine.go.set()
    assert agent.ask("Who?", budget=1).answer == "Jane"


def test_cancelled_caller_releases_the_episode():
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
