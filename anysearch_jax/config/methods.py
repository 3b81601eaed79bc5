"""The part of the configuration that belongs to one compared system each.

Defaults are those of the system's paper or, where that is silent, of its
scripts. `config` has these names too.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class SearchR1Config:
  """Search-R1's reward: exact match, or its variant with a format reward.

  structure: what a well-formed response without a right answer is worth, and
  what a right answer loses without the form. final: a wrong answer without the
  form. retrieval: added to `structure` where a passage that was shown has the
  right answer.
  """

  format_variant: bool = False
  structure: float = 0.2
  final: float = 0.1
  retrieval: float = 0.0


@dataclasses.dataclass(frozen=True)
class StepSearchConfig:
  """StepSearch's outcome and step rewards.

  key_weight: of the search-key score beside the answer's F1. step_scale: of a
  search's gain less its redundancy. missing: reward without an answer.
  """

  key_weight: float = 0.618
  step_scale: float = 0.6
  missing: float = -1.0


@dataclasses.dataclass(frozen=True)
class ZeroSearchConfig:
  """ZeroSearch's share of noisy answers of the simulated search engine.

  noise_start, noise_end: at the start and the end of training, in [0, 1].
  noise_base: how late it rises, > 0; 1 is a straight line.
  """

  noise_start: float = 0.0
  noise_end: float = 0.5
  noise_base: float = 4.0


@dataclasses.dataclass(frozen=True)
class OtcConfig:
  """OTC-PO's tool productivity reward.

  alpha: its scale. form: `grpo` measures a trajectory's searches by the fewest
  of a right one in its group, `ppo` by none. c: > 0, the smoothing constant of
  the cosine; the larger, the less a search costs.
  """

  alpha: float = 1.0
  c: float = 4.0
  form: str = "grpo"


@dataclasses.dataclass(frozen=True)
class IkeaConfig:
  """IKEA's knowledge-boundary reward.

  kb: what a right answer gains after 0, 1, 2, ... searches; the last one counts
  for all beyond. bad_format: reward of a malformed response. searched_wrong: of
  a wrong answer after a search. right: of a right one, without `kb`.
  """

  kb: tuple[float, ...] = (0.6, 0.4, 0.2, 0.0)
  bad_format: float = -1.0
  searched_wrong: float = 0.05
  right: float = 1.0


@dataclasses.dataclass(frozen=True)
class MethodConfig:
  """Which of the compared systems is trained or evaluated, and their constants.

  name: of the system; only its own constants count.
  """

  name: str = "anysearch"
  search_r1: SearchR1Config = SearchR1Config()
  stepsearch: StepSearchConfig = StepSearchConfig()
  zerosearch: ZeroSearchConfig = ZeroSearchConfig()
  otc: OtcConfig = OtcConfig()
  ikea: IkeaConfig = IkeaConfig()
