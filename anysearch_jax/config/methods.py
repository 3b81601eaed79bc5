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
  one_of,
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
class OtcConfig:
  """OTC-PO's tool productivity reward."""

  alpha: float = learning(1.0, POSITIVE)
  """Factor of the reward."""
  c: float = learning(4.0, POSITIVE)
  """Smoothing constant of the cosine; a larger one makes a search cost less."""
  form: str = learning("grpo", one_of("grpo", "ppo"))
  """`grpo` compares a trajectory's searches with the fewest searches of a right
  answer in its group, `ppo` with zero searches."""


@dataclasses.dataclass(frozen=True)
class IkeaConfig:
  """IKEA's knowledge-boundary reward."""

  kb: tuple[float, ...] = learning((0.6, 0.4, 0.2, 0.0), REWARD)
  """Bonus of a right answer after 0, 1, 2, ... searches; the last one also
  counts for more searches."""
  bad_format: float = learning(-1.0, REWARD)
  """Reward of a malformed response."""
  searched_wrong: float = learning(0.05, REWARD)
  """Reward of a wrong or missing answer after a search; without a search it is
  0."""
  right: float = learning(1.0, POSITIVE)
  """Reward of a right answer, to which `kb` is added."""


@dataclasses.dataclass(frozen=True)
class ResearchConfig:
  """ReSearch's reward."""

  wrong: float = learning(0.1, REWARD)
  """Reward of a well-formed response whose answer has an F1 of 0."""


@dataclasses.dataclass(frozen=True)
class AutoRefineConfig:
  """AutoRefine's reward."""

  refined: float = learning(0.1, REWARD)
  """Reward of an answer with an F1 of 0 if a refinement holds an accepted
  answer."""


@dataclasses.dataclass(frozen=True)
class MtGrpoConfig:
  """MT-GRPO's rewards of searches and of the outcome."""

  executed: float = learning(0.2, at_least(0))
  """Reward of a search."""
  found: float = learning(0.5, at_least(0))
  """Added if its passages hold an accepted answer."""
  exact: float = learning(1.0, at_least(0))
  """Reward of a right answer."""
  contained: float = learning(0.5, at_least(0))
  """Reward of an answer that holds an accepted answer."""
  well_formed: float = learning(0.2, at_least(0))
  """Reward of a well-formed response."""


@dataclasses.dataclass(frozen=True)
class R1SearcherConfig:
  """R1-Searcher's rewards in two stages."""

  stage_one: float = learning(0.16, SHARE)
  """Share of the training that is the first stage."""
  answer: float = learning(1.0, at_least(0))
  """In stage 1, reward of an answer with the words of an accepted one, and loss
  otherwise; 0 is the paper's."""
  formed: float = learning(0.5, at_least(0))
  """In stage 1, added if the response thought and answered once."""
  searched: float = learning(0.5, at_least(0))
  """In stage 1, added if it searched and each search has passages."""
  malformed: float = learning(2.0, at_least(0))
  """In stage 2, subtracted if the response is not well formed."""


@dataclasses.dataclass(frozen=True)
class SsrlConfig:
  """SSRL's reward."""

  right: float = learning(0.9, at_least(0))
  """Weight of exact match."""
  formed: float = learning(0.1, at_least(0))
  """Weight of a well-formed response."""


@dataclasses.dataclass(frozen=True)
class BetaGrpoConfig:
  """beta-GRPO's reward."""

  beta: float = learning(0.4, SHARE)
  """Least probability that each token of every query must have had for a right
  answer to be rewarded."""


@dataclasses.dataclass(frozen=True)
class SaasConfig:
  """SAAS's reward; `searchless` is the size of its group without searches."""

  stage_one: float = learning(0.5, SHARE)
  """Share of the training in which no search is penalised."""
  alpha: float = learning(0.05, at_least(0))
  """Penalty of a right answer for each needless search."""
  delta: int = learning(2, at_least(1))
  """Right answers without searches from which a question needs none."""
  formed: float = learning(0.0, at_least(0))
  """Reward of a well-formed response whose answer has an F1 of 0."""
  repeated: float = learning(0.0, at_least(0))
  """Penalty of a response that searches a query twice."""


