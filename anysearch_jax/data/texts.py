"""Questions and answers as they are stored: one line of readable text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from anysearch_jax.data import formats, leaks
from anysearch_jax.environment import official_scoring, scoring

# Ten times the longest question of the known sets; what is longer is a
# document in the wrong column.
LONGEST = 10_000
# Control characters that are no white space.
_CONTROLS = re.compile("[\x01-\x08\x0e-\x1b\x7f]")


def ask(text: str) -> str:
  """A question as the policy reads it: one line that ends in `?`."""
  text = line(text)
  inner = text[1:-1]
  # TriviaQA has cells of a table as they stood there, with quotes doubled.
  if text[:1] == text[-1:] == '"' and '""' in inner:
    if '"' not in inner.replace('""', ""):
      text = line(inner.replace('""', '"'))
  return text if text.endswith("?") else f"{text}?"


def accept(answers: Iterable[str]) -> tuple[str, ...]:
  """Distinct answers in order, without those that normalise to nothing."""
  lines = map(line, answers)
  return tuple(dict.fromkeys(a for a in lines if scoring.normalize_answer(a)))


def distinct(answers: Iterable[str]) -> tuple[str, ...]:
  """Distinct answers in order, without empty ones."""
  return tuple(dict.fromkeys(a for a in map(line, answers) if a))


def clean(
  found: formats.Found, aliases: Mapping[str, Sequence[str]]
) -> formats.Found:
  """A question in readable text, with all answers that its script accepts.

  Raises:
    MalformedError: it cannot be read, or asks nothing.
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
  if names := aliases.get(metadata.get("answer_id")):
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
  """A text in one line, with single spaces."""
  return " ".join(whole(text).split())


def whole(text: str) -> str:
  """Halves of characters, which JSON can hold and no file, are replaced."""
  return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _readable(text: str, what: str) -> str:
  """A text without control characters; `what` it is, an error says."""
  # A file that was read in a wrong encoding has NULs.
  if "\0" in text:
    raise formats.MalformedError(f"{what} with the character NUL")
  if len(text) > LONGEST:
    raise formats.MalformedError(f"{what} of more than {LONGEST} characters")
  return _CONTROLS.sub(" ", text)
