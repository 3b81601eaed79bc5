"""Whole rollouts with their optimizer steps, and the bits they end with."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import itertools
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.methods import systems
from anysearch_jax.policy import hf
from anysearch_jax.rollout import driver
from anysearch_jax.rollout.jax_engine import engine as engine_lib
from anysearch_jax.training import learner as learner_lib
from anysearch_jax.training import rewards_and_advantages, throughput
from anysearch_jax.world import world as world_lib
from bench import harness, policies
from bench.first_gpu import engine, running
from configs import quickstart, qwen3_4b
from launch import flags as launch_flags
from launch import shipped

_POLICY = "Qwen3-4B"
_STEPS = 3
_MICRO_BATCHES = 2
_ROLLOUTS = 4
# Of a rehearsal of the quickstart.
_FEWER = (
  *("questions=2", "group=2", "curriculum.steps_per_rollout=1"),
  *("engine.lanes=(4,)", "batch.row_lengths=(576,)"),
  "batch.micro_batch_tokens=576",
)
_WORD = re.compile(r"\w+")


class WordOverlap:
  """Finds the passages of the world that share most words with a query.

  The retriever of the quickstart needs a package; this one needs none.
  """

  def __init__(self, world: world_lib.World):
    self._world = world

  async def search(
    self, request: types.SearchRequest
  ) -> Sequence[types.Passage]:
    wanted = set(_words(request.query))

    def shared(passage: types.Passage) -> int:
      """Counts shared words; those of the title three times."""
      words = 3 * _words(passage.title) + _words(passage.text)
      return sum(word in wanted for word in words)

    passages = self._world.corpus(request.corpus)
    return sorted(passages, key=shared, reverse=True)[: request.k]


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


@functools.cache
def _words(text: str) -> list[str]:
  return _WORD.findall(text.lower())


class Loop:
  """Plays a rollout, trains on it, and hands the weights to the engine."""

  def __init__(
    self,
    config: config_lib.ExperimentConfig,
    policy: hf.Policy,
    *,
    questions: Sequence[types.Question],
    retriever: types.Retriever,
  ):
    self._config, self._questions = config, itertools.cycle(questions)
    self._learner = learner_lib.Learner(config, policy)
    self._method = systems.trained(config)
    self._engine = engine_lib.JaxEngine(
      policy._replace(
        params=self._learner.published(),
        architecture=self._learner.architecture,
      ),
      config=config.engine,
      sampling=config.sampling,
      seed=config.seed,
      dtype=config.compute_dtype,
      mesh=self._learner.placement.rollout,
      stop=self._method.environment.stops,
    )
    self._parts = driver.EpisodeParts(
      self._engine, retriever, config.episode, policy.tokenizer
    )
    self._done = 0

  def rollout(self) -> dict[str, Any]:
    """Plays and trains one rollout; returns its figures."""
    config = self._config
    rollout, played = harness.timed(
      lambda: policies.play(
        [*itertools.islice(self._questions, config.questions)],
        self._parts,
        group=config.group,
        rollout=self._done,
        concurrency=config.engine.slots,
      )
    )
    scored = rewards_and_advantages.score(
      rollout.groups,
      np.asarray([g.budget for g in rollout.groups]),
      samples=config.group,
      method=self._method,
      objective=config.objective,
    )
    packed = self._learner.pack(scored)
    values, trained = harness.timed(lambda: list(self._learner.steps(packed)))
    bits, handed = harness.timed(self._publish)
    self._done += 1
    found, tokens = policies.trajectories(rollout), policies.generated(rollout)
    counters = self._engine.counters
    return {
      "sampled, s": played,
      "trained, s": trained,
      "handed over, s": handed,
      "trajectories": len(found),
      "failed episodes": sum(t.failed for t in found),
      "generated tokens": tokens,
      "generated tokens/s": tokens / played,
      "trained tokens": throughput.count(packed).tokens,
      "searches": sum(t.searches for t in found),
      "occupancy": counters["lanes_used"] / max(counters["lanes_offered"], 1),
      "loss": values[-1]["loss/total"],
      "bits": bits,
    }

  def _publish(self) -> str:
    """Hands over the weights; returns a hash of the trained ones."""
    self._engine.set_params(self._learner.published(), self._done + 1)
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(self._learner.state.params):
      digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()[:16]


def small(notes: running.Notes) -> None:
  """Trains the quickstart's policy twice: do the bits repeat?"""
  config, count = quickstart.get_config(), _ROLLOUTS
  if notes.rehearse:
    config, count = launch_flags.override(config, _FEWER), 1
  first, second = (_small(config, count) for _ in range(2))
  notes.add({f"rollout {i}": figures for i, figures in enumerate(first)})
  bits = [[figures["bits"] for figures in run] for run in (first, second)]
  last = second[-1]
  notes.add(
    {
      "same bits twice": bits[0] == bits[1],
      "second run, s a rollout": last["sampled, s"] + last["trained, s"],
    }
  )


