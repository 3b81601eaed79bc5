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
code does. configs/fidelity_rules.csv lists what differs from it.
"""

from __future__ import annotations

import re

import jax.numpy as jnp
import numpy as np

from anysearch_jax import types
from anysearch_jax.config import methods as constants
from anysearch_jax.environment import scoring
from anysearch_jax.methods import (
  early_answers,
  method,
  search_r1,
  stepsearch,
)

_SIMILAR = 0.8  # A query that is more similar to an earlier one repeats it.
_TEXT = r"(?:(?!</?(?:think|search|answer)>).)*"
_SOUND = re.compile(
  rf"\s*<think>{_TEXT}</think>\s*<(search|answer)>{_TEXT}</\1>\s*", re.DOTALL
)


def sufficient(trajectory: types.Trajectory) -> int | None:
  """Returns the index of the sufficient search; None without one."""
  right = [em for _, em in early_answers.curve(trajectory)[:-1]]
  return right.index(1) if any(right) else None


def measure(trajectory: types.Trajectory) -> dict[str, float]:
  """Returns `sufficient`, `sound` of the last turn, and `anytime`.

  `anytime` is the mean F1 of the answers after each search and of the final
  one, the area under the curve.
  """
  final = scoring.extract_answer(trajectory.spans)
  f1s = [f1 for f1, _ in early_answers.curve(trajectory)]
  f1s.append(scoring.f1(final, trajectory.question.golden_answers))
  last = scoring.turns(trajectory.spans)[-1:]
  return {
    "sufficient": float(sufficient(trajectory) is not None),
    "sound": float(bool(last) and _kind(last[0]) == "answer"),
    "anytime": sum(f1s) / len(f1s),
  }


def steps(
  trajectory: types.Trajectory, config: constants.AutoSearchConfig
) -> np.ndarray:
  """Returns the reward of each charged search, float32 `[searches]`."""
  final = scoring.extract_answer(trajectory.spans)
  right = scoring.exact_match(final, trajectory.question.golden_answers)
  first, turns = sufficient(trajectory), scoring.turns(trajectory.spans)
  kept = trajectory.searches if first is None else first + 1
  rewards = np.full(trajectory.searches, -config.beyond, np.float32)
  best, shares = 0.0, True
  for t, (f1, _) in enumerate(early_answers.curve(trajectory)[:kept]):
    seen, before = trajectory.observations[t], trajectory.queries[:t]
    repeats = before and (
      max(stepsearch.similarities(seen.argument, before)) > _SIMILAR
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


@method.jitted
def reward(o: method.Outcomes, c: constants.AutoSearchConfig) -> method.Terms:
  """Returns the reward of the last turn, without those of `steps`."""
  em, searches = o.em, o.searches
  sound = o.measures["sound"]
  depth = c.depth / jnp.maximum(searches, 1) - c.cost
  added = jnp.where(em != 0, depth, c.explored) * (searches > 0) * sound
  form = jnp.where(sound != 0, c.answered, -c.malformed)
  beyond = o.measures["sufficient"]
  return {
    "em": em,
    "anytime": o.measures["anytime"],
    "sufficient": beyond,
    "total": jnp.where(beyond != 0, -c.beyond, em + added + form),
  }


METHOD = method.compared(
  *("autosearch", "AutoSearch", search_r1.wordings("autosearch"), reward),
  measures=("sufficient", "sound", "anytime"),
  measure=measure,
  train=stepsearch.train,
  steps=steps,
  step=early_answers.step,
)
