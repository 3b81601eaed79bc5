"""An OpenEnv environment: questions with a search budget. See README.md."""

from __future__ import annotations

import random
from typing import Any, Literal

import pydantic
from openenv import core

import anysearch_jax as aj
from examples import budgeted_search

BUDGETS = (0, 1, 2, 3, 5, 8)  # A reset without a budget draws one of them.


class Action(core.Action):
  kind: Literal["search", "answer"]
  text: str = pydantic.Field(max_length=10_000)


class Observation(core.Observation):
  question: str
  searches_left: int
  passages: list[str] = []
  message: str = ""


class State(core.State):
  budget: int = 0
  searches: int = 0
  refused_searches: int = 0


class SearchEnvironment(core.Environment):
  # Each session has an environment, which plays one episode after the other.
  SUPPORTS_CONCURRENT_SESSIONS = True
  state = State()

  def __init__(self, questions: list[aj.Question], retriever: aj.Retriever):
    super().__init__()
    self._questions = questions
    self._retriever = retriever
    self._question: aj.Question | None = None

  def reset(self, seed=None, episode_id=None, budget=None, **_: Any):
    """Asks the question with the number `seed`, modulo how many there are."""
    seed = random.getrandbits(32) if seed is None else seed
    budget = random.Random(seed).choice(BUDGETS) if budget is None else budget
    for name, value in (("seed", seed), ("budget", budget)):
      if type(value) is not int or value < 0:
        raise ValueError(f"{name}: found {value!r}, expected an integer >= 0.")
    self._question = self._questions[seed % len(self._questions)]
    self._search = budgeted_search.BudgetedSearch(
      self._retriever, self._question.corpus, budget
    )
    self.state = State(episode_id=episode_id, budget=budget)
    return self._observation(self._question)

  def step(self, action: Action, timeout_s=None, **_: Any):
    """Searches; or ends the episode, whose reward is the exact match."""
    question = self._question
    if question is None:
      raise ValueError("Found no episode under way; expected a reset first.")
    self.state.step_count += 1
    if action.kind == "answer":
      self._question = None
      em = aj.scoring.exact_match(action.text, question.golden_answers)
      return self._observation(question, done=True, reward=float(em))
    passages = aj.run(self._search.search(action.text))
    self.state.searches = self.state.budget - self._search.left
    self.state.refused_searches = self._search.refused
    if passages is None:
      return self._observation(question, message="No search is left: answer.")
    return self._observation(question, passages=[p.contents for p in passages])

  def _observation(self, question: aj.Question, **fields: Any) -> Observation:
    left = self._search.left
    return Observation(question=question.text, searches_left=left, **fields)
