"""Scores answers as the published evaluation script of their data set does.

Training and the paper's tables use the paper's exact match
(`scoring.exact_match`). The official scores are recorded too, to compare
results with other publications. docs/evaluation.md lists the differences. The
scripts:

    nq               google-research/language, orqa/utils/eval_utils.py
    triviaqa         mandarjoshi90/triviaqa, evaluation/triviaqa_evaluation.py
    popqa            AlexTMallen/adaptive-retrieval, run_model.py
    hotpotqa         hotpotqa/hotpot, hotpot_evaluate_v1.py
    2wikimultihopqa  Alab-NII/2wikimultihop, 2wikimultihop_evaluate_v1.1.py
    musique          StonyBrookNLP/musique, metrics/answer.py
    bamboogle        has no script; SQuAD's exact match and F1

The scripts of NQ and PopQA have no F1. Their F1 here is SQuAD's, of words that
are normalised as for the script's exact match (NQ) or as in SQuAD (PopQA).
"""

from __future__ import annotations

import string
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from anysearch_jax import types
from anysearch_jax.environment import scoring

# The metadata key of the answers that a data set's script accepts, of questions
# where they differ from the golden answers.
ANSWERS = "official_answers"
# The names of the two values of a score in files.
NAMES = ("official_em", "official_f1")

_TRIVIA_SPACES = str.maketrans(dict.fromkeys(string.punctuation + "‘’´`", " "))
_CLOSED = frozenset(("yes", "no", "noanswer"))


class Score(NamedTuple):
  """The score of one answer: `em` is 0 or 1, `f1` is in [0, 1]."""

  em: int
  f1: float


def score(
  dataset: str, answer: str | None, accepted: Sequence[str]
) -> Score | None:
  """Scores an answer; each value is the best over all accepted answers.

  Args:
    dataset: name of the data set, as in `launch.prepare_data`.
    answer: the policy's answer; a missing one, None, scores 0.
    accepted: the answers that `accepted` returns.

  Returns:
    The score; None if the data set has no script.
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
  """Returns the answers that the script of a question's data set accepts.

  Raises ValueError if the answers are not a list of texts.
  """
  answers = metadata.get(ANSWERS) or golden_answers
  is_list = isinstance(answers, list | tuple)
  if not is_list or not all(isinstance(answer, str) for answer in answers):
    raise ValueError(
      f"Found answers {answers!r:.60}, expected a list of texts."
    )
  return tuple(answers)


def of_question(
  question: types.Question, answer: str | None
) -> dict[str, float | None]:
  """Returns the score of an answer to a question, keyed by `NAMES`."""
  dataset = str(question.metadata.get("dataset", ""))
  answers = accepted(question.golden_answers, question.metadata)
  return by_name(score(dataset, answer, answers))


def by_name(answer_score: Score | None) -> dict[str, float | None]:
  """Returns a score keyed by `NAMES`; a missing score has None values."""
  return dict(zip(NAMES, answer_score or (None, None), strict=True))


class _Rules(NamedTuple):
  """How a script compares an answer with one accepted answer."""

  match: Callable[[str, str], bool]
  f1: Callable[[str, str], float]


def by_words(
  normalize: Callable[[str], str],
  decided: Callable[[str, str], float | None] = lambda predicted, golden: None,
) -> _Rules:
  """Returns rules that compare normalised texts by exact match and F1.

  `decided` returns the F1 if a special rule of the script decides it without
  counting words, otherwise None.
  """

  def f1(answer: str, gold: str) -> float:
    predicted = normalize(answer)
    golden = normalize(gold)
    special = decided(predicted, golden)
    if special is not None:
      return special
    return scoring.words_f1(predicted.split(), golden.split())

  def match(answer: str, gold: str) -> bool:
    return normalize(answer) == normalize(gold)

  return _Rules(match, f1)


def closed(predicted: str, golden: str) -> float | None:
  """Applies HotpotQA's rule: yes, no and noanswer match only themselves.

  Without it "no" would share a word with "no one".
  """
  return 0.0 if predicted != golden and {predicted, golden} & _CLOSED else None


def _empty(predicted: str, golden: str) -> float | None:
  """Applies MuSiQue's rule: an empty text matches only an empty one."""
  return None if predicted and golden else float(predicted == golden)


def _decomposed(text: str) -> str:
  """Normalises as NQ-open: an accent becomes a separate character (NFD)."""
  return scoring.normalize_answer(unicodedata.normalize("NFD", text))


def trivia(text: str) -> str:
  """Normalises as TriviaQA: punctuation and ‘’´` become spaces."""
  return scoring.normalize_answer(text, _TRIVIA_SPACES)


def _holds(answer: str, gold: str) -> bool:
  """Matches as PopQA: the answer contains one of three spellings of `gold`."""
  spellings = gold, gold.lower(), gold.capitalize()
  return any(spelling in answer for spelling in spellings)


_SQUAD = by_words(scoring.normalize_answer)
_HOTPOT = by_words(scoring.normalize_answer, closed)
_RULES = {
  "nq": by_words(_decomposed),
  "triviaqa": by_words(trivia),
  "popqa": _SQUAD._replace(match=_holds),
  "hotpotqa": _HOTPOT,
  "2wikimultihopqa": _HOTPOT,
  "musique": by_words(scoring.normalize_answer, _empty),
  "bamboogle": _SQUAD,
}
# The paper's datasets, in the order of its tables.
DATASETS = tuple(_RULES)
