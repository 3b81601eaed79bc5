"""The experts whose demonstrations a warm start learns from, by name.

* `thrifty` searches what it does not know and trusts its memory. It made the
  warm start of the `fixed` world, which leaves a reward little to teach.
* `soft` searches what it knows too, a little more often if the memory is less
  reliable or budget is left over. With the scaffold it depends on both more
  strongly, so the scaffold helps before any training. Made for `graded`.
* `blind` searches everything with the same probability.
* `interruptible` is `soft` that also plays under stated caps on tokens, ignores
  them, and answers when it is asked to. Made for `configs/dual_budgets.py`.
"""

from __future__ import annotations

from typing import NamedTuple

from anysearch_jax.world import expert


class Demonstrator(NamedTuple):
  """An expert, and what a policy that has learned from it must show.

  Attributes:
    plain, scaffolded: its decisions in the two kinds of episodes.
    largest_budget: budgets are uniform from 0 to this.
    probe: the least mean probability of each probed decision.
    gap: the least P(recall | known) - P(recall | unknown).
    scaffold_gain: the least accuracy that the scaffold adds at budget 8; None:
      this is not played.
    slopes: whether P(search | known) must depend on reliability and slack as
      the expert's does.
    caps: 60 % of the episodes without the scaffold state one of these caps on
      tokens; empty: none does.
  """

  plain: expert.ExpertConfig
  scaffolded: expert.ExpertConfig
  largest_budget: int
  probe: float
  gap: float
  scaffold_gain: float | None = None
  slopes: bool = True
  caps: tuple[int, ...] = ()


_BLIND = expert.ExpertConfig(
  p_search_known=0.6,
  p_search_unknown=0.6,
  p_retry_on_miss=0.7,
  p_check_on_conflict=0.5,
)
EXPERTS = {
  "thrifty": Demonstrator(
    expert.ExpertConfig(),
    expert.ExpertConfig(),
    largest_budget=8,
    probe=0.9,
    gap=0.3,
    slopes=False,
  ),
  "soft": Demonstrator(
    expert.ExpertConfig(
      p_search_known=0.6,
      p_search_unknown=0.75,
      p_retry_on_miss=0.7,
      p_check_on_conflict=0.5,
      change_slope=0.6,
      slack_slope=0.15,
    ),
    expert.ExpertConfig(
      p_search_known=0.5,
      p_search_unknown=0.95,
      p_retry_on_miss=0.85,
      p_check_on_conflict=0.7,
      change_slope=1.2,
      slack_slope=0.4,
    ),
    largest_budget=10,
    probe=0.99,
    gap=0.2,
    scaffold_gain=0.08,
  ),
  "blind": Demonstrator(_BLIND, _BLIND, largest_budget=10, probe=0.99, gap=0.3),
}


EXPERTS["interruptible"] = EXPERTS["soft"]._replace(
  caps=tuple(range(20, 201, 10))
)


def get(name: str) -> Demonstrator:
  """Returns an expert. Raises ValueError if there is none of this name."""
  if name not in EXPERTS:
    raise ValueError(
      f"warm_start.expert: found {name!r}, expected one of "
      f"{', '.join(EXPERTS)}, priced."
    )
  return EXPERTS[name]
