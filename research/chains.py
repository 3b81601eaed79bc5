"""Where a search starts to pay, if the answer needs more than one fact.

    python -m research.chains --figure=chains.svg
    python -m research.chains runs/a/evaluation/plain --switches=switches.json

The first command draws the switch point over the probability that a sample
finds all other facts; the second computes it from episodes, for each budget and
for all of them, and adds it to a file under the name of the folder.

The setting is that of docs/objective.md: a policy remembers a fact, and its
memory is right with probability rho, for the whole group. It searches for the
fact with probability 1/2 in each of the group's samples. A search finds the
fact for all samples that make it, or, with probability 1 - q, for none. A
sample is right if it has this fact and all others. The expected gradient of
P(search) is linear in rho,

    rho wasted + (1 - rho) gained

and the switch point is where it is 0. `wasted` and `gained` are the sums of
A (searched - 1/2) over the samples of a group that have a search left, averaged
over groups, if the memory is right and if it is wrong. The library's own
rewards and advantages compute A.

An evaluation must have several seeds, which are the samples of a question. Of
each right memory in a chain, the other facts and searches of the samples are
what they were; the fact and its search are drawn anew.
"""

from __future__ import annotations

import collections
import json
import pathlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from absl import app, flags
from scipy import stats

import anysearch_jax as aj
from anysearch_jax import grpo, rewards
from research import first_facts, price_of_a_search

# Of the generated world: the share of facts that the first wording finds.
FOUND = 0.65
GROUP = 5
_GROUPS = 1 << 16  # Drawn for one switch point.
_SEED = 0
_CHANCES = np.linspace(0.3, 1.0, 15)
# Largest weights of the tool reward, and the tries of Binomial(tries, 1/2), the
# number of other searches.
_GAMMAS = (0.3, 0.1, 0.03)
_TRIES = (0, 2, 4)
_BUDGET = 5


class Others(NamedTuple):
  """What the samples of a question did apart from one fact.

  Attributes:
    right: bool `[S]`, whether a sample found all other facts.
    searches: int `[S]`, its other searches.
    budget: searches that it had.
  """

  right: np.ndarray
  searches: np.ndarray
  budget: int


class Switches(NamedTuple):
  """Where a search starts to pay in played chains.

  Attributes:
    by_budget: the switch point at each budget, a policy of its own for each.
    of_all: that of one policy which does the same at every budget: of the sum
      of the gradients.
    chances: by budget, the share of samples that found all other facts.
    deviations: by budget, the deviation of other searches within a question.
  """

  by_budget: dict[int, float]
  of_all: float
  chances: dict[int, float]
  deviations: dict[int, float]


class Pushes(NamedTuple):
  """The gradient of P(search) if the memory is right, and if it is wrong.

  Attributes:
    wasted: at most 0 if a search costs something.
    gained: at least 0.
  """

  wasted: float
  gained: float

  @property
  def switch(self) -> float:
    """The reliability below which a search pays, in [0, 1]; NaN: none does."""
    total = self.gained - self.wasted
    return self.gained / total if total > 0 else float("nan")


