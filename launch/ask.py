r"""Asks a policy questions under a search budget.

    python -m launch.ask --config=configs/quickstart.py --budget=3 "QUESTION"

Without a question it reads one from each line of the terminal or the pipe, and
in the generated world it begins with some that can be asked. It shows the
reasoning, the queries, the passages and the budget as they come;
--compare=0,1,3,5 shows the answers under these budgets side by side. --json
prints one line for each answer, for programs. `launch.policies` lists the ways
to name a policy. See docs/serving.md.
"""

from __future__ import annotations

import json
import os
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import rich.console
import rich.table
import rich.text
from absl import app, flags

from anysearch_jax import budgets as budgets_lib
from anysearch_jax.agent import events
from launch import evaluate as launch_evaluate
from launch import flags as launch_flags
from launch import jax_setup, policies

_EXAMPLES = 5
_SHOWN = 160  # Characters of a passage.
_STYLES = {
  "thinking": "dim",
  "search": "bold cyan",
  "passage": "cyan",
  "budget": "yellow",
  "answer": "bold green",
  "problem": "bold red",
}


def define_flags() -> None:
  """Defines the command's flags; importing the module defines none."""
  launch_flags.define_config()
  policies.define_flags()
  flags.DEFINE_string(
    "budget", "3", "Searches allowed, or such as searches=3,tokens=256."
  )
  flags.DEFINE_string(
    "compare", None, "Budgets to show side by side, as 0,1,3,5 or 0..5."
  )
  flags.DEFINE_integer("seed", 42, "Of the random numbers.", lower_bound=0)
  flags.DEFINE_float(
    "deadline", None, "Seconds to answer in; default: no limit.", lower_bound=0
  )
  flags.DEFINE_bool("json", False, "One line of JSON for each answer.")
  launch_flags.define_process()


def main(argv: Sequence[str]) -> None:
  f = flags.FLAGS
  config = launch_flags.read_config()
  try:
    budgets: Sequence[budgets_lib.Assigned] = (
      (budgets_lib.parse(f.budget, config.evaluation.prices),)
      if f.compare is None
      else launch_evaluate.parse_budgets(f.compare, "--compare")
    )
  except ValueError as error:
    flag = f"--budget={f.budget}: " if f.compare is None else ""
    raise app.UsageError(f"{flag}{error}") from error
  config, chosen = policies.read_flags(config)
  jax_setup.configure(threads=f.threads, cache=f.cache)
  from anysearch_jax.agent import agent as agent_lib
  from launch import agents

  questions = [" ".join(argv[1:])] if len(argv) > 1 else []
  asking = sys.stdin.isatty() and not questions
  answered = True
  try:
    prepared = agents.prepare(config, chosen, allow_cpu=f.allow_cpu)
    with agents.loaded(prepared) as agent:
      examples = [question.text for question in agent.examples[:_EXAMPLES]]
      if asking and not f.json:
        greet(examples)
      for text in questions or _typed(prompt=asking and not f.json):
        if refused := agent.refusal(text):
          answered = False
          _say(refused, "problem", stderr=True)
          if f.json:
            print(
              json.dumps(
                {
                  "question": text,
                  "answer": None,
                  "outcome": "refused",
                  "reason": refused,
                }
              ),
              flush=True,
            )
          continue
        if f.json or len(budgets) > 1:
          (replies,) = agent.ask_many(
            [text], budgets=budgets, seed=f.seed, deadline=f.deadline
          )
          if f.json:
            for reply in replies:
              print(json.dumps(record(reply)), flush=True)
          else:
            compare(replies)
        else:
          told = agent.stream(
            text, budget=budgets[0], seed=f.seed, deadline=f.deadline
          )
          replies = [show(told)]
        answered = all(reply.answer is not None for reply in replies)
  except agent_lib.BusyError as error:
    sys.exit(f"launch.ask: {error}")
  if questions and not answered:
    sys.exit(1)


def _typed(*, prompt: bool) -> Iterator[str]:
  """Yields the lines of the terminal or the pipe that hold a question."""
  while True:
    try:
      line = input("\nquestion: " if prompt else "")
    except EOFError:
      if prompt:
        print()  # Ctrl-D leaves the prompt on its line.
      return
    if line.strip():
      yield line.strip()


def record(reply: events.Reply) -> dict[str, Any]:
  """Returns a reply as JSON values."""
  trajectory = reply.trajectory
  capped = trajectory.budget < budgets_lib.UNCAPPED
  return {
    "question": trajectory.question.text,
    "budget": trajectory.budget if capped else None,
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


def greet(examples: Sequence[str]) -> None:
  """Says how to ask, with questions that can be asked."""
  _say("Type a question; Ctrl-D leaves.", "budget")
  if examples:
    _say(
      "Nobody knows the words of the generated world. For example:", "budget"
    )
    for example in examples:
      _say(f"  {example}", "thinking")


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
      case events.Budget() as budget if budget.total < budgets_lib.UNCAPPED:
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


if __name__ == "__main__":
  # A warning of a library in the middle of an answer helps nobody.
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
  define_flags()
  launch_flags.run(main, arguments=True)
