r"""Answers the searches by a retriever of your own.

    python -m examples.own_retriever --questions=50

A retriever is anything with `search`. It may also have `search_many`, which is
given the searches of many episodes at once: `launch.train` then batches them.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import tempfile
from collections.abc import Sequence

import anysearch_jax as aj
from configs import quickstart

ROOT = pathlib.Path(__file__).resolve().parents[1]


class WordOverlap:
  """Ranks the passages of a corpus by the words that they share with a query.

  Args:
    corpora: the passages of a corpus by its name. The generated world has many
      corpora, one for each version of its facts; most data sets have one, "".
  """

  def __init__(self, corpora):
    self._corpora = corpora

  async def search(self, request: aj.SearchRequest) -> list[aj.Passage]:
    """Returns at most `request.k` passages, best first.

    Raises `aj.RetrievalError` if it cannot answer: the episode is then left
    out of training. Any other error is a bug, and ends the run.
    """
    wanted = set(request.query.split())
    scored = [
      dataclasses.replace(p, score=len(wanted & {p.title, *p.text.split()}))
      for p in self._corpora(request.corpus)
    ]
    # Equal scores keep the order of the corpus, so that runs repeat.
    best = sorted(scored, key=lambda passage: -passage.score)
    return [p for p in best[: request.k] if p.score > 0]


def main(argv: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--questions", type=int, default=50)
  args = parser.parse_args(argv)
  config = quickstart.get_config()
  evaluation = dataclasses.replace(config.evaluation, budgets=(0, 3))
  policy, world = aj.load_policy(ROOT / config.policy), aj.World()
  for retriever in (
    aj.LexicalRetriever(world.corpus),
    WordOverlap(world.corpus),
  ):
    engine = aj.make_engine(policy, config, seed=0)
    with tempfile.TemporaryDirectory() as folder:
      summary = aj.evaluate(
        evaluation,
        aj.Playing(config.episode, config.engine.slots),
        player=aj.Player(engine, policy.tokenizer),
        questions=world.questions("held-out", args.questions, seed=0),
        retriever=retriever,
        folder=pathlib.Path(folder),
      )
    for cell in summary["cells"]:
      print(
        f"{type(retriever).__name__}, budget {cell['budget']}: {cell['em']} of "
        f"{cell['n']} right with {cell['searches']} searches"
      )


if __name__ == "__main__":
  main()
