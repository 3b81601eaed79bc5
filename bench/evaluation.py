"""Compares one pass over all budgets with one run per budget.

    python -m bench.evaluation --questions=100 --budgets=0..8

Plays the same episodes in several ways, in turns, and checks that all ways give
the same rows. The first comparison is between commands, as whole processes:
`launch.evaluate` once with all budgets, and once for each budget. The others
are inside this process:

* one pass: what the command does
* a run per budget: with a new engine and an empty search cache for each,
  excluding the time to start a process
* one pass, but without shared prefixes, without deduplicated searches, or with
  each budget by itself, so that its last episodes leave slots empty

`--servers=A+B` answers a batch of n searches after A + B n milliseconds, one
batch after the other, like a server that computes; 0+0 is the index in this
process. Prints wall-clock and CPU seconds, and their ratios to one pass.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

from absl import flags

from anysearch_jax import types
from configs import quickstart
from launch import evaluate, jax_setup, parts, policies
from launch import flags as launch_flags

_QUESTIONS = flags.DEFINE_integer("questions", 100, "Under each budget.")
_BUDGETS = flags.DEFINE_string("budgets", "0..8", "As launch.evaluate's.")
_SEEDS = flags.DEFINE_integer("seeds", 1, "How many.")
_SERVERS = flags.DEFINE_list(
  "servers", ["0+0", "50+0", "20+10"], "Milliseconds of a batch + of a search."
)
_COMMANDS = flags.DEFINE_bool("commands", True, "Also run whole processes.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Of measurements.")
_SLOTS = flags.DEFINE_integer("slots", 0, "Instead of the quickstart's.")
_PROCESS = flags.DEFINE_integer("threads", 1, "CPU threads; 0: all.")
_JSON = flags.DEFINE_string("json", None, "File for the numbers.")

_WAYS = (
  "one pass",
  "a run a budget",
  "no shared prefixes",
  "no deduplicated searches",
  "each budget by itself",
)


class Server:
  """A retriever that takes as long as a server with these latencies."""

  def __init__(self, retriever: Any, batch: float, each: float):
    self._retriever = retriever
    self._batch, self._each = batch, each
    self._free = 0.0

  async def search_many(self, requests):
    if seconds := self._batch + self._each * len(requests):
      now = time.monotonic()
      self._free = max(self._free, now) + seconds
      await asyncio.sleep(self._free - now)
    return [await self._retriever.search(request) for request in requests]


@contextlib.contextmanager
def no_shared_prefixes() -> Iterator[None]:
  """Disables prefix sharing, so that every prompt is prefilled whole."""
  from anysearch_jax.rollout.jax_engine import page_pool

  nothing = lambda pool, tokens: page_pool.Shared([])  # noqa: E731
  with mock.patch.object(page_pool.PagePool, "shared", nothing):
    yield


def milliseconds(server: str) -> list[float]:
  """Parses "A+B" milliseconds into seconds per batch and per search."""
  return [float(part) / 1e3 for part in server.split("+")]


def commands() -> list[dict[str, Any]]:
  """Measures one command for all budgets against one for each budget."""

  def run(budgets: Sequence[str], root: str) -> tuple[float, float, list[str]]:
    """Returns wall-clock seconds, CPU seconds, and the sorted rows."""
    rows: list[str] = []
    started = time.perf_counter(), _children()
    for number, budget in enumerate(budgets):
      folder = pathlib.Path(root) / str(number)
      subprocess.run(
        [
          sys.executable,
          "-m",
          "launch.evaluate",
          "--config=configs/quickstart.py",
          f"--config.evaluation.questions={_QUESTIONS.value}",
          f"--budgets={budget}",
          f"--seeds={_SEEDS.value}",
          f"--threads={_PROCESS.value}",
          f"--output={folder}",
        ],
        check=True,
        capture_output=True,
      )
      rows += (folder / "episodes.jsonl").read_text().splitlines()
    ended = time.perf_counter(), _children()
    return ended[0] - started[0], ended[1] - started[1], sorted(rows)

  apart = [str(b) for b in evaluate.parse_budgets(_BUDGETS.value)]
  with tempfile.TemporaryDirectory() as root:
    # A first run compiles for both, so that neither is charged for it.
    run([_BUDGETS.value], f"{root}/warm")
    one = run([_BUDGETS.value], f"{root}/one")
    many = run(apart, f"{root}/many")
  if one[2] != many[2]:
    raise AssertionError("Separate commands gave other rows than one.")
  out = []
  for name, found in (("one command", one), ("a command a budget", many)):
    seconds, cpu, _ = found
    print(
      f"{name:36s} {seconds:7.1f} s  {seconds / one[0]:.2f}x  cpu {cpu:6.1f} s "
      f"{cpu / one[1]:.2f}x",
      flush=True,
    )
    out.append({"way": name, "seconds": seconds, "cpu": cpu})
  return out


def _children() -> float:
  """Returns the CPU seconds of all child processes that have ended."""
  used = resource.getrusage(resource.RUSAGE_CHILDREN)
  return used.ru_utime + used.ru_stime


def main(argv) -> None:
  del argv
  jax_setup.configure(threads=_PROCESS.value, cache=".jax_cache")
  from anysearch_jax.evaluation import harness
  from anysearch_jax.rollout import searching

  class Apart(searching.Searcher):
    """Batches searches but never answers from its cache."""

    async def search(self, request: types.SearchRequest):
      self.identity = object()
      return await super().search(request)

  config = quickstart.get_config()
  budgets = evaluate.parse_budgets(_BUDGETS.value)
  config = dataclasses.replace(
    config,
    engine=dataclasses.replace(
      config.engine, slots=_SLOTS.value or config.engine.slots
    ),
    evaluation=dataclasses.replace(
      config.evaluation,
      budgets=budgets,
      seeds=tuple(range(_SEEDS.value)),
      questions=_QUESTIONS.value,
    ),
  )
  source = parts.source(config)
  questions = source.evaluation_questions(each=_QUESTIONS.value)
  chosen = policies.Chosen("hf", config.policy)

  def play(way: str, server: str) -> tuple[dict[str, Any], list[str]]:
    """Plays all episodes in one way; returns measurements and sorted rows."""
    alone = way in ("a run a budget", "each budget by itself")
    shared = no_shared_prefixes if way == _WAYS[2] else contextlib.nullcontext
    make = Apart if way == _WAYS[3] else searching.Searcher
    runs = [(b,) for b in budgets] if alone else [budgets]
    summaries, rows = [], []
    with contextlib.ExitStack() as stack:
      stack.enter_context(shared())
      player = retriever = None
      seconds = cpu = 0.0
      for run in runs:
        if player is None or way == "a run a budget":
          # Weights are read before the clock starts.
          player = stack.enter_context(policies.player(chosen, config, source))
          retriever = make(
            Server(source.retriever, *milliseconds(server)), config.search
          )
        folder = pathlib.Path(
          stack.enter_context(tempfile.TemporaryDirectory())
        )
        one = dataclasses.replace(
          config, evaluation=dataclasses.replace(config.evaluation, budgets=run)
        )
        started = time.perf_counter(), time.process_time()
        summaries.append(
          harness.evaluate(
            one.evaluation,
            harness.Playing(
              one.episode, one.engine.slots, one.watch.quiet_seconds
            ),
            player=player,
            questions=questions,
            retriever=retriever,
            folder=folder,
          )
        )
        seconds += time.perf_counter() - started[0]
        cpu += time.process_time() - started[1]
        rows += (folder / harness.EPISODES).read_text().splitlines()
    last = summaries if way == "a run a budget" else summaries[-1:]

    def total(group: str, name: str) -> float:
      return sum(s[group].get(name, 0) for s in last)

    offered = total("engine", "lanes_offered")
    return {
      "seconds": seconds,
      "cpu": cpu,
      "prefilled": total("engine", "prefilled_tokens"),
      "shared": total("engine", "shared_tokens"),
      "searches": total("search", "searches"),
      "queries": total("search", "batched_queries"),
      "decode_calls": total("engine", "decode_calls"),
      "occupancy": total("engine", "lanes_used") / max(offered, 1),
    }, sorted(rows)

  print(
    f"{len(questions)} questions, budgets {_BUDGETS.value}, {_SEEDS.value} "
    f"seeds, {config.engine.slots} slots, lanes {config.engine.lanes}, load "
    f"{os.getloadavg()[0]:.1f}"
  )
  out = commands() if _COMMANDS.value else []
  _, expected = play(_WAYS[0], "0+0")
  for server in _SERVERS.value:
    rounds = []
    for _ in range(_ROUNDS.value):
      measured = {}
      for way in _WAYS:
        measured[way], rows = play(way, server)
        if rows != expected:
          raise AssertionError(f"{way!r} gave other rows than one pass.")
      rounds.append(measured)
    for way in _WAYS:
      found = {
        name: statistics.median(r[way][name] for r in rounds)
        for name in rounds[0][way]
      }
      ratios = {
        clock: sorted(r[way][clock] / r[_WAYS[0]][clock] for r in rounds)
        for clock in ("seconds", "cpu")
      }
      print(
        f"{server:6s} ms  {way:25s} {found['seconds']:7.1f} s  "
        f"{_spread(ratios['seconds'])}  cpu {found['cpu']:6.1f} s  "
        f"{_spread(ratios['cpu'])}  prefilled {found['prefilled']:.0f} shared "
        f"{found['shared']:.0f}  searches {found['searches']:.0f} queries "
        f"{found['queries']:.0f}  decode calls {found['decode_calls']:.0f}  "
        f"occupancy {found['occupancy']:.0%}",
        flush=True,
      )
      out.append({"server": server, "way": way, "ratios": ratios} | found)
  print(f"all rows equal; load {os.getloadavg()[0]:.1f}")
  if _JSON.value:
    pathlib.Path(_JSON.value).write_text(json.dumps(out, indent=2) + "\n")


def _spread(ratios: list[float]) -> str:
  return f"{statistics.median(ratios):.2f}x [{ratios[0]:.2f}, {ratios[-1]:.2f}]"


if __name__ == "__main__":
  launch_flags.run(main)
