"""Whole rollouts with their optimizer steps."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.configs import one_gpu, qwen3_4b
from anysearch_jax.launch import flags as launch_flags
from anysearch_jax.methods import systems
from anysearch_jax.planning import flops, programs
from anysearch_jax.policy import hf
from anysearch_jax.rollout import driver, engines
from anysearch_jax.training import learner as learner_lib
from anysearch_jax.training import rewards_and_advantages, throughput
from bench import harness, policies
from bench.first_gpu import engine, running

_POLICY = "Qwen3-4B"
_STEPS = 3
_MICRO_BATCHES = 2
# Of an H200, on which a step of all weights fits.
_LARGE = 120 * 2**30
# What a step needs besides state and weights.
_ACTIVATIONS = 6 * 2**30


class Invented:
  """Answers every search with three passages of about 195 words."""

  async def search(
    self, request: types.SearchRequest
  ) -> Sequence[types.Passage]:
    rng = np.random.default_rng(len(request.query))
    return [
      types.Passage(
        id=str(i),
        title=f'"Passage {i}"',
        text=" ".join(f"word{n}" for n in rng.integers(0, 9999, 190)),
      )
      for i in range(request.k)
    ]


def colocated(notes: running.Notes, *, policy: str) -> None:
  """Samples, trains and hands over a large policy on one device.

  All weights are trained where they fit, otherwise adapters; both with the KL
  term.
  """
  a = engine.architecture(policy, rehearse=notes.rehearse)
  adapters = not engine.fits(_LARGE)
  config = _colocated(adapters=adapters, rehearse=notes.rehearse)
  engine.need(2 * engine.parameters(a) + 30 * 2**30 if adapters else _LARGE)
  notes.add({"trained": "adapters" if adapters else "every weight"})
  dtype = config.lora.base_dtype if adapters else "float32"
  base = policies.weights_of(a, dtype=dtype)
  questions = [
    types.Question(
      id=str(i),
      text=" ".join(f"word{i + n}" for n in range(20)),
      golden_answers=(f"word{i}",),
    )
    for i in range(config.questions)
  ]
  start = hf.Policy(base, a, engine.Words(a.vocab_size))
  learner = learner_lib.Learner(config, start)
  published = start._replace(
    params=learner.published(), architecture=learner.architecture
  )
  sampler = engines.make(published, config, seed=config.seed)
  parts = driver.EpisodeParts(
    sampler,
    Invented(),
    config.episode,
    start.tokenizer,
    systems.of_episode(config.episode),
  )
  del base, start, published  # Their memory is the learner's.

  def measure(number: int) -> dict[str, Any]:
    rollout, played = harness.timed(
      lambda: policies.play(
        questions,
        parts,
        group=config.group,
        rollout=number,
        concurrency=config.engine.slots,
      )
    )
    scored = rewards_and_advantages.score(
      rollout.groups,
      np.asarray([g.budget for g in rollout.groups]),
      samples=config.group,
      method=systems.trained(config),
      objective=config.objective,
    )
    packed = learner.pack(scored)
    values, trained = harness.timed(lambda: list(learner.steps(packed)))
    handed = harness.seconds(
      lambda: sampler.set_params(
        jax.block_until_ready(learner.published()), number + 1
      )
    )
    found, tokens = policies.trajectories(rollout), policies.generated(rollout)
    counters = sampler.counters
    return {
      "sampled, s": played,
      "trained, s": trained,
      "handed over, s": handed,
      "trajectories": len(found),
      "failed episodes": sum(t.failed for t in found),
      "generated tokens": tokens,
      "generated tokens/s": tokens / played,
      "trained tokens": throughput.count(packed, learner.architecture).tokens,
      "searches": sum(t.searches for t in found),
      "occupancy": counters["lanes_used"] / max(counters["lanes_offered"], 1),
      "loss": values[-1]["loss/total"],
      "KL to the reference": values[-1].get("loss/kl", 0.0),
    }

  for number in range(1 if notes.rehearse else 2):
    notes.case(f"rollout {number}", functools.partial(measure, number))
  notes.add(throughput.memory(jax.local_devices()))


def _colocated(
  *, adapters: bool, rehearse: bool
) -> config_lib.ExperimentConfig:
  """Returns a rollout of 160 trajectories of at most 4,096 tokens."""
  config = one_gpu.get_config("qwen3_4b-full141")
  if adapters:
    config = qwen3_4b.get_config("lora80")
  context, generated, group = (1024, 24, 2) if rehearse else (4096, 512, 5)
  slots, lanes, questions = (4, 4, 1) if rehearse else (160, 128, 32)
  tokens = context if rehearse else (4 if adapters else 2) * context
  return launch_flags.override(
    config,
    [
      *(f"questions={questions}", f"group={group}"),
      "curriculum.steps_per_rollout=1",
      f"episode.max_generated={generated}",
      *(f"episode.max_context={context}", f"engine.max_context={context}"),
      *(f"engine.slots={slots}", f"engine.lanes=({lanes},)"),
      f"engine.kv_tokens={slots * context if rehearse else 1 << 17}",
      f"engine.prefill_lanes={2 if rehearse else config.engine.prefill_lanes}",
      f"batch.row_lengths=({context},)",
      f"batch.micro_batch_tokens={tokens}",
      f"batch.max_micro_batches={questions * group}",
    ],
  )


def step(
  notes: running.Notes,
  *,
  lora: bool,
  remat: str,
  rows: int,
  profile: bool = False,
) -> None:
  """Times optimizer steps on random weights, in packed rows of 8,192 tokens.

  Args:
    notes: gets the figures.
    lora: whether adapters of rank 32 are trained, instead of all weights.
    remat: what the backward pass computes again.
    rows: rows of a micro-batch.
    profile: whether to trace them.
  """
  a = engine.architecture(_POLICY, rehearse=notes.rehearse)
  count = engine.parameters(a)
  # Masters, two moments and gradients; or the frozen base.
  size = (2 if lora else 16) * count + _ACTIVATIONS
  engine.need(size)
  config = qwen3_4b.get_config("lora80" if lora else "")
  # With adapters, the base is the reference too.
  kl = config.objective.kl_coefficient
  if not lora and not engine.fits(size + 2 * count):
    kl = 0.0
    notes.add({"reference": "left out with its KL, for lack of memory"})
  row = 128 if notes.rehearse else 8192
  config = dataclasses.replace(
    launch_flags.override(
      config,
      [
        f"objective.kl_coefficient={kl}",
        *(f"batch.row_lengths=({row},)", f"batch.remat={remat}"),
        f"batch.micro_batch_tokens={rows * row}",
        f"batch.max_micro_batches={_MICRO_BATCHES}",
      ],
    ),
    mesh=config_lib.MeshConfig(),
    pipeline=config_lib.PipelineConfig(),
  )
  planned, *_ = programs.programs(
    config,
    a,
    devices=jax.local_devices(),
    micro_batches=_MICRO_BATCHES,
    # Trajectories take an eighth to a half of a row.
    segment=row // 4,
  )
  jaxpr = planned.fn.trace(*planned.args).jaxpr
  trace = str(notes.traces) if profile else None
  ours = policies.TrainStep(config, a, _MICRO_BATCHES)
  found = policies.measure_step(ours, _STEPS, profile=trace)
  tokens, seconds = found["tokens"], found["step, s"]
  found |= engine.beside(
    notes,
    seconds,
    flops=1e12 * found["model TFLOP a step"],
    read=1e9 * found["optimizer's least traffic, GB"],
    # Two micro-batches hardly hide the optimizer; a whole step has 160.
    paper=engine.EPISODES.tokens * seconds / tokens,
    planned_flops=flops.count(jaxpr, segment=planned.segment, **planned.loops),
  )
  notes.add(found | ({"trace": trace} if trace else {}))
