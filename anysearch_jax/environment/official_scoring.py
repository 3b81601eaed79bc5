"""Scores answers as the published evaluation script of their data set does.

The paper's exact match (`scoring.exact_match`) is what is trained on and what
the paper reports; these scores stand beside it, so that results can be compared
with others. docs/evaluation.md lists the differences. The scripts:

    nq               google-research/language, orqa/utils/eval_utils.py
    triviaqa         mandarjoshi90/triviaqa, evaluation/triviaqa_evaluation.py
    popqa            AlexTMallen/adaptive-retrieval, run_model.py
    hotpotqa         hotpotqa/hotpot, hotpot_evaluate_v1.py
    2wikimultihopqa  Alab-NII/2wikimultihop, 2wikimultihop_evaluate_v1.1.py
    musique          StonyBrookNLP/musique, metrics/answer.py
    bamboogle        has none; SQuAD's exact match and F1

The scripts of NQ and PopQA have no F1: theirs is SQuAD's, of the words that
their script compares.
"""

from __future__ import annotations

import collections
import re
import string
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from anysearch_jax import types
from anysearch_jax.environment import scoring

# The key of a question's metadata that holds the answers which the script of
# its data set accepts, where they differ from its golden answers.
ANSWERS = "official_answers"
# The names of a score in files.
NAMES = ("official_em", "official_f1")

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_TRIVIA_SPACES = str.maketrans(dict.fromkeys(string.punctuation + "‘’´`", " "))
_CLOSED = frozenset(("yes", "no", "noanswer"))


class Score(NamedTuple):
  """What a script gives one answer: `em` 0 or 1, `f1` in [0, 1]."""

  em: int
  f1: float


def score(
  dataset: str, answer: str | None, accepted: Sequence[str]
) -> Score | None:
  """Scores an answer against the accepted one that fits it best.

  Args:
    dataset: by the name that `launch.prepare_data` gives it.
    answer: the policy's; None without one, which scores 0.
    accepted: the answers of `accepted`.

  Returns:
    The score, or None for a data set without a known script.
  """
  rules = _RULES.get(dataset)
  if rules is None:
    return None
  if answer is None:
    return Score(0, 0.0)
  return Score(
    max((int(rules.match(answer, gold)) for gold in accepted), default=0),
    max((rules.f1(answer, gold) for gold in accepted), default=0.0),
  )


def accepted(
  golden_answers: Sequence[str], metadata: Mapping[str, Any]
) -> tuple[str, ...]:
  """The answers of a question that the script of its data set accepts.

  Raises:
    ValueError: they are no list of texts.
  """
  found = metadata.get(ANSWERS) or golden_answers
  whole = isinstance(found, list | tuple)
  if not whole or not all(isinstance(each, str) for each in found):
    raise ValueError(f"Found answers {found!r:.60}, expected a list of texts.")
  return tuple(found)


def of_question(
  question: types.Question, answer: str | None
) -> dict[str, float | None]:
  """The score of an answer to a question, by `NAMES`."""
  dataset = str(question.metadata.get("dataset", ""))
  found = accepted(question.golden_answers, question.metadata)
  return named(score(dataset, answer, found))


def named(found: Score | None) -> dict[str, float | None]:
  """A score by `NAMES`; None where there is no script."""
  return dict(zip(NAMES, found or (None, None), strict=True))


class _Rules(NamedTuple):
  """How a script compares an answer with one accepted answer."""

  match: Callable[[str, str], bool]
  f1: Callable[[str, str], float]


def _by_words(
  normalize: Callable[[str], str],
  decided: Callable[[str, str], float | None] = lambda ours, theirs: None,
) -> _Rules:
  """Exact match and F1 of normalised texts.

  Args:
    normalize: a text.
    decided: the F1 of two normalised texts where a rule of the script gives it
      without counting words; None where it does not.
  """

  def f1(answer: str, gold: str) -> float:
    ours, theirs = normalize(answer), normalize(gold)
    given = decided(ours, theirs)
    return _shared(ours.split(), theirs.split()) if given is None else given

  return _Rules(lambda a, gold: normalize(a) == normalize(gold), f1)


def _shared(ours: Sequence[str], theirs: Sequence[str]) -> float:
  """F1 of two lists of words; 0 without a word in common."""
  common = (collections.Counter(ours) & collections.Counter(theirs)).total()
  return 2 * common / (len(ours) + len(theirs)) if common else 0.0


def _closed(ours: str, theirs: str) -> float | None:
  """HotpotQA: yes, no and noanswer have no word in common with other answers.

  Otherwise "no" would have a word in common with "no one".
  """
  return 0.0 if ours != theirs and {ours, theirs} & _CLOSED else None


def _empty(ours: str, theirs: str) -> float | None:
  """MuSiQue: two empty answers are equal, an empty one has no words."""
  return None if ours and theirs else float(ours == theirs)


def _decomposed(text: str) -> str:
  """NQ-open: accents are characters of their own."""
  return scoring.normalize_answer(unicodedata.normalize("NFD", text))


def _trivia(text: str) -> str:
  """TriviaQA: punctuation, four quotation marks among it, becomes a space."""
  text = text.lower().translate(_TRIVIA_SPACES)
  return " ".join(_ARTICLES.sub(" ", text).split())


def _holds(answer: str, gold: str) -> bool:
  """PopQA: the answer holds an accepted one, in one of three spellings."""
  spellings = gold, gold.lower(), gold.capitalize()
  return bool(gold) and any(each in answer for each in spellings)


_SQUAD = _by_words(scoring.normalize_answer)
_HOTPOT = _by_words(scoring.normalize_answer, _closed)
_RULES = {
  "nq": _by_words(_decomposed),
  "triviaqa": _by_words(_trivia),
  "popqa": _SQUAD._replace(match=_holds),
  "hotpotqa": _HOTPOT,
  "2wikimultihopqa": _HOTPOT,
  "musique": _by_words(scoring.normalize_answer, _empty),
  "bamboogle": _SQUAD,
}
