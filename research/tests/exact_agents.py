"""The generated world's agents: exact ones, and the expert's demonstrations."""

from __future__ import annotations

import anysearch_jax as aj
from research import demonstrations

WORLD = aj.World()
LOOKUP = aj.LexicalRetriever(WORLD.corpus, reads=WORLD.searched).lookup
CODEC = aj.Tokenizer(aj.world_tokenizer(WORLD))
SETTING = demonstrations.Setting(
  WORLD, LOOKUP, CODEC, aj.config.EpisodeConfig(prompts="world")
)


def record(question, budget, turns, em):
  """Returns the row of an episode with these turns of the policy."""
  return {
    "question_id": question.id,
    "budget": budget,
    "em": em,
    "searches": len(turns) - 1,
    "spans": [
      {"author": author, "text": text}
      for turn in turns
      for author, text in (("model", turn), ("environment", "passages"))
    ],
  }


def played(question, budget, agent):
  """Returns the row of an episode as an agent of `aj.optimum` plays it."""
  start, *chain, _ = question.text.split()
  snapshot = WORLD.snapshot(int(question.id.split("/")[1]))
  found, turns = {}, []
  while (
    move := agent.moves(start, tuple(chain), budget - len(turns), found)[0]
  ).fact:
    query = f"{WORLD.entities[move.fact[0]]} {move.wording}"
    seen = aj.optimum.visible_values(WORLD, snapshot, query)
    found[move.fact] = seen[move.fact, move.wording]
    turns.append(f"<search> {query} </search>")
  chances = agent.answers(start, tuple(chain), found)
  answer = WORLD.entities[int(chances.argmax())]
  turns.append(f"<answer> {answer} </answer>")
  return record(
    question, budget, turns, int(answer == question.golden_answers[0])
  )
