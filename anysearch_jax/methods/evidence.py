"""The passages and queries that lead to a question's answer.

They stand in a question's metadata, under the names of `data.formats`:
`supporting` passages, and `search_keys` (StepSearch's rows) or `sub_questions`
(MuSiQue's). What names its passages otherwise is given them here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable

from anysearch_jax import types
from anysearch_jax.data import world as world_lib

Passages = tuple[str, ...]
Keys = tuple[tuple[str, ...], ...]

# MuSiQue's later steps name the answer of an earlier one by its number.
_EARLIER = re.compile(r"#(\d+)")


def gold(question: types.Question) -> tuple[Passages, Keys]:
  """The gold passages of a question and its groups of equal search keys.

  Args:
    question: of a source that knows them.

  Returns:
    Title and text of each passage, those without a text left out; for each step
    to the answer, the queries that would do. One of the two may be empty.

  Raises:
    ValueError: the question has neither.
  """
  metadata = question.metadata
  passages = tuple(
    f"{passage['title']} {passage['text']}"
    for passage in metadata.get("supporting", ())
    if passage.get("text")
  )
  keys = tuple(map(tuple, metadata.get("search_keys", ())))
  keys = keys or tuple(
    (step,) for step in _resolved(metadata.get("sub_questions", ()))
  )
  if not passages and not keys:
    raise ValueError(
      f"Question {question.id!r} has neither supporting passages with their "
      "texts nor search keys or sub-questions in its metadata, and StepSearch "
      "is rewarded by them. Train on MuSiQue's or StepSearch's rows or on the "
      "generated world (evidence.of_world), or give it the passages that it "
      "names (evidence.of_corpus)."
    )
  return passages, keys


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


def of_corpus(
  question: types.Question, find: Callable[[str], types.Passage]
) -> types.Question:
  """A question with the texts of the passages that it names by id.

  Args:
    question: one with `gold_doc_ids` in its metadata.
    find: the passage of an id.

  Returns:
    The question with `supporting`, else as it was.
  """
  passages = map(find, question.metadata["gold_doc_ids"])
  supporting = [{"title": p.title, "text": p.text} for p in passages]
  return _with(question, supporting=supporting)


def _with(question: types.Question, **known) -> types.Question:
  return dataclasses.replace(question, metadata={**question.metadata, **known})


def _resolved(steps: Iterable[dict[str, str]]) -> Iterable[str]:
  """The sub-questions, with earlier answers in the place of their numbers."""
  answers: list[str] = []

  def answer(match: re.Match[str]) -> str:
    place = int(match[1]) - 1
    return answers[place] if 0 <= place < len(answers) else match[0]

  for step in steps:
    yield _EARLIER.sub(answer, step["question"])
    answers.append(step["answer"])
