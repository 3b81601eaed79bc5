"""Adds the supporting passages and queries to questions of the world."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from anysearch_jax import types
from anysearch_jax.world import world as world_lib


def of_world(
  world: world_lib.World, questions: Iterable[types.Question]
) -> list[types.Question]:
  """Returns questions of the world with evidence from its corpora.

  The evidence of a question has a passage for each fact of its chain, known or
  not, and the query in the wording that finds it. A fact with a false twin also
  has the passage and the query of the verdict.

  Args:
    world: the world of the questions.
    questions: any of `world.questions`.

  Returns:
    The questions, with `supporting` and `search_keys` added to their metadata.
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
