"""The generated world's agents: exact ones, and the expert's demonstrations."""

from __future__ import annotations

import dataclasses

import numpy as np

import anysearch_jax as aj
from research import demonstrations

WORLD = aj.World()
LOOKUP = aj.LexicalRetriever(WORLD.corpus, reads=WORLD.searched).lookup
CODEC = aj.Tokenizer(aj.world_tokenizer(WORLD))
SETTING = demonstrations.Setting(
  WORLD, LOOKUP, CODEC, aj.config.EpisodeConfig(prompts="world")
)
NOTHING = dataclasses.replace(aj.expert.UNKNOWN_ONLY, p_search_unknown=0)


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


def played(question, budget, config, seed):
  """Returns the row of an episode as this expert writes it."""
  turns = aj.expert.Expert(
    question,
    world=WORLD,
    budget=budget,
    scaffold=False,
    config=config,
    rng=np.random.default_rng(seed),
  ).turns()
  said = [next(turns).words]
  while "<search>" in said[-1]:
    at = said[-1].index("<search>")
    query = " ".join(said[-1][at + 1 : said[-1].index("</search>")])
    said.append(turns.send(LOOKUP(query, 3, question.corpus)).words)
  right = int(said[-1][-2] == question.golden_answers[0])
  return record(question, budget, [" ".join(words) for words in said], right)


def best_played(question, budget, best):
  """Returns the row of an episode as the best agent plays it."""
  start, *chain, _ = question.text.split()
  snapshot = WORLD.snapshot(int(question.id.split("/")[1]))
  found, turns = {}, []
  while (
    move := best.moves(start, tuple(chain), budget - len(turns), found)[0]
  ).fact:
    query = f"{WORLD.entities[move.fact[0]]} {move.wording}"
    seen = aj.optimum.seen(WORLD, snapshot, query)
    found[move.fact] = seen[move.fact, move.wording]
    turns.append(f"<search> {query} </search>")
  chances = best.answers(start, tuple(chain), found)
  answer = WORLD.entities[int(chances.argmax())]
  turns.append(f"<answer> {answer} </answer>")
  return record(
    question, budget, turns, int(answer == question.golden_answers[0])
  )
