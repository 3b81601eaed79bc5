"""Compares five ways to play rollouts of a small policy, by search latency.

    python -m bench.rollout --policy=FOLDER [--sglang=URL]

The ways are (a) this engine with continuous batching, (b) the same engine
turn-synchronously (all episodes take a turn, then all of them search), (c)
transformers' `generate`, turn-synchronously, which computes the whole context
of a batch again every turn, (d) an SGLang server on this machine, started with
the same policy, and (e) as (a) with `engine.exact`. Every search is answered
from the same index, `latency` milliseconds later. Prints episodes and generated
tokens per second, the occupancy (the share of the lanes of decode calls that
sampled) and the ratios of each round. The ways take turns in one run.
"""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
from collections.abc import Awaitable, Callable, Sequence

from absl import flags

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.configs import quickstart
from anysearch_jax.launch import flags as launch_flags
from anysearch_jax.launch import jax_setup
from bench import harness

Turns = Callable[
  [Sequence[types.GenerateRequest]], Awaitable[Sequence[types.Generation]]
]


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
  turn only after its search is answered. `ask` samples the turns of all of
  them, and `engine` forgets an episode; `episodes` is the total number of
  episodes, `slots` the most that run at a time.
  """

  def __init__(
    self, ask: Turns, engine: types.Engine, *, episodes: int, slots: int
  ):
    self._ask, self._engine = ask, engine
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
    self, requests: Sequence[types.GenerateRequest]
  ) -> list[types.Generation]:
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
        types.Generation(
          tuple(new),
          tuple(float(logps[i, j, t]) for j, t in enumerate(new)),
          text if cut is None else cut,
          types.Finish.STOP if cut is not None else types.Finish.LENGTH,
          (0,) * len(new),
        )
      )
    return turns


def main(argv: Sequence[str]) -> None:
  f = flags.FLAGS
  jax_setup.configure(threads=f.threads, cache=".jax_cache")
  from anysearch_jax.launch import parts
  from anysearch_jax.methods import systems
  from anysearch_jax.policy import hf
  from anysearch_jax.rollout import driver
  from anysearch_jax.rollout.jax_engine import engine as engine_lib
  from bench import policies

  config = quickstart.get_config()
  config = dataclasses.replace(config, policy=f.policy or config.policy)
  source = parts.world_source(config.data, config.retrieval.kind)
  questions = source.questions("dev", f.questions, 0)
  policy = hf.load(config.policy)
  shapes = dataclasses.replace(
    config.engine, slots=f.slots, lanes=tuple(map(int, f.lanes))
  )
  ours, exact = (
    engine_lib.JaxEngine(policy, config=c, sampling=config.sampling, seed=0)
    for c in (shapes, dataclasses.replace(shapes, exact=True))
  )

  async def ours_at_once(requests):
    return await asyncio.gather(*map(ours.generate, requests))

  # The ways whose turns wait for each other, and the others.
  synchronous: dict[str, Turns] = {"b": ours_at_once}
  engines: dict[str, types.Engine] = {"a": ours}
  if f.exact:
    engines["e"] = exact
  if f.torch:
    import torch

    torch.set_num_threads(f.threads or torch.get_num_threads())
    synchronous["c"] = TorchEngine(config.policy, policy.tokenizer)
  if f.sglang:
    from anysearch_jax.rollout.servers import engine as servers_engine
    from anysearch_jax.rollout.servers import sglang

    engines["d"] = servers_engine.ServersEngine(
      policy,
      dialect=sglang.SglangServer,
      config=config_lib.SglangConfig(urls=(f.sglang,)),
      sampling=config.sampling,
      dtype="float32",
    )
  episodes = len(questions) * config.group

  def play(way: str, rollout: int, latency: float) -> dict[str, float]:
    """Plays one rollout; `latency` is the seconds of a search."""
    engine = engines.get(way) or TurnSynchronous(
      synchronous[way], ours, episodes=episodes, slots=f.slots
    )
    retriever = Late(source.retriever, latency)
    ours.counters.clear()
    played, timing = harness.timed(
      lambda: policies.play(
        questions,
        driver.EpisodeParts(
          engine,
          retriever,
          config.episode,
          policy.tokenizer,
          systems.of_episode(config.episode),
        ),
        group=config.group,
        rollout=rollout,
        concurrency=f.slots,
      )
    )
    found = policies.trajectories(played)
    c = ours.counters
    return {
      "episodes/s": len(found) / timing,
      "tokens/s": policies.generated(played) / timing,
      "occupancy": c["lanes_used"] / max(c["lanes_offered"], 1),
      "searches": sum(t.searches for t in found) / len(found),
    }

  ways = sorted({*engines, *synchronous})
  for way in ways:
    play(way, 0, 0.0)
  print(f"{episodes} episodes, {f.slots} slots; occupancy is of (a) and (b)")
  columns = ("episodes/s", "tokens/s", "occupancy", "searches")
  titles = "".join(f"{name:>13}" for name in columns)
  print(f"{'search, way':16}{titles}  (a) is faster by", flush=True)
  for latency in map(float, f.latencies):
    rounds = [
      {way: play(way, 1 + i, latency / 1e3) for way in ways}
      for i in range(f.pairs)
    ]
    for way in ways:
      medians = {
        name: statistics.median(found[way][name] for found in rounds)
        for name in columns
      }
      # By tokens, because different samples have different lengths.
      ratios = sorted(
        found["a"]["tokens/s"] / found[way]["tokens/s"] for found in rounds
      )
      cells = "".join(f"{value:13.4g}" for value in medians.values())
      faster = f"{statistics.median(ratios):.2f}x"
      limits = f"[{ratios[0]:.2f}, {ratios[-1]:.2f}]"
      row = f"{latency:5.0f} ms  ({way})"
      print(f"{row:16}{cells}  {faster} {limits}", flush=True)


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
  flags.DEFINE_bool("exact", False, "Also play (e).")
  flags.DEFINE_string("sglang", None, "Also play (d), at this address.")
  launch_flags.run(main)
