r"""Answers the searches by a retriever of your own, alone and in a pipeline.

    python -m examples.own_retriever --questions=50
    python -m launch.evaluate --config=configs/quickstart.py --output=runs/own \
        --config.retrieval.kind=examples/own_retriever.py:best

A retriever is anything with `search`. It may also have `search_many`, which is
given the searches of many episodes at once: they are then asked in batches.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import tempfile

import anysearch_jax as aj
from anysearch_jax.configs import quickstart

ROOT = pathlib.Path(__file__).resolve().parents[1]


class WordOverlap:
  """Ranks the passages of a corpus by the words that a query has too."""

  def __init__(self, corpora):
    self._corpora = corpora  # Returns the passages of a corpus by its name.

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
    best = sorted(scored, key=lambda passage: -passage.score)
    return [p for p in best[: request.k] if p.score > 0]


def best(config: aj.ExperimentConfig) -> aj.Retriever:
  """What `retrieval.kind` names: word overlap and BM25, fused by rank."""
  world = aj.World()  # A retriever of yours opens its own documents.
  lexical = aj.LexicalRetriever(world.corpus, reads=world.searched)
  return aj.fuse(WordOverlap(world.corpus), lexical, k=5)


def main(argv: list[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--questions", type=int, default=50)
  count = parser.parse_args(argv).questions
  config = quickstart.get_config()
  env = aj.environment_of(config.episode)
  evaluation = dataclasses.replace(config.evaluation, budgets=(0, 3))
  policy, world = aj.load_policy(ROOT / config.policy), aj.World()
  for retriever in (WordOverlap(world.corpus), best(config)):
    with tempfile.TemporaryDirectory() as folder:
      engine = aj.make_engine(policy, config, seed=0)
      summary = aj.evaluate(
        evaluation,
        aj.Playing(config.episode, env, config.engine.slots),
        player=aj.Player(engine, policy.tokenizer),
        questions=world.questions("held-out", count, seed=0),
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
