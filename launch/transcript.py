"""Shows an agent's events in a terminal, or plainly in a pipe.

Questions, passages and policies are outside text: it is never read as markup,
and control characters, which could drive the terminal, are shown as symbols.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

import rich.console
import rich.table
import rich.text

from anysearch_jax import budgets
from anysearch_jax.agent import events

_SHOWN = 160  # Characters of a passage.
_STYLES = {
  "thinking": "dim",
  "search": "bold cyan",
  "passage": "cyan",
  "budget": "yellow",
  "answer": "bold green",
  "problem": "bold red",
}


def record(reply: events.Reply) -> dict[str, Any]:
  """Returns a reply as JSON values."""
  trajectory = reply.trajectory
  return {
    "question": trajectory.question.text,
    "budget": None if free(trajectory.budget) else trajectory.budget,
    **({"caps": caps} if (caps := dict(trajectory.caps.caps)) else {}),
    "answer": reply.answer,
    "outcome": str(reply.outcome),
    "reason": reply.reason,
    "searches": reply.searches,
    "queries": list(trajectory.queries),
    "documents": [
      [{"id": p.id, "title": p.title, "text": p.text} for p in found]
      for found in reply.documents
    ],
    "tokens": reply.tokens,
    "seconds": round(reply.seconds, 3),
  }


def free(budget: int) -> bool:
  """Returns whether a number of searches is no cap."""
  return budget >= budgets.UNCAPPED


def greet(examples: Sequence[str]) -> None:
  """Says how to ask, with questions that can be asked."""
  _say("Type a question; Ctrl-D leaves.", "budget")
  if examples:
    _say(
      "Nobody knows the words of the generated world. For example:", "budget"
    )
    for example in examples:
      _say(f"  {example}", "thinking")


def warn(unknown: Sequence[str], examples: Sequence[str]) -> None:
  """Says on standard error that the policy cannot read some words."""
  words = ", ".join(map(repr, unknown[:5]))
  hint = (
    f" It knows the words of, for example: {examples[0]}" if examples else ""
  )
  _say(f"The policy's tokenizer has no {words}.{hint}", "problem", stderr=True)


def show(told: Iterable[events.Event]) -> events.Reply:
  """Shows the events of one question as they come, and returns the reply.

  Raises:
    ValueError: the events end without an `Answer`.
  """
  thinking = False
  for event in told:
    if thinking and not isinstance(event, events.Thinking):
      _say("", "thinking")
    thinking = isinstance(event, events.Thinking)
    match event:
      case events.Thinking(text):
        _say(text, "thinking", end="")
      case events.Searching(number, query):
        _say(f"search {number}: {query}", "search")
      case events.Found(_, passages):
        for passage in passages:
          _say(f"  {_line(passage.title, passage.text)}", "passage")
        if not passages:
          _say("  no results", "passage")
      case events.Budget() as budget if not free(budget.total):
        _say(f"{_count(budget.left, 'search', 'searches')} left", "budget")
      case events.Answer(reply):
        _conclude(reply)
        return reply
  raise ValueError("Found events without an answer, expected one at the end.")


def compare(replies: Sequence[events.Reply]) -> None:
  """Shows the replies to one question under several budgets side by side."""
  table = rich.table.Table(show_lines=True)
  table.add_column("budget", style=_STYLES["budget"])
  rows = (
    ("answer", lambda r: r.answer if r.answer is not None else r.reason),
    ("searches", lambda r: str(r.searches)),
    ("queries", lambda r: "\n".join(r.trajectory.queries)),
    ("tokens", lambda r: str(r.tokens)),
    ("seconds", lambda r: f"{r.seconds:.1f}"),
  )
  for reply in replies:
    table.add_column(str(reply.trajectory.budget), overflow="fold")
  for name, of in rows:
    cells = [rich.text.Text(_clean(of(reply))) for reply in replies]
    table.add_row(name, *cells)
  _console().print(table)


def _conclude(reply: events.Reply) -> None:
  if reply.answer is None:
    _say(f"no answer: {reply.reason}", "problem")
  else:
    _say(f"answer: {reply.answer}", "answer")
  searches = _count(reply.searches, "search", "searches")
  _say(f"{searches}, {reply.tokens} tokens, {reply.seconds:.1f} s", "thinking")


def _say(
  text: str, style: str, end: str = "\n", *, stderr: bool = False
) -> None:
  _console(stderr=stderr).print(
    rich.text.Text(_clean(text), _STYLES[style]), end=end, soft_wrap=True
  )


def _console(*, stderr: bool = False) -> rich.console.Console:
  """Returns a console of the present streams; it is plain if that is a pipe."""
  return rich.console.Console(highlight=False, stderr=stderr)


def _line(title: str, text: str) -> str:
  """Returns a passage as one line."""
  line = " ".join(f"{title}: {text}".split())
  return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}..."


def _count(number: int, one: str, more: str) -> str:
  return f"{number} {one if number == 1 else more}"


def _clean(text: str) -> str:
  """Replaces control characters, except line ends, by U+FFFD."""
  return "".join(
    "\ufffd" if unicodedata.category(c) in ("Cc", "Cs") and c != "\n" else c
    for c in text
  )
