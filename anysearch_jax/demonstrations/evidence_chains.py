"""Chains of searches that lead to a question's known answer.

A chain asks the real retriever, so its passages are those that the policy will
see. It begins with the question itself. Later queries are ones that a policy
could write too: sub-questions of the row, and titles of passages with evidence
that occur in what was read. It stops when the evidence is there. Of the chains
whose budget ends without it, a share answers all the same, so that a policy
learns to.
"""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import NamedTuple

from anysearch_jax import types
from anysearch_jax.data import evidence
from anysearch_jax.environment import protocol, scoring

Search = Callable[[str], Awaitable[Sequence[types.Passage]]]

# What a chain answers if its searches did not show the answer. It is wrong, so
# the episode is not imitated.
UNKNOWN = "unknown"
# Of so many questions, one is answered from memory after searches in vain.
_GUESSED_PERIOD = 2
_BRACKETS = re.compile(r"\s*\([^)]*\)")


class Turn(NamedTuple):
  """A thought, and the query or the answer that follows it."""

  thought: str
  action: str
  is_answer: bool = False


class _Evidence:
  """The passages that a row names, and whether they tell the answer.

  Attributes:
    passages: (id, title) of each; either may be "".
  """

  def __init__(self, question: types.Question):
    metadata = question.metadata
    ids = [str(id_) for id_ in metadata.get("gold_doc_ids", ())]
    supporting = metadata.get("supporting", ())
    titles = [_plain_title(passage["title"]) for passage in supporting]
    self.passages = tuple(itertools.zip_longest(ids, titles, fillvalue=""))
    self._answers = question.golden_answers
    texts = evidence.of_metadata(metadata)[0]
    # The answer to a comparison, such as "yes", is in no passage.
    self._is_told = not texts or any(map(self.tells, texts))
    hops = metadata.get("hops") or 1
    self._needs_all = bool(self.passages) and (hops > 1 or not self._is_told)

  def tells(self, text: str) -> bool:
    """Returns whether a text contains an accepted answer."""
    return scoring.contains(text, self._answers)

  def missing(self, passages: Sequence[types.Passage]) -> list[tuple[str, str]]:
    """Returns those that are not among the passages."""
    shown_ids = {passage.id for passage in passages}
    shown_titles = {_plain_title(passage.title) for passage in passages}
    return [
      (id_, title)
      for id_, title in self.passages
      if not (id_ in shown_ids or (not id_ and title in shown_titles))
    ]

  def supports(self, passages: Sequence[types.Passage]) -> bool:
    """Returns whether the passages justify the answer."""
    if self._is_told:
      return any(self.tells(passage.contents) for passage in passages)
    return not self.missing(passages)

  def is_complete(self, passages: Sequence[types.Passage]) -> bool:
    """Returns whether another search adds nothing."""
    if self._needs_all and self.missing(passages):
      return False
    return self.supports(passages)


async def turns(
  question: types.Question, *, budget: int, search: Search
) -> list[Turn]:
  """Returns the turns of an episode that answers from what its searches show.

  With a budget of 0 it answers from nothing, and so do half of the questions
  whose budget ends without evidence.

  Args:
    question: names its evidence, or only its answers.
    budget: number of searches allowed.
    search: returns the passages for a query.
  """
  if not budget:
    return [_recalled(question, "No search. From memory.")]
  gold = _Evidence(question)
  shown_passages: list[types.Passage] = []
  queries: list[str] = []
  steps: list[Turn] = []
  while len(queries) < budget and not gold.is_complete(shown_passages):
    next_search = await _next_search(
      question, gold, shown_passages, queries, search
    )
    if next_search is None:
      break
    query, passages = next_search
    thought = f"{budget - len(queries)} of {budget} searches left."
    if queries:
      thought += " Not enough yet."
    steps.append(Turn(thought, query))
    queries.append(query)
    shown_passages += passages
  in_vain = not gold.supports(shown_passages)
  if in_vain and len(queries) == budget and _is_guessed(question):
    return [*steps, _recalled(question, "No search left. From memory.")]
  return [*steps, _answer(question, gold, shown_passages)]


