"""Search-o1, inference only: search markers, and a boxed answer.

The prompt states the search limit. A search beyond it, or a query that was
already asked, gets a message instead of documents and costs nothing. A turn
without a search is the last one. A search shows the policy's own summary of
the documents, see `generative_retrieval/refining`.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.algorithms import method
from anysearch_jax.environment import prompts, protocol, spec, tools, wording

QUERY = ("<|begin_search_query|>", "<|end_search_query|>")
RESULT = ("<|begin_search_result|>", "<|end_search_result|>")

_BOXED = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"[{}]")
_STYLED = re.compile(r"\\text\w*\s*\{([^{}]*)\}")


def action(text: str) -> protocol.Action | None:
  """Returns a search if the turn ends with one, otherwise a boxed answer."""
  stripped = text.rstrip()
  start = stripped.rfind(QUERY[0])
  if stripped.endswith(QUERY[1]) and start >= 0:
    query = stripped[start + len(QUERY[0]) : -len(QUERY[1])].strip()
    return protocol.Action(protocol.ActionKind.SEARCH, query)
  boxed_answer = boxed(text)
  if boxed_answer is None:
    return None
  return protocol.Action(protocol.ActionKind.ANSWER, boxed_answer)


def boxed(text: str) -> str | None:
  r"""Returns the content of the last complete `\boxed{...}`.

  Braces are balanced. Each `\text{...}` inside is replaced by its content. The
  last box is the one that opens last, so a nested box wins over the outer one.
  """
  boxes = {opening.end() for opening in _BOXED.finditer(text)}
  open_braces = []
  last = (-1, -1)
  for brace in _BRACE.finditer(text):
    if brace[0] == "{":
      open_braces.append(brace.end())
    elif open_braces and (start := open_braces.pop()) in boxes:
      last = max(last, (start, brace.start()))
  if last[0] < 0:
    return None
  return _STYLED.sub(r"\1", text[slice(*last)]).strip()


def answer(spans: Sequence[types.Span]) -> str | None:
  """Returns the last boxed answer that the model wrote."""
  for span in reversed(spans):
    if span.author == types.Author.MODEL:
      boxed_answer = boxed(span.text)
      if boxed_answer is not None:
        return boxed_answer
  return None


def observation(
  passages: Sequence[types.Passage], unwanted: Sequence[str], *, nothing: str
) -> str:
  """Returns the block that answers a search.

  Args:
    passages: the hits, or the policy's summary of them as one passage.
    unwanted: texts that are neutralised.
    nothing: the content of the block without passages.
  """
  text = "\n".join(p.text.strip() for p in passages).strip()
  text = protocol.neutralise(text, unwanted) or nothing
  return f"\n\n{RESULT[0]}{text}{RESULT[1]}\n\n"


def _notice(message: str) -> str:
  return f"\n{RESULT[0]}\n{message}\n{RESULT[1]}\n"


def _environment(texts: Mapping[str, str]) -> spec.Environment:
  lines = {name: wording.template(text) for name, text in texts.items()}
  return spec.Environment(
    scaffold=lines["prompt"],
    plain=lines["prompt"],
    over_budget=_notice(lines["over_budget"]),
    no_action="\n",
    repeated=_notice(lines["repeated"]),
    stops=(QUERY[1],),
    action=action,
    answer=answer,
    format=None,
    tools=(
      tools.Tool(
        protocol.SEARCH,
        *QUERY,
        observation=functools.partial(
          observation, nothing=lines["nothing_found"]
        ),
      ),
    ),
    markers=(*QUERY, *RESULT),
    ends_itself=True,
  )


WORDINGS = {
  "search_o1": wording.Wording(
    "search_o1.toml",
    {
      "prompt": wording.PROMPT,
      "over_budget": wording.LINE,
      "repeated": wording.LINE,
      "nothing_found": wording.LINE,
      "reader": wording.Slots(
        needs=("query", "documents"), may=("reasoning", "final", "nothing")
      ),
      "final_mark": wording.LINE,
    },
    _environment,
  ),
  # The world's policy only knows the paper's tags; the turn rules are the same.
  "search_o1_world": prompts.WORLD.then(
    lambda env: dataclasses.replace(
      env, format=None, repeated=env.no_action, ends_itself=True
    )
  ),
}

_TURN_TOKENS = 8192  # The token limit of a turn in the released code.


def refined(config: config_lib.ExperimentConfig) -> config_lib.ExperimentConfig:
  """Enables the second model call; in the generated world it is a script."""
  if config.data.source == "world":
    return config_lib.changed(config, retrieval={"refined": "world"})
  return method.searching_with_policy(config, _TURN_TOKENS, refined="policy")


METHOD = method.compared("search_o1", "Search-o1", WORDINGS, train=refined)
