"""Predicts one optimizer step with the sampling of its episodes.

Training is counted from its compiled programs. Sampling is counted by hand,
because the compiled calls have every row at the longest context: FLOPs of the
weights and of attention at the mean context, and bytes of weights, keys and
values for each token that a row samples.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from anysearch_jax import config as config_lib
from anysearch_jax.planning import collectives, compilation, plan, targets
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import parameters as weights
from anysearch_jax.policy import table
from anysearch_jax.policy.attention import pages as pages_lib
from anysearch_jax.training import batching

# Three or four turns with their passages; nobody has measured it.
_TOKENS = 2560
_GENERATED = 800
# The standard deviation of an episode's tokens, as a share of their mean.
SPREAD = 0.3
# The share of a decode call's rows that sample, on average.
OCCUPANCY = 0.8
# The share of lookahead's guesses that are right, each after right ones:
# between .18 in the generated world and .32 in three episodes of Qwen3-8B.
ACCEPTED = 0.25
# Tokens of the passages that a search adds; a chunk of prefill is padded.
OBSERVATION = 590
# Tokens of the paper's shorter prompt, without the scaffold, and a question.
PROMPT = 230
SIXTY = targets.Assumptions(compute=0.6, memory=0.6, links=0.6)


class Episodes(NamedTuple):
  """The episodes of an optimizer step.

  tokens: of the average episode's whole context, which is one segment of a
    training row. generated: of them, those that the policy samples.
  trajectories: episodes that an optimizer step trains on.
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

  def segment(self, longest: int) -> int:
    """Returns the mean over all tokens of the tokens of their episode.

    Attention's work grows with the squares of `sizes`: it is that of segments
    of this length.
    """
    sizes = self.sizes(longest)
    return round(sum(n * n for n in sizes) / sum(sizes))

  def micro_batches(self, batch: config_lib.BatchConfig, multiple: int) -> int:
    """Returns the number of micro-batches that `pack` makes of them.

    `multiple` is the number of devices that rows are sharded over. Raises
    ValueError if the configuration allows fewer.
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
    tokens, generated, trajectories // config.curriculum.batches_per_rollout
  )


class Calls(NamedTuple):
  """What one device does in `times` equal calls: FLOPs, bytes, collectives."""

  name: str
  times: float
  flops: float
  read: float
  traffic: Mapping[str, collectives.Traffic]


def predict(
  parts: Sequence[compilation.Part],
  *,
  config: config_lib.ExperimentConfig,
  a: architecture_lib.Architecture,
  expected: Episodes,
  target: targets.Target,
) -> plan.Step | None:
  """Predicts a step; returns None if a program was refused by its compiler.

  `parts` are the plan's, and `a` is without adapters.
  """
  if any(part.predicted is None for part in parts):
    return None
  named = {part.name: part for part in parts}
  # The epochs share the sampling and the passes before the first step.
  once = 1 / config.curriculum.epochs
  share = 1 / config.curriculum.steps_per_rollout

  def phase(calls: Calls, share: float = 1.0) -> plan.Phase:
    name, times, flops, read, traffic = calls
    predicted, sixty = (
      targets.predict(
        target, flops=flops, read=read, traffic=traffic, assumed=shares
      )
      for shares in (targets.ASSUMED, SIXTY)
    )
    seconds = (predicted.total, sixty.total, predicted.floor)
    return plan.Phase(name, *(share * times * each for each in seconds))

  def counted(name: str, times: float) -> list[plan.Phase]:
    """Returns the phase of a program, if the run has it."""
    if (part := named.get(name)) is None:
      return []
    work = part.flops / part.devices
    return [phase(Calls(name, times, work, part.read, part.traffic or {}))]

  sampled = sampling(config, a, expected, named)
  phases = [phase(calls, once) for calls in sampled]
  phases += counted("hand-over", share)
  if moved := named["decode"].offloaded:
    floor = share * 2 * moved / target.hardware.host_bandwidth
    links = (targets.ASSUMED.links, SIXTY.links, 1.0)
    name = "state to the host and back"
    phases.append(plan.Phase(name, *(floor / each for each in links)))
  return plan.Step(
    tuple(phases),
    (
      # With one epoch, the first step of a rollout knows its own.
      *counted("old log-probabilities", once if once < 1 else 1 - share),
      *counted("value pass", once),
      *counted("train step", 1),
    ),
    overlapped=bool(config.mesh.rollout and config.pipeline.async_level),
  )


def sampling(
  config: config_lib.ExperimentConfig,
  a: architecture_lib.Architecture,
  expected: Episodes,
  parts: Mapping[str, compilation.Part],
) -> tuple[Calls, Calls]:
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
  seen = a.seen(context)
  scores = 4 * a.layers * a.heads * a.head_dim * seen
  stored = pages_lib.stored(config.engine.kv_dtype, config.compute_dtype)
  cached = pages_lib.token_bytes(a, stored) * seen

  chunk = engine.prefill_chunk
  padding = math.ceil(OBSERVATION / chunk) * chunk / OBSERVATION
  given = expected.tokens - expected.generated
  # One row of a group prefills the prompt, and the others share its pages.
  prompts = min(PROMPT, given) * (1 - 1 / config.group)
  tokens = engine.prefill_lanes * chunk
  prefill = Calls(
    "prefill",
    padding * expected.trajectories * (given - prompts) / tokens,
    tokens * (2 * (matrices - vocabulary) + scores) / devices,
    resident + engine.prefill_lanes * cached / devices,
    parts["prefill"].traffic or {},
  )
  rows, steps = concurrent_rows(engine, context), engine.decode_steps
  sampled = rows * OCCUPANCY * steps * tokens_a_step(engine)
  return prefill, Calls(
    "decode",
    expected.trajectories * expected.generated / sampled,
    # Rows that do not sample are computed too, and so is every guess.
    steps * rows * (1 + engine.lookahead) * (2 * matrices + scores) / devices,
    steps * (resident + rows * OCCUPANCY * cached / devices),
    decode.traffic or {},
  )


def tokens_a_step(engine: config_lib.EngineConfig) -> float:
  """Returns the tokens that a row samples in a step of decode."""
  return sum(ACCEPTED**i for i in range(1 + engine.lookahead))


def concurrent_rows(engine: config_lib.EngineConfig, context: int) -> int:
  """Returns the rows of a decode call that the KV cache has room for."""
  room = (engine.kv_tokens or math.inf) / max(1, context)
  return int(min(engine.lanes[-1], max(1, room)))


def sentences(
  config: config_lib.ExperimentConfig, expected: Episodes
) -> list[str]:
  """Returns sentences that state what the prediction of a step assumes."""
  engine = config.engine
  rows = concurrent_rows(engine, expected.tokens // 2)
  found = [
    f"Of an episode's tokens, {expected.generated:,} are sampled and the "
    f"others prefilled once; prompts, {PROMPT} tokens each, once a group, "
    "whose rows share their pages.",
    f"Decode has {rows} rows, {OCCUPANCY:.0%} of them sampling, at half of an "
    "episode's context. A step of all rows reads every weight once. Prefill "
    f"pads passages of {OBSERVATION} tokens to chunks of "
    f"{engine.prefill_chunk}.",
    "Searches, the host and the start of kernels take no time: a search is "
    "answered while other rows sample.",
    "A rollout has one hand-over, and "
    f"{config.curriculum.steps_per_rollout} optimizer steps share its time. "
    "Its memory is counted by its arrays, not compiled.",
  ]
  if engine.lookahead:
    found.append(
      f"With {engine.lookahead} guesses, a step of decode gives "
      f"{tokens_a_step(engine):.2f} tokens of a row (engine.lookahead)."
    )
  if config.pipeline.async_level:
    return found
  if engine.kind == "jax" and engine.free_kv_while_training:
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
