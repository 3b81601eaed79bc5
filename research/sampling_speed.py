"""Compares five ways to play rollouts of a small policy, by search latency.

    python -m research.sampling_speed --policy=FOLDER [--sglang=URL]

The ways are (a) this engine with continuous batching, (b) the same engine
turn-synchronously (all episodes take a turn, then all of them search), (c)
transformers' `generate`, turn-synchronously, which computes the whole context
of a batch again every turn, (d) an SGLang server on this machine, started with
the same policy, and (e) as (a) with `engine.exact`. Every search is answered
from the same index, `latency` milliseconds later. Prints episodes and generated
tokens per second, the occupancy (the share of the lanes of decode calls that
sampled) and the ratios of each round. The ways take turns in one run. `make
bench` runs it with one thread for each way.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import anysearch_jax as aj
from anysearch_jax.configs import quickstart

_BUDGETS = 5  # Questions have budgets of 1 to 5 in turn.
Turns = Callable[
  [Sequence[aj.GenerateRequest]], Awaitable[Sequence[aj.Generation]]
]


class Late:
  """A retriever that delays its answers."""

  def __init__(self, retriever: aj.Retriever, seconds: float):
    self._retriever = retriever
    self._seconds = seconds

  async def search(self, request: aj.SearchRequest):
    if self._seconds:
      await asyncio.sleep(self._seconds)
    return await self._retriever.search(request)


class TurnSynchronous:
  """An engine that answers only when every running episode waits for a turn.

  The barrier also synchronises searches, because an episode asks for its next
  turn only after its search is answered. `ask` samples the turns of all of
  them, and `engine` forgets an episode; `episodes` is the total number of
  episodes, `slots` the most that run at a time.
  """

  def __init__(
    self, ask: Turns, engine: aj.Engine, *, episodes: int, slots: int
  ):
    self._ask, self._engine = ask, engine
    self._unborn = episodes
    self._slots = slots
    self._alive: set[aj.Address] = set()
    self._asked: list[tuple[aj.GenerateRequest, asyncio.Future]] = []

  async def generate(self, request: aj.GenerateRequest) -> aj.Generation:
    if request.address not in self._alive:
      self._alive.add(request.address)
      self._unborn -= 1
    future = asyncio.get_running_loop().create_future()
    self._asked.append((request, future))
    self._go()
    return await future

  def release(self, address: aj.Address) -> None:
    self._engine.release(address)
    self._alive.discard(address)
    asyncio.get_running_loop().call_soon(self._go)

  def _go(self) -> None:
    coming = min(self._unborn, self._slots - len(self._alive))
    if self._asked and len(self._asked) == len(self._alive) and not coming:
      asked, self._asked = self._asked, []
      asyncio.get_running_loop().create_task(self._round(asked))

  async def _round(self, asked) -> None:
    answers = await self._ask([request for request, _ in asked])
    for (_, future), answer in zip(asked, answers, strict=True):
      future.set_result(answer)


class TorchEngine:
  """Samples several turns at once by transformers' `generate`.

  This is what a short script over transformers would do. Turns are left-padded
  and generated as one batch, with the whole context computed again every turn.
  """

  def __init__(self, folder: str, tokenizer):
    import torch
    import transformers

    self._torch = torch
    self.model = transformers.AutoModelForCausalLM.from_pretrained(
      folder, dtype=torch.float32
    ).eval()
    self._tokenizer = tokenizer
    torch.manual_seed(0)

  async def __call__(
    self, requests: Sequence[aj.GenerateRequest]
  ) -> list[aj.Generation]:
    torch = self._torch
    longest = max(len(r.token_ids) for r in requests)
    ids = torch.zeros(len(requests), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, request in enumerate(requests):
      n = len(request.token_ids)
      ids[i, longest - n :] = torch.tensor(request.token_ids)
      mask[i, longest - n :] = 1
    enders = sorted(
      self._tokenizer.end_of_turn_ids
      | {
        i
        for i, text in enumerate(self._tokenizer.token_texts())
        # Added tokens are decoded with a space before them.
        if text.strip() in requests[0].stop
      }
    )
    with torch.inference_mode():
      out = self.model.generate(
        input_ids=ids,
        attention_mask=mask,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=min(min(r.max_tokens for r in requests), 64),
        eos_token_id=enders,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
      )
    logps = torch.stack(out.logits, 1).log_softmax(-1)
    turns = []
    for i, request in enumerate(requests):
      new = out.sequences[i, longest:].tolist()
      ends = [j for j, token in enumerate(new) if token in enders]
      new = new[: ends[0] + 1] if ends else new
      text = self._tokenizer.decode(new)
      cut = request.cut(text)
      turns.append(
        aj.Generation(
          tuple(new),
          tuple(float(logps[i, j, t]) for j, t in enumerate(new)),
          text if cut is None else cut,
          aj.Finish.STOP if cut is not None else aj.Finish.LENGTH,
          (0,) * len(new),
        )
      )
    return turns


def engines_of(
  options: argparse.Namespace, config: aj.ExperimentConfig, policy: aj.Policy
) -> tuple[dict[str, aj.Engine], dict[str, Turns]]:
  """Returns the engines of the ways, and of those whose turns wait.

  Args:
    options: those of the command; they name the ways besides (a) and (b).
    config: the engine's settings and the sampling.
    policy: what all of them sample.
  """
  ours = aj.make_engine(policy, config, seed=0)

  async def ours_at_once(
    requests: Sequence[aj.GenerateRequest],
  ) -> list[aj.Generation]:
    return await asyncio.gather(*map(ours.generate, requests))

  engines: dict[str, aj.Engine] = {"a": ours}
  synchronous: dict[str, Turns] = {"b": ours_at_once}
  if options.exact:
    exact = aj.config.changed(config, engine={"exact": True})
    engines["e"] = aj.make_engine(policy, exact, seed=0)
  if options.torch:
    synchronous["c"] = TorchEngine(config.policy, policy.tokenizer)
  if options.sglang:
    served = aj.config.changed(
      config,
      engine={"kind": "sglang"},
      servers={"urls": (options.sglang,)},
    )
    engines["d"] = aj.make_engine(policy, served, seed=0)
  return engines, synchronous


def main(arguments: Sequence[str] | None = None) -> None:
  options = _parser().parse_args(arguments)
  config = quickstart.get_config()
  config = aj.config.changed(
    config,
    policy=options.policy or config.policy,
    engine={"slots": options.slots, "lanes": tuple(options.lanes)},
  )
  world = aj.World(config.data.world_seed, config.data.world_reliability)
  index = aj.LexicalRetriever(world.corpus, reads=world.searched)
  questions = world.questions("dev", options.questions, 0)
  policy = aj.load_policy(config.policy)
  engines, synchronous = engines_of(options, config, policy)
  ours: Any = engines["a"]  # Has counters, which not every engine has.
  episodes = len(questions) * config.group

  def play(way: str, rollout: int, latency: float) -> dict[str, float]:
    """Plays one rollout; `latency` is the seconds of a search."""
    engine = engines.get(way) or TurnSynchronous(
      synchronous[way], ours, episodes=episodes, slots=options.slots
    )
    parts = aj.EpisodeParts(
      engine,
      Late(index, latency),
      config.episode,
      policy.tokenizer,
      aj.environment_of(config.episode),
    )
    assignments = [
      aj.Assignment(i, question, i % _BUDGETS + 1, False)
      for i, question in enumerate(questions)
    ]
    counters = ours.counters
    counters.clear()
    began = time.perf_counter()
    played = aj.run(
      aj.run_groups(
        assignments,
        parts,
        group=config.group,
        rollout=rollout,
        max_concurrency=options.slots,
      )
    )
    seconds = time.perf_counter() - began
    trajectories = [t for group in played.groups for t in group.trajectories]
    tokens = sum(t.generated_tokens for t in trajectories)
    searches = sum(t.searches for t in trajectories)
    return {
      "episodes/s": len(trajectories) / seconds,
      "tokens/s": tokens / seconds,
      "occupancy": counters["lanes_used"] / max(counters["lanes_offered"], 1),
      "searches": searches / len(trajectories),
    }

  ways = sorted({*engines, *synchronous})
  for way in ways:
    play(way, 0, 0.0)
  print(
    f"{episodes} episodes, {options.slots} slots; occupancy is of (a) and (b)"
  )
  columns = ("episodes/s", "tokens/s", "occupancy", "searches")
  titles = "".join(f"{name:>13}" for name in columns)
  print(f"{'search, way':16}{titles}  (a) is faster by", flush=True)
  for latency in options.latencies:
    rounds = [
      {way: play(way, 1 + i, latency / 1e3) for way in ways}
      for i in range(options.pairs)
    ]
    for way in ways:
      cells = "".join(
        f"{statistics.median(round[way][name] for round in rounds):13.4g}"
        for name in columns
      )
      # By tokens, because different samples have different lengths.
      ratios = sorted(
        round["a"]["tokens/s"] / round[way]["tokens/s"] for round in rounds
      )
      faster = f"{statistics.median(ratios):.2f}x"
      limits = f"[{ratios[0]:.2f}, {ratios[-1]:.2f}]"
      row = f"{latency:5.0f} ms  ({way})"
      print(f"{row:16}{cells}  {faster} {limits}", flush=True)


def _parser() -> argparse.ArgumentParser:
  """Returns the parser of the command's options."""
  parser = argparse.ArgumentParser(description=__doc__)
  add = parser.add_argument
  add("--policy", help="Hugging Face folder; default: the quickstart's policy")
  add(
    "--latencies",
    type=float,
    nargs="+",
    default=[0, 50, 500],
    help="of a search, in milliseconds",
  )
  add("--pairs", type=int, default=3, help="rounds of measurements")
  add("--questions", type=int, default=64, help="of a rollout, 5 times each")
  add("--slots", type=int, default=320, help="episodes under way at a time")
  add(
    "--lanes",
    type=int,
    nargs="+",
    default=[32],
    help="rows of decode calls, ascending",
  )
  add("--notorch", dest="torch", action="store_false", help="leave (c) out")
  add("--exact", action="store_true", help="also play (e)")
  add("--sglang", help="also play (d), at this address")
  return parser


if __name__ == "__main__":
  main()
