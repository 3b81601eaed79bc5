r"""Measures a served policy beside the same policy asked in process.

    python -m bench.serving [--hf=configs/graded_world_policy]

* Throughput: 64 clients of the HTTP service beside `Agent.ask_many`, with the
  CPU time that each side takes. Clients and server share the machine.
* First event: the seconds from a question to its first piece of reasoning, over
  HTTP beside in process, one question at a time.
* 16 clients of the service beside a loop as in Search-R1's infer.py: one
  request at a time, transformers' `generate`, the whole text again after every
  search.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from absl import flags

from anysearch_jax import config as config_lib
from anysearch_jax import types
from bench import harness
from configs import quickstart
from launch import jax_setup

if TYPE_CHECKING:
  from anysearch_jax.agent import agent as agent_lib

_CLIENTS, _FEW_CLIENTS = 64, 16
_BUDGET = 3
_INSIDE, _LOOP = "ask_many in process", "generate, one at a time"
_MANY, _FEW = f"{_CLIENTS} HTTP clients", f"{_FEW_CLIENTS} HTTP clients"
_PATH = "/v1/responses"


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
  from launch import parts

  config = loading.with_answer_room(quickstart.get_config())
  # Lanes of several numbers, because the load varies.
  config = config_lib.changed(
    config, engine={"slots": _CLIENTS, "lanes": (8, 16, 32)}
  )
  world = parts.world_source(config.data, "lexical")
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
      port=0,
      connections=1024,
      headers=10,
      request=120,
      grace=10,
    )
  return {}


def _body(question: types.Question, **more: Any) -> dict[str, Any]:
  return {"input": question.text, "max_tool_calls": _BUDGET, **more}


def _ask_all(port: int, questions: list[types.Question], clients: int) -> None:
  """Asks each question once, over HTTP."""
  left = iter(questions)

  async def ask(connection: harness.Connection) -> None:
    for question in left:
      await connection.post(_PATH, _body(question))

  asyncio.run(harness.in_parallel(port, clients, ask))


def _first_event(port: int, question: types.Question) -> None:
  """Waits for the first reasoning over HTTP."""

  async def ask(connection: harness.Connection) -> None:
    body = _body(question, stream=True)
    await connection.post(_PATH, body, b"event: response.reasoning_text.delta")

  asyncio.run(harness.in_parallel(port, 1, ask))


def _first_piece(agent: agent_lib.Agent, question: types.Question) -> None:
  """Waits for the first reasoning in process."""
  from anysearch_jax.agent import events

  with contextlib.closing(agent.stream(question, budget=_BUDGET)) as told:
    next((e for e in told if isinstance(e, events.Thinking)), None)


def compare(folder: str, *, rounds: int, questions: int) -> dict[str, Any]:
  """Measures the three comparisons and prints their ratios."""
  command = harness.worker_command("serve", folder)
  with (
    harness.served(command) as (port, pid),
    agent_of(folder) as agent,
    agent_of(folder, torch=True) as loop,
  ):
    asked = list(agent.examples[:questions])
    # The loop is slow: it gets fewer questions than the clients beside it.
    some, few = asked[: questions // 4], asked[: max(1, questions // 16)]
    sides: dict[str, tuple[Sequence[Any], Callable[[], object]]] = {
      _INSIDE: (asked, lambda: agent.ask_many(asked, budgets=[_BUDGET])),
      _MANY: (asked, lambda: _ask_all(port, asked, _CLIENTS)),
      _FEW: (some, lambda: _ask_all(port, some, _FEW_CLIENTS)),
      _LOOP: (few, lambda: [loop.ask(q, budget=_BUDGET) for q in few]),
    }

    def measure(side: str) -> dict[str, float]:
      """Returns seconds, of which CPU here and there, for a question."""
      count, before = len(sides[side][0]), harness.cpu_of(pid)
      _, spent = harness.timed(sides[side][1])
      there = harness.cpu_of(pid) - before
      work = {"seconds": spent.seconds, "here": spent.cpu, "server": there}
      work["cpu"] = spent.cpu + there
      return {name: value / count for name, value in work.items()}

    agent.ask_many(asked[:_CLIENTS], budgets=[_BUDGET])
    _ask_all(port, asked[:_CLIENTS], _CLIENTS)
    loop.ask(asked[0], budget=_BUDGET)
    # As the server does.
    gc.collect()
    gc.freeze()
    found = harness.in_turns(sides, measure, rounds=rounds)
    waits = [
      harness.seconds(lambda q=q: _first_event(port, q))  # type: ignore[misc]
      - harness.seconds(lambda q=q: _first_piece(agent, q))  # type: ignore[misc]
      for q in few
    ]
  table = harness.Table("side", "questions/s", "ms here", "ms in server")
  for side in sides:
    each = found.medians(side)
    here, there = 1000 * each["here"], 1000 * each["server"]
    table.row(side, 1 / each["seconds"], here, there)
  print("ms: of CPU time for a question; clients and `ask_many` run here")
  ratios = {
    "throughput": ("seconds", _INSIDE, _MANY),
    "cpu": ("cpu", _INSIDE, _MANY),
    "against_generate": ("seconds", _LOOP, _FEW),
    "cpu_against_generate": ("cpu", _LOOP, _FEW),
  }
  out = {name: found.ratio(*ratio) for name, ratio in ratios.items()}
  more = 1000 * statistics.median(waits)
  print(f"throughput of HTTP against ask_many: {out['throughput']} (goal 0.85)")
  print(f"CPU time of ask_many against HTTP with its clients: {out['cpu']}")
  print(f"first event beyond the engine's own: {more:.1f} ms (goal 30)")
  print(f"against generate, one at a time: {out['against_generate']} (goal 5)")
  print(f"by CPU time, with its clients: {out['cpu_against_generate']}")
  return {k: v.median for k, v in out.items()} | {"first_event_ms": more}


def main() -> dict[str, Any]:
  f = flags.FLAGS
  jax_setup.configure(threads=0, cache=".jax_cache")
  return compare(f.hf, rounds=f.rounds, questions=f.questions)


if __name__ == "__main__":
  flags.DEFINE_string("hf", "configs/graded_world_policy", "The policy.")
  flags.DEFINE_integer("rounds", 5, "Of measurements, in turns.", 1)
  flags.DEFINE_integer("questions", 512, "Of a round.", 64)
  harness.run(main, workers={"serve": serve})
