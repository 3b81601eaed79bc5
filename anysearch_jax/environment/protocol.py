"""The tags that a policy and its environment exchange.

A tag is exactly one of five lower-case names in angle brackets, with a slash
before the name in a closing tag. Any other `<...>` is ordinary text.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import re
from collections.abc import Sequence

from anysearch_jax import budgets, types

TAGS = ("budget", "think", "search", "information", "answer")
STOPS = ("</search>", "</answer>")
SEARCH = "search"  # The name of the tool that every environment has.

# Groups: "/" of a closing tag or "", then the name.
TAG_PATTERN = re.compile(rf"<(/?)({'|'.join(TAGS)})>")

_ANY_CASE_TAG = re.compile(rf"<(/?(?:{'|'.join(TAGS)}))>", re.IGNORECASE)
_FIRST_ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL | re.I)
_OPENED_REASONING = re.compile(r"<think>\s*\Z")
_CALLS = ((SEARCH, "<search>", "</search>"),)
_SLOT = re.compile(r"\{(?:B|Question)\}")
_ZERO_WIDTH_SPACE = "\u200b"
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class ActionKind(enum.StrEnum):
  """The actions that a turn can ask for; `SEARCH` is a call of any tool."""

  SEARCH = "search"
  ANSWER = "answer"


@dataclasses.dataclass(frozen=True)
class Action:
  """The action of a turn.

  Attributes:
    kind: a call of a tool, or an answer.
    content: the query (the tool's argument) or the answer, stripped.
    tool: name of the called tool; of an answer it has no meaning.
  """

  kind: ActionKind
  content: str
  tool: str = SEARCH


def tags(names: Sequence[str] = TAGS) -> tuple[str, ...]:
  """Returns the opening and the closing tag of each name."""
  return tuple(f"<{slash}{name}>" for name in names for slash in ("", "/"))


def opened_reasoning(prompt: str) -> str:
  """Returns the end of a prompt that opens a reasoning block; "" without one.

  Chat templates of models that always reason end in `<think>` and a line break.
  """
  match = _OPENED_REASONING.search(prompt)
  return match[0] if match else ""


def with_opened_reasoning(spans: Sequence[types.Span]) -> list[types.Span]:
  """Returns spans, of which a turn begins by the `<think>` opened before it."""
  joined: list[types.Span] = []
  opened = ""
  for span in spans:
    if opened and span.author is types.Author.MODEL:
      joined[-1] = types.Span(types.Author.MODEL, opened + span.text)
    else:
      joined.append(span)
    is_opening = (
      span.author is types.Author.ENVIRONMENT
      and span.text == opened_reasoning(span.text)
    )
    opened = span.text if is_opening else ""
  return joined


def last_action(
  text: str, calls: Sequence[tuple[str, str, str]] = _CALLS
) -> Action | None:
  """Returns the last complete call or `<answer>` block of a turn; or None.

  A block counts wherever it is, even within another one; the last block is the
  one that closes last. The paper's prompts (appendix "Prompt Design") name no
  other action. A call with an empty argument has the content "", which callers
  treat as a turn without an action.

  Args:
    text: the turn.
    calls: name, opening and closing mark of each tool; searches by default.
  """
  kinds = [(ActionKind.SEARCH, *call) for call in calls]
  kinds.append((ActionKind.ANSWER, SEARCH, "<answer>", "</answer>"))
  last = None
  last_end = -1
  for kind, tool, opens, closes in kinds:
    block = _last_block(text, opens, closes)
    if block is not None and block[1] > last_end:
      start, last_end = block
      last = Action(kind, text[start:last_end].strip(), tool)
  return last


def first_action(text: str) -> Action | None:
  """Returns the first complete `<search>` or `<answer>` block; or None.

  Tags may be in upper or lower case, as in the run of the paper's authors.
  """
  match = _FIRST_ACTION.search(text)
  if match is None:
    return None
  return Action(ActionKind(match[1].lower()), match[2].strip())


def last_content(text: str, name: str) -> str | None:
  """Returns the stripped content of the last complete `<name>` block, or None.

  Of nested opening tags the innermost counts: in
  `<answer> a <answer> b </answer>` the content is `b`, so content never
  contains an opening tag of its own name.
  """
  block = _last_block(text, f"<{name}>", f"</{name}>")
  return None if block is None else text[slice(*block)].strip()


def extract_answer(spans: Sequence[types.Span]) -> str | None:
  """Returns the last complete answer of the model, stripped; or None.

  Only spans of the model are read, each by itself, so `<answer>x</answer>` in a
  document is ignored. An empty block is the answer "".
  """
  for span in reversed(spans):
    if span.author == types.Author.MODEL:
      answer = last_content(span.text, "answer")
      if answer is not None:
        return answer
  return None


def _last_block(
  text: str, opening: str, closing: str
) -> tuple[int, int] | None:
  """Returns the start and end of the last complete block's content, or None."""
  last_closing = text.rfind(closing)
  if last_closing < 0:
    return None
  start = text.rfind(opening, 0, last_closing)
  if start < 0:
    return None
  # The first closing tag: stray ones may follow it.
  return start + len(opening), text.find(closing, start)


_LAST_QUESTION = "question: "


def conversation(turns: Sequence[tuple[str, str]], last: str) -> str:
  """Returns the text of a question after earlier turns of a conversation.

  Args:
    turns: role and text of each earlier message.
    last: the question.
  """
  earlier_lines = (f"{role}: {text}" for role, text in turns)
  return "\n".join([*earlier_lines, f"{_LAST_QUESTION}{last}"])


def last_question(text: str) -> str:
  """Returns the question at the end of a conversation, or a single one."""
  return text.rpartition(f"\n{_LAST_QUESTION}")[2]


def neutralise(text: str, control_tokens: Sequence[str] = ()) -> str:
  """Rewrites a text so that it contains no protocol tag and no control token.

  The angle brackets of every tag, in upper or lower case, become `‹` and `›`. A
  zero-width space is inserted after the first character of every control token.
  A lone surrogate, which no tokenizer encodes, becomes U+FFFD. The function is
  idempotent.

  Args:
    text: a question, or the text of a document.
    control_tokens: other texts that must not appear, such as the tokenizer's.

  Raises:
    ValueError: this rewriting cannot break one of the control tokens.
  """
  text = _ANY_CASE_TAG.sub(r"‹\1›", text)
  return break_control_tokens(text, control_tokens)


def break_control_tokens(text: str, control_tokens: Sequence[str]) -> str:
  """Rewrites a text as `neutralise` does, but leaves the protocol's tags.

  Args:
    text: the text.
    control_tokens: texts that must not appear.

  Raises:
    ValueError: as `neutralise`.
  """
  text = _LONE_SURROGATE.sub("\ufffd", text)
  if control_tokens:
    text = _control_pattern(tuple(control_tokens)).sub(
      lambda match: match[0] + _ZERO_WIDTH_SPACE, text
    )
  return text


@functools.lru_cache(maxsize=16)
def _control_pattern(control_tokens: tuple[str, ...]) -> re.Pattern[str]:
  """Returns a pattern of the first character of every control token."""
  for token in control_tokens:
    if len(token) < 2 or any(c in token for c in f"‹›{_ZERO_WIDTH_SPACE}"):
      raise ValueError(
        f"Control token {token!r} cannot be neutralised: expected at least two "
        "characters and none of U+2039, U+203A, U+200B. Leave it out."
      )
  # Only the first character is consumed, so overlapping tokens are all found.
  # The first lookahead rules out most positions: Gemma 3 has 6,000 tokens.
  first = re.escape("".join(sorted({token[0] for token in control_tokens})))
  tokens = "|".join(map(re.escape, control_tokens))
  return re.compile(f"(?=[{first}])(?={tokens}).", re.S)


def render(template: str, *, searches: int | str, question: str) -> str:
  """Returns the content of the user message.

  The template is filled in one pass, so a question may itself contain `{B}`.

  Args:
    template: `scaffold` or `plain` of a `spec.Environment`.
    searches: the budget's number of searches, or a word for an unlimited one.
    question: the question, already neutralised.
  """
  values = {"{B}": str(searches), "{Question}": question}
  return _SLOT.sub(lambda match: values[match[0]], template)


def budget_state(budget: int, used: int) -> str:
  """Returns the content of a budget block (the paper's Phase I prompt).

  It is `remaining=R; used=U; total=T`, or `used=U` if searches have no cap.

  Raises:
    ValueError: `used` is outside [0, budget].
  """
  if not 0 <= used <= budget:
    raise ValueError(
      f"Found {used} searches used of a budget of {budget}; expected 0 <= used "
      "<= budget. A search beyond the budget is not to be charged."
    )
  if budget >= budgets.UNCAPPED:
    return f"used={used}"
  return f"remaining={budget - used}; used={used}; total={budget}"


def budget_line(budget: int, used: int) -> str:
  """Returns the line before every model turn while the scaffold is on.

  The paper's formula has no newline after the block, but its printed
  trajectories and its prompt have one. The tokenizers of Qwen and Llama encode
  `>` and a newline as a single token; without the newline, every turn of the
  policy would begin in the middle of a familiar token.
  """
  return f"<budget>{budget_state(budget, used)}</budget>\n"


def observation(
  passages: Sequence[types.Passage],
  control_tokens: Sequence[str] = (),
  *,
  layout: str = "Doc {rank}(Title: {title}) {text}",
  begins: str = "<information>",
  ends: str = "</information>",
) -> str:
  """Returns the block that answers a search, with a passage on each line.

  Args:
    passages: the hits in rank order; may be empty.
    control_tokens: see `neutralise`.
    layout: format string of a passage, with `rank`, `title` and `text`. A
      passage without a title has `Doc {rank}: {text}` instead, if the layout
      contains "Title: "; the corpora of the systems' authors all have titles.
    begins, ends: marks of the block, which is between blank lines.
  """

  def line(rank: int, passage: types.Passage) -> str:
    title = " ".join(passage.title.splitlines())
    text = " ".join(passage.text.splitlines())
    untitled = not title.strip('" ') and "Title: " in layout
    form = "Doc {rank}: {text}" if untitled else layout
    return form.format(rank=rank, title=title, text=text)

  lines = itertools.starmap(line, enumerate(passages, 1))
  # All lines are neutralised together, because a tag or a control token could
  # be assembled across the boundaries of title, text and layout.
  content = neutralise("\n".join(lines).rstrip(), control_tokens)
  content = content or "No results found."
  return f"\n\n{begins}{content}{ends}\n\n"
