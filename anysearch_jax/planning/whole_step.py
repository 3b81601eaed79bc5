"""Predicts one optimizer step with the sampling of its episodes.

Training is counted from its compiled programs. Sampling is counted by hand,
because the compiled calls have every row at the longest context: FLOPs of the
weights and of attention at the mean context, and bytes of weights, keys and
values for each token that a row samples.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp

from anysearch_jax import config as config_lib
from anysearch_jax.planning import collectives, plan, targets
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import parameters as weights
from anysearch_jax.policy import table

# Three or four turns with their passages; nobody has measured it.
_TOKENS = 2560
_GENERATED = 800
# The share of a decode call's rows that sample, on average.
OCCUPANCY = 0.8
# Tokens of the passages that a search adds; a chunk of prefill is padded.
OBSERVATION = 590
# Tokens of the paper's shorter prompt, without the scaffold, and a question.
PROMPT = 230
SIXTY = targets.Assumptions(compute=0.6, memory=0.6, links=0.6)


class Work(NamedTuple):
  """What one device does in a phase: FLOPs, bytes of memory, collectives."""

  name: str
  flops: float
  bytes: float
  traffic: Mapping[str, collectives.Traffic]


def predict(
  parts: Sequence[plan.Part],
  *,
  config: config_lib.ExperimentConfig,
  a: architecture_lib.Architecture,
  expected: Episodes,
  target: targets.Target,
  assumptions: targets.Assumptions,
) -> plan.Step | None:
  """Predicts a step; returns None if a program was refused by its compiler.

  Args:
    parts: of the plan.
    config: the whole configuration.
    a: the policy's architecture, without adapters.
    expected: the episodes.
    target: the devices.
    assumptions: shares of the peaks.
  """
  named = {part.name: part for part in parts}
  if any(part.predicted is None for part in parts):
    return None
  # The epochs share the sampling and the passes before the first step.
  once = 1 / config.curriculum.epochs
  sampled = [
    _times(once, work) for work in sampling(config, a, expected, named)
  ]
  hand_over = named["hand-over"]
  share = 1 / config.curriculum.steps_per_rollout
  sampled.append(Work("hand-over", 0, share * hand_over.read, {}))
  moved = _moved(named["decode"].offloaded, target, assumptions, share)
  trained = [
    _times(
      times,
      Work(
        part.name,
        part.compiled.flops / part.devices,
        part.read,
        part.compiled.traffic or {},
      ),
    )
    for name, times in (
      # With one epoch, the first step of a rollout knows its own.
      ("old log-probabilities", once if once < 1 else 1 - share),
      ("value pass", once),
      ("train step", 1),
    )
    if (part := named.get(name)) is not None
  ]

  def phases(works: Sequence[Work]) -> tuple[plan.Phase, ...]:
    return tuple(_phase(work, target, assumptions) for work in works)

  return plan.Step(
    (*phases(sampled), *moved),
    phases(trained),
    overlapped=bool(config.mesh.rollout and config.pipeline.async_level),
  )


def sampling(
  config: config_lib.ExperimentConfig,
  a: architecture_lib.Architecture,
  expected: Episodes,
  parts: Mapping[str, plan.Part],
) -> list[Work]:
  """Returns the prefill and the decode of a step's episodes, on one device.

  Collectives are those of the compiled calls, `prefill` and `decode` of
  `parts`.
  """
  decode = parts["decode"]
  engine, devices = config.engine, decode.devices
  resident = decode.kinds["engine weights"]
  vocabulary = a.vocab_size * a.d_model
  matrices = weights.count(table.rows(a)) - (0 if a.tied else vocabulary)
  # Contexts grow evenly, so the mean one is half of the last.
  context = expected.tokens // 2
  scores = 4 * a.layers * a.heads * a.head_dim * context
  cached = _token_bytes(config, a) * context

  chunk = engine.prefill_chunk
  padding = math.ceil(OBSERVATION / chunk) * chunk / OBSERVATION
  given = expected.tokens - expected.generated
  # One row of a group prefills the prompt, and the others share its pages.
  read = expected.trajectories * (
    given - min(PROMPT, given) * (1 - 1 / config.group)
  )
  calls = padding * read / (engine.prefill_lanes * chunk)
  prefill = Work(
    "prefill",
    padding * read * (2 * (matrices - vocabulary) + scores) / devices,
    calls * (resident + engine.prefill_lanes * cached / devices),
    _of_calls(parts["prefill"], calls),
  )

  rows = concurrent_rows(engine, context) * OCCUPANCY
  steps = expected.trajectories * expected.generated / rows
  return [
    prefill,
    Work(
      "decode",
      # Rows that do not sample are computed too.
      steps * rows / OCCUPANCY * (2 * matrices + scores) / devices,
      steps * (resident + rows * cached / devices),
      _of_calls(decode, steps / engine.decode_steps),
    ),
  ]


def _of_calls(part: plan.Part, calls: float) -> dict[str, collectives.Traffic]:
  """Returns the collectives of some calls of a program."""
  return _scaled(calls, part.compiled.traffic or {})


def _times(share: float, work: Work) -> Work:
  """Returns a share of some work."""
  return Work(
    work.name,
    share * work.flops,
    share * work.bytes,
    _scaled(share, work.traffic),
  )


def _scaled(
  share: float, traffic: Mapping[str, collectives.Traffic]
) -> dict[str, collectives.Traffic]:
  return {
    kind: collectives.Traffic(
      math.ceil(share * one.operations), share * one.bytes
    )
    for kind, one in traffic.items()
  }


def concurrent_rows(engine: config_lib.EngineConfig, context: int) -> int:
  """Returns the rows of a decode call that the KV cache has room for."""
  rows = engine.lanes[-1]
  if engine.kv_tokens:
    rows = min(rows, max(1, engine.kv_tokens // max(1, context)))
  return rows


def sentences(
  config: config_lib.ExperimentConfig, expected: Episodes
) -> list[str]:
  """Returns sentences that state what the prediction of a step assumes."""
  rows = concurrent_rows(config.engine, expected.tokens // 2)
  return [
    f"Of an episode's tokens, {expected.generated:,} are sampled and the "
    f"others prefilled once; prompts, {PROMPT} tokens each, once a group, "
    "whose rows share their pages.",
    f"Decode has {rows} rows, {OCCUPANCY:.0%} of them sampling, at half of an "
    "episode's context. A step of all rows reads every weight once. Prefill "
    f"pads passages of {OBSERVATION} tokens to chunks of "
    f"{config.engine.prefill_chunk}.",
    "Searches, the host and the start of kernels take no time: a search is "
    "answered while other rows sample.",
    "A rollout has one hand-over, and "
    f"{config.curriculum.steps_per_rollout} optimizer steps share its time. "
    "Its memory is counted by its arrays, not compiled.",
    *_turns(config),
  ]


def _turns(config: config_lib.ExperimentConfig) -> list[str]:
  """Returns what leaves the device between phases, as sentences."""
  if config.pipeline.async_level or config.engine.kind != "jax":
    return []
  found = []
  if config.engine.free_kv_while_training:
    found.append(
      "A device that samples and trains has no KV cache while it trains, nor "
      "at the hand-over (engine.free_kv_while_training)."
    )
  if config.pipeline.offload != "none":
    found.append(
      f"pipeline.offload={config.pipeline.offload}: each rollout, that part of "
      "the state goes to pinned host memory before it is sampled, and back "
      "before training."
    )
  return found


def _phase(
  work: Work, target: targets.Target, assumptions: targets.Assumptions
) -> plan.Phase:
  predicted, sixty = (
    targets.predict(
      target,
      flops=work.flops,
      read=work.bytes,
      traffic=work.traffic,
      assumptions=shares,
    )
    for shares in (assumptions, SIXTY)
  )
  return plan.Phase(work.name, predicted.total, sixty.total, predicted.floor)


def _moved(
  size: int,
  target: targets.Target,
  assumptions: targets.Assumptions,
  share: float,
) -> tuple[plan.Phase, ...]:
  """Returns the phase that moves `size` bytes to the host and back, if any."""
  if not size:
    return ()
  floor = share * 2 * size / target.hardware.host_bandwidth
  return (
    plan.Phase(
      "state to the host and back",
      floor / assumptions.links,
      floor / SIXTY.links,
      floor,
    ),
  )


def _token_bytes(
  config: config_lib.ExperimentConfig, a: architecture_lib.Architecture
) -> int:
  """Returns the bytes of a token's keys and values in all layers."""
  size = jnp.dtype(config.compute_dtype).itemsize
  return 2 * a.layers * a.kv_heads * a.head_dim * size


