r"""A program that a training plays: a loop of its own over OpenAI's client.

    pip install openai[aiohttp]
    anysearch train --config=configs/quickstart.py --output=runs/outside \
        --agents=examples/outside_agent.py:play \
        --config.episode.prompts=world --config.agents.states_budget=false

The training opens a session with an address of its own for each episode, and
calls `play`. The loop asks for turns as it would ask any OpenAI endpoint, and
searches by itself. It is the quickstart's method, so the policy learns the same
as in `--config=configs/quickstart.py` alone.
"""

from __future__ import annotations

import functools

import openai
from openai.types import chat

import anysearch_jax as aj

_ENVIRONMENT = aj.get_environment("world")
_BAD_TURNS = 2  # Turns without a search or an answer that get another try.


@functools.cache
def _client() -> openai.AsyncOpenAI:
  """Returns the connections that all episodes share."""
  return openai.AsyncOpenAI(
    base_url="http://session",
    api_key="of-a-session",
    # With many connections it costs a third of the default client's time.
    http_client=openai.DefaultAioHttpClient(),
  )


@functools.cache
def _retriever() -> aj.Retriever:
  world = aj.World()
  return aj.LexicalRetriever(world.corpus, reads=world.searched)


async def play(task: aj.Task) -> None:
  """Plays one episode; the policy's last message is its answer."""
  env = _ENVIRONMENT
  client = _client().with_options(
    base_url=task.base_url, api_key=task.api_key, max_retries=0
  )
  budget = int(task.budget["searches"])
  used = 0
  bad_turns = 0
  prompt = aj.protocol.render(
    env.scaffold if task.scaffold else env.plain,
    searches=budget,
    question=task.question,
  )
  messages = [{"role": "user", "content": prompt}]
  while bad_turns <= _BAD_TURNS:
    if task.scaffold:  # Phase I states the budget before each turn.
      line = env.before_turn(budget, used)
      messages.append({"role": "user", "content": line})
    try:
      # `chat.completions.create` takes twice the time of the rest to look
      # through the types of all messages.
      reply = await client.post(
        "/chat/completions",
        cast_to=chat.ChatCompletion,
        body={"model": task.model, "messages": messages},
      )
    except openai.RateLimitError:  # The budget is spent.
      return
    text = reply.choices[0].message.content
    messages.append({"role": "assistant", "content": text})
    action = env.action(text)
    if action is not None and action.kind is aj.ActionKind.ANSWER:
      return
    observation = env.no_action
    if action is not None and action.content:
      passages = await _retriever().search(
        aj.SearchRequest(action.content, k=3, corpus=task.corpus)
      )
      observation = env.tool("search").observation(passages, ())
      used += 1
    else:
      bad_turns += 1
    messages.append({"role": "user", "content": observation})
