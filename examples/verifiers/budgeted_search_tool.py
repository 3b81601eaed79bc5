"""The tool of the taskset: one process counts the searches of all rollouts."""

from __future__ import annotations

import functools

import verifiers.v1 as vf

import anysearch_jax as aj
from examples import budgeted_search

ROLLOUTS = 1 << 16  # Number of rollouts whose searches are remembered.


class State(vf.State):
  """What a rollout may spend and spent; `failure` says why a search failed."""

  rollout: str = ""
  corpus: str = ""
  budget: int = 0
  searches: int = 0
  refused_searches: int = 0
  failure: str = ""


class Config(vf.SharedToolsetConfig):
  passages: str = ""


class SearchToolset(vf.Toolset[Config, State]):
  """Refuses searches beyond the budget of the rollout that calls.

  The counts of `State` are reports: parallel calls may overwrite each other's.
  """

  TOOL_PREFIX = None

  async def setup(self) -> None:
    retriever = budgeted_search.open_retriever(self.config.passages)

    @functools.lru_cache(ROLLOUTS)
    def search_of(rollout: str, corpus: str, budget: int):
      del rollout  # Each has a budget of its own.
      return budgeted_search.BudgetedSearch(retriever, corpus, budget)

    self._search_of = search_of

  @vf.tool
  async def search(self, query: str) -> str:
    """Finds passages for a query."""
    state = self.state
    search = self._search_of(state.rollout, state.corpus, state.budget)
    try:
      passages = await search.search(query)
    except aj.RetrievalError as error:
      state.failure = str(error)
      return f"The search failed: {error}"
    state.searches = state.budget - search.left
    state.refused_searches = search.refused
    if passages is None:
      return "No search is left: answer."
    texts = [passage.contents for passage in passages] or ["Nothing was found."]
    return "\n\n".join([*texts, f"Searches left: {search.left}"])


if __name__ == "__main__":
  SearchToolset.run()
