"""The generated world's agents: exact ones, and the expert's demonstrations."""

from __future__ import annotations

import numpy as np

import anysearch_jax as aj
from research import demonstrations

WORLD = aj.World()
LOOKUP = aj.LexicalRetriever(WORLD.corpus, reads=WORLD.searched).lookup
CODEC = aj.Tokenizer(aj.world_tokenizer(WORLD))
SETTING = demonstrations.Setting(
  WORLD, LOOKUP, CODEC, aj.config.EpisodeConfig(prompts="world")
)
EXACT = aj.expert.ExpertConfig(p_over_budget=0, p_redundant=0, p_early_answer=0)


def record(question, budget, turns, em):
  """Returns the row of an episode with these turns of the policy."""
  return {
    "metadata": question.metadata,
    "budget": budget,
    "em": em,
    "searches": len(turns) - 1,
    "spans": [
      {"author": author, "text": text}
      for turn in turns
      for author, text in (("model", turn), ("environment", "passages"))
    ],
  }


def played(question, budget, strategy, seed):
  """Returns the row of an episode as an agent of this strategy writes it."""
  turns = aj.expert.Expert(
    question,
    world=WORLD,
    budget=budget,
    scaffold=False,
    config=EXACT,
    rng=np.random.default_rng(seed),
    strategy=strategy,
  ).turns()
  said = [next(turns).words]
  while "<search>" in said[-1]:
    at = said[-1].index("<search>")
    query = " ".join(said[-1][at + 1 : said[-1].index("</search>")])
    said.append(turns.send(LOOKUP(query, 3, question.corpus)).words)
  right = int(said[-1][-2] == question.golden_answers[0])
  return record(question, budget, [" ".join(words) for words in said], right)