@dataclasses.dataclass(frozen=True)
class AutoSearchConfig:
  """AutoSearch's rewards of turns."""

  sound: float = learning(0.025, at_least(0))
  """Reward of a well-formed search that repeats none, and loss otherwise."""
  answered: float = learning(0.1, REWARD)
  """Reward of a well-formed turn that answers."""
  malformed: float = learning(0.5, at_least(0))
  """Loss of a last turn that is not."""
  explored: float = learning(0.0125, at_least(0))
  """Added to each sound turn if it searches and the answer is wrong."""
  depth: float = learning(0.2, at_least(0))
  """If the answer is right, shared by its searches up to the sufficient one."""
  cost: float = learning(0.025, at_least(0))
  """Subtracted from each of these shares."""
  beyond: float = learning(0.05, at_least(0))
  """Loss of each turn after the sufficient search, the answer included."""


@dataclasses.dataclass(frozen=True)
class HipragConfig:
  """HiPRAG's reward, and the servers that judge steps."""

  formed: float = learning(0.2, SHARE)
  """Reward of a well-formed response; a right answer in a malformed one loses
  it."""
  process: float = learning(0.4, at_least(0))
  """Bonus of a right answer if all steps are optimal."""
  by_search: bool = learning(False)
  """Whether optimal steps are divided by the number of searches, as in the
  released code, where the share can exceed 1 and is 1 without a search; False:
  by the number of steps, the paper's share."""
  url: str = learning("")
  """Address of the judge (an OpenAI chat completions API)."""
  name: str = learning("")
  """Name of the judge's model."""
  memory_url: str = learning("")
  """Address of the model that answers queries from memory; "": the judge's."""
  memory_name: str = learning("")
  """Name of that model; "": the judge's."""
  key_variable: str = placement("")
  """Environment variable with the key of both addresses; "": none."""
  max_tokens: int = learning(200, at_least(1))
  """Limit on the tokens of a reply."""
  concurrency: int = placement(64, at_least(1))
  """Concurrent calls to an address."""
  deadline: float = placement(60.0, POSITIVE)
  """Seconds of a call."""


@dataclasses.dataclass(frozen=True)
class MethodConfig:
  """Which of the compared systems runs, and the constants of each."""

  name: str = identity("anysearch")
  """The system, or `file.py:NAME` of yours (docs/methods.md); only its own
  constants have an effect."""
  judge: str = learning("")
  """`module:NAME` or `file.py:NAME` of a function that measures a trajectory in
  place of the system's judge; "": the system's, docs/methods.md."""
  measure_deadline: float = placement(120.0, POSITIVE)
  """Seconds in which a judge's measures of one trajectory are due; a trajectory
  without them counts as failed."""
  search_r1: SearchR1Config = SearchR1Config()
  stepsearch: StepSearchConfig = StepSearchConfig()
  zerosearch: ZeroSearchConfig = ZeroSearchConfig()
  otc: OtcConfig = OtcConfig()
  ikea: IkeaConfig = IkeaConfig()
  research: ResearchConfig = ResearchConfig()
  autorefine: AutoRefineConfig = AutoRefineConfig()
  mt_grpo: MtGrpoConfig = MtGrpoConfig()
  r1_searcher: R1SearcherConfig = R1SearcherConfig()
  ssrl: SsrlConfig = SsrlConfig()
  beta_grpo: BetaGrpoConfig = BetaGrpoConfig()
  hiprag: HipragConfig = HipragConfig()
  saas: SaasConfig = SaasConfig()
  autosearch: AutoSearchConfig = AutoSearchConfig()
