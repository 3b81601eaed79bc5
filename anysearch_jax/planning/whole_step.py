"""Predicts the seconds of an optimizer step with the sampling of its episodes.

Operations are counted by hand and take the time of `targets.seconds`: XLA's own
cost analysis counts the body of a loop once, and the decoder is a loop over
layers. Training has the operations of `training.throughput`, with a forward
pass more where everything is recomputed. Sampling has the products with all
weights, attention at the mean context, and the bytes of weights, keys and
values.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp

from anysearch_jax import config as config_lib
from anysearch_jax.planning import compilation, targets
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import lora, table
from anysearch_jax.policy import parameters as weights
from anysearch_jax.policy.attention import pages as pages_lib
from anysearch_jax.training import batching, throughput

# Assumed tokens of an episode, three or four turns with their passages, and the
# sampled ones among them. They are not measured.
_TOKENS = 2560
_GENERATED = 800
# The standard deviation of an episode's tokens, as a share of their mean.
SPREAD = 0.3
# The share of a decode call's rows that sample, on average.
OCCUPANCY = 0.8
# Tokens of the passages that a search adds; a chunk of prefill is padded.
OBSERVATION = 590
# Tokens of the paper's shorter prompt, without the scaffold, and a question.
PROMPT = 230


class Step(NamedTuple):
  """Seconds of one optimizer step.

  Attributes:
    sampling: seconds of sampling its episodes, by phase.
    training: seconds of all training passes.
    overlapped: whether sampling runs while training does.
  """

  sampling: Mapping[str, float]
  training: float
  overlapped: bool

  @property
  def phases(self) -> dict[str, float]:
    """All phases, and the whole step as the last one."""
    sampling = sum(self.sampling.values())
    whole = sampling + self.training
    if self.overlapped:
      whole = max(sampling, self.training)
    return {**self.sampling, "training": self.training, "whole step": whole}

  @property
  def seconds(self) -> float:
    """The seconds of the whole step."""
    return self.phases["whole step"]


class Episodes(NamedTuple):
  """The episodes of an optimizer step.

  Attributes:
    tokens: number of tokens of the average episode's whole context, which is
      one segment of a training row.
    generated: number of these tokens that the policy samples.
    trajectories: number of episodes that an optimizer step trains on.
  """

  tokens: int
  generated: int
  trajectories: int

  def sizes(self, longest: int) -> list[int]:
    """Returns the tokens of each episode: quantiles of a normal distribution.

    Their mean is `tokens`. They are spread less if the largest would exceed
    `longest`.
    """
    normal = statistics.NormalDist()
    ranks = [(i + 0.5) / self.trajectories for i in range(self.trajectories)]
    scores = [normal.inv_cdf(rank) for rank in ranks]
    room = (longest - self.tokens) / max(scores[-1], 1e-9)
    deviation = min(SPREAD * self.tokens, room)
    return [max(1, round(self.tokens + deviation * z)) for z in scores]

  def micro_batches(self, batch: config_lib.BatchConfig, multiple: int) -> int:
    """Returns the number of micro-batches into which they are packed.

    Args:
      batch: the lengths of rows and the limits of micro-batches.
      multiple: number of devices that share the rows.

    Raises:
      ValueError: the configuration allows fewer micro-batches.
    """
    sizes = [n - 1 for n in self.sizes(batch.row_lengths[-1]) if n > 1]
    return sum(batching.micro_batches(sizes, config=batch, multiple=multiple))


def episodes_of(
  config: config_lib.ExperimentConfig,
  *,
  tokens: int | None = None,
  generated: int | None = None,
) -> Episodes:
  """Returns the assumed episodes of a run.

  Args:
    config: the whole configuration.
    tokens: tokens of an episode; by default 2,560, or a training row if it is
      shorter.
    generated: sampled tokens of an episode; by default 800, or half of its
      tokens if that is fewer.

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
    tokens, generated, trajectories // config.curriculum.batches_per_rollout
  )


def predict(
  config: config_lib.ExperimentConfig,
  a: architecture_lib.Architecture,
  expected: Episodes,
  *,
  decode: compilation.Part,
  target: targets.Target,
) -> Step:
  """Predicts a step.

  Args:
    config: the whole configuration.
    a: the policy's architecture, without adapters.
    expected: the episodes of the step.
    decode: the decode of the plan.
    target: the hardware of all devices.
  """
  # The epochs share the sampling and the passes before the first step.
  once = 1 / config.curriculum.epochs
  itemsize = jnp.dtype(config.compute_dtype).itemsize
  share = 1 / config.curriculum.steps_per_rollout
  sampled = {
    name: once
    * targets.seconds(target.hardware, operations, read=read, itemsize=itemsize)
    for name, (operations, read) in sampling(
      config, a, expected, decode
    ).items()
  }
  if decode.offloaded:
    bandwidth = target.hardware.host_bandwidth * targets.ASSUMED.memory
    sampled["state to the host and back"] = (
      share * 2 * decode.offloaded / bandwidth
    )
  return Step(
    sampled,
    training_seconds(config, a, expected, target=target),
    overlapped=bool(config.mesh.rollout and config.pipeline.async_level),
  )


