"""Compares four ways to play rollouts of a small policy, by search latency.

    python -m bench.widened --output=/tmp/policy
    python -m bench.rollout --policy=/tmp/policy [--sglang=URL]

The ways are (a) this engine with continuous batching, (b) the same engine
turn-synchronously (all episodes take a turn, then all of them search), (c)
transformers' `generate`, turn-synchronously, which computes the whole context
of a batch again every turn, and (d) an SGLang server on this machine, started
with the same policy. Every search is answered from the same index, `latency`
milliseconds later. Prints episodes and generated tokens per second, the
occupancy (the share of the lanes of decode calls that sampled) and the ratios
of each round. The ways take turns in one run.
"""

from __future__ import annotations

import asyncio
import json
import pathlib
import statistics
import time
from typing import Any

from absl import flags

from anysearch_jax import types
from configs import quickstart
from launch import flags as launch_flags
from launch import jax_setup, parts

_POLICY = flags.DEFINE_string(
  "policy", None, "Hugging Face folder; default: the quickstart's policy."
)
_LATENCIES = flags.DEFINE_list(
  "latencies", ["0", "50", "500"], "In milliseconds."
)
_PAIRS = flags.DEFINE_integer("pairs", 3, "Rounds of measurements.")
_QUESTIONS = flags.DEFINE_integer(
  "questions", 64, "Of a rollout, five times each."
)
_SLOTS = flags.DEFINE_integer("slots", 320, "Episodes under way at a time.")
_LANES = flags.DEFINE_list("lanes", ["32"], "Rows of decode calls, ascending.")
_THREADS = flags.DEFINE_integer("threads", 0, "CPU threads; 0: all.")
_TORCH = flags.DEFINE_bool("torch", True, "Also play (c).")
_SGLANG = flags.DEFINE_string("sglang", None, "Also play (d), at this address.")
_JSON = flags.DEFINE_string("json", None, "File for the numbers.")


class Late:
  """A retriever that delays its answers."""

  def __init__(self, retriever: types.Retriever, seconds: float):
    self._retriever = retriever
    self._seconds = seconds

  async def search(self, request: types.SearchRequest):
    if self._seconds:
      await asyncio.sleep(self._seconds)
    return await self._retriever.search(request)


class TurnSynchronous:
  """An engine that answers only when every running episode waits for a turn.

  The barrier also synchronises searches, because an episode asks for its next
  turn only after its search is answered. `episodes` is the total number of
  episodes, `slots` the most that run at a time.
  """

  def __init__(self, engine: types.Engine, *, episodes: int, slots: int):
    self._engine = engine
    self._unborn = episodes
    self._slots = slots
    self._alive: set[types.Address] = set()
    self._asked: list[tuple[types.GenerateRequest, asyncio.Future]] = []

  async def generate(self, request: types.GenerateRequest) -> types.Generation:
    if request.address not in self._alive:
      self._alive.add(request.address)
      self._unborn -= 1
    future = asyncio.get_running_loop().create_future()
    self._asked.append((request, future))
    self._go()
    return await future

  def release(self, address: types.Address) -> None:
    self._engine.release(address)
    self._alive.discard(address)
    asyncio.get_running_loop().call_soon(self._go)

  def _go(self) -> None:
    coming = min(self._unborn, self._slots - len(self._alive))
    if self._asked and len(self._asked) == len(self._alive) and not coming:
      asked, self._asked = self._asked, []
      asyncio.get_running_loop().create_task(self._round(asked))

  async def _round(self, asked) -> None:
    answers = await asyncio.gather(
      *(self._engine.generate(request) for request, _ in asked)
    )
    for (_, future), answer in zip(asked, answers, strict=True):
      future.set_result(answer)


