"""SAAS: penalises a search where the present policy gets by without it.

Half of a question's trajectories are played with a budget of 0. With n_d right
answers among them and n_e among the others, a question is

    known      if n_d >= delta: any search is needless
    needed     if n_d = 0 and n_e > 0: a search beyond the fewest of a right
               answer is needless
    undecided  otherwise: no search is needless

    r = F1                                       in the first stage
    r = F1 - alpha (needless searches if F1 = 1)    after it

Advantages compare the trajectories of either half. The first stage is the
first `stage_one` of the training; the paper begins the second when validation
stops improving. https://arxiv.org/abs/2605.29796
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping

import jax.numpy as jnp

import anysearch_jax as aj

# The paper's trajectories of a question, and those of them without searches.
GROUP, SEARCHLESS = 8, 4


@dataclasses.dataclass(frozen=True)
class Options:
  """SAAS's reward; `searchless` is the size of its group without searches."""

  stage_one: float = aj.settings.learning(0.5, aj.settings.SHARE)
  """Share of the training in which no search is penalised."""
  alpha: float = aj.settings.learning(0.05, aj.settings.at_least(0))
  """Penalty of a right answer for each needless search."""
  delta: int = aj.settings.learning(2, aj.settings.at_least(1))
  """Right answers without searches from which a question needs none."""
  formed: float = aj.settings.learning(0.0, aj.settings.at_least(0))
  """Reward of a well-formed response whose answer has an F1 of 0."""
  repeated: float = aj.settings.learning(0.0, aj.settings.at_least(0))
  """Penalty of a response that searches a query twice."""


def environment(texts: Mapping[str, str]) -> aj.Environment:
  """Returns Search-R1's environment with a prompt for a budget of 0."""
  closed = aj.wording.template(texts["closed"])
  return dataclasses.replace(aj.search_r1.environment(texts), closed=closed)


WORDINGS = {
  "saas": aj.wording.Wording(
    "saas.toml",
    {**aj.wording.ONE_PROMPT, "closed": aj.wording.Slots(needs=("Question",))},
    environment,
    folder=pathlib.Path(__file__).with_name("texts"),
  ),
  "search_r1_world": aj.prompts.WORLD,
}


def train(config: aj.ExperimentConfig) -> aj.ExperimentConfig:
  """Selects a fixed budget and the paper's groups.

  A rollout keeps its number of trajectories, if the groups divide it.
  """
  return aj.config.changed(
    aj.method.fixed_budget(config),
    questions=max(1, config.questions * config.group // GROUP),
    group=GROUP,
    searchless=SEARCHLESS,
  )


def measure(trajectory: aj.Trajectory) -> dict[str, float]:
  """Returns `closed`: 1 with a budget of 0; `repeated`: 1 if a query was."""
  queries = trajectory.queries
  return {
    "closed": float(trajectory.budget == 0),
    "repeated": float(len({*queries}) < len(queries)),
  }


@aj.method.jitted
def reward(o: aj.Outcomes, c: Options) -> aj.method.Terms:
  """Returns the reward of the table above, with two terms of the script.

  `formed` is the reward of a well-formed response with an F1 of 0, `repeated`
  the penalty of a repeated query; both are 0 in the paper. The terms `known`
  and `needed` are 1 in questions of this kind.
  """
  right = o.valid & (o.em != 0)
  closed = o.measures["closed"] != 0
  searches = jnp.where(o.valid, jnp.asarray(o.searches, float), 0)
  without = jnp.sum(right & closed, -1, keepdims=True)
  fewest = jnp.min(
    searches, -1, keepdims=True, where=right & ~closed, initial=jnp.inf
  )
  known = without >= c.delta
  needed = (without == 0) & jnp.isfinite(fewest)
  beyond = jnp.maximum(searches - fewest, 0)
  needless = jnp.where(known, searches, jnp.where(needed, beyond, 0))
  f1, formed = o.f1, c.formed * o.format
  staged = o.progress.share >= c.stage_one
  penalty = c.alpha * needless * (staged & (f1 == 1))
  base = jnp.where(f1 > 0, f1, formed)
  if c.repeated:
    base -= c.repeated * o.measures["repeated"]
  return {
    "f1": f1,
    "known": known & o.valid,
    "needed": needed & o.valid,
    "penalty": penalty,
    "total": base - penalty,
  }


METHOD = aj.method.compared(
  "saas",
  "SAAS",
  WORDINGS,
  reward,
  measures=("closed", "repeated"),
  measure=measure,
  train=train,
  options=Options(),
)
