"""The passages and queries that lead to the answers of the generated world."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from anysearch_jax import types
from anysearch_jax.world import world as world_lib


def of_world(
  world: world_lib.World, questions: Iterable[types.Question]
) -> list[types.Question]:
  """Questions of the world with the evidence that its corpora hold.

  A step is a fact of the chain, known or not, in the wording that finds it; for
  a fact with a false twin, also the verdict on the two.

  Args:
    world: that the questions are of.
    questions: any of `world.questions`.

  Returns:
    The questions with `supporting` and `search_keys`, else as they were.
  """
  corpora: dict[str, dict[str, types.Passage]] = {}
  out = []
  for question in questions:
    name = question.corpus
    if name not in corpora:
      corpora[name] = {passage.id: passage for passage in world.corpus(name)}
    supporting, keys = [], []
    for fact in question.metadata["facts"]:
      wording = fact["alternative" if fact["misses"] else "relation"]
      steps = [(fact["relation"], wording)]
      if fact["contradicted"]:
        steps.append((world_lib.VERDICT, world_lib.VERDICT))
      for label, word in steps:
        passage = corpora[name][f"{name}/{fact['entity']}/{label}"]
        supporting.append({"title": passage.title, "text": passage.text})
        keys.append([f"{fact['entity']} {word}"])
    out.append(_with(question, supporting=supporting, search_keys=keys))
  return out


def _with(question: types.Question, **known) -> types.Question:
  return dataclasses.replace(question, metadata={**question.metadata, **known})
