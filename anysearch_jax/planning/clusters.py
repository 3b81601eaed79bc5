"""What a simulation needs: the workload of a plan, or of a run that was made.

More trainers are copies of the planned mesh, which share the micro-batches and
sum their gradients over the network; more samplers are copies of the planned
one.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from anysearch_jax import config as config_lib
from anysearch_jax.host import json_files
from anysearch_jax.planning import plan as plan_lib
from anysearch_jax.planning import simulation, targets, whole_step
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.training import timeline

_SPREAD = 0.5  # Deviation of the logarithm of a turn's or search's length.
_DELTA = 0.05  # Of a folder's bytes; at most .044 were seen at a rate of 1e-6.
_FIRST = 2  # Rollouts of a run that are left out, because they compile.
# Logarithms of the seconds of a step, between which a run's is searched.
_LOW, _HIGH, _HALVINGS = -20.0, 5.0, 20


def planned(
  plan: plan_lib.Plan,
  a: architecture_lib.Architecture,
  expected: whole_step.Episodes,
  *,
  search_seconds: float,
) -> simulation.Workload:
  """Returns the workload of a plan whose programs have all compiled.

  `a` is without adapters, `expected` are the episodes of an optimizer step and
  `search_seconds` the mean of a search.
  """
  config, target, engine = plan.config, plan.target, plan.config.engine
  parts = {part.name: part for part in plan.parts}
  observed = expected.tokens - expected.generated
  prompt = min(whole_step.PROMPT, observed)
  searches = (observed - prompt) / whole_step.OBSERVATION
  sampled = expected.generated / (1 + searches)

  def draw(rng: np.random.Generator) -> list[simulation.Episode]:
    found: list[simulation.Episode] = []
    for i in range(config.questions * config.group):
      turns = 1 + min(config.curriculum.max_budget, rng.poisson(searches))
      # The samples of a question share its prompt.
      given = [0 if i % config.group else prompt]
      given += [whole_step.OBSERVATION] * (turns - 1)
      # The mean of a log-normal is above the exponential of its logarithm's.
      spread = rng.lognormal(-(_SPREAD**2) / 2, _SPREAD, (2, turns))
      seconds = spread * [[sampled], [search_seconds]]
      found.append(list(map(simulation.Turn, given, *seconds.tolist())))
    return found

  def sampling(rows: int) -> tuple[float, float]:
    """Returns the seconds of a prefilled token, and of a step of `rows`."""
    lanes = (max(1, round(rows / whole_step.OCCUPANCY)),)
    changed = config_lib.changed(config, engine={"lanes": lanes})
    prefill, decode = (
      times * targets.predict(own, flops=f, read=r, traffic=t).total
      for _, times, f, r, t in whole_step.sampling(changed, a, expected, parts)
    )
    tokens = observed - prompt * (1 - 1 / config.group)
    played, busy = expected.trajectories, lanes[0] * whole_step.OCCUPANCY
    return (
      prefill / played / tokens,
      decode / played / expected.generated * busy,
    )

  mesh, samples = config.mesh, parts["decode"].devices
  # The devices of a sampler are in one host, if they fit, whatever the target.
  own = dataclasses.replace(target, shape=(samples,))
  rows = whole_step.concurrent_rows(engine, expected.tokens // 2)
  prefill, one = sampling(1)
  row = (sampling(rows)[1] - one) / max(1, rows - 1)
  trains = mesh.size
  micro = expected.micro_batches(config.batch, mesh.rows)
  assert plan.step is not None
  step = sum(phase.predicted for phase in plan.step.training)
  network = targets.ASSUMED.links * (
    target.hardware.network_bandwidth or target.hardware.link_bandwidth
  )

  def train(copies: int) -> float:
    # Gradients are float32, and each byte is sent and received.
    summed = 8 * plan.trained / trains * (1 - 1 / copies) / network
    step_ = math.ceil(micro / copies) / micro * step + summed
    return config.curriculum.steps_per_rollout * step_

  def hand_over(copies: int, servers: int) -> float:
    # Bfloat16 to every server, by the slower of what receives and what sends:
    # adapters, all weights or a delta of them.
    share = max(1 / samples, servers / (copies * trains))
    sent = plan.trained * (_DELTA if config.sglang.deltas else 1)
    return 2 * sent * share / network

  return simulation.Workload(
    draw,
    simulation.Server(prefill, max(one - row, 0.0), row, rows, engine.slots),
    train,
    hand_over,
    config.pipeline.async_level,
    config.curriculum.steps_per_rollout,
    samples,
    trains,
  )


def measured(
  folder: pathlib.Path, config: config_lib.ExperimentConfig, *, seed: int
) -> tuple[simulation.Workload, float]:
  """Reads a run that `launch.train --timeline` made, with its configuration.

  Episodes, waits for searches, seconds of training and of the hand-over are the
  run's. Its sampler has the speed with which simulated rollouts last as long as
  the run's, on average; a prefilled token costs a row's share of a step. The
  first rollouts, which compile, and the last are left out.

  Returns:
    (workload, the run's rollouts an hour).

  Raises:
    ValueError: the folder lacks a file, or rollouts.
  """
  spans: dict[int, collections.Counter[str]] = {}
  turns = collections.defaultdict(list)
  events = json_files.read(folder / "timeline.json", list, missing=[])
  for event, after in itertools.pairwise([*events, {}]):
    of = event["args"]
    if event["ph"] == "X":
      seconds = spans.setdefault(of["rollout"], collections.Counter())
      seconds[f"{event['cat']}/{event['name']}"] += event["dur"] / 1e6
    elif event["ph"] == "b" and event["cat"] == timeline.TURNS:
      key = of["rollout"], of["question"], of["sample"]
      turns[key].append((event["ts"] / 1e6, after["ts"] / 1e6))
  made = json_files.read(folder / "config.json", missing={})
  level = made.get("pipeline", {}).get("async_level", 0)
  rollouts = sorted(spans)[_FIRST : -1 - level]
  episodes = [
    found
    for path in sorted(folder.glob("trajectories/rollout-*.jsonl"))
    for line in path.read_text().splitlines()
    for trajectory in json.loads(line)["trajectories"]
    if (found := _turns(trajectory))
  ]
  if len(rollouts) < 2 or not episodes:
    raise ValueError(
      f"--run: found {len(rollouts)} rollouts on the timeline of {folder}, "
      f"besides the first {_FIRST} and the last, and {len(episodes)} recorded "
      "trajectories; expected some of both: train longer, with --timeline."
    )

  def mean(*names: str) -> float:
    # While these were trained on, those `level` later were sampled.
    return sum(
      spans[rollout + level * name.startswith("sampler")][name]
      for rollout in rollouts
      for name in names
    ) / len(rollouts)

  played = [sorted(x) for (at, *_), x in turns.items() if at in set(rollouts)]
  waits = [
    max(0.0, after[0] - before[1])
    for each in played
    for before, after in itertools.pairwise(each)
  ] or [0.0]

  def draw(rng: np.random.Generator) -> list[simulation.Episode]:
    chosen = rng.integers(len(episodes), size=len(played) // len(rollouts))
    return [
      [turn._replace(search=float(rng.choice(waits))) for turn in episodes[i]]
      for i in chosen
    ]

  rng, engine = np.random.default_rng(seed), config.engine
  drawn = [draw(rng) for _ in range(4)]
  low, high = _LOW, _HIGH
  for _ in range(_HALVINGS):
    step = math.exp((low + high) / 2)
    rows = engine.lanes[-1]
    server = simulation.Server(step / rows, step, 0.0, rows, engine.slots)
    took = [simulation.play(each, 1, server).seconds for each in drawn]
    if np.mean(took) < mean("sampler/collect"):
      low = math.log(step)
    else:
      high = math.log(step)
  trained = mean("trainer/train", "trainer/save")
  synced = mean("sampler/sync", "trainer/sync")
  work = simulation.Workload(
    draw,
    server,
    lambda copies: trained / copies,
    lambda copies, servers: synced,
    config.pipeline.async_level,
    config.curriculum.steps_per_rollout,
    between=mean("sampler/score", "sampler/fingerprint"),
  )
  of_trainer = ("idle", "train", "save", "sync")
  return work, 3600 / mean(*(f"trainer/{name}" for name in of_trainer))


def _turns(trajectory: Mapping[str, Any]) -> list[simulation.Turn]:
  """Returns the turns of a record, whose tokens go by their characters."""
  found, given = [], 0.0
  counts = {"model": "generated_tokens", "environment": "retrieved_tokens"}
  sizes = collections.Counter[str]()
  for span in trajectory["spans"]:
    sizes[span["author"]] += len(span["text"])
  for span in trajectory["spans"]:
    if (author := span["author"]) in counts and span["text"]:
      share = len(span["text"]) / sizes[author]
      tokens = trajectory[counts[author]] * share
      if author == "model":
        found.append(simulation.Turn(given, tokens))
      given = tokens if author == "environment" else 0.0
  return found