def training_seconds(
  config: config_lib.ExperimentConfig,
  a: architecture_lib.Architecture,
  expected: Episodes,
  *,
  target: targets.Target,
  efficiency: targets.Efficiency = targets.ASSUMED,
) -> float:
  """Returns the seconds of all training passes of a step.

  Args:
    config: the whole configuration.
    a: the policy's architecture, without adapters.
    expected: the episodes of the step.
    target: the hardware of all devices.
    efficiency: assumed shares of its peaks.
  """
  seconds = targets.seconds(
    target.hardware,
    training_operations(config, a, expected),
    itemsize=jnp.dtype(config.compute_dtype).itemsize,
    efficiency=efficiency,
  )
  return seconds / config.mesh.size


def training_operations(
  config: config_lib.ExperimentConfig,
  a: architecture_lib.Architecture,
  expected: Episodes,
) -> throughput.Operations:
  """Returns the operations of a step over all devices.

  Args:
    config: the whole configuration.
    a: the policy's architecture, without adapters.
    expected: the episodes of the step.
  """
  sizes = expected.sizes(config.batch.row_lengths[-1])
  tokens = sum(sizes)
  work = throughput.Work(
    tokens=tokens,
    scored=expected.trajectories * expected.generated,
    positions=tokens,
    # A token in the middle of its episode sees half of it.
    pairs=sum(size * a.mean_attended(size // 2) for size in sizes),
  )
  curriculum = config.curriculum
  objective = config.objective
  repeated = config.batch.remat == "full"
  reference = bool(objective.kl_coefficient or config.critic.reward_kl)
  on_policy = curriculum.steps_per_rollout == 1
  scored = objective.old_logp == "trainer" and not on_policy
  # With one epoch, the first step of a rollout knows its own log-probs.
  several = curriculum.epochs > 1
  unscored = 0 if several else 1 / curriculum.steps_per_rollout
  return throughput.operations(
    lora.attach(a, config.lora),
    work,
    forwards=int(repeated) + int(reference),
    first_forwards=(1 - unscored) if scored else 0,
    critic=objective.has_critic,
    epochs=curriculum.epochs,
  )


def sampling(
  config: config_lib.ExperimentConfig,
  a: architecture_lib.Architecture,
  expected: Episodes,
  decode: compilation.Part,
) -> dict[str, tuple[throughput.Operations, float]]:
  """Returns the work of a device that samples a step's episodes.

  Args:
    config: the whole configuration.
    a: the policy's architecture, without adapters.
    expected: the episodes of the step.
    decode: the decode of the plan.

  Returns:
    (operations, bytes of weights and caches read from memory) by phase.
  """
  engine = config.engine
  devices = decode.devices
  resident = decode.kinds["engine weights"]
  vocabulary = a.vocab_size * a.d_model
  matrices = weights.count(table.rows(a)) - (0 if a.tied else vocabulary)
  # Contexts grow evenly, so the mean one is half of the last.
  context = expected.tokens // 2
  seen = a.mean_attended(context)
  scores = 4 * a.layers * a.heads * a.head_dim * seen
  stored = pages_lib.storage_dtype(engine.kv_dtype, config.compute_dtype, "gpu")
  cached = pages_lib.token_bytes(a, stored) * seen

  chunk = engine.prefill_chunk
  padding = math.ceil(OBSERVATION / chunk) * chunk / OBSERVATION
  context_tokens = expected.tokens - expected.generated
  # One row of a group prefills the prompt, and the others share its pages.
  shared = min(PROMPT, context_tokens) * (1 - 1 / config.group)
  prefilled = padding * expected.trajectories * (context_tokens - shared)
  calls = prefilled / (engine.prefill_lanes * chunk)
  rows = concurrent_rows(engine, context)
  steps = expected.trajectories * expected.generated / (rows * OCCUPANCY)
  layers = throughput.activations(a)
  # Rows that do not sample are computed too.
  decoded = steps * rows
  return {
    "prefill": (
      throughput.Operations(
        products=prefilled * 2 * (matrices - vocabulary) / devices,
        attention=prefilled * scores / devices,
        activations=prefilled * layers / devices,
      ),
      calls * (resident + engine.prefill_lanes * cached / devices),
    ),
    "decode": (
      throughput.Operations(
        products=decoded * 2 * matrices / devices,
        attention=decoded * scores / devices,
        activations=decoded * (layers + a.vocab_size + a.d_model) / devices,
      ),
      steps * (resident + rows * OCCUPANCY * cached / devices),
    ),
  }


def concurrent_rows(engine: config_lib.EngineConfig, context: int) -> int:
  """Returns the rows of a decode call that the KV cache has room for."""
  room = (engine.kv_tokens or math.inf) / max(1, context)
  return int(min(engine.lanes[-1], max(1, room)))


def sentences(
  config: config_lib.ExperimentConfig, expected: Episodes
) -> Sequence[str]:
  """Returns sentences that state what the prediction of a step assumes."""
  engine = config.engine
  rows = concurrent_rows(engine, expected.tokens // 2)
  return [
    f"Of an episode's tokens, {expected.generated:,} are sampled and the "
    f"others prefilled once; prompts, {PROMPT} tokens each, once a group, "
    "whose rows share their pages.",
    f"Decode has {rows} rows, {OCCUPANCY:.0%} of them sampling, at half of an "
    "episode's context. A step of all rows reads every weight once. Prefill "
    f"pads passages of {OBSERVATION} tokens to chunks of "
    f"{engine.prefill_chunk}.",
    "Searches, the host, the hand-over and the start of kernels take no time, "
    "and nothing waits for the longest episode: whole steps that NeMo-RL "
    "published took 2.4 to 3.7 times their plan (docs/will_it_fit.md). "
    "The memory of the hand-over is counted by its arrays, not compiled.",
  ]
