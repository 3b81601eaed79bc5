r"""The quickstart's method in OpenAI's Agents SDK, trained as it is.

    pip install openai-agents
    anysearch train --config=configs/quickstart.py --output=runs/sdk \
        --agents=examples/agents_sdk.py:play \
        --config.episode.prompts=world --config.agents.states_budget=false

The SDK knows nothing of the training: it has an address, a key and a tool. The
session turns the policy's `<search>` into a call of that tool, and refuses it
beyond the budget.
"""

from __future__ import annotations

import dataclasses
import functools

import agents
import openai

import anysearch_jax as aj

_ENVIRONMENT = aj.get_environment("world")
_MAX_TURNS = 12

agents.set_tracing_disabled(True)


@dataclasses.dataclass
class Episode:
  """What the tool knows of the episode that calls it."""

  task: aj.Task
  searches: int = 0

  def budget_line(self) -> str:
    """Returns what Phase I states before each turn; "" in Phase II."""
    if not self.task.scaffold:
      return ""
    budget = int(self.task.budget["searches"])
    return _ENVIRONMENT.before_turn(budget, self.searches)


@functools.cache
def _client() -> openai.AsyncOpenAI:
  return openai.AsyncOpenAI(base_url="http://session", api_key="of-a-session")


@functools.cache
def _retriever() -> aj.Retriever:
  world = aj.World()
  return aj.LexicalRetriever(world.corpus, reads=world.searched)


@agents.function_tool
async def search(context: agents.RunContextWrapper[Episode], query: str) -> str:
  """Returns passages.

  Args:
    query: the words to search for.
  """
  episode = context.context
  request = aj.SearchRequest(query, k=3, corpus=episode.task.corpus)
  passages = await _retriever().search(request)
  episode.searches += 1
  observation = _ENVIRONMENT.tool("search").observation(passages, ())
  return observation + episode.budget_line()


async def play(task: aj.Task) -> None:
  """Plays one episode; the policy's last message is its answer."""
  env = _ENVIRONMENT
  prompt = aj.protocol.render(
    env.scaffold if task.scaffold else env.plain,
    searches=int(task.budget["searches"]),
    question=task.question,
  )
  episode = Episode(task)
  messages = [{"role": "user", "content": prompt}]
  if task.scaffold:
    messages.append({"role": "user", "content": episode.budget_line()})
  client = _client().with_options(
    base_url=task.base_url, api_key=task.api_key, max_retries=0
  )
  searcher = agents.Agent(
    "searcher",
    model=agents.OpenAIChatCompletionsModel(task.model, openai_client=client),
    tools=[search],
  )
  try:
    await agents.Runner.run(
      searcher, messages, context=episode, max_turns=_MAX_TURNS
    )
  except (openai.RateLimitError, agents.MaxTurnsExceeded):
    return  # The budget is spent.
