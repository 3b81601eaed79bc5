"""What a finished episode was assigned, and what it spent of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from anysearch_jax import budgets, types
from anysearch_jax.environment import protocol


def assigned(t: types.Trajectory) -> budgets.Budget:
  """Returns the whole budget of an episode."""
  return dataclasses.replace(t.caps, searches=t.budget)


def input_tokens(t: types.Trajectory) -> int:
  """Returns the total length of the contexts of all turns.

  This is what an API bills as input. The environment writes between any two
  turns, so each run of consecutive model tokens is one turn.
  """
  model = t.authors == types.Author.MODEL
  starts = model & ~np.concatenate([[False], model[:-1]])
  return int(np.sum(np.flatnonzero(starts))) + t.discarded_input


def dollars(t: types.Trajectory, prices: budgets.Prices | None = None) -> float:
  """Returns what an episode cost; None: by the prices of its budget."""
  tools = [each.tool for each in t.observations]
  prices = t.caps.prices if prices is None else prices
  return prices.of_calls(
    tools or [protocol.SEARCH] * t.searches,
    input_tokens=input_tokens(t),
    output_tokens=t.written_tokens,
  )


def tables(
  trajectories: Mapping[tuple[int, int], types.Trajectory],
  shape: tuple[int, int],
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
  """Returns what groups spent and could spend, in units besides searches.

  Args:
    trajectories: by question and sample.
    shape: number of questions and of samples.

  Returns:
    By unit: float32 `[Q, G]`, what was spent, and `[Q]`, the caps, infinite
    without one.
  """
  units = ("tokens", "dollars", "seconds")
  spent = {unit: np.zeros(shape, np.float32) for unit in units}
  caps = {unit: np.full(shape[0], np.inf, np.float32) for unit in units}
  for place, t in trajectories.items():
    spent["tokens"][place] = t.written_tokens
    spent["dollars"][place] = dollars(t) if t.caps.prices else 0
    spent["seconds"][place] = t.seconds
    for unit, cap in t.caps.caps:
      caps[unit][place[0]] = cap
  return spent, caps
