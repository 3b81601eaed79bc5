"""The passages and queries that lead to a question's answer.

They are in a question's metadata, under the names of `data/formats`:
`supporting` passages, and `search_keys` (StepSearch) or `sub_questions`
(MuSiQue). `world.with_evidence` adds them to questions of the generated world,
and `launch.prepare_data --passages` to questions that name passages of a
corpus. Rows of BrowseComp-Plus encrypt them, and rows of FRAMES link them.
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
from anysearch_jax.host import listing

Passages = tuple[str, ...]
Keys = tuple[tuple[str, ...], ...]

# A later step of MuSiQue refers to an earlier step's answer by its number.
_REFERENCE = re.compile(r"#(\d+)")


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
  """Returns the shares of a question's evidence that an episode used.

  They are those of evaluate_run.py of BrowseComp-Plus. Evidence is
  `evidence_doc_ids`, or the titles in `supporting`.

  Args:
    trajectory: the episode, with the evidence in its question's metadata.
    cited: its answer with the citations.

  Returns:
    `gold_recall` and `evidence_recall` of the passages that searches showed;
    `citation_precision` and `citation_recall` of the answer's citations. A
    share is missing if it would be divided by 0, or nothing is cited.
  """
  metadata = trajectory.question.metadata
  shown_passages = [
    passage
    for observation in trajectory.observations
    for passage in observation.passages
  ]
  cited_passages = [passage for _, passage in cited.citations]
  gold_ids = set(metadata.get("gold_doc_ids", ()))
  evidence = set(metadata.get("evidence_doc_ids", ()))
  shown_keys = {passage.id for passage in shown_passages}
  cited_keys = {passage.id for passage in cited_passages}
  # Numerator and denominator of each share.
  shares = {"gold_recall": (gold_ids & shown_keys, gold_ids)}
  if not evidence:
    supporting = metadata.get("supporting", ())
    evidence = {_folded(passage["title"]) for passage in supporting}
    shown_keys = {_folded(passage.title) for passage in shown_passages}
    cited_keys = {_folded(passage.title) for passage in cited_passages}
  shares["evidence_recall"] = (evidence & shown_keys, evidence)
  if evidence and (cited_keys or cited.refused):
    all_cited = cited_keys | set(map(str, cited.refused))
    shares["citation_precision"] = (evidence & cited_keys, all_cited)
    shares["citation_recall"] = (evidence & cited_keys, evidence)
  return {
    name: len(part) / len(total)
    for name, (part, total) in shares.items()
    if total
  }


def _folded(title: str) -> str:
  return title.strip(' "').casefold()


def gold(question: types.Question) -> tuple[Passages, Keys]:
  """Returns the gold passages and search keys of a question with evidence.

  Raises:
    ValueError: it has neither passages nor search keys.
  """
  check([question])
  return of_metadata(question.metadata)


def check(questions: Iterable[types.Question]) -> None:
  """Checks, before any sampling, that every question has evidence.

  Raises:
    ValueError: questions have no evidence; the error counts them and lists the
      first.
  """
  count = 0
  lacking_ids = []
  for question in questions:
    count += 1
    if not any(of_metadata(question.metadata)):
      lacking_ids.append(question.id)
  if lacking_ids:
    listed = listing.first_names(lacking_ids, limit=5)
    raise ValueError(
      f"Found {len(lacking_ids)} of {count} questions without evidence "
      f"({listed}); StepSearch is rewarded by it. "
      "Expected supporting passages with their texts, search keys or "
      "sub-questions in the metadata of each. Prepare the questions again with "
      "--evidence, which leaves such training questions out, or train on "
      "another data.split; docs/data.md says which files have evidence."
    )


def _resolved(steps: Iterable[dict[str, str]]) -> Iterable[str]:
  """Yields the sub-questions with references replaced by earlier answers."""
  answers: list[str] = []

  def earlier_answer(match: re.Match[str]) -> str:
    index = int(match[1]) - 1
    return answers[index] if 0 <= index < len(answers) else match[0]

  for step in steps:
    yield _REFERENCE.sub(earlier_answer, step["question"])
    answers.append(step["answer"])


def decrypted(row: Mapping[str, Any]) -> dict[str, Any]:
  """Returns query, answer and document ids of a row of BrowseComp-Plus.

  Texts are base64 of UTF-8 that is XORed with the repeated SHA-256 of the row's
  `canary` (texttron/BrowseComp-Plus, scripts_build_index/decrypt_dataset.py). A
  row whose query has spaces is not encrypted.

  Raises:
    ValueError, KeyError, TypeError: the row has another form or canary.
  """
  key = hashlib.sha256((row.get("canary") or "").encode()).digest()

  def decrypt(text: str) -> str:
    if " " in row["query"]:
      return text
    data = base64.b64decode(text, validate=True)
    return bytes(map(operator.xor, data, itertools.cycle(key))).decode()

  texts = {name: decrypt(row[name]) for name in ("query", "answer")}
  ids = {
    f"{kind}_doc_ids": [decrypt(doc["docid"]) for doc in row[f"{kind}_docs"]]
    for kind in ("gold", "evidence")
  }
  return texts | ids


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
  names = (urllib.parse.unquote(path[1]) for path in paths if path)
  return list(dict.fromkeys(name.replace("_", " ") for name in names))
