r"""Asks a policy questions under a search budget.

    python -m launch.ask --config=configs/quickstart.py --budget=3 "QUESTION"

Without a question it reads one from each line of the terminal or the pipe, and
in the generated world it begins with some that can be asked. It shows the
reasoning, the queries, the passages and the budget as they come;
--compare=0,1,3,5 shows the answers under these budgets side by side. --json
prints one line for each answer, for programs. `launch.policies` lists the ways
to name a policy. See docs/asking.md.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence

from absl import app, flags

from anysearch_jax import budgets as budgets_lib
from anysearch_jax import types
from anysearch_jax.agent import limits
from launch import agents, jax_setup, policies, transcript
from launch import evaluate as launch_evaluate
from launch import flags as launch_flags

_EXAMPLES = 5


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
  try:
    config = launch_flags.read_config()
    budgets: Sequence[budgets_lib.Assigned] = (
      (_budget(f.budget, config.evaluation.prices),)
      if f.compare is None
      else launch_evaluate.parse_budgets(f.compare, "--compare")
    )
  except ValueError as error:
    raise app.UsageError(str(error)) from error
  config, chosen = policies.read_flags(config)
  jax_setup.configure(threads=f.threads, cache=f.cache)
  questions = [" ".join(argv[1:])] if len(argv) > 1 else []
  asking = sys.stdin.isatty() and not questions
  answered = True
  try:
    with agents.opened(config, chosen, allow_cpu=f.allow_cpu) as agent:
      examples = [question.text for question in agent.examples[:_EXAMPLES]]
      if asking and not f.json:
        transcript.greet(examples)
      for text in questions or _typed(prompt=asking and not f.json):
        if unknown := agent.unknown_words(text):
          transcript.warn(unknown, examples)
        if f.json or len(budgets) > 1:
          (replies,) = agent.ask_many(
            [text], budgets=budgets, seed=f.seed, deadline=f.deadline
          )
          if f.json:
            for reply in replies:
              print(json.dumps(transcript.record(reply)), flush=True)
          else:
            transcript.compare(replies)
        else:
          events = agent.stream(
            text, budget=budgets[0], seed=f.seed, deadline=f.deadline
          )
          replies = [transcript.show(events)]
        answered = all(reply.answer is not None for reply in replies)
  except (OSError, ValueError, types.EngineError, limits.BusyError) as error:
    sys.exit(f"launch.ask: {error}")
  if questions and not answered:
    sys.exit(1)


def _budget(text: str, prices: budgets_lib.Prices) -> budgets_lib.Budget:
  """Reads --budget. Raises ValueError if it is invalid."""
  try:
    return budgets_lib.parse(text, prices)
  except ValueError as error:
    raise ValueError(f"--budget={text}: {error}") from error


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


if __name__ == "__main__":
  # A warning of a library in the middle of an answer helps nobody.
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
  define_flags()
  launch_flags.run(main)
