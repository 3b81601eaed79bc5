"""A system of your own: tags, a second tool, a judge, rewards. One file.

    python -m launch.train --config=configs/quickstart.py \
        --method=examples/own_system.py:METHOD \
        --config.search.tools=count=examples/own_system.py:Count
    python -m launch.evaluate --config=configs/quickstart.py --output=runs/own \
        --method=examples/own_system.py:METHOD --budgets=1 \
        --config.search.tools=count=examples/own_system.py:Count
"""

import dataclasses

import numpy as np

import anysearch_jax as aj

# Tags of its own around passages; a second tool, whose call costs a search too.
SEARCH = aj.search_tool(begins="<found>", ends="</found>")
COUNT = aj.Tool("count", "<count>", "</count>")
ENVIRONMENT = aj.Environment(
  scaffold="budget {B} question {Question}",
  plain="question {Question}",
  over_budget="no budget ; answer now\n",
  no_action="search or answer\n",
  format=None,
)


class Count:
  """Answers calls of the second tool: the number of words of an argument."""

  def __init__(self, config: aj.ExperimentConfig):
    self.config = config

  async def search(self, request: aj.SearchRequest) -> list[aj.Passage]:
    words = len(request.query.split())
    return [aj.Passage(f"count-{words}", "count", str(words))]


def measure(trajectory: aj.Trajectory) -> dict[str, float]:
  """Judges a trajectory. One that raises fails it: it then trains nothing."""
  if not trajectory.spans:
    raise ConnectionError("the judge has nothing to read")
  return {"long_queries": sum(len(q.split()) > 8 for q in trajectory.queries)}


def reward(outcomes: aj.Outcomes, config: aj.ExperimentConfig) -> dict:
  """Returns arrays `[Q, G]`: a right answer, minus a price of long queries."""
  price = 0.1 * outcomes.measures["long_queries"]
  return {"total": outcomes.em - price, "price": price + 0 * outcomes.f1}


METHOD = aj.Method(
  "thrifty",
  "Thrifty",
  environments={
    "own": dataclasses.replace(ENVIRONMENT, tools=(SEARCH,)).with_tools(COUNT)
  },
  reward=reward,
  train=aj.fixed_budget,
  measures=("long_queries",),
  measure=measure,
  steps=lambda trajectory, config: -0.01 * np.ones(trajectory.searches),
)
