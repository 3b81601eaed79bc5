"""An OpenEnv environment: questions with a search budget. See README.md."""

from __future__ import annotations

import random
from typing import Any

from openenv import core

import anysearch_jax as aj
from examples import budgeted_search
from examples.openenv import models

BUDGETS = (0, 1, 2, 3, 5, 8)  # A reset without a budget draws one of them.


class SearchEnvironment(core.Environment):
  """One session, which plays one episode after the other."""

  SUPPORTS_CONCURRENT_SESSIONS = True
  state = models.State()

  def __init__(self, questions: list[aj.Question], retriever: aj.Retriever):
    super().__init__()
    self._questions = questions
    self._retriever = retriever
    self._question: aj.Question | None = None

  def reset(
    self,
    seed: int | None = None,
    episode_id: str | None = None,
    budget: int | None = None,
    **_: Any,
  ) -> models.Observation:
    """Begins an episode.

    Args:
      seed: number of the question, >= 0, modulo how many there are; None: any.
      episode_id: is returned in the state.
      budget: number of searches, >= 0; None: one of `BUDGETS`, by the seed.

    Raises:
      ValueError: the seed or the budget is out of range.
    """
    seed = random.getrandbits(32) if seed is None else seed
    budget = random.Random(seed).choice(BUDGETS) if budget is None else budget
    for name, value in (("seed", seed), ("budget", budget)):
      if type(value) is not int or value < 0:
        raise ValueError(f"{name}: found {value!r}, expected an integer >= 0.")
    self._question = self._questions[seed % len(self._questions)]
    self._search = budgeted_search.BudgetedSearch(
      self._retriever, self._question.corpus, budget
    )
    self.state = models.State(episode_id=episode_id, budget=budget)
    return self._observation(self._question)

  def step(self, action: models.Action, **_: Any) -> models.Observation:
    """Searches or answers. Raises ValueError if no episode is under way."""
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

  def _observation(
    self, question: aj.Question, **fields: Any
  ) -> models.Observation:
    fields |= {"question": question.text, "searches_left": self._search.left}
    return models.Observation(**fields)
