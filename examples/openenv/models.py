"""What the environment and its clients send to each other."""

from __future__ import annotations

from typing import Literal

import pydantic
from openenv import core


class Action(core.Action):
  """A search for a text, or a text as the answer, which ends the episode."""

  kind: Literal["search", "answer"]
  text: str = pydantic.Field(max_length=10_000)


class Observation(core.Observation):
  """The question, and what the last action found.

  The reward of an answer is 1 if it matches exactly, otherwise 0; a search has
  none. The message says why a search was refused.
  """

  question: str
  searches_left: int
  passages: list[str] = []
  message: str = ""


class State(core.State):
  """What was spent; `refused_searches` are those beyond the budget."""

  budget: int = 0
  searches: int = 0
  refused_searches: int = 0
