"""Search-o1, inference only: markers, limits in words, a boxed answer.

The limit stands in the prompt. A search beyond it, and a query that was asked
before, get a message in the place of documents and cost nothing; a turn that
asks nothing is the last one. What a search shows is what the policy itself made
of the documents, see `refining`. Deviations: a search is the last
complete pair of markers of a turn, which ends at it; the messages count as bad
turns (`episode.answered_bad_turns`), in the place of a limit on turns; braces
in a box are balanced, and what stands beside `\\text{...}` in it stays.
"""
# ruff: noqa: E501 - prompts stand as they are sent.

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.environment import environment, prompts, protocol
from anysearch_jax.methods import method

QUERY = ("<|begin_search_query|>", "<|end_search_query|>")
RESULT = ("<|begin_search_result|>", "<|end_search_result|>")

_PROMPT = f"""\
You are a reasoning assistant that can search the web to answer the question of the user accurately.
- To search, write {QUERY[0]} your query {QUERY[1]}.
- The system then looks through the pages that were found and gives you what helps: {RESULT[0]} ...search results... {RESULT[1]}
The maximum number of search attempts is limited to {{B}}. You may search as often as that where it is needed. When you have all that you need, go on with your reasoning.
Example: to learn who wrote a book, write {QUERY[0]} author of the book {QUERY[1]} and read what comes back.
Think step by step, then give the final answer as \\boxed{{YOUR_ANSWER}}.
Question: {{Question}}
"""
_BOXED = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"[{}]")
_STYLED = re.compile(r"\\text\w*\s*\{([^{}]*)\}")


def action(text: str) -> protocol.Action | None:
  """A search if the turn ends with one, an answer if it holds one."""
  end = text.rstrip()
  start = end.rfind(QUERY[0])
  if end.endswith(QUERY[1]) and start >= 0:
    query = end[start + len(QUERY[0]) : -len(QUERY[1])].strip()
    return protocol.Action(protocol.ActionKind.SEARCH, query)
  found = boxed(text)
  if found is None:
    return None
  return protocol.Action(protocol.ActionKind.ANSWER, found)


def boxed(text: str) -> str | None:
  r"""Content of the last complete `\boxed{...}`, its braces balanced.

  `\text{...}` in it is its content. The last box is the one that opens last.
  """
  boxes = {opening.end() for opening in _BOXED.finditer(text)}
  opened, last = [], (-1, -1)
  for brace in _BRACE.finditer(text):
    if brace[0] == "{":
      opened.append(brace.end())
    elif opened and (start := opened.pop()) in boxes:
      last = max(last, (start, brace.start()))
  if last[0] < 0:
    return None
  return _STYLED.sub(r"\1", text[slice(*last)]).strip()


def answer(spans: Sequence[types.Span]) -> str | None:
  """The last boxed answer that the model wrote."""
  for span in reversed(spans):
    if span.author == types.Author.MODEL:
      found = boxed(span.text)
      if found is not None:
        return found
  return None


def observation(
  passages: Sequence[types.Passage], unwanted: Sequence[str]
) -> str:
  """What was found, between the markers of results."""
  text = "\n".join(p.text.strip() for p in passages).strip()
  text = protocol.neutralise(text, unwanted) or "No helpful information found."
  return f"\n\n{RESULT[0]}{text}{RESULT[1]}\n\n"


def _result(message: str) -> str:
  return f"\n\n{RESULT[0]}{message}{RESULT[1]}\n\n"


SEARCH_O1 = environment.Environment(
  scaffold=_PROMPT,
  plain=_PROMPT,
  over_budget=_result(
    "The maximum search limit is exceeded. You are not allowed to search."
  ),
  no_action="\n",
  repeated=_result(
    "You have searched this query. Please refer to previous results."
  ),
  stops=(QUERY[1],),
  action=action,
  answer=answer,
  format=None,
  observation=observation,
  markers=(*QUERY, *RESULT),
  ends_itself=True,
)
ENVIRONMENTS = {
  "search_o1": SEARCH_O1,
  # The world's policy knows the paper's tags only; the manners are the same.
  "search_o1_world": dataclasses.replace(
    prompts.PROMPTS["world"],
    format=None,
    repeated="search or answer\n",
    ends_itself=True,
  ),
}

# Tokens of a turn, in the released code.
_MOST_TOKENS = 8192


def refined(
  config: config_lib.ExperimentConfig,
) -> config_lib.ExperimentConfig:
  """With the second call, which is a script in the generated world."""
  if config.data.source == "world":
    r = dataclasses.replace(config.retrieval, refined="world")
    return dataclasses.replace(config, retrieval=r)
  e = config.episode
  model = dataclasses.replace(
    config.retrieval.model,
    max_tokens=_MOST_TOKENS,
    deadline=e.turn_deadline,
  )
  return dataclasses.replace(
    config,
    retrieval=dataclasses.replace(
      config.retrieval, refined="policy", model=model
    ),
    # A search now holds a turn.
    episode=dataclasses.replace(
      e, search_deadline=e.search_deadline + e.turn_deadline
    ),
  )


METHOD = method.Method(
  "search_o1", "Search-o1", environments=ENVIRONMENTS, train=refined
)