def _small(
  config: config_lib.ExperimentConfig, rollouts: int
) -> list[dict[str, Any]]:
  world = world_lib.World(config.data.world_seed)
  policy = hf.load(shipped.find(config.policy))
  if importlib.util.find_spec("jinja2") is None:
    # transformers renders templates by it, but does not require it.
    policy.tokenizer.hf.chat_template = None
  loop = Loop(
    config,
    policy,
    questions=world.questions("train", rollouts * config.questions, 0),
    retriever=WordOverlap(world),
  )
  return [loop.rollout() for _ in range(rollouts)]


def colocated(notes: running.Notes, *, policy: str) -> None:
  """Samples, trains and hands over adapters of a large policy on one device."""
  a = engine.architecture(policy, rehearse=notes.rehearse)
  config = _colocated(rehearse=notes.rehearse)
  engine.need(2 * engine.parameters(a) + 30 * 2**30)
  base = policies.weights_of(a, dtype=config.lora.base_dtype)
  questions = [
    types.Question(
      id=str(i),
      text=" ".join(f"word{i + n}" for n in range(20)),
      golden_answers=(f"word{i}",),
    )
    for i in range(config.questions)
  ]
  loop = Loop(
    config,
    hf.Policy(base, a, engine.Words(a.vocab_size)),
    questions=questions,
    retriever=Invented(),
  )
  for number in range(1 if notes.rehearse else 2):
    notes.case(f"rollout {number}", loop.rollout)
  notes.add(throughput.memory(jax.local_devices()))


def _colocated(*, rehearse: bool) -> config_lib.ExperimentConfig:
  """Returns a rollout of 160 trajectories of at most 2,048 tokens."""
  config = qwen3_4b.get_config("lora80")
  context, generated, group = (1024, 24, 2) if rehearse else (4096, 512, 5)
  slots, lanes, questions = (4, 4, 1) if rehearse else (160, 128, 32)
  tokens = context if rehearse else 4 * context
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
      f"batch.max_micro_batches={2 * questions}",
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
  config = qwen3_4b.get_config("lora80" if lora else "")
  row = 128 if notes.rehearse else config.batch.row_lengths[-1]
  config = dataclasses.replace(
    launch_flags.override(
      config,
      [
        # Without a KL term there is no reference beside the masters.
        "objective.kl_coefficient=0",
        *(f"batch.row_lengths=({row},)", f"batch.remat={remat}"),
        f"batch.micro_batch_tokens={rows * row}",
        f"batch.max_micro_batches={_MICRO_BATCHES}",
      ],
    ),
    mesh=config_lib.MeshConfig(),
    pipeline=config_lib.PipelineConfig(),
  )
  a = engine.architecture(_POLICY, rehearse=notes.rehearse)
  count = engine.parameters(a)
  # Masters, two moments and gradients; or the frozen base.
  engine.need(2 * count if lora else 16 * count)
  ours = policies.TrainStep(config, a, _MICRO_BATCHES)
  arguments = (ours.state, ours.reference, ours.batch)
  compiled, took = harness.timed(lambda: ours.step.lower(*arguments).compile())
  notes.add({"compile, s": took} | _planned(compiled))
  trace = str(notes.traces) if profile else None
  found = policies.measure_step(ours, _STEPS, profile=trace)
  # Forward and activations' gradients cost 4 N, gradients of weights 2 T.
  flops = (4 * count + 2 * found["trained"]) * found["tokens"]
  found["TFLOP/s by 6 N"] = flops / found["step, s"] / 1e12
  notes.add(found | ({"trace": trace} if trace else {}))


def _planned(compiled: Any) -> dict[str, float]:
  """Returns the bytes that the compiler counts, by its own analysis."""
  analysis = compiled.memory_analysis()
  return {
    f"compiler: {name}, GiB": getattr(analysis, field) / 2**30
    for name, field in (
      ("arguments", "argument_size_in_bytes"),
      ("temporaries", "temp_size_in_bytes"),
      ("peak", "peak_memory_in_bytes"),
    )
    if analysis is not None
  }
