"""The texts that a policy and its environment exchange.

Text in, values out. A tag is one of five lower-case names in angle brackets,
exactly; any other `<...>` is ordinary text.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import re
from collections.abc import Sequence

from anysearch_jax import types

TAGS = ("budget", "think", "search", "information", "answer")
STOPS = ("</search>", "</answer>")

# Groups: "/" of a closing tag or "", then the name.
TAG_PATTERN = re.compile(rf"<(/?)({'|'.join(TAGS)})>")

_ANY_CASE_TAG = re.compile(rf"<(/?(?:{'|'.join(TAGS)}))>", re.IGNORECASE)
_ZERO_WIDTH_SPACE = "\u200b"
_HALF = re.compile("[\ud800-\udfff]")


class ActionKind(enum.StrEnum):
  """What a turn asks of its environment."""

  SEARCH = "search"
  ANSWER = "answer"


@dataclasses.dataclass(frozen=True)
class Action:
  """What a turn asks for: `content` is the stripped query or answer."""

  kind: ActionKind
  content: str


def last_action(text: str) -> Action | None:
  """The last complete `<search>` or `<answer>` block of a turn's text.

  Blocks count wherever they stand; the last is the one that closes last. The
  paper's prompts (appendix "Prompt Design") name no other action.

  Args:
    text: what the model wrote in one turn.

  Returns:
    The action, or None without a complete block. A search with an empty query
    is returned with content "": the caller takes it for no well-formed action.
  """
  found = (
    (block[1], Action(kind, text[slice(*block)].strip()))
    for kind in ActionKind
    if (block := _last_block(text, kind)) is not None
  )
  return max(found, key=lambda item: item[0], default=(0, None))[1]


def last_content(text: str, name: str) -> str | None:
  """Stripped content of the last complete `<name>` block of `text`.

  The innermost complete reading is taken: in `<answer> a <answer> b </answer>`
  the block is `b`, so content never holds an opening tag of its own name.

  Args:
    text: any text.
    name: one of `TAGS`.

  Returns:
    The content ("" for an empty block), or None without a complete block.
  """
  block = _last_block(text, name)
  return None if block is None else text[slice(*block)].strip()


def _last_block(text: str, name: str) -> tuple[int, int] | None:
  """Start and end of the content of the last complete block `name`."""
  opening, closing = f"<{name}>", f"</{name}>"
  last_closing = text.rfind(closing)
  if last_closing < 0:
    return None
  start = text.rfind(opening, 0, last_closing)
  if start < 0:
    return None
  # Stray closing tags may stand between the block's own and the last one.
  return start + len(opening), text.find(closing, start)


def neutralise(text: str, control_tokens: Sequence[str] = ()) -> str:
  """Text that can pass neither for a protocol tag nor for a control token.

  The angle brackets of every tag, in any case, become `‹` and `›`; every
  control token gets a zero-width space after its first character. Half of a
  surrogate pair, which no tokenizer encodes, becomes U+FFFD. Applied to its own
  result it changes nothing.

  Args:
    text: a title, passage or question from outside.
    control_tokens: the tokenizer's control-token strings.

  Returns:
    The text with no tag and no control token in it.

  Raises:
    ValueError: a control token that this rewriting cannot break.
  """
  text = _ANY_CASE_TAG.sub(r"‹\1›", _HALF.sub("\ufffd", text))
  if control_tokens:
    text = _control_pattern(tuple(control_tokens)).sub(
      lambda match: match[0] + _ZERO_WIDTH_SPACE, text
    )
  return text


@functools.lru_cache(maxsize=16)
def _control_pattern(control_tokens: tuple[str, ...]) -> re.Pattern[str]:
  """Matches the first character of every control token, overlaps included."""
  for token in control_tokens:
    if len(token) < 2 or any(c in token for c in f"‹›{_ZERO_WIDTH_SPACE}"):
      raise ValueError(
        f"Control token {token!r} cannot be neutralised: expected at least two "
        "characters and none of U+2039, U+203A, U+200B. Leave it out."
      )
  # A lookahead consumes one character, so tokens that overlap are all found.
  return re.compile(f"(?={'|'.join(map(re.escape, control_tokens))}).", re.S)


def budget_state(budget: int, used: int) -> str:
  """The three numbers of a budget block (the paper's Phase I prompt).

  Args:
    budget: searches assigned to the episode, >= 0.
    used: searches charged so far, in [0, budget].

  Returns:
    `remaining=R; used=U; total=T`.

  Raises:
    ValueError: `used` outside [0, budget].
  """
  if not 0 <= used <= budget:
    raise ValueError(
      f"Found {used} searches used of a budget of {budget}; expected 0 <= used "
      "<= budget. A search beyond the budget is not to be charged."
    )
  return f"remaining={budget - used}; used={used}; total={budget}"


def budget_line(budget: int, used: int) -> str:
  """The line that precedes every model turn while the scaffold is on.

  The paper's formula has no newline after the block, but the trajectories that
  it prints do, and so does its prompt. Tokenizers of Qwen and Llama write `>`
  and a newline as one token: without it every turn of the policy would begin
  in the middle of a token that it knows.

  Args and Raises as for `budget_state`.

  Returns:
    The budget block and a newline.
  """
  return f"<budget>{budget_state(budget, used)}</budget>\n"


def observation(
  passages: Sequence[types.Passage],
  control_tokens: Sequence[str] = (),
  *,
  layout: str = "Doc {rank}(Title: {title}) {text}",
) -> str:
  """The information block that answers a search.

  Args:
    passages: the hits in rank order; none is legal.
    control_tokens: the tokenizer's control-token strings, as `neutralise`.
    layout: of one passage.

  Returns:
    The block between blank lines, one neutralised passage a line.
  """
  lines = (
    layout.format(
      rank=rank, title=_one_line(passage.title), text=_one_line(passage.text)
    )
    for rank, passage in enumerate(passages, 1)
  )
  # Neutralised as a whole: nothing can be assembled across a boundary.
  content = neutralise("\n".join(lines).rstrip(), control_tokens)
  content = content or "No results found."
  return f"\n\n<information>{content}</information>\n\n"


def _one_line(text: str) -> str:
  return " ".join(text.splitlines())
