r"""Asks a policy questions under a search budget.

    anysearch ask --documents=my_notes --budget=2 "When does the lease end?"
    anysearch ask --config=configs/quickstart.py --budget=3 "QUESTION"
    anysearch chat --documents=my_notes
    anysearch chat --config=configs/quickstart.py --budget=3

--documents names files and folders of your own, see `launch.documents`. Without
a flag for the policy, servers of this machine are asked for a model.

Without a question it reads one from each line of the terminal or the pipe, and
in the generated world it begins with some that can be asked. It shows the
reasoning, the queries, the passages and the budget as they come, and the
answer's sources; --compare=0,1,3,5 shows the answers under these budgets side
by side. --json prints one line for each answer, for programs. --chat is a
conversation: earlier turns are passed on. See docs/serving.md.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import rich.console
import rich.table
import rich.text
from absl import app, flags

from anysearch_jax import budgets as budgets_lib
from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.agent import events
from anysearch_jax.environment import citations
from anysearch_jax.host import terminal
from anysearch_jax.launch import documents, jax_setup, policies
from anysearch_jax.launch import evaluate as launch_evaluate
from anysearch_jax.launch import flags as launch_flags

if TYPE_CHECKING:
  from anysearch_jax.agent import agent as agent_lib

_EXAMPLES = 5  # Questions that the greeting suggests.
_PASSAGE_CHARACTERS = 160  # Shown of a passage.
_STYLES = {
  "thinking": "dim",
  "search": "bold cyan",
  "passage": "cyan",
  "budget": "yellow",
  "answer": "bold green",
  "problem": "bold red",
}


def define_flags() -> None:
  policies.define_flags()
  flags.DEFINE_string(
    "budget",
    "3",
    "Budget of each answer: a number of searches, or caps in several units, "
    "such as searches=3,tokens=256.",
  )
  flags.DEFINE_string(
    "compare",
    None,
    "Budgets whose answers are shown side by side, as 0,1,3,5 or 0..5; "
    "replaces --budget.",
  )
  flags.DEFINE_integer(
    "seed", 42, "Seed of the random numbers of sampling.", lower_bound=0
  )
  flags.DEFINE_float(
    "deadline",
    None,
    "Seconds that one answer may take; default: no limit.",
    lower_bound=0,
  )
  flags.DEFINE_bool("json", False, "Print one line of JSON for each answer.")
  flags.DEFINE_bool(
    "chat",
    False,
    "Hold a conversation, which passes earlier turns on; `anysearch chat` is "
    "short for it.",
  )
  launch_flags.define_process()


def main(argv: Sequence[str]) -> None:
  f = flags.FLAGS
  if f.chat and (f.json or f.compare is not None):
    raise app.UsageError("--chat: expected neither --json nor --compare.")
  config = documents.read_config()
  budgets: Sequence[budgets_lib.Assigned]
  if f.compare is not None:
    budgets = launch_evaluate.parse_budgets(f.compare, "--compare")
  else:
    try:
      budgets = (budgets_lib.parse(f.budget, config.evaluation.prices),)
    except ValueError as error:
      raise app.UsageError(f"--budget={f.budget}: {error}") from error
  config, choice = policies.read_flags(config, finds_servers=True)
  jax_setup.configure(threads=f.threads, cache=f.cache)
  from anysearch_jax.agent import agent as agent_lib
  from anysearch_jax.launch import agents

  questions = [" ".join(argv[1:])] if len(argv) > 1 else []
  prompts = sys.stdin.isatty() and not f.json and (f.chat or not questions)
  try:
    prepared = agents.prepare(config, choice, allow_cpu=f.allow_cpu)
    documents.update(config)
    with agents.open_agent(prepared) as agent:
      if prompts:
        greet([question.text for question in agent.examples[:_EXAMPLES]])
      if f.chat:
        lines = itertools.chain(questions, _typed(prompt=prompts))
        return chat(agent, config, budgets[0], lines)
      all_answered = True
      for text in questions or _typed(prompt=prompts):
        all_answered &= _ask(agent, text, budgets)
  except agent_lib.BusyError as error:
    sys.exit(f"anysearch ask: {error}")
  if not prompts and not all_answered:
    sys.exit(1)


def _ask(
  agent: agent_lib.Agent, text: str, budgets: Sequence[budgets_lib.Assigned]
) -> bool:
  """Asks one question and shows the answers; returns whether all came."""
  f = flags.FLAGS
  if (refusal := agent.refusal(text)) is not None:
    if f.json:
      row = {"question": text, "answer": None, "outcome": "refused"}
      print(json.dumps(row | {"reason": refusal}), flush=True)
    _say(refusal, "problem", stderr=True)
    return False
  limits = {"seed": f.seed, "deadline": f.deadline}
  if f.json or len(budgets) > 1:
    (replies,) = agent.ask_many([text], budgets=budgets, **limits)
    if f.json:
      for reply in replies:
        print(json.dumps(record(reply)), flush=True)
    else:
      compare(replies)
  else:
    replies = [show(agent.stream(text, budget=budgets[0], **limits))]
  return all(reply.answer is not None for reply in replies)


def chat(
  agent: agent_lib.Agent,
  config: config_lib.ExperimentConfig,
  budget: budgets_lib.Assigned,
  lines: Iterable[str],
) -> None:
  """Answers questions, each with the turns before it, and obeys commands.

  The question is composed as the service composes it for OpenAI's clients
  (docs/serving.md). The oldest turns are left out once all together fill half
  of the policy's context, at four characters a token.

  Args:
    agent: answers the questions.
    config: configuration of the agent: its prices.
    budget: the budget of each answer, until /budget changes it.
    lines: what the user types: questions, and commands that begin with "/".
  """
  from anysearch_jax.serving import fields

  f = flags.FLAGS
  turns: list[tuple[str, str]] = []
  documents: Iterable[Sequence[types.Passage]] = ()
  for line in lines:
    name, _, value = line.partition(" ")
    if name == "/quit":
      return
    if name == "/budget":
      try:
        budget = budgets_lib.parse(value.strip(), config.evaluation.prices)
      except ValueError as error:
        _say(f"/budget {value}: {error}", "problem")
    elif name == "/sources":
      for passage in dict.fromkeys(itertools.chain.from_iterable(documents)):
        _say(f"{citations.head(passage)}\n{passage.text}\n", "passage")
    elif name.startswith("/"):
      _say("/budget 5, /sources (of the last answer) or /quit", "budget")
    elif (refusal := agent.refusal(line)) is not None:
      _say(refusal, "problem")
    else:
      while (
        turns
        and sum(len(text) for _, text in turns) + len(line)
        > agent.history_characters
      ):
        del turns[:2]
        _say("The oldest question is left out from here on.", "budget")
      conversation = fields.conversation([*turns, ("user", line)])
      reply = show(
        agent.stream(
          conversation, budget=budget, seed=f.seed, deadline=f.deadline
        )
      )
      documents = reply.documents
      # Its citations number passages that the next episode has not shown.
      if answer := citations.without_marks(reply.answer):
        turns += [("user", line), ("assistant", answer)]


def _typed(*, prompt: bool) -> Iterator[str]:
  """Yields the lines of the terminal or the pipe that hold a question."""
  if prompt:
    with contextlib.suppress(ImportError):
      import readline  # noqa: F401  # `input` then edits and remembers lines.
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
  return {
    "question": reply.trajectory.question.text,
    "answer": reply.answer,
    **reply.record(),
    "queries": list(reply.trajectory.queries),
    "citations": [
      {"number": number, "id": p.id, "title": citations.title(p)}
      | citations.source(p)
      for number, p in reply.citations
    ],
    "refused_citations": list(reply.refused_citations),
    "tokens": reply.tokens,
  }


def greet(examples: Sequence[str]) -> None:
  """Prints how to ask, and some questions that the agent can answer."""
  _say("Type a question; Ctrl-D leaves.", "budget")
  if examples:
    _say(
      "Nobody knows the words of the generated world. For example:", "budget"
    )
    for example in examples:
      _say(f"  {example}", "thinking")


def show(answer_events: Iterable[events.Event]) -> events.Reply:
  """Shows the events of one question as they come, and returns the reply.

  Raises ValueError if the events end without an `Answer`.
  """
  thinking = False
  for event in answer_events:
    if thinking and not isinstance(event, events.Thinking):
      _say("", "thinking")
    thinking = isinstance(event, events.Thinking)
    match event:
      case events.Thinking(text):
        _say(text, "thinking", end="")
      case events.Searching(number, query):
        _say(f"search {number}: {query}", "search")
      case events.Found(_, passages, numbers):
        marks = [f"[{number}] " for number in numbers] or [""] * len(passages)
        for mark, passage in zip(marks, passages, strict=True):
          head = mark + citations.head(passage)
          _say(f"  {_line(head, passage.text)}", "passage")
        if not passages:
          _say("  no results", "passage")
      case events.Budget() as budget if budget.total < budgets_lib.UNCAPPED:
        _say(f"{_searches(budget.left)} left", "budget")
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
    ("sources", lambda r: "\n".join(_cited(r))),
    ("searches", lambda r: str(r.searches)),
    ("queries", lambda r: "\n".join(r.trajectory.queries)),
    ("tokens", lambda r: str(r.tokens)),
    ("seconds", lambda r: f"{r.seconds:.1f}"),
  )
  for reply in replies:
    table.add_column(str(reply.trajectory.budget), overflow="fold")
  for name, cell_text in rows:
    cells = [
      rich.text.Text(terminal.printable(cell_text(reply), keeps_lines=True))
      for reply in replies
    ]
    if name != "sources" or any(cells):
      table.add_row(name, *cells)
  _console().print(table)


def _cited(reply: events.Reply) -> list[str]:
  return [f"[{n}] {citations.head(p)}" for n, p in reply.citations]


def _conclude(reply: events.Reply) -> None:
  if reply.answer is None:
    _say(f"no answer: {reply.reason}", "problem")
  else:
    _say(f"answer: {reply.answer}", "answer")
  for line in _cited(reply):
    _say(f"  {line}", "passage")
  if reply.refused_citations:
    numbers = ", ".join(map(str, reply.refused_citations))
    _say(f"It also cited {numbers}, which no search had shown.", "problem")
  searches = _searches(reply.searches)
  _say(f"{searches}, {reply.tokens} tokens, {reply.seconds:.1f} s", "thinking")


def _say(
  text: str, style: str, end: str = "\n", *, stderr: bool = False
) -> None:
  _console(stderr=stderr).print(
    rich.text.Text(terminal.printable(text, keeps_lines=True), _STYLES[style]),
    end=end,
    soft_wrap=True,
  )


def _console(*, stderr: bool = False) -> rich.console.Console:
  """Returns a console of the present streams; it is plain if that is a pipe."""
  return rich.console.Console(highlight=False, stderr=stderr)


def _line(title: str, text: str) -> str:
  """Returns a passage as one line."""
  line = " ".join(f"{title}: {text}".split())
  return (
    line
    if len(line) <= _PASSAGE_CHARACTERS
    else f"{line[:_PASSAGE_CHARACTERS]}..."
  )


def _searches(number: int) -> str:
  return f"{number} search" if number == 1 else f"{number} searches"


if __name__ == "__main__":
  # A warning of a library in the middle of an answer helps nobody.
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
  define_flags()
  launch_flags.run(
    main,
    arguments="[QUESTION]",
    plain_log=True,
    first_flags=(
      "documents",
      "openai",
      "openai_model",
      "local",
      "hf",
      "config",
      "budget",
      "ocr",
      *(() if "--chat" in sys.argv else ("compare", "json")),
    ),
  )
