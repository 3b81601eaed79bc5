"""The generated world as the source of a command's questions and passages."""

from __future__ import annotations

import typing
from collections.abc import Sequence

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.host import plugins
from anysearch_jax.world import world as world_lib
from retrieval import lexical


class WorldSource(typing.NamedTuple):
  """The generated world: its questions and its passages."""

  world: world_lib.World
  retriever: lexical.LexicalRetriever

  def questions(
    self, split: str, count: int, seed: int
  ) -> Sequence[types.Question]:
    """Returns the training stream: `count` questions of a split."""
    return self.world.questions(split, count, seed)

  def evaluation_questions(
    self, datasets: Sequence[str] = (), each: int = 0, *, split: str = ""
  ) -> list[types.Question]:
    """Returns evaluation questions; a smaller set is a prefix of a larger one.

    Args:
      datasets: "world" or nothing, because the world is the only dataset.
      each: number of questions; 0 returns 1000 (600 of "dev").
      split: a split of the world; "" is "held-out".

    Raises:
      ValueError: a dataset or the split is unknown.
    """
    if others := set(datasets) - {"world"}:
      raise ValueError(
        f"Dataset {min(others)!r}: data.source 'world' has only 'world'; "
        "prepared ones need data.source=prepared and data.path."
      )
    return self.world.evaluation_questions(each, split or "held-out")


def make(data: config_lib.DataConfig, retriever: str) -> WorldSource:
  """Returns the world that `data.source` "world" names.

  Args:
    data: names the world.
    retriever: kind of the retriever, `retrieval.kind`.

  Raises:
    ValueError: another source, another retriever or a folder is named.
  """
  if data.source != "world":
    raise ValueError(
      f"data.source: found {data.source!r}, expected 'world', the generated "
      "world."
    )
  if retriever != "lexical" and not plugins.is_name(retriever):
    raise ValueError(
      f"retrieval.kind: found {retriever!r} with data.source 'world', whose "
      "questions are each of one of many small corpora that nothing else "
      "holds; expected 'lexical', which searches them, or one of your own "
      "(path/to/file.py:NAME). Others answer "
      "prepared questions (data.source=prepared, data.path=FOLDER)."
    )
  if data.path:
    raise ValueError(
      f"data.path: found {data.path!r} with data.source 'world', which reads "
      "no folder; expected data.source=prepared, or no path."
    )
  world = world_lib.World(data.world_seed)
  return WorldSource(world, lexical.LexicalRetriever(world.corpus))