def _recalled(question: types.Question, thought: str) -> Turn:
  """Returns a turn that answers without evidence."""
  answers = (*question.golden_answers, UNKNOWN)
  return Turn(thought, answers[0], is_answer=True)


def _is_guessed(question: types.Question) -> bool:
  """Returns whether a question is answered after searches in vain."""
  return not zlib.crc32(question.id.encode()) % _GUESSED_PERIOD


async def _next_search(
  question: types.Question,
  gold: _Evidence,
  shown_passages: Sequence[types.Passage],
  queries: Sequence[str],
  search: Search,
) -> tuple[str, Sequence[types.Passage]] | None:
  """Returns the next query that adds evidence, with its passages.

  The first search of a chain may add none; later ones must. None if no query
  does.
  """
  evidence_before = (
    gold.supports(shown_passages),
    -len(gold.missing(shown_passages)),
  )
  for query in _queries(question, gold, shown_passages):
    if query in queries:
      continue
    passages = await search(query)
    together = [*shown_passages, *passages]
    evidence_after = (gold.supports(together), -len(gold.missing(together)))
    if not queries or evidence_after > evidence_before:
      return query, passages
  return None


def _queries(
  question: types.Question,
  gold: _Evidence,
  shown_passages: Sequence[types.Passage],
) -> Iterator[str]:
  """Yields the queries that a policy could write by now, the best first."""
  yield question.text
  for group in evidence.of_metadata(question.metadata)[1]:
    yield group[0]
  context = "\n".join(
    [question.text, *(passage.text for passage in shown_passages)]
  )
  for _, title in gold.missing(shown_passages):
    name = _BRACKETS.sub("", title)
    if name and scoring.contains(context, [name]):
      yield title


def _answer(
  question: types.Question,
  gold: _Evidence,
  shown_passages: Sequence[types.Passage],
) -> Turn:
  """Returns the last turn: where the answer is told, and the answer.

  A quote would tell more, but small models answer worse after one: sampled word
  by word, it often goes astray before the answer.
  """
  answer = question.golden_answers[0] if question.golden_answers else UNKNOWN
  if not gold.supports(shown_passages):
    return Turn("Not found.", UNKNOWN, is_answer=True)
  telling_passages = [
    passage for passage in shown_passages if gold.tells(passage.contents)
  ]
  if not telling_passages:
    titles = [_plain_title(passage.title) for passage in shown_passages]
    named_titles = [title for _, title in gold.passages if title in titles]
    return Turn(f"From {' and '.join(named_titles)}.", answer, is_answer=True)
  question_words = set(scoring.normalize_answer(question.text).split())

  def overlap(passage: types.Passage) -> int:
    words = set(scoring.normalize_answer(passage.contents).split())
    return len(question_words & words)

  source = max(telling_passages, key=overlap)
  # Aliases differ in case; one that the passage spells is learned by copying.
  answer = min(
    (
      alias
      for alias in question.golden_answers
      if scoring.contains(source.contents, [alias])
    ),
    key=lambda alias: alias not in source.contents,
  )
  title = _plain_title(source.title) or "a passage"
  return Turn(f"From {title}.", answer, is_answer=True)


def _plain_title(title: str) -> str:
  return " ".join(title.strip(' "').split())


def written(turn: Turn, control_tokens: Sequence[str]) -> str:
  """Returns a turn as the policy would write it, in tags.

  Args:
    turn: the turn.
    control_tokens: texts that a turn must not contain, see
      `protocol.neutralise`.
  """
  name = "answer" if turn.is_answer else protocol.SEARCH
  thought = protocol.neutralise(turn.thought, control_tokens)
  action = protocol.neutralise(turn.action, control_tokens)
  return f"<think>{thought}</think>\n<{name}>{action}</{name}>"