def pushes(
  others: Sequence[Others],
  reward: aj.config.RewardConfig,
  *,
  found: float = FOUND,
  normalize: str = "group",
  size: int = GROUP,
  groups: int = _GROUPS,
) -> Pushes:
  """Returns what pushes a policy towards a search and away from it.

  Args:
    others: of each question and fact; all weigh the same.
    reward: the reward's weights.
    found: q, in [0, 1].
    normalize: as `objective.normalize`.
    size: G, samples of a group.
    groups: number of groups that are drawn, over all of `others`.
  """
  rng = np.random.default_rng(_SEED)
  groups_of_each = -(-groups // len(others))
  drawn_groups = []
  for other in others:
    samples = rng.integers(0, len(other.right), (groups_of_each, size))
    budgets = np.full(groups_of_each, other.budget)
    drawn_groups.append(
      (other.right[samples], other.searches[samples], budgets)
    )
  others_right, other_searches, budgets = map(
    np.concatenate, zip(*drawn_groups, strict=True)
  )
  # Only a sample that has a search left decides.
  can_search = other_searches < budgets[:, None]
  searched = can_search & (rng.random(others_right.shape) < 0.5)
  score = np.where(can_search, searched - 0.5, 0)
  finds = rng.random((len(searched), 1)) < found
  searches = other_searches + searched

  def push(has_fact: np.ndarray) -> float:
    right = others_right & has_fact
    valid = jnp.ones(right.shape, bool)
    composite = rewards.composite(
      jnp.asarray(right),
      valid,
      valid,
      jnp.asarray(searches),
      jnp.asarray(budgets),
      valid,
      config=reward,
    )
    advantages = grpo.advantages(
      composite.total, valid, epsilon=1e-6, normalize=normalize
    )
    return float(np.mean(np.sum(advantages * score, axis=1)))

  return Pushes(
    wasted=push(np.ones_like(searched)), gained=push(searched & finds)
  )


def alike(chance: float, tries: int = 0, budget: int = _BUDGET) -> Others:
  """Returns others that are right independently of their searches.

  Args:
    chance: p, the probability that a sample finds all other facts.
    tries: its other searches are Binomial(tries, 1/2).
    budget: searches that it has.
  """
  count = 2000
  quantiles = (np.arange(count) + 0.5) / count
  searches = stats.binom.ppf(quantiles, tries, 0.5).astype(int)
  right = np.random.default_rng(_SEED).permutation(quantiles < chance)
  return Others(right, searches, budget)


def limit(chance: float, found: float = FOUND, size: int = GROUP) -> float:
  """Returns the switch point without other searches as gamma goes to 0.

  A wasted search then costs something in groups in which all samples are right
  only, and there as much as a right answer elsewhere.

  Args:
    chance: p, as for `alike`.
    found: q.
    size: G.
  """
  cost, gain = price_of_a_search.forces(chance, size)
  wasted = chance**size * cost
  gained = found * gain
  return gained / (gained + wasted)


def others_of(
  episodes: Iterable[Mapping[str, Any]],
) -> dict[int, list[Others]]:
  """Returns the others of each right memory in played chains, by budget.

  Args:
    episodes: rows of evaluations in the generated world, with several seeds.

  Raises:
    ValueError: no question has a right memory and two samples.
  """
  samples: dict[tuple[str, int], list[Mapping[str, Any]]]
  samples = collections.defaultdict(list)
  for episode in episodes:
    if episode["budget"] >= 1:
      samples[episode["question_id"], episode["budget"]].append(episode)
  by_budget: dict[int, list[Others]] = collections.defaultdict(list)
  for (_, budget), played in samples.items():
    if len(played) < 2:
      continue
    for fact in played[0]["metadata"]["facts"]:
      if not fact["known"] or fact["stale"]:
        continue
      for_fact = [
        sum(first_facts.asks_for(query, fact) for query in episode["queries"])
        for episode in played
      ]
      searches = [len(episode["queries"]) for episode in played]
      by_budget[budget].append(
        Others(
          right=np.array([bool(episode["em"]) for episode in played]),
          searches=np.array(searches) - np.array(for_fact),
          budget=budget,
        )
      )
  if not by_budget:
    raise ValueError(
      "Found no question with a remembered fact and two seeds; expected an "
      "evaluation in the generated world with --config.evaluation.seeds=1,2,..."
    )
  return dict(sorted(by_budget.items()))


def switches_of(
  by_budget: Mapping[int, Sequence[Others]],
  reward: aj.config.RewardConfig,
  *,
  groups: int = _GROUPS,
) -> Switches:
  """Returns the switch points of played chains.

  Args:
    by_budget: of each budget, the others of its questions.
    reward: the reward's weights.
    groups: number of groups that are drawn at each budget.
  """
  by_budget_pushes = {
    budget: pushes(others, reward, groups=groups)
    for budget, others in by_budget.items()
  }
  gained = sum(push.gained for push in by_budget_pushes.values())
  wasted = sum(push.wasted for push in by_budget_pushes.values())
  chances = {
    budget: float(np.mean([other.right.mean() for other in others]))
    for budget, others in by_budget.items()
  }
  deviations = {
    budget: float(np.mean([other.searches.std() for other in others]))
    for budget, others in by_budget.items()
  }
  return Switches(
    {budget: push.switch for budget, push in by_budget_pushes.items()},
    Pushes(wasted=wasted, gained=gained).switch,
    chances,
    deviations,
  )


def add(path: pathlib.Path, name: str, switches: Switches) -> None:
  """Adds switch points to a JSON file, which it makes if it is not there."""
  stored = json.loads(path.read_text()) if path.is_file() else {}
  rounded = jax.tree.map(lambda number: round(number, 3), switches._asdict())
  stored[name] = rounded
  path.write_text(json.dumps(dict(sorted(stored.items())), indent=1) + "\n")


def draw(path: pathlib.Path) -> None:
  """Draws the switch point over p, and prints it."""
  figure, axes = plt.subplots(1, len(_TRIES), figsize=(10, 3.5), sharey=True)
  figure.set_layout_engine("constrained")
  for axis, tries in zip(axes, _TRIES):
    if not tries:
      limits = [limit(chance) for chance in _CHANCES]
      axis.plot(_CHANCES, limits, "k:", label="gamma to 0")
    for gamma in _GAMMAS:
      reward = aj.config.RewardConfig(gamma_max=gamma)
      switches = [
        pushes([alike(chance, tries)], reward).switch for chance in _CHANCES
      ]
      axis.plot(_CHANCES, switches, label=f"gamma {gamma}")
      numbers = " ".join(f"{switch:.2f}" for switch in switches)
      print(f"{tries} other tries, gamma {gamma}: {numbers}")
    axis.axhline(FOUND / (1 + FOUND), color="gray", lw=0.8)
    axis.set(
      xlabel="p, all other facts are found",
      title=f"other searches: deviation {np.sqrt(tries) / 2:.1f}",
    )
  axes[0].set_ylabel("switch point")
  axes[0].legend()
  figure.savefig(path)


def define_flags() -> None:
  """Defines the command's flags; importing the module defines none."""
  flags.DEFINE_string("figure", None, "An SVG file.")
  flags.DEFINE_string("switches", None, "A JSON file that gets the points.")


def main(argv: Sequence[str]) -> None:
  if figure := flags.FLAGS.figure:
    draw(pathlib.Path(figure))
  reward = aj.config.RewardConfig()
  for folder in argv[1:]:
    try:
      episodes = aj.read_episodes(pathlib.Path(folder) / "episodes.jsonl")
      by_budget = others_of(episodes)
    except (OSError, ValueError) as error:
      sys.exit(f"research.chains: {folder}: {error}")
    switches = switches_of(by_budget, reward)
    for budget, switch in switches.by_budget.items():
      print(
        f"{folder} B = {budget}: p {switches.chances[budget]:.2f}, deviation "
        f"of other searches {switches.deviations[budget]:.2f}, switch "
        f"{switch:.2f}"
      )
    print(f"{folder} all budgets: switch {switches.of_all:.2f}")
    if path := flags.FLAGS.switches:
      add(pathlib.Path(path), pathlib.Path(folder).name, switches)


if __name__ == "__main__":
  define_flags()
  app.run(main)
