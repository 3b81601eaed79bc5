"""R1-Searcher: first learn to search, then to answer with what was found.

    stage 1    answer if the answer holds an accepted one, otherwise -answer;
               + formed if well formed; + searched if also a search was made
    stage 2    F1, minus malformed if the response is not well formed

Stage 1 is the first `stage_one` of the training. The policy searches between
markers of its own. In the generated world it is played in Search-R1's
environment. https://arxiv.org/abs/2503.05592

configs/fidelity_rules.csv lists what differs from the released code.
"""

from __future__ import annotations

import re

import chex
import jax.numpy as jnp

from anysearch_jax import types
from anysearch_jax.config import methods as config_methods
from anysearch_jax.environment import scoring, tools
from anysearch_jax.methods import method, search_r1

SEARCH = tools.search(
  "<|begin_of_query|>",
  "<|end_of_query|>",
  begins="<|begin_of_documents|>",
  ends="<|end_of_documents|>",
  layout="({rank}) {title} {text}",
)
_HAN = re.compile("[\u4e00-\u9fff]")
_LONGEST = 10  # Words of a well-formed answer.


WORDINGS = search_r1.wordings(
  "r1_searcher",
  tools=(SEARCH,),
  stops=(SEARCH.closes, "</answer>"),
  action=tools.action((SEARCH,)),
  format=None,
)


def measure(trajectory: types.Trajectory) -> dict[str, float]:
  """Returns `contained`, as `method.contained`, and `well_formed`.

  A response is well formed if its thoughts and its one answer are closed, every
  search was answered by passages, the answer has at most ten words, and the
  model wrote no Chinese letter.
  """
  said = method.said(trajectory)
  thoughts, answers = (
    (said.count(f"<{tag}>"), said.count(f"</{tag}>"))
    for tag in ("think", "answer")
  )
  # The generated world's policy writes the second kind of marks.
  opened, closed = (
    said.count(mark) + said.count(plain)
    for mark, plain in (
      (SEARCH.opens, "<search>"),
      (SEARCH.closes, "</search>"),
    )
  )
  formed = (
    thoughts[0] == thoughts[1] >= 1
    and answers == (1, 1)
    and opened == closed == trajectory.searches
    and len((scoring.extract_answer(trajectory.spans) or "").split())
    <= _LONGEST
    and not _HAN.search(said)
  )
  return {**method.contained(trajectory), "well_formed": float(formed)}


@method.jitted
def reward(
  outcomes: method.Outcomes, config: config_methods.R1SearcherConfig
) -> dict[str, chex.Array]:
  """Returns the reward of the `stage`, 1 or 2, that the training is in."""
  formed = outcomes.measures["well_formed"]
  contained = outcomes.measures["contained"]
  first = (
    config.answer * (2 * contained - 1)
    + config.formed * formed
    + config.searched * formed * (outcomes.searches > 0)
  )
  second = outcomes.f1 - config.malformed * (1 - formed)
  begins = outcomes.progress.share < config.stage_one
  return {
    "f1": outcomes.f1,
    "well_formed": formed,
    "stage": jnp.where(begins, 1, 2) + 0 * formed,
    "total": jnp.where(begins, first, second),
  }


METHOD = method.compared(
  "r1_searcher",
  "R1-Searcher",
  WORDINGS,
  reward=reward,
  measures=("contained", "well_formed"),
  measure=measure,
)
