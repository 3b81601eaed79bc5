"""What a plan assumes about the episodes of a run."""

from __future__ import annotations

import dataclasses
import math

from anysearch_jax import config as config_lib

# Three or four turns with their passages; nobody has measured it.
_TOKENS = 2560
_GENERATED = 800


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


def of(
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
