"""Questions, a retriever and a budget, for environments of other frameworks.

`openenv/` and `verifiers/` wrap what is here for the framework of that name.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence

import anysearch_jax as aj

WORLD = aj.World()
PASSAGES = 3  # Number of passages that a search shows.


def open_questions(path: str, split: str, count: int) -> list[aj.Question]:
  """Returns the questions to ask, in a fixed order.

  Args:
    path: a Parquet file of `anysearch prepare_data`; "": the generated world.
    split: of the generated world: `train`, `dev` or `held-out`.
    count: number of questions, >= 1; a file may have fewer.
  """
  if not path:
    return WORLD.evaluation_questions(count, split)
  import pyarrow.parquet as pq

  rows = pq.read_table(path).slice(0, count).to_pylist()
  return [
    aj.Question(row["id"], row["question"], tuple(row["golden_answers"]))
    for row in rows
  ]


def open_retriever(path: str) -> aj.Retriever:
  """Returns a retriever that ranks by BM25 in memory.

  Its passages are those of a path, JSON lines with `id`, and `contents`: a
  title, a line break and a text. "" is the generated world.
  """
  if not path:
    return aj.LexicalRetriever(WORLD.corpus, reads=WORLD.searched)
  passages = []
  with pathlib.Path(path).open(encoding="utf-8") as lines:
    for line in lines:
      row = json.loads(line)
      title, _, text = row["contents"].partition("\n")
      passages.append(aj.Passage(str(row["id"]), title, text))
  return aj.LexicalRetriever({"": passages})


class BudgetedSearch:
  """The searches of an episode: how many are `left`, and how many `refused`."""

  def __init__(self, retriever: aj.Retriever, corpus: str, budget: int):
    self._retriever = retriever
    self._corpus = corpus
    self.left = budget
    self.refused = 0

  async def search(self, query: str) -> Sequence[aj.Passage] | None:
    """Returns the passages that a query finds; None beyond the budget.

    Raises `aj.RetrievalError` if the retriever fails, which charges nothing.
    """
    if self.left == 0:
      self.refused += 1
      return None
    self.left -= 1  # Before it waits: searches may be parallel.
    request = aj.SearchRequest(query, PASSAGES, self._corpus)
    try:
      return await self._retriever.search(request)
    except BaseException:
      self.left += 1
      raise
