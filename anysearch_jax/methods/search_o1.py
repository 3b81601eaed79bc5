"""Search-o1, inference only: search markers, and a boxed answer.

The prompt states the search limit. A search beyond it, or a query that was
already asked, gets a message instead of documents and costs nothing. A turn
without a search is the last one. A search shows the policy's own summary of
the documents, see `generative_retrieval/refining`.

Deviations from the released code:
- A search is the last complete pair of markers of a turn, and ends the turn.
- The messages count as bad turns (`episode.answered_bad_turns`); there, the
  number of turns is limited.
- Braces in a box are balanced, and text beside `\\text{...}` in it is kept.
"""
# ruff: noqa: E501 - prompts are not wrapped: they are sent exactly as written.

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.environment import prompts, protocol, spec
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
  """Returns a search if the turn ends with one, otherwise a boxed answer."""
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
  r"""Returns the content of the last complete `\boxed{...}`.

  Braces are balanced. Each `\text{...}` inside is replaced by its content. The
  last box is the one that opens last, so a nested box wins over the outer one.
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
  """Returns the last boxed answer that the model wrote."""
  for span in reversed(spans):
    if span.author == types.Author.MODEL:
      found = boxed(span.text)
      if found is not None:
        return found
  return None


def observation(
  passages: Sequence[types.Passage], unwanted: Sequence[str]
) -> str:
  """Returns the passages' texts between the markers of results."""
  text = "\n".join(p.text.strip() for p in passages).strip()
  text = protocol.neutralise(text, unwanted) or "No helpful information found."
  return f"\n\n{RESULT[0]}{text}{RESULT[1]}\n\n"


def _result(message: str) -> str:
  return f"\n\n{RESULT[0]}{message}{RESULT[1]}\n\n"


SEARCH_O1 = spec.Environment(
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
  # The world's policy only knows the paper's tags; the turn rules are the same.
  "search_o1_world": dataclasses.replace(
    prompts.PROMPTS["world"],
    format=None,
    repeated="search or answer\n",
    ends_itself=True,
  ),
}

# The token limit of a turn in the released code.
_MOST_TOKENS = 8192


def refined(
  config: config_lib.ExperimentConfig,
) -> config_lib.ExperimentConfig:
  """Enables the second model call; in the generated world it is a script."""
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
    # A search now includes a turn of the policy.
    episode=dataclasses.replace(
      e, search_deadline=e.search_deadline + e.turn_deadline
    ),
  )


METHOD = method.Method(
  "search_o1", "Search-o1", environments=ENVIRONMENTS, train=refined
)