def main(argv) -> None:
  del argv
  jax_setup.configure(threads=_THREADS.value, cache=".jax_cache")
  import dataclasses

  from anysearch_jax import config as config_lib
  from anysearch_jax.policy import hf
  from anysearch_jax.rollout import driver
  from anysearch_jax.rollout.jax_engine import engine as engine_lib
  from anysearch_jax.rollout.sglang import engine as sglang

  config = quickstart.get_config()
  if _POLICY.value:
    config = dataclasses.replace(config, policy=_POLICY.value)
  shapes = dataclasses.replace(
    config.engine,
    slots=_SLOTS.value,
    lanes=tuple(map(int, _LANES.value)),
  )
  source = parts.source(config)
  policy = hf.load(config.policy)
  questions = source.questions("dev", _QUESTIONS.value, 0)
  episodes = len(questions) * config.group
  ours = engine_lib.JaxEngine(
    policy,
    config=shapes,
    sampling=config.sampling,
    seed=0,
  )
  ways: dict[str, Any] = {"a": ours, "b": ours}
  if _TORCH.value:
    import torch

    from bench import torch_peer

    if _THREADS.value:
      torch.set_num_threads(_THREADS.value)
    ways["c"] = torch_peer.TorchEngine(config.policy, policy.tokenizer)
  if _SGLANG.value:
    ways["d"] = sglang.SglangEngine(
      policy,
      config=config_lib.SglangConfig(urls=(_SGLANG.value,)),
      sampling=config.sampling,
      dtype="float32",
    )

  def play(way: str, rollout: int, latency: float) -> dict[str, float]:
    engine = ways[way]
    if way in "bc":
      engine = TurnSynchronous(engine, episodes=episodes, slots=_SLOTS.value)
    ours.counters.clear()
    started = time.perf_counter()
    played = asyncio.run(
      driver.run_groups(
        [
          driver.Assignment(i, question, i % 5 + 1, False)
          for i, question in enumerate(questions)
        ],
        group=config.group,
        rollout=rollout,
        engine=engine,
        retriever=Late(source.retriever, latency),
        config=config.episode,
        codec=policy.tokenizer,
        max_concurrency=_SLOTS.value,
      )
    )
    seconds = time.perf_counter() - started
    trajectories = [t for g in played.groups for t in g.trajectories]
    tokens = sum(t.generated_tokens for t in trajectories)
    c = ours.counters
    return {
      "seconds": seconds,
      "episodes/s": len(trajectories) / seconds,
      "tokens/s": tokens / seconds,
      "occupancy": c["lanes_used"] / max(c["lanes_offered"], 1),
      "searches": sum(t.searches for t in trajectories) / len(trajectories),
    }

  out = []
  for way in ways:
    play(way, 0, 0.0)
  print(
    f"{episodes} episodes, {_SLOTS.value} slots, {','.join(_LANES.value)} lanes"
  )
  for latency in map(float, _LATENCIES.value):
    rounds = [
      {way: play(way, 1 + i, latency / 1e3) for way in ways}
      for i in range(_PAIRS.value)
    ]
    for way in ways:
      found = {
        name: statistics.median(r[way][name] for r in rounds)
        for name in rounds[0][way]
      }
      # By tokens, because different samples have different lengths.
      ratios = sorted(r["a"]["tokens/s"] / r[way]["tokens/s"] for r in rounds)
      occupancy = f"{found['occupancy']:4.0%}" if way in "ab" else "   -"
      print(
        f"{latency:5.0f} ms  ({way})  {found['episodes/s']:7.1f} episodes/s  "
        f"{found['tokens/s']:8.0f} tokens/s  occupancy {occupancy}  "
        f"searches {found['searches']:.2f}  "
        f"(a) is {statistics.median(ratios):.2f}x "
        f"[{ratios[0]:.2f}, {ratios[-1]:.2f}]",
        flush=True,
      )
      out.append({"latency": latency, "way": way, "ratios": ratios} | found)
  if _SGLANG.value:
    ways["d"].close()
  if _JSON.value:
    pathlib.Path(_JSON.value).write_text(json.dumps(out, indent=2) + "\n")


if __name__ == "__main__":
  launch_flags.run(main)
