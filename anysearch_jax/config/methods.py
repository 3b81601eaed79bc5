"""The constants of the compared systems; `config` re-exports these classes.

Defaults are those of the system's paper or, if the paper does not give one, of
its scripts.
"""

from __future__ import annotations

import dataclasses

from anysearch_jax.config.settings import (
  POSITIVE,
  REWARD,
  SHARE,
  at_least,
  identity,
  learning,
  placement,
)


@dataclasses.dataclass(frozen=True)
class SearchR1Config:
  """Search-R1's reward: exact match, or its variant with a format reward."""

  format_variant: bool = learning(False)
  """Whether the reward includes the format; the other values count only then.
  """
  structure: float = learning(0.2, SHARE)
  """Reward of a well-formed response without a right answer; a right answer in
  a malformed response loses the same amount."""
  final: float = learning(0.1, REWARD)
  """Reward of a wrong answer in a malformed response."""
  retrieval: float = learning(0.0, SHARE)
  """Added to `structure` for a well-formed response without a right answer, if
  a passage that was shown contains an accepted answer."""


@dataclasses.dataclass(frozen=True)
class StepSearchConfig:
  """StepSearch's outcome and step rewards."""

  key_weight: float = learning(0.618, at_least(0))
  """Weight of the search-key score, which is added to the answer's F1."""
  step_scale: float = learning(0.6, at_least(0))
  """Factor of a search's reward, which is its gain minus its redundancy."""
  missing: float = learning(-1.0, REWARD)
  """Reward of a response without an answer."""


@dataclasses.dataclass(frozen=True)
class ZeroSearchConfig:
  """ZeroSearch's schedule of noisy answers from the simulated search engine."""

  noise_start: float = learning(0.0, SHARE)
  """Probability of a noisy answer at the start of training."""
  noise_end: float = learning(0.5, SHARE)
  """Probability of a noisy answer at the end of training."""
  noise_base: float = learning(4.0, POSITIVE)
  """Base of the exponential schedule: 1 is a straight line, a larger base rises
  later."""


@dataclasses.dataclass(frozen=True)
class MethodConfig:
  """Which of the compared systems runs, and the constants of each."""

  name: str = identity("anysearch")
  """The system, or `file.py:NAME` of yours (docs/methods.md); only its own
  constants have an effect."""
  judge: str = learning("")
  """`module:NAME` or `file.py:NAME` of a function that measures a trajectory in
  place of the system's judge; "": the system's, docs/methods.md."""
  options: tuple[str, ...] = learning(())
  """`NAME=VALUE` of options of a system of your own, whose file says which it
  has; the others have their defaults."""
  measure_deadline: float = placement(120.0, POSITIVE)
  """Seconds in which a judge's measures of one trajectory are due; a trajectory
  without them counts as failed."""
  search_r1: SearchR1Config = SearchR1Config()
  stepsearch: StepSearchConfig = StepSearchConfig()
  zerosearch: ZeroSearchConfig = ZeroSearchConfig()
