"""Scores a finished trajectory: answer, exact match and format.

The functions raise on no text and take time linear in its length. A response is
read span by span: a block must open and close within one span, so no tag or
block can be assembled from the texts of two turns or two authors.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import re
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from anysearch_jax import types
from anysearch_jax.environment import protocol

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclasses.dataclass(frozen=True)
class Verdict:
  """The scores of a trajectory's text, before reward weights.

  Attributes:
    answer: the stripped answer, "" for an empty one, None for a missing one.
    em: 1 if the answer matches an accepted answer, else 0.
    format: 1 if the response is well formed, else 0; None if the environment
      does not check the format.
  """

  answer: str | None
  em: int
  format: int | None


def turns(spans: Sequence[types.Span]) -> list[str]:
  """Returns the texts of the model's turns, in order.

  They begin by the `<think>` that a chat template opened before them.
  """
  by_model = types.Author.MODEL
  joined = protocol.with_opened_reasoning(spans)
  return [span.text for span in joined if span.author == by_model]


def exact_match(answer: str | None, aliases: Sequence[str]) -> int:
  """Returns 1 if `answer` equals an alias after normalisation, else 0.

  Aliases that normalise to nothing are dropped, so an empty answer never
  matches, nor does a missing one (None).
  """
  if answer is None:
    return 0
  accepted = {normalize_answer(alias) for alias in aliases} - {""}
  return int(normalize_answer(answer) in accepted)


def f1(answer: str | None, aliases: Sequence[str]) -> float:
  """Returns SQuAD's word F1 of `answer`, the best over all aliases, in [0, 1].

  It is 1 if `exact_match` is 1, and 0 without an answer or without a common
  word.
  """
  predicted = normalize_answer(answer or "").split()
  golden = (normalize_answer(alias).split() for alias in aliases)
  return max((words_f1(predicted, words) for words in golden), default=0.0)


def words_f1(predicted: Sequence[str], golden: Sequence[str]) -> float:
  """Returns the F1 of two lists of words; 0 without a common word."""
  common = collections.Counter(predicted) & collections.Counter(golden)
  if not common:
    return 0.0
  return 2 * common.total() / (len(predicted) + len(golden))


def contains(text: str, aliases: Sequence[str]) -> bool:
  """Returns whether a text contains an accepted answer as whole words.

  Text and answers are normalised; answers that normalise to "" are ignored.
  """
  padded = f" {normalize_answer(text)} "
  answers = map(normalize_answer, aliases)
  return any(f" {answer} " in padded for answer in answers if answer)


def normalize_answer(
  text: str, punctuation: dict[int, Any] = _NO_PUNCTUATION
) -> str:
  """Normalises case, ASCII punctuation, articles and white space as SQuAD."""
  text = text.lower().translate(punctuation)
  return " ".join(_ARTICLES.sub(" ", text).split())


def check_format(
  spans: Sequence[types.Span],
  *,
  budget: int,
  searches: int,
  scaffold: bool,
  calls: Mapping[str, str] | None = None,
) -> int:
  """Returns 1 if the response is well formed, else 0 (the paper's R_format).

  A response is well formed if all of these hold:

  * It consists of white space, and of blocks that are closed and not nested.
  * The blocks are `think search information` for each charged search, then
    `think answer`. If and only if the scaffold is on, a `budget` block with the
    right numbers of searches precedes every `think`; units besides searches
    follow after ` ; `.
  * Each block is within one span, which its right author wrote.
  * There are no more searches than the budget allows.

  Args:
    spans: the response, without the prompt.
    budget: searches assigned, >= 0.
    searches: searches charged.
    scaffold: whether the environment had to write budget blocks.
    calls: maps the block of a call to the block that answers it, for tools
      besides `search`, which `information` answers. Each charged search is then
      a call of any tool.
  """
  answers = {"search": "information", **(calls or {})}
  blocks = _read_blocks(spans, _pattern(tuple(answers.items())))
  if blocks is None:
    return 0
  # Checked before a list of this length is made: `searches` can come from a
  # file and be huge.
  called = [block.name for block in blocks if block.name in answers]
  if not len(called) == searches <= budget:
    return 0
  before_turn = ["budget", "think"] if scaffold else ["think"]
  expected = []
  for name in called:
    expected += [*before_turn, name, answers[name]]
  expected += [*before_turn, "answer"]
  if [block.name for block in blocks] != expected:
    return 0
  by_environment = {"budget", *answers.values()}
  for block in blocks:
    right_author = types.Author.MODEL
    if block.name in by_environment:
      right_author = types.Author.ENVIRONMENT
    if block.author != right_author:
      return 0
  states = [block.content for block in blocks if block.name == "budget"]
  return int(
    all(
      state.partition(" ; ")[0] == protocol.budget_state(budget, used)
      for used, state in enumerate(states)
    )
  )


def judge(
  spans: Sequence[types.Span],
  *,
  golden_answers: Sequence[str],
  budget: int,
  searches: int,
  scaffold: bool,
  read: Callable[[Sequence[types.Span]], str | None] = protocol.extract_answer,
  check: Callable[..., int] | None = check_format,
) -> Verdict:
  """Judges one trajectory (the paper's appendix, R_acc and R_format).

  Args:
    spans, budget, searches, scaffold: as for `check_format`.
    golden_answers: the accepted answers.
    read: returns the answer of a response.
    check: returns whether a response is well formed, with the signature of
      `check_format`; None if the format is not checked.
  """
  spans = protocol.with_opened_reasoning(spans)
  answer = read(spans)
  well_formed = None
  if check is not None:
    well_formed = check(
      spans, budget=budget, searches=searches, scaffold=scaffold
    )
  return Verdict(answer, exact_match(answer, golden_answers), well_formed)


@dataclasses.dataclass(frozen=True)
class _Block:
  name: str
  content: str
  author: types.Author


@functools.cache
def _pattern(calls: tuple[tuple[str, str], ...]) -> re.Pattern[str]:
  """Returns `protocol.TAG_PATTERN` with the blocks of these calls too."""
  names = dict.fromkeys((*protocol.TAGS, *itertools.chain(*calls)))
  return re.compile(rf"<(/?)({'|'.join(map(re.escape, names))})>")


def _read_blocks(
  spans: Sequence[types.Span], tags: re.Pattern[str]
) -> list[_Block] | None:
  """Returns the blocks in order; None if there is text outside of blocks."""
  blocks = []
  for span in spans:
    opened = None
    end = 0
    for tag in tags.finditer(span.text):
      slash, name = tag.groups()
      content = span.text[end : tag.start()]
      if slash and name == opened:
        blocks.append(_Block(name, content.strip(), span.author))
        opened = None
      elif not slash and opened is None and not content.strip():
        opened = name
      else:
        return None
      end = tag.end()
    if opened is not None or span.text[end:].strip():
      return None
  return blocks
