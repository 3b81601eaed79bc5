"""StepSearch's rewards: of the outcome, and of each search.

    outcome   F1 + key_weight * search keys, on the last token; without an
              answer only `missing`, and no search is rewarded
    step      step_scale * (gain - redundancy), on the token that closes it

Deviations from the released code: step rewards count `step_scale` times (there
1 + step_scale, by an addition in place); a key group keeps its best query
(there a later, worse one overwrites it, and a query counts for one group only);
F1 is not rounded; a passage is compared with its title, is known by its id
(there, by its text), and is redundant if an earlier search showed it.
Text after the answer cannot occur: a turn ends with it.
"""

from __future__ import annotations

import collections
import functools
import re
from collections.abc import Sequence

import chex
import jax
import jax.numpy as jnp
import numpy as np

from anysearch_jax import types
from anysearch_jax.config import methods as config_methods
from anysearch_jax.data import evidence
from anysearch_jax.environment import scoring
from anysearch_jax.methods import observations
from anysearch_jax.methods import outcomes as outcomes_lib

# What scikit-learn's TfidfVectorizer takes for a word.
_WORD = re.compile(r"\b\w\w+\b")


def measure(trajectory: types.Trajectory) -> dict[str, float]:
  """`search_keys`: how well the queries covered the steps to the answer.

  The mean over the question's key groups of the best F1 that a charged query
  has with one of the group; 0 without key groups.

  Raises:
    ValueError: the question has neither gold passages nor search keys.
  """
  _, keys = evidence.gold(trajectory.question)
  best = [
    max((scoring.f1(query, group) for query in trajectory.queries), default=0)
    for group in keys
  ]
  return {"search_keys": sum(best) / max(len(best), 1)}


def steps(
  trajectory: types.Trajectory, config: config_methods.StepSearchConfig
) -> np.ndarray:
  """The reward of each charged search.

      gain        mean over gold passages of max(0, c_t - max_{s<t} c_s), where
                  c_t is the largest TF-IDF cosine of a passage of search t
      redundancy  share of the passages of search t that were shown before

  Args:
    trajectory: not failed.
    config: the scale.

  Returns:
    float32 `[searches]`; all 0 without an answer or without gold passages.

  Raises:
    ValueError: the question has neither gold passages nor search keys.
  """
  rewards = np.zeros(trajectory.searches, np.float32)
  passages, _ = evidence.gold(trajectory.question)
  if not passages or scoring.extract_answer(trajectory.spans) is None:
    return rewards
  best, seen = np.zeros(len(passages)), set()
  shown = zip(observations.shown(trajectory), trajectory.documents)
  for search, (texts, documents) in enumerate(shown):
    cosines = [similarities(text, passages) for text in texts]
    raised = np.max([best, *cosines], axis=0)
    ids = [document.id for document in documents]
    redundancy = np.mean([id_ in seen for id_ in ids]) if ids else 0
    rewards[search] = config.step_scale * (np.mean(raised - best) - redundancy)
    best = raised
    seen.update(ids)
  return rewards


def similarities(text: str, others: Sequence[str]) -> np.ndarray:
  """TF-IDF cosines of a text with each of some others.

  Words are SQuAD-normalised, of two characters or more; the inverse document
  frequency is smooth (scikit-learn's) and over these texts alone.

  Args:
    text: any.
    others: at least one.

  Returns:
    float64 `[len(others)]` in [0, 1]; 0 without a word in common.
  """
  counts = [_counts(each) for each in (text, *others)]
  words = sorted(set().union(*counts))
  table = np.array([[count[word] for word in words] for count in counts], float)
  having = np.sum(table > 0, axis=0)
  table *= np.log((1 + len(counts)) / (1 + having)) + 1
  norms = np.linalg.norm(table, axis=1, keepdims=True)
  table /= np.where(norms > 0, norms, 1)
  return table[1:] @ table[0]


@functools.partial(jax.jit, static_argnames="config")
def reward(
  outcomes: outcomes_lib.Outcomes, *, config: config_methods.StepSearchConfig
) -> dict[str, chex.Array]:
  """The reward of the outcome; `steps` come besides.

  Args:
    outcomes: of groups; with `measures` of `measure`.
    config: the constants.

  Returns:
    `f1`, `search_keys` and `total`.
  """
  keys = outcomes.measures["search_keys"]
  scored = outcomes.f1 + config.key_weight * keys
  return outcomes_lib.parts(
    outcomes.valid,
    f1=outcomes.f1,
    search_keys=keys,
    total=jnp.where(outcomes.answered, scored, config.missing),
  )


# The same passages come back all over a group.
@functools.lru_cache(maxsize=4096)
def _counts(text: str) -> collections.Counter[str]:
  """How often each word stands in a text; not to be changed."""
  return collections.Counter(_WORD.findall(scoring.normalize_answer(text)))
