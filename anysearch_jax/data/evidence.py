"""The passages and queries that lead to a question's answer.

They are in a question's metadata, under the names of `data/formats`:
`supporting` passages, and `search_keys` (StepSearch's rows) or `sub_questions`
(MuSiQue's). `world.with_evidence` adds them to questions of the generated
world. `launch.prepare_data --passages` adds supporting passages to questions
that name passages of a corpus. Rows of BrowseComp-Plus hide theirs, and rows of
FRAMES link them.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import operator
import re
import urllib.parse
from collections.abc import Iterable, Mapping
from typing import Any

from anysearch_jax import types
from anysearch_jax.environment import citations

Passages = tuple[str, ...]
Keys = tuple[tuple[str, ...], ...]

# A later step of MuSiQue refers to an earlier step's answer by its number.
_EARLIER = re.compile(r"#(\d+)")
_KINDS = "gold", "evidence"
# Number of questions that an error lists.
_NAMED = 5


def of_metadata(metadata: Mapping[str, Any]) -> tuple[Passages, Keys]:
  """Returns a question's gold passages and its groups of search keys.

  Returns:
    Title and text of each passage that has a text; and, for each step to the
    answer, the group of equivalent queries. Either may be empty.
  """
  passages = tuple(
    f"{passage['title']} {passage['text']}"
    for passage in metadata.get("supporting", ())
    if passage.get("text")
  )
  keys = tuple(map(tuple, metadata.get("search_keys", ())))
  keys = keys or tuple(
    (step,) for step in _resolved(metadata.get("sub_questions", ()))
  )
  return passages, keys


def measure(
  trajectory: types.Trajectory, cited: citations.Cited
) -> dict[str, float]:
  """Returns shares of its question's evidence that an episode found and cited.

  As evaluate_run.py of BrowseComp-Plus: `gold_recall` and `evidence_recall` of
  what searches showed, `citation_precision` and `citation_recall` of what the
  answer cites. Evidence is `evidence_doc_ids`, or the titles in `supporting`.
  """
  known = trajectory.question.metadata
  shown = [p for each in trajectory.observations for p in each.passages]
  marked = [passage for _, passage in cited.citations]
  gold, needed = (set(known.get(f"{k}_doc_ids", ())) for k in _KINDS)
  seen, named = ({p.id for p in passages} for passages in (shown, marked))
  shares = {"gold_recall": (gold & seen, gold)}
  if not needed:
    needed = {_folded(each["title"]) for each in known.get("supporting", ())}
    seen, named = ({_folded(p.title) for p in x} for x in (shown, marked))
  shares["evidence_recall"] = needed & seen, needed
  if needed and (named or cited.refused):
    everything = named | set(map(str, cited.refused))
    shares["citation_precision"] = needed & named, everything
    shares["citation_recall"] = needed & named, needed
  return {k: len(part) / len(of) for k, (part, of) in shares.items() if of}


def _folded(title: str) -> str:
  return title.strip(' "').casefold()


def gold(question: types.Question) -> tuple[Passages, Keys]:
  """Returns `of_metadata` of a question, which must have evidence.

  Raises:
    ValueError: it has neither passages nor search keys.
  """
  check([question])
  return of_metadata(question.metadata)


def check(questions: Iterable[types.Question]) -> None:
  """Checks, before any sampling, that every question has evidence.

  Raises:
    ValueError: some have none; the error counts them and lists the first.
  """
  count, lacking = 0, []
  for question in questions:
    count += 1
    if not any(of_metadata(question.metadata)):
      lacking.append(question.id)
  if lacking:
    more = ", ..." if len(lacking) > _NAMED else ""
    raise ValueError(
      f"Found {len(lacking)} of {count} questions without evidence "
      f"({', '.join(lacking[:_NAMED])}{more}); StepSearch is rewarded by it. "
      "Expected supporting passages with their texts, search keys or "
      "sub-questions in the metadata of each. Prepare the questions again with "
      "--evidence, which leaves such training questions out, or train on "
      "another data.split; docs/data.md says which files have evidence."
    )


def _resolved(steps: Iterable[dict[str, str]]) -> Iterable[str]:
  """Yields the sub-questions with references replaced by earlier answers."""
  answers: list[str] = []

  def answer(match: re.Match[str]) -> str:
    place = int(match[1]) - 1
    return answers[place] if 0 <= place < len(answers) else match[0]

  for step in steps:
    yield _EARLIER.sub(answer, step["question"])
    answers.append(step["answer"])


def decrypted(row: Mapping[str, Any]) -> dict[str, Any]:
  """Returns query, answer and ids of documents of a row of BrowseComp-Plus.

  Texts are base64 of UTF-8 that is XORed with the repeated SHA-256 of a canary,
  the row's `canary` (texttron/BrowseComp-Plus, scripts_build_index/
  decrypt_dataset.py); a query with spaces is plain.

  Raises:
    ValueError, KeyError, TypeError: the row has another form or canary.
  """
  key = hashlib.sha256((row.get("canary") or "").encode()).digest()

  def shown(text: str) -> str:
    if " " in row["query"]:
      return text
    data = base64.b64decode(text, validate=True)
    return bytes(map(operator.xor, data, itertools.cycle(key))).decode()

  return {name: shown(row[name]) for name in ("query", "answer")} | {
    f"{kind}_doc_ids": [shown(each["docid"]) for each in row[f"{kind}_docs"]]
    for kind in ("gold", "evidence")
  }


def linked_articles(row: Mapping[str, Any]) -> list[str]:
  """Returns the titles of the Wikipedia articles that a row of FRAMES links.

  A cell has an address, the text of a list, or several of them with remarks.
  """
  links = [
    link.split()[0].strip("'\"[],;")
    for name, cell in row.items()
    if name.startswith(("wiki_links", "wikipedia_link"))
    for link in re.split("(?=https?://)", str(cell))[1:]
  ]
  paths = (re.search(r"/wiki/([^?#]+)", link) for link in links)
  named = (urllib.parse.unquote(path[1]) for path in paths if path)
  return list(dict.fromkeys(name.replace("_", " ") for name in named))