@dataclasses.dataclass(frozen=True)
class Episodes:
  """The average episode, as every episode is taken to be.

  tokens: of its whole context, which is one segment of a training row.
  generated: of them, those that the policy samples.
  trajectories: episodes that an optimizer step trains on.
  """

  tokens: int
  generated: int
  trajectories: int

  def micro_batches(self, batch: config_lib.BatchConfig) -> int:
    """Returns the number of micro-batches that fill up with these episodes."""
    needed = math.ceil(
      self.trajectories * self.tokens / batch.micro_batch_tokens
    )
    return min(needed, batch.max_micro_batches)


def episodes_of(
  config: config_lib.ExperimentConfig,
  *,
  tokens: int | None = None,
  generated: int | None = None,
) -> Episodes:
  """Returns the assumed episodes of a run.

  Args:
    config: the whole configuration.
    tokens: of an episode; by default 2,560 or a training row, if that is less.
    generated: of them, those that the policy samples; by default 800 or half
      of an episode, if that is less.

  Raises:
    ValueError: an episode is longer than a training row, or samples more tokens
      than it has.
  """
  longest = config.batch.row_lengths[-1]
  tokens = tokens or min(_TOKENS, longest)
  if not 0 < tokens <= longest:
    raise ValueError(
      f"--episode_tokens: found {tokens}, expected 1 to {longest}, the tokens "
      "of a training row (batch.row_lengths)."
    )
  generated = generated or min(_GENERATED, (tokens + 1) // 2)
  if not 0 < generated <= tokens:
    raise ValueError(
      f"--generated_tokens: found {generated}, expected 1 to {tokens}, the "
      "tokens of an episode."
    )
  trajectories = config.questions * config.group
  return Episodes(
    tokens=tokens,
    generated=generated,
    trajectories=trajectories // config.curriculum.batches_per_rollout,
  )
