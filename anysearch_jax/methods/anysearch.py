"""AnySearch, the paper's method: a budget curriculum and four reward terms."""

from __future__ import annotations

from anysearch_jax import config as config_lib
from anysearch_jax.algorithms import method
from anysearch_jax.environment import prompts, wording
from anysearch_jax.rollout import last_answer, short_prompts

_SHORT = ("documents_short", "plain_retrieval")


def _with_step(name: str) -> wording.Wording:
  """Returns the texts of an environment, whose episodes take its own course."""
  words = prompts.WORDINGS[name]
  if name in _SHORT:
    return words.then(short_prompts.add)
  if words.environment().last:
    return words.then(last_answer.add)
  return words


WORDINGS = {name: _with_step(name) for name in prompts.WORDINGS}


def reward(
  o: method.Outcomes, config: config_lib.ExperimentConfig
) -> method.Terms:
  """Returns the terms and the total of `rewards.composite`.

  It is also a valid `reward.function`, so it takes the whole configuration.
  """
  from anysearch_jax.algorithms import rewards

  terms = rewards.composite(
    o.em,
    o.format,
    o.generated_tokens,
    o.searches,
    o.budget,
    o.valid,
    config=config.reward,
    spent=o.spent,
    caps=o.caps,
  )
  return method.reward_terms(
    o.valid,
    total=terms.total,
    length=terms.length,
    tool=terms.tool,
    gamma=terms.gamma[..., None] * o.valid,
  )


METHOD = method.Method(
  "anysearch",
  "AnySearch",
  environments={name: w.environment() for name, w in WORDINGS.items()},
  wordings=WORDINGS,
  reward=reward,
)
