"""Compares one pass over all budgets with one run per budget.

    python -m bench.evaluation --questions=100 --budgets=0..8

Plays the same episodes in several ways, in turns, and checks that all ways give
the same rows. The first comparison is between commands, as whole processes:
`launch.evaluate` once with all budgets, and once for each budget. The others
are inside this process:

* one pass: what the command does
* a run per budget: with a new engine and an empty search cache for each,
  excluding the time to start a process
* one pass, but without deduplicated searches, or with each budget by itself, so
  that its last episodes leave slots empty

`--servers=A+B` answers a batch of n searches after A + B n milliseconds, one
batch after the other, like a server that computes; 0+0 is the index in this
process. Prints wall-clock and CPU seconds, and their ratios to one pass.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from absl import flags

from anysearch_jax import config as config_lib
from anysearch_jax import types
from bench import harness
from configs import quickstart
from launch import evaluate, jax_setup, policies
from retrieval import requests as requests_lib

if TYPE_CHECKING:
  from anysearch_jax.evaluation import harness as evaluation
  from anysearch_jax.rollout import searching
  from launch import world_source
  from retrieval import lexical

_ONE_PASS = "one pass"
_RUN_A_BUDGET = "a run a budget"
_UNSHARED = "no deduplicated searches"
_ALONE = "each budget by itself"
_WAYS = (_ONE_PASS, _RUN_A_BUDGET, _UNSHARED, _ALONE)


class Server(requests_lib.OneByBatch):
  """A retriever that takes as long as a server with these latencies."""

  def __init__(
    self, retriever: lexical.LexicalRetriever, batch: float, each: float
  ):
    self._retriever = retriever
    self._batch, self._each = batch, each
    self._free = 0.0

  async def search_many(
    self, requests: Sequence[types.SearchRequest]
  ) -> list[Sequence[types.Passage]]:
    if seconds := self._batch + self._each * len(requests):
      now = time.monotonic()
      self._free = max(self._free, now) + seconds
      await asyncio.sleep(self._free - now)
    return [await self._retriever.search(request) for request in requests]


def milliseconds(server: str) -> list[float]:
  """Parses "A+B" milliseconds into seconds per batch and per search."""
  return [float(part) / 1e3 for part in server.split("+")]


def commands() -> list[dict[str, object]]:
  """Measures one command for all budgets against one for each budget."""
  budgets = flags.FLAGS.budgets
  apart = [str(b) for b in evaluate.parse_budgets(budgets)]
  with tempfile.TemporaryDirectory() as name:
    root = pathlib.Path(name)
    # A first run compiles for both, so that neither is charged for it.
    _command([budgets], root / "warm")
    one, rows = _command([budgets], root / "one")
    many, others = _command(apart, root / "many")
  if rows != others:
    raise AssertionError("Separate commands gave other rows than one.")
  out: list[dict[str, object]] = []
  table = harness.Table("", "s", "ratio", "CPU s", "ratio")
  for name, took in (("one command", one), ("a command a budget", many)):
    table.row(
      name,
      took.seconds,
      f"{took.seconds / one.seconds:.2f}x",
      took.cpu,
      f"{took.cpu / one.cpu:.2f}x",
    )
    out.append({"way": name, **took._asdict()})
  return out


def _command(
  budgets: Sequence[str], root: pathlib.Path
) -> tuple[harness.Timing, list[str]]:
  """Runs the command for each of `budgets`; also returns the sorted rows."""
  f = flags.FLAGS
  rows: list[str] = []
  started = harness.Timing(time.perf_counter(), harness.children_cpu())
  for number, budget in enumerate(budgets):
    folder = root / str(number)
    subprocess.run(
      [
        sys.executable,
        "-m",
        "launch.evaluate",
        "--config=configs/quickstart.py",
        f"--config.evaluation.questions={f.questions}",
        f"--budgets={budget}",
        f"--seeds={f.seeds}",
        f"--threads={f.threads}",
        f"--output={folder}",
      ],
      check=True,
      capture_output=True,
    )
    rows += (folder / "episodes.jsonl").read_text().splitlines()
  return (
    harness.Timing(
      time.perf_counter() - started.seconds,
      harness.children_cpu() - started.cpu,
    ),
    sorted(rows),
  )


@dataclasses.dataclass(frozen=True)
class Plays:
  """The episodes that all ways play.

  expected: their sorted rows, which each way must give.
  """

  config: config_lib.ExperimentConfig
  source: world_source.WorldSource
  questions: Sequence[types.Question]
  expected: Sequence[str] = ()

  def play(self, way: str, server: str) -> tuple[dict[str, float], list[str]]:
    """Plays all episodes in one way; returns measurements and sorted rows."""
    budgets = self.config.evaluation.budgets
    alone = way in (_RUN_A_BUDGET, _ALONE)
    timing = harness.Timing(0.0, 0.0)
    summaries, rows = [], []
    with contextlib.ExitStack() as stack:
      player = retriever = None
      for some in [(b,) for b in budgets] if alone else [budgets]:
        if player is None or retriever is None or way == _RUN_A_BUDGET:
          # Weights are read before the clock starts.
          player = stack.enter_context(self._player())
          retriever = self._retriever(way, server)
        summary, took, found = self._evaluate(player, retriever, some)
        summaries.append(summary)
        rows += found
        timing = harness.Timing(
          timing.seconds + took.seconds, timing.cpu + took.cpu
        )
    # Counters of an engine that plays several runs include the earlier ones.
    last = summaries if way == _RUN_A_BUDGET else summaries[-1:]
    return timing._asdict() | _counted(last), sorted(rows)

  def measure(self, way: str, *, server: str) -> dict[str, float]:
    """Plays in one way and checks its rows."""
    found, rows = self.play(way, server)
    if rows != self.expected:
      raise AssertionError(f"{way!r} gave other rows than one pass.")
    return found

  def _player(self) -> contextlib.AbstractContextManager[evaluation.Player]:
    chosen = policies.Chosen("hf", self.config.policy)
    return policies.player(chosen, self.config, self.source)

  def _retriever(self, way: str, server: str) -> searching.BatchingRetriever:
    from anysearch_jax.rollout import searching

    class Unshared(searching.BatchingRetriever):
      """Batches searches but never answers from its cache."""

      async def search(self, request: types.SearchRequest):
        self.identity = object()
        return await super().search(request)

    make = Unshared if way == _UNSHARED else searching.BatchingRetriever
    return make(
      Server(self.source.retriever, *milliseconds(server)), self.config.search
    )

  def _evaluate(
    self,
    player: evaluation.Player,
    retriever: types.Retriever,
    budgets: tuple[int, ...],
  ) -> tuple[dict[str, dict[str, float]], harness.Timing, list[str]]:
    """Plays some budgets; returns the summary, the time, and the rows."""
    from anysearch_jax.evaluation import harness as evaluation

    config = dataclasses.replace(
      self.config,
      evaluation=dataclasses.replace(self.config.evaluation, budgets=budgets),
    )
    with tempfile.TemporaryDirectory() as name:
      folder = pathlib.Path(name)
      summary, took = harness.timed(
        lambda: evaluation.evaluate(
          config.evaluation,
          evaluation.Playing(
            config.episode, config.engine.slots, config.watch.quiet_seconds
          ),
          player=player,
          questions=self.questions,
          retriever=retriever,
          folder=folder,
        )
      )
      rows = (folder / evaluation.EPISODES).read_text().splitlines()
    return summary, took, rows


def _counted(
  summaries: Sequence[dict[str, dict[str, float]]],
) -> dict[str, float]:
  """Returns the counters of some evaluations, summed."""

  def total(group: str, name: str) -> float:
    return sum(s[group].get(name, 0) for s in summaries)

  offered = total("engine", "lanes_offered")
  return {
    "prefilled": total("engine", "prefilled_tokens"),
    "shared": total("engine", "shared_tokens"),
    "searches": total("search", "searches"),
    "queries": total("search", "batched_queries"),
    "decode calls": total("engine", "decode_calls"),
    "occupancy": total("engine", "lanes_used") / max(offered, 1),
  }


def _configuration() -> config_lib.ExperimentConfig:
  f = flags.FLAGS
  config = quickstart.get_config()
  return dataclasses.replace(
    config,
    engine=dataclasses.replace(
      config.engine, slots=f.slots or config.engine.slots
    ),
    evaluation=dataclasses.replace(
      config.evaluation,
      budgets=evaluate.parse_budgets(f.budgets),
      seeds=tuple(range(f.seeds)),
      questions=f.questions,
    ),
  )


def main() -> list[dict[str, object]]:
  f = flags.FLAGS
  jax_setup.configure(threads=f.threads, cache=".jax_cache")
  from launch import world_source

  config = _configuration()
  source = world_source.make(config.data, config.retrieval.kind)
  plays = Plays(config, source, source.evaluation_questions(each=f.questions))
  print(
    f"{len(plays.questions)} questions, budgets {f.budgets}, {f.seeds} seeds, "
    f"{config.engine.slots} slots, lanes {config.engine.lanes}, load "
    f"{os.getloadavg()[0]:.1f}"
  )
  out = commands() if f.commands else []
  _, rows = plays.play(_ONE_PASS, "0+0")
  plays = dataclasses.replace(plays, expected=rows)
  for server in f.servers:
    measure = functools.partial(plays.measure, server=server)
    found = harness.in_turns(_WAYS, measure, rounds=f.rounds)
    out += _show(server, found)
  print(f"all rows equal; load {os.getloadavg()[0]:.1f}")
  return out


def _show(server: str, found: harness.Rounds) -> list[dict[str, object]]:
  """Prints a table of the ways with one server; returns its numbers."""
  print(f"{server} ms")
  names = list(found.medians(_ONE_PASS))
  table = harness.Table("", *names, "clock", "CPU")
  out: list[dict[str, object]] = []
  for way in _WAYS:
    medians = found.medians(way)
    ratios = {
      clock: sorted(found.ratios(clock, way, _ONE_PASS))
      for clock in harness.Timing._fields
    }
    table.row(
      way,
      *medians.values(),
      *(f"  {found.ratio(clock, way, _ONE_PASS)}" for clock in ratios),
    )
    out.append({"server": server, "way": way, "ratios": ratios, **medians})
  return out


if __name__ == "__main__":
  flags.DEFINE_integer("questions", 100, "Under each budget.")
  flags.DEFINE_string("budgets", "0..8", "As launch.evaluate's.")
  flags.DEFINE_integer("seeds", 1, "How many.")
  flags.DEFINE_list(
    "servers",
    ["0+0", "50+0", "20+10"],
    "Milliseconds of a batch + of a search.",
  )
  flags.DEFINE_bool("commands", True, "Also run whole processes.")
  flags.DEFINE_integer("rounds", 3, "Of measurements.")
  flags.DEFINE_integer("slots", 0, "Instead of the quickstart's.")
  flags.DEFINE_integer("threads", 1, "CPU threads; 0: all.")
  harness.run(main)
