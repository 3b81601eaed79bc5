r"""A world of noisy passages, in which policies weigh what they have seen.

    python -m research.noisy_start --output=runs/noisy-world/policy
    python -m research.study --study=ablations --seeds=3 \
        --config=research/noisy_world.py --budgets=1,2,3,4,5,6,7,8 \
        --output=runs/noisy-world/study
    python -m research.noisy_losses runs/noisy-world/study/*/evaluation/plain

A question asks for one fact, as in `kipol mentor ?`. The answer is one of V = 6
values, or with probability NO_ANSWER there is none. A search shows one passage,
which states one value; asking again shows another one:

    answer y:  P(a passage states y) = p, each other value (1 - p) / (V - 1)
    no answer: each value 1 / V

where p is .5 for `kipol mentor` and .8 for `kipol verdict`, the dear search.
Passages are independent, given the answer. Of some relations the policy
remembers a value, which is the answer (if there is one) with a known
probability; the others are then equally likely.

An answer earns 1 if it is right, ABSTAIN if it is `nothing`, and 0 otherwise.
A budget counts both searches alike, so the reward charges for the dear one:

    reward = right + ABSTAIN (answer is `nothing`) - .1 dear searches

A row of a study adds its own terms, such as the paper's tool reward. Groups
share passages: the n-th search of a question shows the same one to all that
ask in the same way.

The environment is that of the prompts `world`, without the scaffold. Hardware:
as configs/quickstart.py. The optimum earns .540 at B = 1, .665 at B = 5 and
.725 at B = 8; the expert of the warm start .41, .50 and .51.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence

import numpy as np

import anysearch_jax as aj
from anysearch_jax import config as config_lib
from anysearch_jax.configs import quickstart
from research import warm_start_settings

CHEAP, DEAR = "cheap", "dear"
SOURCES = (CHEAP, DEAR)
# The probability that a passage states the answer, and a search's charge.
RIGHT = {CHEAP: 0.5, DEAR: 0.8}
CHARGE = {CHEAP: 0.0, DEAR: 0.1}
NO_ANSWER = 0.2
ABSTAIN = 0.4
NOTHING, VERDICT = "nothing", "verdict"
# By relation, the probability that memory holds the answer, if there is one;
# 0: memory holds no value.
TRUST = {"birthplace": 0.0, "employer": 0.4, "mentor": 0.65}
_SUBJECTS = 40
# Questions of each split.
_SIZES = {"train": 4000, "dev": 600, "test": 2000}
# No answer equals it, because punctuation does not count.
_NONE = "?"
_FILE = "research/noisy_world.py"

NAMES = aj.World()
SUBJECTS = NAMES.entities[:_SUBJECTS]
_COUNTRIES = NAMES.members["country"]
VALUES = tuple(NAMES.entities[entity] for entity in _COUNTRIES[:6])


def get_config() -> aj.ExperimentConfig:
  return config_lib.changed(
    quickstart.get_config(),
    name="noisy-world",
    policy="runs/noisy-world/policy",
    data={"source": f"{_FILE}:questions"},
    retrieval={"kind": f"{_FILE}:Search"},
    reward={
      "function": f"{_FILE}:reward",
      "length_limit": 320,
      "length_tolerance": 80,
    },
    curriculum={"phase1_scaffold": False},
    episode={"max_generated": 400},
  )


def get_warm_start() -> warm_start_settings.WarmStart:
  return warm_start_settings.WarmStart(
    steps=6000, demonstrations=4000, learning_rate=2e-3
  )


def remembered(subject: str, relation: str) -> str | None:
  """Returns the value that memory holds, None if it holds none."""
  if not TRUST[relation]:
    return None
  return VALUES[_digest(f"{subject} {relation}") % len(VALUES)]


@functools.cache
def questions(split: str) -> tuple[aj.Question, ...]:
  """Returns the questions of `train`, `dev` or `test`, see `data.source`.

  Their metadata are `subject`, `relation`, `memory` and `answer`; the last two
  are None if there is none.

  Raises:
    ValueError: the split is unknown.
  """
  if split not in _SIZES:
    raise ValueError(f"Found split {split!r}; expected {', '.join(_SIZES)}.")
  rng = _generator(split)
  return tuple(_question(rng, split, i) for i in range(_SIZES[split]))


def _question(rng: np.random.Generator, split: str, index: int) -> aj.Question:
  subject = SUBJECTS[rng.integers(len(SUBJECTS))]
  relation = tuple(TRUST)[rng.integers(len(TRUST))]
  memory = remembered(subject, relation)
  kept, exists = rng.random() < TRUST[relation], rng.random() >= NO_ANSWER
  others = [value for value in VALUES if value != memory]
  answer = memory if kept else others[rng.integers(len(others))]
  return aj.Question(
    f"{split}/{index}/{subject}/{relation}",
    f"{subject} {relation} ?",
    (answer,) if exists and answer else (_NONE,),
    metadata={
      "subject": subject,
      "relation": relation,
      "memory": memory,
      "answer": answer if exists else None,
    },
  )


def source_of(query: str, subject: str, relation: str) -> str | None:
  """Returns which search a query is; None if it finds nothing."""
  if query == f"{subject} {relation}":
    return CHEAP
  return DEAR if query == f"{subject} {VERDICT}" else None


def stated(question: aj.Question, source: str, index: int) -> str:
  """Returns the value of the passage that search `index`, from 0 on, shows."""
  answer, rng = question.metadata["answer"], _generator(question.id, source)
  drawn, others = rng.random((index + 1, 2))[index], VALUES
  if answer is not None:
    if drawn[0] < RIGHT[source]:
      return answer
    others = tuple(value for value in VALUES if value != answer)
  return others[int(drawn[1] * len(others))]


class Search:
  """The retriever, see `retrieval.kind`; it needs the context of a search."""

  def __init__(self, config: aj.ExperimentConfig | None = None):
    del config

  def context_key(self, context) -> tuple[str, int]:
    """Returns the question and the number of searches before this one."""
    return context.question.id, context.text.count("</information>")

  async def search(self, request: aj.SearchRequest) -> Sequence[aj.Passage]:
    context = request.known_context()
    known, query = context.question.metadata, " ".join(request.query.split())
    source = source_of(query, known["subject"], known["relation"])
    if source is None:
      return ()
    key = self.context_key(context)
    value = stated(context.question, source, key[1])
    wording = known["relation"] if source == CHEAP else VERDICT
    name = f"{key[0]}/{source}/{key[1]}"
    return (aj.Passage(name, known["subject"], f"{wording} {value}"),)


def reward(
  outcomes: aj.Outcomes, config: aj.ExperimentConfig
) -> dict[str, np.ndarray]:
  """Returns AnySearch's reward in this world, arrays `[Q, G]` by name.

  To the terms of `rewards.composite`, in which `alpha` is what a right answer
  earns, it adds `abstain` and `charge`, which are shares of alpha.
  """
  anysearch_reward = aj.get_method("anysearch").reward
  answers = outcomes.answers
  trajectories = outcomes.trajectories
  assert anysearch_reward and answers is not None and trajectories is not None
  terms = anysearch_reward(outcomes, config)
  abstain, charge = np.zeros((2, *outcomes.valid.shape), np.float32)
  for q, g in np.argwhere(outcomes.valid):
    t = trajectories[q, g]
    abstain[q, g] = ABSTAIN * (answers[q, g] == NOTHING)
    charge[q, g] = charged(t.queries)
  total = terms["total"] + config.reward.alpha * (abstain - charge)
  return {**terms, "total": total, "abstain": abstain, "charge": charge}


def earned(
  answer: str | None, queries: Sequence[str], question: aj.Question
) -> float:
  """Returns the world's reward of an episode."""
  right = answer is not None and answer == question.metadata["answer"]
  return right + ABSTAIN * (answer == NOTHING) - charged(queries)


def charged(queries: Sequence[str]) -> float:
  """Returns what these searches cost; a dear one has the word `verdict`."""
  return sum(
    CHARGE[DEAR if VERDICT in query.split() else CHEAP] for query in queries
  )


def _digest(text: str) -> int:
  return zlib.crc32(text.encode())


def _generator(*parts: str) -> np.random.Generator:
  return np.random.Generator(np.random.PCG64(_digest("/".join(parts))))
