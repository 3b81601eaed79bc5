"""Compares four ways to play rollouts of a small policy, by search latency.

    python -m bench.rollout --policy=FOLDER [--sglang=URL]

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
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from absl import flags

from anysearch_jax import config as config_lib
from anysearch_jax import types
from bench import harness
from configs import quickstart
from launch import jax_setup

if TYPE_CHECKING:
  from anysearch_jax.policy import hf
  from anysearch_jax.rollout.jax_engine import engine as engine_lib
  from anysearch_jax.rollout.sglang import engine as sglang

# The ways whose turns wait for each other.
_TURN_SYNCHRONOUS = ("b", "c")


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


@dataclasses.dataclass(frozen=True)
class Ways:
  """The ways to play, and what they play.

  engines: by way. local: the in-process engine, whose counters are read.
  """

  config: config_lib.ExperimentConfig
  questions: Sequence[types.Question]
  codec: types.TextCodec
  retriever: types.Retriever
  engines: Mapping[str, types.Engine]
  local: engine_lib.JaxEngine
  slots: int

  @property
  def episodes(self) -> int:
    return len(self.questions) * self.config.group

  def play(self, way: str, rollout: int, latency: float) -> dict[str, float]:
    """Plays one rollout; `latency` is the seconds of a search."""
    from anysearch_jax.rollout import driver
    from bench import playing

    engine = self.engines[way]
    if way in _TURN_SYNCHRONOUS:
      engine = TurnSynchronous(engine, episodes=self.episodes, slots=self.slots)
    self.local.counters.clear()
    played, timing = harness.timed(
      lambda: playing.play(
        self.questions,
        driver.EpisodeParts(
          engine,
          Late(self.retriever, latency),
          self.config.episode,
          self.codec,
        ),
        group=self.config.group,
        rollout=rollout,
        concurrency=self.slots,
      )
    )
    found = playing.trajectories(played)
    c = self.local.counters
    return {
      "seconds": timing.seconds,
      "episodes/s": len(found) / timing.seconds,
      "tokens/s": playing.generated(played) / timing.seconds,
      "occupancy": c["lanes_used"] / max(c["lanes_offered"], 1),
      "searches": sum(t.searches for t in found) / len(found),
    }


def main() -> list[dict[str, object]]:
  f = flags.FLAGS
  jax_setup.configure(threads=f.threads, cache=".jax_cache")
  from anysearch_jax.policy import hf
  from bench import playing
  from launch import world_source

  config = quickstart.get_config()
  config = dataclasses.replace(config, policy=f.policy or config.policy)
  source = world_source.make(config.data, config.retrieval.kind)
  policy = hf.load(config.policy)
  shapes = dataclasses.replace(
    config.engine, slots=f.slots, lanes=tuple(map(int, f.lanes))
  )
  ours = playing.local_engine(policy, shapes, config.sampling)
  engines: dict[str, types.Engine] = {"a": ours, "b": ours}
  if f.torch:
    engines["c"] = _torch_engine(config.policy, policy, f.threads)
  closes: Callable[[], object] = lambda: None  # noqa: E731
  if f.sglang:
    engines["d"] = server = _sglang_engine(policy, config.sampling, f.sglang)
    closes = server.close
  ways = Ways(
    config=config,
    questions=source.questions("dev", f.questions, 0),
    codec=policy.tokenizer,
    retriever=source.retriever,
    engines=engines,
    local=ours,
    slots=f.slots,
  )
  try:
    return _compare(ways, [float(x) for x in f.latencies], f.pairs)
  finally:
    closes()


def _torch_engine(folder: str, policy: hf.Policy, threads: int) -> types.Engine:
  import torch

  from bench import torch_peer

  if threads:
    torch.set_num_threads(threads)
  return torch_peer.TorchEngine(folder, policy.tokenizer)


def _sglang_engine(
  policy: hf.Policy, sampling: config_lib.SamplingConfig, url: str
) -> sglang.SglangEngine:
  from anysearch_jax.rollout.sglang import engine as sglang

  return sglang.SglangEngine(
    policy,
    config=config_lib.SglangConfig(urls=(url,)),
    sampling=sampling,
    dtype="float32",
  )


def _compare(
  ways: Ways, latencies: Sequence[float], rounds: int
) -> list[dict[str, object]]:
  """Plays all ways in turns, for each latency in milliseconds."""
  for way in ways.engines:
    ways.play(way, 0, 0.0)
  print(f"{ways.episodes} episodes, {ways.slots} slots")
  table = harness.Table(
    "search, way",
    "episodes/s",
    "tokens/s",
    "occupancy",
    "searches",
    "(a) is faster by",
    first=16,
  )
  out: list[dict[str, object]] = []
  for latency in latencies:
    found = harness.Rounds(
      [
        {way: ways.play(way, 1 + i, latency / 1e3) for way in ways.engines}
        for i in range(rounds)
      ]
    )
    for way in ways.engines:
      medians = found.medians(way)
      ours = ways.engines[way] is ways.local
      table.row(
        f"{latency:5.0f} ms  ({way})",
        medians["episodes/s"],
        medians["tokens/s"],
        f"{medians['occupancy']:.0%}" if ours else "-",
        medians["searches"],
        # By tokens, because different samples have different lengths.
        f"  {found.ratio('tokens/s', 'a', way)}",
      )
      ratios = sorted(found.ratios("tokens/s", "a", way))
      out.append({"latency": latency, "way": way, "ratios": ratios} | medians)
  return out


if __name__ == "__main__":
  flags.DEFINE_string(
    "policy", None, "Hugging Face folder; default: the quickstart's policy."
  )
  flags.DEFINE_list("latencies", ["0", "50", "500"], "In milliseconds.")
  flags.DEFINE_integer("pairs", 3, "Rounds of measurements.")
  flags.DEFINE_integer("questions", 64, "Of a rollout, five times each.")
  flags.DEFINE_integer("slots", 320, "Episodes under way at a time.")
  flags.DEFINE_list("lanes", ["32"], "Rows of decode calls, ascending.")
  flags.DEFINE_integer("threads", 0, "CPU threads; 0: all.")
  flags.DEFINE_bool("torch", True, "Also play (c).")
  flags.DEFINE_string("sglang", None, "Also play (d), at this address.")
  harness.run(main)
