"""AutoSearch: pays for searches up to the one after which the answer is known.

After each search the policy is asked what it would answer if its budget ended
there, beside the episode (`early_answers`). The first of these that is
right, before the last search, makes its search the *sufficient* one. PPO
rewards every turn:

    search up to it    the rise of the answer's F1; sound or -sound; with a
                       right answer at the end depth / searches up to it - cost,
                       with a wrong one explored
    turn after it      -beyond, the final answer too
    other answer       1 if right; answered or -malformed; after searches also
                       depth / searches - cost if right, explored if wrong

What a sound turn adds to these needs one. https://arxiv.org/abs/2604.17337

The paper's text could not be read, only its abstract: this is what the released
code does. fidelity_rules.csv lists what differs from it.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re

import jax.numpy as jnp
import numpy as np

import anysearch_jax as aj
from research.methods import early_answers

_SIMILAR = 0.8  # A query that is more similar to an earlier one repeats it.
_TEXT = r"(?:(?!</?(?:think|search|answer)>).)*"
_SOUND = re.compile(
  rf"\s*<think>{_TEXT}</think>\s*<(search|answer)>{_TEXT}</\1>\s*", re.DOTALL
)


@dataclasses.dataclass(frozen=True)
class Options:
  """AutoSearch's rewards of turns."""

  sound: float = aj.settings.learning(0.025, aj.settings.at_least(0))
  """Reward of a well-formed search that repeats none, and loss otherwise."""
  answered: float = aj.settings.learning(0.1, aj.settings.REWARD)
  """Reward of a well-formed turn that answers."""
  malformed: float = aj.settings.learning(0.5, aj.settings.at_least(0))
  """Loss of a last turn that is not."""
  explored: float = aj.settings.learning(0.0125, aj.settings.at_least(0))
  """Added to each sound turn if it searches and the answer is wrong."""
  depth: float = aj.settings.learning(0.2, aj.settings.at_least(0))
  """If the answer is right, shared by its searches up to the sufficient one."""
  cost: float = aj.settings.learning(0.025, aj.settings.at_least(0))
  """Subtracted from each of these shares."""
  beyond: float = aj.settings.learning(0.05, aj.settings.at_least(0))
  """Loss of each turn after the sufficient search, the answer included."""


def sufficient(trajectory: aj.Trajectory) -> int | None:
  """Returns the index of the sufficient search; None without one."""
  right = [em for _, em in early_answers.curve(trajectory)[:-1]]
  return right.index(1) if any(right) else None


def measure(trajectory: aj.Trajectory) -> dict[str, float]:
  """Returns `sufficient`, `sound` of the last turn, and `anytime`.

  `anytime` is the mean F1 of the answers after each search and of the final
  one, the area under the curve.
  """
  final = aj.protocol.extract_answer(trajectory.spans)
  f1s = [f1 for f1, _ in early_answers.curve(trajectory)]
  f1s.append(aj.scoring.f1(final, trajectory.question.golden_answers))
  last = aj.scoring.turns(trajectory.spans)[-1:]
  return {
    "sufficient": float(sufficient(trajectory) is not None),
    "sound": float(bool(last) and _kind(last[0]) == "answer"),
    "anytime": sum(f1s) / len(f1s),
  }


def steps(trajectory: aj.Trajectory, config: Options) -> np.ndarray:
  """Returns the reward of each charged search, float32 `[searches]`."""
  final = aj.protocol.extract_answer(trajectory.spans)
  right = aj.scoring.exact_match(final, trajectory.question.golden_answers)
  first, turns = sufficient(trajectory), aj.scoring.turns(trajectory.spans)
  kept = trajectory.searches if first is None else first + 1
  rewards = np.full(trajectory.searches, -config.beyond, np.float32)
  best, shares = 0.0, True
  for t, (f1, _) in enumerate(early_answers.curve(trajectory)[:kept]):
    seen, before = trajectory.observations[t], trajectory.queries[:t]
    repeats = before and (
      max(aj.stepsearch.similarities(seen.argument, before)) > _SIMILAR
    )
    sound = _kind(turns[seen.turn]) == "search" and not repeats
    # Before a sufficient search, the first that is not sound ends the sharing.
    shares = sound and (shares or first is None)
    share = (config.depth / kept - config.cost) * shares
    added = share if right else config.explored
    rewards[t] = max(0.0, f1 - best) + (
      config.sound + added if sound else -config.sound
    )
    best = max(best, f1)
  return rewards


def _kind(turn: str) -> str:
  """Returns what a turn that is well formed does; "" if it is not."""
  match = _SOUND.fullmatch(turn)
  return match[1] if match else ""


@aj.method.jitted
def reward(o: aj.Outcomes, c: Options) -> aj.method.Terms:
  """Returns the reward of the last turn, without those of `steps`."""
  em, searches = o.em, o.searches
  sound = o.measures["sound"]
  depth = c.depth / jnp.maximum(searches, 1) - c.cost
  added = jnp.where(em != 0, depth, c.explored) * (searches > 0) * sound
  form = jnp.where(sound != 0, c.answered, -c.malformed)
  beyond = o.measures["sufficient"]
  return {
    "anytime": o.measures["anytime"],
    "sufficient": beyond,
    "total": jnp.where(beyond != 0, -c.beyond, em + added + form),
  }


METHOD = aj.method.compared(
  "autosearch",
  "AutoSearch",
  aj.search_r1.wordings(
    "autosearch", folder=pathlib.Path(__file__).with_name("texts")
  ),
  reward,
  measures=("sufficient", "sound", "anytime"),
  measure=measure,
  train=aj.stepsearch.train,
  steps=steps,
  step=early_answers.step,
  options=Options(),
)
