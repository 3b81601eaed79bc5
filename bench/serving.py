r"""Measures a served policy beside the same policy asked in process.

    python -m bench.serving [--hf=configs/graded_world_policy]

* Throughput: 64 clients of the HTTP service beside `Agent.ask_many`, with the
  CPU time that each side takes. Clients and server share the machine, so the
  clients are as light as possible (`http_load`).
* First event: the seconds from a question to its first piece of reasoning, over
  HTTP beside in process, one question at a time.
* 16 clients of the service beside a loop as in Search-R1's infer.py: one
  request at a time, transformers' `generate`, the whole text again after every
  search.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import re
import statistics
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import httpx2
from absl import flags

from anysearch_jax import types
from bench import harness, http_load
from configs import quickstart
from launch import jax_setup

if TYPE_CHECKING:
  from anysearch_jax.agent import agent as agent_lib

_CLIENTS = 64
_FEW_CLIENTS = 16
_BUDGET = 3
_INSIDE, _LOOP = "ask_many in process", "generate, one at a time"
_MANY, _FEW = f"{_CLIENTS} HTTP clients", f"{_FEW_CLIENTS} HTTP clients"


def agent_of(folder: str, *, torch: bool = False) -> agent_lib.Agent:
  """Returns an agent of the generated world.

  Args:
    folder: the policy.
    torch: whether transformers samples, one question at a time.
  """
  from anysearch_jax.agent import agent as agent_lib
  from anysearch_jax.agent import loading
  from anysearch_jax.policy import hf
  from anysearch_jax.rollout import engines, searching
  from bench import torch_peer
  from launch import world_source

  config = loading.with_answer_room(quickstart.get_config())
  # Lanes of several numbers, because the load varies.
  config = dataclasses.replace(
    config,
    engine=dataclasses.replace(
      config.engine, slots=_CLIENTS, lanes=(8, 16, 32)
    ),
  )
  world = world_source.make(config.data, "lexical")
  policy = hf.load(folder)
  engine: types.Engine = (
    torch_peer.TorchEngine(folder, policy.tokenizer)
    if torch
    else engines.make(policy, config, seed=0)
  )
  retriever = searching.BatchingRetriever(world.retriever, config.search)
  return agent_lib.Agent(
    engine,
    policy.tokenizer,
    retriever,
    config=config.episode,
    slots=1 if torch else _CLIENTS,
    known=world.evaluation_questions(),
  )


def serve(folder: str) -> dict[str, float]:
  """Serves an agent until a signal arrives; a worker of this bench."""
  jax_setup.configure(threads=0, cache=".jax_cache")
  from anysearch_jax.serving import fields, service
  from launch import http_server
  from launch import serve as launch_serve

  launch_serve.log_requests()
  with agent_of(folder) as agent:
    agent.ask(agent.examples[0], budget=_BUDGET)
    running = service.Service(agent, fields.Served("bench"), most=10_000)
    http_server.serve(
      service.create_app(running),
      running,
      named="a bench",
      host="127.0.0.1",
      port=0,
      connections=1024,
      headers=10,
      request=120,
      grace=10,
    )
  return {}


@contextlib.contextmanager
def server(folder: str) -> Iterator[tuple[str, int]]:
  """Yields the address and the process id of a server of its own."""
  process = subprocess.Popen(
    harness.worker_command("serve", folder),
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
    text=True,
  )
  try:
    assert process.stdout is not None
    found = re.search(r"http://\S+", process.stdout.readline())
    if found is None:
      raise RuntimeError("The server did not start.")
    yield found[0], process.pid
  finally:
    process.terminate()
    process.wait(60)


@contextlib.asynccontextmanager
async def clients(url: str) -> AsyncIterator[httpx2.AsyncClient]:
  """Yields a client that may have a connection for each question."""
  limits = httpx2.Limits(max_connections=None)
  async with httpx2.AsyncClient(
    base_url=url, limits=limits, timeout=120, trust_env=False
  ) as client:
    yield client


def body(question: types.Question, **more: Any) -> dict[str, Any]:
  return {"input": question.text, "max_tool_calls": _BUDGET, **more}


async def ask_all(
  url: str, questions: list[types.Question], at_once: int
) -> None:
  """Asks each question once, `at_once` at a time, by a light client."""
  left = iter(questions)

  async def one() -> None:
    connection = await http_load.connect(url)
    try:
      for question in left:
        await connection.post("/v1/responses", body(question))
    finally:
      connection.close()

  async with asyncio.TaskGroup() as tasks:
    for _ in range(at_once):
      tasks.create_task(one())


async def first_event(url: str, question: types.Question) -> float:
  """Returns the seconds to the first reasoning over HTTP."""
  async with clients(url) as client:
    await client.get("/health")  # The connection exists already.
    started = time.perf_counter()
    async with client.stream(
      "POST", "/v1/responses", json=body(question, stream=True)
    ) as response:
      async for line in response.aiter_lines():
        if line.startswith("event: response.reasoning_text.delta"):
          return time.perf_counter() - started
  return time.perf_counter() - started


def first_piece(agent: agent_lib.Agent, question: types.Question) -> float:
  """Returns the seconds to the first reasoning in process."""
  from anysearch_jax.agent import events

  started = time.perf_counter()
  with contextlib.closing(agent.stream(question, budget=_BUDGET)) as told:
    for event in told:
      if isinstance(event, events.Thinking):
        break
  return time.perf_counter() - started


def compare(folder: str, *, rounds: int, questions: int) -> dict[str, Any]:
  """Measures the three comparisons and prints their ratios."""
  with (
    server(folder) as (url, pid),
    agent_of(folder) as agent,
    agent_of(folder, torch=True) as loop,
  ):
    asked = list(agent.examples[:questions])
    # The loop is slow: it gets fewer questions than the clients beside it.
    some, few = asked[: questions // 4], asked[: max(1, questions // 16)]
    agent.ask_many(asked[:_CLIENTS], budgets=[_BUDGET])
    asyncio.run(ask_all(url, asked[:_CLIENTS], _CLIENTS))
    loop.ask(asked[0], budget=_BUDGET)
    # As the server does.
    gc.collect()
    gc.freeze()

    def http(questions: list[types.Question], at_once: int) -> harness.Numbers:
      before = harness.cpu_of(pid)
      _, spent = harness.timed(
        lambda: asyncio.run(ask_all(url, questions, at_once))
      )
      return spent._asdict() | {"server": harness.cpu_of(pid) - before}

    def here(call: Callable[[], object]) -> harness.Numbers:
      return harness.timed(call)[1]._asdict() | {"server": 0.0}

    sides: dict[str, tuple[int, Callable[[], harness.Numbers]]] = {
      _INSIDE: (
        len(asked),
        lambda: here(lambda: agent.ask_many(asked, budgets=[_BUDGET])),
      ),
      _MANY: (len(asked), lambda: http(asked, _CLIENTS)),
      _FEW: (len(some), lambda: http(some, _FEW_CLIENTS)),
      _LOOP: (
        len(few),
        lambda: here(lambda: [loop.ask(q, budget=_BUDGET) for q in few]),
      ),
    }
    found = harness.in_turns(
      sides, lambda name: sides[name][1](), rounds=rounds
    )
    waits: dict[str, list[float]] = {"HTTP": [], "process": []}
    for question in few:
      waits["process"].append(first_piece(agent, question))
      waits["HTTP"].append(asyncio.run(first_event(url, question)))
  _print_sides(found, {side: count for side, (count, _) in sides.items()})
  throughput = found.ratio("seconds", _INSIDE, _MANY)
  beside, lighter = (
    harness.Spread.of(
      [
        cost(each[_LOOP]) / len(few) / (cost(each[_FEW]) / len(some))
        for each in found.each
      ]
    )
    for cost in (_seconds, _work)
  )
  work = harness.Spread.of(
    [_work(each[_INSIDE]) / _work(each[_MANY]) for each in found.each]
  )
  more = 1000 * statistics.median(
    http - own for http, own in zip(*waits.values(), strict=True)
  )
  print(f"throughput of HTTP against ask_many: {throughput} (goal 0.85)")
  print(f"CPU time of ask_many against HTTP with its clients: {work}")
  print(f"first event beyond the engine's own: {more:.1f} ms (goal 30)")
  print(f"against generate, one at a time: {beside} (goal 5)")
  print(f"CPU time of generate against HTTP with its clients: {lighter}")
  return {
    "throughput": throughput.median,
    "cpu": work.median,
    "first_event_ms": more,
    "against_generate": beside.median,
    "cpu_against_generate": lighter.median,
  }


def _print_sides(found: harness.Rounds, counts: Mapping[str, int]) -> None:
  table = harness.Table(
    *("side", "questions", "questions/s", "ms here", "ms in server")
  )
  for side, count in counts.items():
    each = {name: v / count for name, v in found.medians(side).items()}
    table.row(
      *(side, count, 1 / each["seconds"]),
      *(1000 * each["cpu"], 1000 * each["server"]),
    )
  print("ms: of CPU time for a question; clients and `ask_many` run here")


def _seconds(numbers: harness.Numbers) -> float:
  return numbers["seconds"]


def _work(numbers: harness.Numbers) -> float:
  """Returns the CPU seconds of a side, here and in the server."""
  return numbers["cpu"] + numbers["server"]


def main() -> dict[str, Any]:
  f = flags.FLAGS
  jax_setup.configure(threads=0, cache=".jax_cache")
  return compare(f.hf, rounds=f.rounds, questions=f.questions)


if __name__ == "__main__":
  flags.DEFINE_string("hf", "configs/graded_world_policy", "The policy.")
  flags.DEFINE_integer("rounds", 5, "Of measurements, in turns.", 1)
  flags.DEFINE_integer("questions", 512, "Of a round.", 64)
  harness.run(main, workers={"serve": serve})
