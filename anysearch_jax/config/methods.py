"""The constants of the compared systems; `config` re-exports these classes.

Defaults are those of the system's paper or, if the paper does not give one, of
its scripts.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class SearchR1Config:
  """Search-R1's reward: exact match, or its variant with a format reward.

  format_variant: whether the reward includes the format; the other values count
    only then.
  structure: reward of a well-formed response without a right answer; a right
    answer in a malformed response loses the same amount.
  final: reward of a wrong answer in a malformed response.
  retrieval: added to `structure` for a well-formed response without a right
    answer, if a passage that was shown contains an accepted answer.
  """

  format_variant: bool = False
  structure: float = 0.2
  final: float = 0.1
  retrieval: float = 0.0


@dataclasses.dataclass(frozen=True)
class StepSearchConfig:
  """StepSearch's outcome and step rewards.

  key_weight: weight of the search-key score, which is added to the answer's F1.
  step_scale: factor of a search's reward, which is its gain minus its
    redundancy.
  missing: reward of a response without an answer.
  """

  key_weight: float = 0.618
  step_scale: float = 0.6
  missing: float = -1.0


@dataclasses.dataclass(frozen=True)
class ZeroSearchConfig:
  """ZeroSearch's schedule of noisy answers from the simulated search engine.

  noise_start, noise_end: probability of a noisy answer at the start and at the
    end of training, in [0, 1].
  noise_base: base of the exponential schedule, > 0: 1 is a straight line, a
    larger base rises later.
  """

  noise_start: float = 0.0
  noise_end: float = 0.5
  noise_base: float = 4.0


@dataclasses.dataclass(frozen=True)
class OtcConfig:
  """OTC-PO's tool productivity reward.

  alpha: factor of the reward.
  form: `grpo` compares a trajectory's searches with the fewest searches of a
    right answer in its group, `ppo` with zero searches.
  c: smoothing constant of the cosine, > 0; a larger one makes a search cost
    less.
  """

  alpha: float = 1.0
  c: float = 4.0
  form: str = "grpo"


@dataclasses.dataclass(frozen=True)
class IkeaConfig:
  """IKEA's knowledge-boundary reward.

  kb: bonus of a right answer after 0, 1, 2, ... searches; the last one also
    counts for more searches.
  bad_format: reward of a malformed response.
  searched_wrong: reward of a wrong or missing answer after a search; without
    a search it is 0.
  right: reward of a right answer, to which `kb` is added.
  """

  kb: tuple[float, ...] = (0.6, 0.4, 0.2, 0.0)
  bad_format: float = -1.0
  searched_wrong: float = 0.05
  right: float = 1.0


@dataclasses.dataclass(frozen=True)
class ResearchConfig:
  """ReSearch's reward.

  wrong: reward of a well-formed response whose answer has an F1 of 0.
  """

  wrong: float = 0.1


@dataclasses.dataclass(frozen=True)
class AutoRefineConfig:
  """AutoRefine's reward.

  refined: reward of an answer with an F1 of 0 if a refinement holds an accepted
    answer.
  """

  refined: float = 0.1


@dataclasses.dataclass(frozen=True)
class MtGrpoConfig:
  """MT-GRPO's rewards of searches and of the outcome.

  executed: reward of a search.
  found: added if its passages hold an accepted answer.
  exact: reward of a right answer.
  contained: reward of an answer that holds an accepted answer.
  well_formed: reward of a well-formed response.
  """

  executed: float = 0.2
  found: float = 0.5
  exact: float = 1.0
  contained: float = 0.5
  well_formed: float = 0.2


@dataclasses.dataclass(frozen=True)
class R1SearcherConfig:
  """R1-Searcher's rewards in two stages.

  stage_one: share of the training that is the first stage.
  answer: in stage 1, reward of an answer that holds an accepted one, and loss
    otherwise; 0 is the paper's.
  formed: in stage 1, added if the response is well formed.
  searched: in stage 1, added if it also searched.
  malformed: in stage 2, subtracted if the response is not well formed.
  """

  stage_one: float = 0.16
  answer: float = 1.0
  formed: float = 0.5
  searched: float = 0.5
  malformed: float = 2.0


@dataclasses.dataclass(frozen=True)
class SsrlConfig:
  """SSRL's reward.

  right, formed: weights of exact match and of a well-formed response.
  """

  right: float = 0.9
  formed: float = 0.1


@dataclasses.dataclass(frozen=True)
class BetaGrpoConfig:
  """beta-GRPO's reward.

  beta: least probability that each token of every query must have had for a
    right answer to be rewarded.
  """

  beta: float = 0.4


@dataclasses.dataclass(frozen=True)
class HipragConfig:
  """HiPRAG's reward, and the servers that judge steps.

  formed: reward of a well-formed response; a right answer in a malformed one
    loses it.
  process: bonus of a right answer if all steps are optimal.
  url, name: address of the judge (an OpenAI chat completions API), and its
    model.
  memory_url, memory_name: the same of the model that answers queries from
    memory; "": the judge's.
  key_variable: environment variable with the key of both addresses; "": none.
  max_tokens: limit on the tokens of a reply.
  concurrency, deadline: concurrent calls to an address, and seconds of a call.
  """

  formed: float = 0.2
  process: float = 0.4
  url: str = ""
  name: str = ""
  memory_url: str = ""
  memory_name: str = ""
  key_variable: str = ""
  max_tokens: int = 200
  concurrency: int = 64
  deadline: float = 60.0


@dataclasses.dataclass(frozen=True)
class MethodConfig:
  """Which of the compared systems is trained or evaluated, and their constants.

  name: the system; only its own constants have an effect.
  measure_deadline: seconds in which a judge's measures of one trajectory are
    due; a trajectory without them counts as failed.
  """

  name: str = "anysearch"
  measure_deadline: float = 120.0
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
