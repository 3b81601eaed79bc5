"""SlimSearcher: a right answer is worth more, the less of its group it cost.

    r = right gate(searches) gate(tokens)
    gate(c) = 2 / (1 + exp((c - least) / (least + epsilon)))

`least` is the cost of the cheapest right answer in the group, whose gate is 1;
gates fall to 0 as the cost grows. What a wrong answer cost does not count. The
paper also trains on cheap right demonstrations first, which is left out. It is
played in Search-R1's environment. https://arxiv.org/abs/2606.07074

Its code is not public. Of the paper we could read the abstract and readers'
notes, which do not name epsilon: with a small one, a right answer of one search
would earn nothing beside one without a search. The default here is 1.
"""

from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp

import anysearch_jax as aj


@dataclasses.dataclass(frozen=True)
class Options:
  """SlimSearcher's gates."""

  epsilon: float = aj.settings.learning(1.0, aj.settings.POSITIVE)
  """Added to the least cost, in searches and in tokens; a larger one makes a
  search cost less."""
  tokens: bool = aj.settings.learning(True)
  """Whether the tokens that the model wrote have a gate, as searches have."""


@aj.method.jitted
def reward(o: aj.Outcomes, c: Options) -> aj.method.Terms:
  """Returns the reward above; its terms are the gates of right answers."""
  right = o.valid & (o.em != 0)
  searches = gate(o.searches, right, epsilon=c.epsilon)
  tokens = gate(o.generated_tokens, right, epsilon=c.epsilon)
  return {
    "searches_gate": searches,
    "tokens_gate": tokens,
    "total": searches * (tokens if c.tokens else 1),
  }


def gate(cost: chex.Array, right: chex.Array, *, epsilon: float) -> chex.Array:
  """Returns the gates of the right answers of groups, and 0 for the others.

  Args:
    cost: `[..., G]`, >= 0.
    right: bool `[..., G]`.
    epsilon: above 0, in the unit of `cost`.
  """
  cost = jnp.asarray(cost, float)
  least = jnp.min(cost, -1, keepdims=True, where=right, initial=jnp.inf)
  least = jnp.where(jnp.isinf(least), 0, least)
  excess = (cost - least) / (least + epsilon)
  return jnp.where(right, 2 * jax.nn.sigmoid(-excess), 0)


METHOD = aj.method.compared(
  "slimsearcher",
  "SlimSearcher",
  aj.search_r1.WORDINGS,
  reward,
  options=Options(),
)
