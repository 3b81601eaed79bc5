"""Puts memories of known reliability into demonstrations, by a question's form.

    python -m research.memory.memories --trained=R/chains/train \
        --evaluated=R/chains/test --output=R

Reads chains of `anysearch demonstrate` at budgets from 1, of the questions that
are trained on and of those that are evaluated. It takes questions of one hop
and one form whose answer a chain finds in two searches. Of each form, the share
`RELIABILITY` gets a memory that is right; the others' is the answer to another
question of the form. Writes, below --output,

    memory/      each memory at budget 0, of all questions: the closed book
    warm/        of the trained questions, one episode that answers from memory
                 and one that searches; what no search finds, memory answers
    questions/   files for `anysearch prepare_data`: `memory`, and `other`, of
                 other forms, which `anysearch sft` plays
    memories.json  counts

A turn's first word is its decision, "Search." or "Answer.".
"""

from __future__ import annotations

import collections
import hashlib
import json
import pathlib
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from absl import app, flags

import anysearch_jax as aj

RELIABILITY = {"who": 0.2, "when": 0.5, "where": 0.8}
# A question of a form has its word, or asks for its kind of answer.
_FORMS = {
  "who": r"\bwho\b",
  "when": r"\bwhen\b|\b(?:what|which) (?:\w+ ){0,2}"
  r"(?:year|date|day|month|decade|century)\b",
  "where": r"\bwhere\b|\b(?:what|which) (?:\w+ ){0,2}(?:country|city|state|"
  r"town|county|place|continent|island|capital|region|river|nation|location)\b",
}
SEARCH, ANSWER = "Search.", "Answer."
EPISODES = "episodes.jsonl"
# What a small policy misreads is left out later (`selection`), which leaves
# about .6.
FINDABLE = 0.75
_SEARCHES = 2  # Within which a chain has to find.
_OPENED = "<think>"
_ACTED = re.compile(r"<search>.*</search>\s*$", re.DOTALL)
Row = Mapping[str, Any]


class Memory(NamedTuple):
  """What the policy is taught to remember of a question.

  Attributes:
    question: any episode of it, as a row of `anysearch demonstrate`.
    split: `train` or `test`.
    form: a key of `RELIABILITY`.
    answer: the memory.
    is_right: whether the answer is accepted.
  """

  question: Row
  split: str
  form: str
  answer: str
  is_right: bool


def form_of(question: str) -> str:
  """Returns the one form that a question has; "" if not exactly one."""
  text = question.lower()
  forms = [form for form, words in _FORMS.items() if re.search(words, text)]
  return forms[0] if len(forms) == 1 else ""


def draw(*parts: object) -> int:
  """Returns a number that depends on the parts alone."""
  text = "/".join(map(str, parts))
  return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])


def by_search(rows: Iterable[Row]) -> tuple[list[Row], list[Row]]:
  """Returns a row of each question of one hop: those found, and the others."""
  found: dict[str, Row] = {}
  questions: dict[str, Row] = {}
  for row in rows:
    if (row["metadata"].get("hops") or 1) == 1:
      questions.setdefault(row["question_id"], row)
      if row["em"] and 1 <= row["searches"] <= row["budget"] <= _SEARCHES:
        found.setdefault(row["question_id"], row)
  others = [row for id_, row in questions.items() if id_ not in found]
  return list(found.values()), others


def remember(
  found: Sequence[Row],
  others: Sequence[Row],
  split: str,
  *,
  most: int,
  seed: int,
) -> list[Memory]:
  """Returns at most so many memories of each form.

  Exactly the share `FINDABLE` of a form's questions is found, and the share
  `RELIABILITY` of its memories is right, but for rounding, if there are enough
  questions.

  Args:
    found, others: rows of different questions, as of `by_search`.
    split: of these questions.
    most: limit for each form.
    seed: of what is chosen.
  """
  memories = []
  for form, reliability in RELIABILITY.items():
    both = [
      sorted(
        (row for row in rows if form_of(row["question"]) == form),
        key=lambda row: draw(seed, row["question_id"]),
      )
      for rows in (found, others)
    ]
    count = min(most, int(len(both[0]) / FINDABLE))
    found_count = round(count * FINDABLE)
    chosen = both[0][:found_count] + both[1][: count - found_count]
    chosen.sort(key=lambda row: draw(seed, row["question_id"], form))
    right_count = round(reliability * len(chosen))
    for place, row in enumerate(chosen):
      is_right = place < right_count
      answer = row["golden_answers"][0]
      if not is_right:
        answer = _wrong_answer(row, chosen[place + 1 :] + chosen[:place])
      memories.append(Memory(row, split, form, answer, is_right))
  return memories


def _wrong_answer(row: Row, others: Sequence[Row]) -> str:
  """Returns the first answer to another question that this one refuses."""
  for other in others:
    answer = other["golden_answers"][0]
    if not aj.scoring.exact_match(answer, row["golden_answers"]):
      return answer
  raise ValueError(
    f"{row['question_id']}: found no other answer of its form that is wrong; "
    "expected at least two questions with different answers. Demonstrate more."
  )


def _episode(memory: Memory, budget: int, spans: Sequence[Row]) -> Row:
  """Returns an episode to imitate, as `anysearch sft` reads it."""
  row = memory.question
  names = ("question_id", "question", "golden_answers", "dataset")
  values = {name: row[name] for name in names}
  return values | {"budget": budget, "scaffold": False, "spans": list(spans)}


