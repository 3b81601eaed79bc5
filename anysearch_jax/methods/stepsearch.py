"""StepSearch: PPO with a reward for every search.

    outcome   F1 + key_weight * search keys, on the last token; without an
              answer it is `missing`, and no search is rewarded
    step      step_scale * (gain - redundancy), on the search's last token

The policy plans, searches, reads `<information>` and writes what it concludes
in an `<observation>`. A warning follows the passages of the last search.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence

import numpy as np

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.algorithms import method
from anysearch_jax.config import settings
from anysearch_jax.data import evidence
from anysearch_jax.environment import (
  prompts,
  protocol,
  scoring,
  spec,
  tools,
  wording,
)

_MARKERS = tuple(
  f"<{slash}{name}>"
  for name in ("plan", "observation", "warning")
  for slash in ("", "/")
)


def _environment(texts: Mapping[str, str]) -> spec.Environment:
  prompt = wording.template(texts["prompt"])
  warning = wording.template(texts["warning"])
  return spec.Environment(
    scaffold=prompt,
    plain=prompt,
    over_budget="\n" + warning,
    no_action=wording.template(texts["no_action"]),
    format=None,
    tools=(
      tools.search(
        begins="<information> ",
        ends=" </information>",
        layout="Doc {rank}<## Title: {title} ##> {text}",
      ),
    ),
    # After the budget's last search.
    after_search=lambda budget, used: warning if used == budget else "",
    markers=_MARKERS,
  )


WORDINGS = {
  "stepsearch": wording.Wording(
    "stepsearch.toml",
    {
      "prompt": wording.PROMPT,
      "warning": wording.LINE,
      "no_action": wording.LINE,
    },
    _environment,
  ),
  # The toy vocabulary has no plan or observation tags; the policy thinks
  # instead. The warning is omitted too: the only matching line already means
  # "budget exceeded", after which demonstrations guess.
  "stepsearch_world": prompts.WORLD,
}


@dataclasses.dataclass(frozen=True)
class Options:
  """StepSearch's outcome and step rewards."""

  key_weight: float = settings.learning(0.618, settings.at_least(0))
  """Weight of the search-key score, which is added to the answer's F1."""
  step_scale: float = settings.learning(0.6, settings.at_least(0))
  """Factor of a search's reward, which is its gain minus its redundancy."""
  missing: float = settings.learning(-1.0, settings.REWARD)
  """Reward of a response without an answer."""


def train(config: config_lib.ExperimentConfig) -> config_lib.ExperimentConfig:
  """Selects PPO with a fixed budget; the critic learns as the policy does."""
  return config_lib.changed(
    method.fixed_budget(config),
    objective={"advantage": "gae"},
    critic={"learning_rate": config.optimizer.learning_rate},
  )


# The default `token_pattern` of scikit-learn's TfidfVectorizer.
_WORD = re.compile(r"\b\w\w+\b")


def measure(trajectory: types.Trajectory) -> dict[str, float]:
  """Returns `search_keys`: how well the queries cover the question's steps.

  This is the mean, over the question's key groups, of the best F1 between a
  charged query and a key of the group; 0 without key groups. Raises ValueError
  if the question has neither gold passages nor search keys.
  """
  _, keys = evidence.gold(trajectory.question)
  best = [
    max((scoring.f1(query, group) for query in trajectory.queries), default=0)
    for group in keys
  ]
  return {"search_keys": sum(best) / max(len(best), 1)}


def steps(trajectory: types.Trajectory, config: Options) -> np.ndarray:
  """Returns the reward of each charged search.

      gain        mean over gold passages of max(0, c_t - max_{s<t} c_s), where
                  c_t is the largest TF-IDF cosine between the gold passage and
                  a passage of search t
      redundancy  share of the passages of search t that an earlier search
                  showed

  Returns:
    float32 `[searches]`, all 0 without an answer or gold passages.

  Raises:
    ValueError: the question has neither gold passages nor search keys.
  """
  rewards = np.zeros(trajectory.searches, np.float32)
  passages, _ = evidence.gold(trajectory.question)
  if not passages or protocol.extract_answer(trajectory.spans) is None:
    return rewards
  best = np.zeros(len(passages))
  seen_ids = set()
  for search, observation in enumerate(trajectory.observations):
    cosines = [similarities(p.contents, passages) for p in observation.passages]
    new_best = np.max([best, *cosines], axis=0)
    gain = np.mean(new_best - best)
    ids = [passage.id for passage in observation.passages]
    redundancy = np.mean([id_ in seen_ids for id_ in ids]) if ids else 0
    rewards[search] = config.step_scale * (gain - redundancy)
    best = new_best
    seen_ids.update(ids)
  return rewards


def similarities(text: str, documents: Sequence[str]) -> np.ndarray:
  """Returns the TF-IDF cosine similarity of `text` and each of `documents`.

  Words are SQuAD-normalised and have at least two characters. The inverse
  document frequency is scikit-learn's smoothed one, over these texts only.

  Returns:
    float64 `[len(documents)]` in [0, 1]; 0 without a common word.
  """
  counts = [_counts(document) for document in (text, *documents)]
  words = sorted(set().union(*counts))
  table = np.array([[count[word] for word in words] for count in counts], float)
  # idf = ln((1 + texts) / (1 + texts with the word)) + 1, scikit-learn's
  # default: https://scikit-learn.org/stable/modules/feature_extraction.html
  document_counts = np.sum(table > 0, axis=0)
  table *= np.log((1 + len(counts)) / (1 + document_counts)) + 1
  norms = np.linalg.norm(table, axis=1, keepdims=True)
  table /= np.where(norms > 0, norms, 1)
  return table[1:] @ table[0]


@method.jitted
def reward(o: method.Outcomes, c: Options) -> method.Terms:
  """Returns the reward of the outcome, without the step rewards of `steps`."""
  import jax.numpy as jnp

  keys = o.measures["search_keys"]
  scored = o.f1 + c.key_weight * keys
  return {
    "f1": o.f1,
    "search_keys": keys,
    "total": jnp.where(o.answered, scored, c.missing),
  }


# Cached because the samples of a group retrieve the same passages.
@functools.lru_cache(maxsize=4096)
def _counts(text: str) -> collections.Counter[str]:
  """Returns the word counts of a text. Cached: do not modify the result."""
  return collections.Counter(_WORD.findall(scoring.normalize_answer(text)))


METHOD = method.compared(
  "stepsearch",
  "StepSearch",
  WORDINGS,
  reward,
  ("search_keys",),
  measure,
  train=train,
  steps=steps,
  options=Options(),
)
