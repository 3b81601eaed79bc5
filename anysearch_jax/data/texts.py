"""Cleans questions and answers into single lines of readable text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from anysearch_jax.data import formats, leaks
from anysearch_jax.environment import official_scoring, scoring

# Ten times the longest question of the known datasets; a longer text is a
# document in the wrong column.
LONGEST = 10_000
# Control characters that are not white space.
_CONTROLS = re.compile("[\x01-\x08\x0e-\x1b\x7f]")


def ask(text: str) -> str:
  """Returns a question as the policy reads it: one line that ends in `?`."""
  text = line(text)
  inner = text[1:-1]
  # Some TriviaQA questions are raw CSV cells, with doubled quotes inside.
  if text[:1] == text[-1:] == '"' and '""' in inner:
    if '"' not in inner.replace('""', ""):
      text = line(inner.replace('""', '"'))
  return text if text.endswith("?") else f"{text}?"


def accept(answers: Iterable[str]) -> tuple[str, ...]:
  """Returns distinct answers in order, without those that normalise to ""."""
  lines = map(line, answers)
  return tuple(dict.fromkeys(a for a in lines if scoring.normalize_answer(a)))


def distinct(answers: Iterable[str]) -> tuple[str, ...]:
  """Returns distinct answers in order, without empty ones."""
  return tuple(dict.fromkeys(a for a in map(line, answers) if a))


def clean(
  found: formats.Found, aliases: Mapping[str, Sequence[str]]
) -> formats.Found:
  """Removes control characters and adds the answers of the dataset's script.

  Args:
    found: a question as its file has it.
    aliases: by `answer_id`, names that the dataset's script also accepts.

  Raises:
    MalformedError: a text is unreadable, or the question is empty.
  """
  question = _readable(found.question, "a question")
  answers = tuple(_readable(a, "an answer") for a in found.answers)
  id_ = _readable(found.id, "an id")
  if not leaks.key(question):
    raise formats.MalformedError("an empty question")
  mended = found.mended
  if (question, answers, id_) != (found.question, found.answers, found.id):
    mended = (*mended, "control characters")
  metadata = found.metadata
  if names := aliases.get(metadata.get("answer_id", "")):
    accepted = dict.fromkeys((*answers, *names))
    metadata = {**metadata, official_scoring.ANSWERS: list(accepted)}
  return found._replace(
    question=question,
    answers=answers,
    id=id_,
    metadata=metadata,
    mended=mended,
  )


def line(text: str) -> str:
  """Returns a text in one line, with single spaces."""
  return " ".join(whole(text).split())


def whole(text: str) -> str:
  """Replaces unpaired surrogates: JSON can hold them, UTF-8 cannot."""
  return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _readable(text: str, what: str) -> str:
  """Returns a text without control characters; errors call it `what`."""
  # NUL indicates that the file was decoded with a wrong encoding.
  if "\0" in text:
    raise formats.MalformedError(f"{what} with the character NUL")
  if len(text) > LONGEST:
    raise formats.MalformedError(f"{what} of more than {LONGEST} characters")
  return _CONTROLS.sub(" ", text)
