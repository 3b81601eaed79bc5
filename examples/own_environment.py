r"""Plays in an environment of your own: its prompt, its tags, its lines.

    python -m examples.own_environment

An environment is a value. This one has no scaffold; a line with the remaining
budget follows each observation. A function reads the tags; for others give
`answer` and `format` too, as anysearch_jax/methods/search_o1.py does.
"""

from __future__ import annotations

import asyncio
import dataclasses
import pathlib
import re

import anysearch_jax as aj
from configs import quickstart

ROOT = pathlib.Path(__file__).resolve().parents[1]
SEARCH, ANSWER = "search", "answer"  # The tags that the shipped policy writes.
PROMPT = "budget {B} question {Question}"
_BLOCK = re.compile(rf"<({SEARCH}|{ANSWER})>([^<]*)</\1>\s*$")


def action(text: str) -> aj.Action | None:
  """Reads what a turn asks for: the block that it ends with."""
  block = _BLOCK.search(text)
  if block is None:
    return None
  kind = aj.ActionKind.SEARCH if block[1] == SEARCH else aj.ActionKind.ANSWER
  return aj.Action(kind, block[2].strip())


def left(budget: int, used: int) -> str:
  """Returns the line that follows an observation."""
  state = f"remaining={budget - used}; used={used}; total={budget}"
  return f"<budget>{state}</budget>\n"


ENVIRONMENT = aj.Environment(
  scaffold=PROMPT,
  plain=PROMPT,
  over_budget="no budget ; answer now\n",
  no_action="search or answer\n",
  stops=(f"</{SEARCH}>", f"</{ANSWER}>"),
  action=action,
  before_turn=lambda budget, used: "",
  after_search=left,
)


def main() -> None:
  base, own = aj.get_method("anysearch"), {"mine": ENVIRONMENT}
  aj.register_method(dataclasses.replace(base, name="mine", environments=own))
  config = quickstart.get_config()
  # Training in it needs `method.name` besides, see `own_reward.py`.
  episode = dataclasses.replace(config.episode, prompts="mine")
  config = dataclasses.replace(config, episode=episode)
  world, policy = aj.World(), aj.load_policy(ROOT / config.policy)
  question = world.questions("held-out", 20, seed=0)[0]
  engine = aj.make_engine(policy, config, seed=0)
  search = aj.LexicalRetriever(world.corpus)
  played = asyncio.run(
    aj.run_episode(
      question,
      aj.EpisodeParts(engine, search, config.episode, policy.tokenizer),
      budget=3,
      scaffold=False,
      address=aj.evaluation_address(question.id, seed=42, variant=0),
    )
  )
  text = "".join(span.text for span in played.spans)
  print(question.text, text, ENVIRONMENT.judge(played), sep="\n")


if __name__ == "__main__":
  main()