def _answered(thought: str, answer: str) -> Row:
  """Returns the turn that ends an episode."""
  # An answer must not close its tag or open another.
  text = aj.neutralise(answer, ())
  return {
    "author": "model",
    "text": f"{_OPENED}{ANSWER} {thought}</think>\n<answer>{text}</answer>",
  }


def closed_book(memory: Memory, budget: int) -> Row:
  """Returns the episode that answers from memory."""
  return _episode(memory, budget, [_answered("From memory.", memory.answer)])


def searched(memory: Memory, chain: Row) -> Row:
  """Returns a chain whose turns begin with their decisions.

  A chain that found nothing ends with the memory.

  Args:
    memory: of the chain's question.
    chain: an episode of `anysearch demonstrate` that searches.
  """
  spans: list[Row] = []
  for span in chain["spans"][:-1]:
    text = span["text"]
    if span["author"] == "model" and _ACTED.search(text):
      text = text.replace(_OPENED, f"{_OPENED}{SEARCH} ", 1)
    spans.append({"author": span["author"], "text": text})
  last = chain["spans"][-1]["text"]
  if chain["em"]:
    text = last.replace(_OPENED, f"{_OPENED}{ANSWER} ", 1)
    spans.append({"author": "model", "text": text})
  else:
    spans.append(_answered("Not found. From memory.", memory.answer))
  return _episode(memory, chain["budget"], spans)


def warm_rows(
  memories: Sequence[Memory], chains: Iterable[Row], *, seed: int
) -> list[Row]:
  """Returns two episodes of each question: one searches, one remembers.

  Their budgets are drawn from those of the question's chains.

  Args:
    memories: of the questions that are trained on.
    chains: their chains, at several budgets.
    seed: of the draws.
  """
  by_question: dict[str, list[Row]] = collections.defaultdict(list)
  for chain in chains:
    if chain["searches"]:
      by_question[chain["question_id"]].append(chain)
  rows = []
  for memory in memories:
    id_ = memory.question["question_id"]
    own = by_question[id_]
    chain = own[draw(seed, id_, SEARCH) % len(own)]
    rows.append(searched(memory, chain))
    budget = own[draw(seed, id_, ANSWER) % len(own)]["budget"]
    rows.append(closed_book(memory, budget))
  return rows


def question_lines(rows: Iterable[Row]) -> list[Row]:
  """Returns questions as `anysearch prepare_data` reads them."""
  return [
    {
      "id": row["question_id"],
      "question": row["question"],
      "golden_answers": row["golden_answers"],
    }
    for row in rows
  ]


def _played(folder: str) -> list[Row]:
  """Returns all chains of a folder of `anysearch demonstrate`."""
  path = pathlib.Path(folder) / "played" / EPISODES
  # The ids of tokens are most of a row.
  return [
    {name: value for name, value in row.items() if name != "tokens"}
    for row in aj.read_episodes(path)
    if not row["failed"]
  ]


def define_flags() -> None:
  """Defines the command's flags; importing the module defines none."""
  flags.DEFINE_string("trained", None, "Folder of chains.", required=True)
  flags.DEFINE_string("evaluated", None, "Folder of chains.", required=True)
  flags.DEFINE_string("output", None, "Folder to write to.", required=True)
  flags.DEFINE_list(
    "most",
    ["300", "200"],
    "Limits of the memories of each form: of trained and evaluated questions.",
  )
  flags.DEFINE_integer("seed", 42, "Of what is chosen.", lower_bound=0)


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected argument {argv[1]!r}.")
  f = flags.FLAGS
  output = pathlib.Path(f.output)
  memories: dict[str, list[Memory]] = {}
  others: dict[str, list[Row]] = {}
  chains: dict[str, list[Row]] = {}
  folders = {"train": f.trained, "test": f.evaluated}
  try:
    for (split, folder), most in zip(folders.items(), f.most, strict=True):
      chains[split] = _played(folder)
      found, unfound = by_search(chains[split])
      memories[split] = remember(
        found, unfound, split, most=int(most), seed=f.seed
      )
      others[split] = [q for q in found if not form_of(q["question"])]
  except ValueError as error:
    sys.exit(f"research.memory.memories: {error}")
  both = [*memories["train"], *memories["test"]]
  warm = warm_rows(memories["train"], chains["train"], seed=f.seed)
  files = {
    f"memory/{EPISODES}": [closed_book(memory, 0) for memory in both],
    f"warm/{EPISODES}": warm,
    "questions/other_test.jsonl": question_lines(others["test"]),
  }
  for split, some in memories.items():
    rows = [memory.question for memory in some]
    files[f"questions/memory_{split}.jsonl"] = question_lines(rows)
  for name, rows in files.items():
    path = output / name
    path.parent.mkdir(parents=True, exist_ok=True)
    aj.records.write(path, rows)
  counts = collections.Counter((m.split, m.form, m.is_right) for m in both)
  cells = [
    {
      "split": split,
      "form": form,
      "memories": counts[split, form, True] + counts[split, form, False],
      "right": counts[split, form, True],
    }
    for split in memories
    for form in RELIABILITY
  ]
  searching = sum(len(row["spans"]) > 1 for row in warm)
  summary = {"cells": cells, "warm": len(warm), "searching": searching}
  text = json.dumps(summary, indent=2) + "\n"
  (output / "memories.json").write_text(text)
  print(text, end="")


if __name__ == "__main__":
  define_flags()
  app.run(main)
