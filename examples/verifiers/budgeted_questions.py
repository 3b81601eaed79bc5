"""A taskset of verifiers: questions with a search budget. See README.md."""

from __future__ import annotations

from collections.abc import Iterator

import budgeted_search_tool as tool
import verifiers.v1 as vf

import anysearch_jax as aj
from examples import budgeted_search

__all__ = ["BudgetedQuestions"]

PROMPT = """\
Answer the question. You may search at most {budget} times; further searches are
refused. End with the answer alone between <answer> and </answer>.

Question: {question}"""


class Data(vf.TaskData):
  golden_answers: tuple[str, ...]
  corpus: str
  budget: int


class Config(vf.TasksetConfig):
  questions: str = ""
  split: str = "train"
  count: int = 1000
  budgets: list[int] = [0, 1, 3, 8]  # Each question is asked with each.
  search: tool.Config = tool.Config()


class Task(vf.Task[Data, tool.State]):
  """One question with one budget."""

  async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
    trace.state.rollout = trace.id
    trace.state.corpus = self.data.corpus
    trace.state.budget = self.data.budget

  @vf.reward
  async def exact_match(self, trace: vf.Trace) -> float:
    """Returns 1 or 0. Raises ToolsetError if a search failed."""
    if trace.state.failure:
      raise vf.ToolsetError(trace.state.failure)
    spans = [aj.Span(aj.Author.MODEL, trace.last_reply)]
    answer = aj.protocol.extract_answer(spans)
    return float(aj.scoring.exact_match(answer, self.data.golden_answers))

  @vf.metric
  async def spent(self, trace: vf.Trace) -> dict[str, float]:
    """Returns the searches, and those beyond the budget."""
    return trace.state.model_dump(include={"searches", "refused_searches"})


class BudgetedQuestions(vf.Taskset[Task, Config]):
  @classmethod
  def toolsets(cls, config: Config) -> list[vf.Toolset]:
    return [tool.SearchToolset(config.search)]

  def load(self) -> Iterator[Task]:
    """Yields the tasks, question by question."""
    config = self.config
    for question in budgeted_search.open_questions(
      config.questions, config.split, config.count
    ):
      for budget in config.budgets:
        data = Data(
          id=f"{question.id}@{budget}",
          prompt=PROMPT.format(budget=budget, question=question.text),
          golden_answers=question.golden_answers,
          corpus=question.corpus,
          budget=budget,
        )
        yield Task(data, config.task)
