"""What a caller allows a question to cost."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from anysearch_jax import budgets, types
from anysearch_jax import config as config_lib
from anysearch_jax.config import ranges
from anysearch_jax.rollout import driver

_YEARS = 1e9  # Seconds; a deadline beyond it is a mistake.


class BusyError(RuntimeError):
  """A question got no place before its deadline."""


class Limits(NamedTuple):
  """What a question may cost, and its draws; see `agent.Agent.ask`."""

  budget: budgets.Assigned
  seed: int
  deadline: float | None
  max_tokens: int | None
  sampling: config_lib.SamplingConfig | None = None

  def check(self) -> None:
    """Raises ValueError for a value that is out of range."""
    whole: list[tuple[str, object, int]] = [("seed", self.seed, 0)]
    if not isinstance(self.budget, budgets.Budget):  # It checks itself.
      whole.insert(0, ("budget", self.budget, 0))
    if self.max_tokens is not None:
      whole.append(("max_tokens", self.max_tokens, 1))
    for name, value, least in whole:
      if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}: found {value!r}, expected a whole number.")
      if not least <= value < 2**32:
        raise ValueError(
          f"{name}: found {value}, expected {least} to 2^32 - 1."
        )
    seconds = self.deadline
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if seconds is not None and not (number and 0 < seconds <= _YEARS):
      raise ValueError(
        f"deadline: found {seconds!r}, expected seconds above 0, or None."
      )
    if self.sampling is not None:
      ranges.check(self.sampling, "sampling")

  def applied(self, parts: driver.EpisodeParts) -> driver.EpisodeParts:
    """Returns the parts with the limit of tokens.

    The room for the answer shrinks with it, to a half at most.
    """
    config, most = parts.config, self.max_tokens
    if most is None or most >= config.max_generated:
      return parts
    room = min(config.answer_room, most // 2)
    config = dataclasses.replace(config, max_generated=most, answer_room=room)
    return dataclasses.replace(parts, config=config)


def check_question(question: str | types.Question) -> None:
  """Raises ValueError for a question without a text."""
  text = question if isinstance(question, str) else question.text
  if not text.strip():
    raise ValueError("question: found no text, expected a question.")
