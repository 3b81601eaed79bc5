"""The environments of the paper and of the generated world.

Their texts are in `methods/texts/`; `{B}` and `{Question}` are placeholders for
the budget and the question.

    paper             the paper's environment
    anysearch         the same, with the turn rules of the authors' run
    compact           the same rules in a prompt of 50 tokens, for small models
    paper_fetch       with a second tool, which opens a page
    documents         for a user's own documents and models that were not
                      trained here: answers cite passages
    documents_tags    the same for chat models behind an address: without a
                      search they answer from memory, and a model that gave no
                      answer is asked once more
    documents_tools   the same for models that search by their own tool calls,
                      so its prompt names no tag
    documents_short   the same for small models: the question is the first
                      search, and each request is a short prompt of its own
    plain_retrieval   the same with that search alone, the baseline of agents
    program           for programs that play the episodes; they have prompts and
                      tools of their own
    world             the generated world

The texts of `compact`, `paper_fetch` and the documents are our own words.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from anysearch_jax import types
from anysearch_jax.environment import (
  citations,
  protocol,
  scoring,
  spec,
  tools,
  wording,
)

_SLOTS = {
  "scaffold": wording.PROMPT,
  "plain": wording.PROMPT,
  "over_budget": wording.LINE,
  "no_action": wording.LINE,
}

_CHAT_SLOTS = {
  "closed": wording.PROMPT,
  "last": wording.Slots(needs=("Question", "Passages")),
}
_SHORT_SLOTS = {
  **_CHAT_SLOTS,
  "more": wording.Slots(needs=("Question", "Passages")),
}


def _environment(texts: Mapping[str, str]) -> spec.Environment:
  return spec.Environment(
    scaffold=wording.template(texts["scaffold"]),
    plain=wording.template(texts["plain"]),
    over_budget=wording.template(texts["over_budget"]),
    no_action=wording.template(texts["no_action"]),
  )


def _one_prompt(texts: Mapping[str, str]) -> spec.Environment:
  """Returns an environment with the same prompt in both phases."""
  return _environment(
    {**texts, "scaffold": texts["prompt"], "plain": texts["prompt"]}
  )


def _with_fetch(texts: Mapping[str, str]) -> spec.Environment:
  """Returns an environment in which pages can be opened too."""
  env = _environment(texts).with_tools(tools.FETCH)
  check = functools.partial(scoring.check_format, calls={"fetch": "page"})
  return dataclasses.replace(env, format=check)


def _documents(
  texts: Mapping[str, str],
  states: str = "<budget>{}</budget>",
  begins: str = "<information>",
  ends: str = "</information>",
) -> spec.Environment:
  """Returns an environment whose answers cite the passages.

  Args:
    texts: the texts of its file.
    states: the budget's line before a turn. It has a line of its own, because
      chat models read it at the end of a message.
    begins, ends: marks around the passages.
  """
  observation = functools.partial(
    citations.observation, begins=begins, ends=ends
  )

  def before_turn(budget: int, used: int) -> str:
    return f"\n{states.format(protocol.budget_state(budget, used))}\n"

  return dataclasses.replace(
    _environment(texts),
    tools=(dataclasses.replace(tools.SEARCH, numbered=observation),),
    before_turn=before_turn,
    answer=lambda spans: citations.without_marks(
      protocol.extract_answer(spans)
    ),
    marked=protocol.extract_answer,
  )


def _documents_tags(texts: Mapping[str, str]) -> spec.Environment:
  """Returns the environment of a chat model that writes tags."""
  return _for_chat_models(_documents(texts), texts)


def _documents_tools(texts: Mapping[str, str]) -> spec.Environment:
  """Returns the environment without tags of a model that calls tools."""
  texts = {**texts, "scaffold": texts["prompt"], "plain": texts["prompt"]}
  env = _documents(texts, "Searches: {}.", begins="", ends="")
  return _for_chat_models(dataclasses.replace(env, format=None), texts)


def _documents_short(texts: Mapping[str, str]) -> spec.Environment:
  """Returns the environment of a model that is asked in short prompts."""
  lines = {
    "scaffold": "{Question}",
    "plain": "{Question}",
    "over_budget": "",
    "no_action": "",
  }
  env = _for_chat_models(_documents(lines), texts)
  return dataclasses.replace(
    env,
    before_turn=lambda budget, used: "",
    format=None,
    more=texts["more"],
    states_caps=False,
  )


def _plain_retrieval(texts: Mapping[str, str]) -> spec.Environment:
  """Returns the environment that searches once, for the question itself."""
  return dataclasses.replace(_documents_short(texts), more="")


def _program(texts: Mapping[str, str]) -> spec.Environment:
  """Returns the environment of programs, which write their own prompts."""
  lines = {
    "scaffold": "{Question}",
    "plain": "{Question}",
    "over_budget": texts["over_budget"],
    "no_action": "",
  }
  return dataclasses.replace(
    _environment(lines),
    action=lambda text: None,
    answer=_last_message,
    format=None,
  )


def _last_message(spans: Sequence[types.Span]) -> str | None:
  """Returns the last text of the model, without its reasoning; or None."""
  turns = scoring.turns(spans)
  if not turns:
    return None
  answer = protocol.last_content(turns[-1], "answer")
  if answer is not None:
    return answer
  return turns[-1].rpartition("</think>")[2].strip() or None


def _for_chat_models(
  env: spec.Environment, texts: Mapping[str, str]
) -> spec.Environment:
  """Returns an environment with the prompts for models not trained here."""
  return dataclasses.replace(
    env,
    closed=wording.template(texts.get("closed", "")),
    last=texts.get("last", ""),
  )


def _as_the_authors_ran(env: spec.Environment) -> spec.Environment:
  """Returns an environment with the turn rules of the authors' run."""

  def before_turn(budget: int, used: int) -> str:
    return protocol.budget_line(budget, used).rstrip()

  return dataclasses.replace(
    env, action=protocol.first_action, before_turn=before_turn
  )


WORLD = wording.Wording("world.toml", _SLOTS, _environment).then(
  lambda env: dataclasses.replace(env, units="budget_world.toml")
)
WORDINGS = {
  "paper": wording.Wording("paper.toml", _SLOTS, _environment),
  "anysearch": wording.Wording("paper.toml", _SLOTS, _environment).then(
    _as_the_authors_ran
  ),
  "compact": wording.Wording("compact.toml", wording.ONE_PROMPT, _one_prompt),
  "paper_fetch": wording.Wording("paper_fetch.toml", _SLOTS, _with_fetch),
  "documents": wording.Wording(
    "documents.toml", _SLOTS, _documents, optional=_CHAT_SLOTS
  ),
  "documents_tags": wording.Wording(
    "documents.toml", _SLOTS, _documents_tags, optional=_CHAT_SLOTS
  ),
  "documents_tools": wording.Wording(
    "documents_tools.toml",
    wording.ONE_PROMPT,
    _documents_tools,
    optional=_CHAT_SLOTS,
  ),
  "documents_short": wording.Wording(
    "documents_short.toml", _SHORT_SLOTS, _documents_short
  ),
  "plain_retrieval": wording.Wording(
    "documents_short.toml", _SHORT_SLOTS, _plain_retrieval
  ),
  "program": wording.Wording(
    "program.toml", {"over_budget": wording.LINE}, _program
  ),
  "world": WORLD,
}
PROMPTS = {name: words.environment() for name, words in WORDINGS.items()}
