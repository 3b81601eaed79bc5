"""Turns question files into clean questions for each dataset and split.

Every row is either kept or dropped, and dropped rows are counted by reason:
`read == kept + sum(dropped)` for each dataset and split.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import pathlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from anysearch_jax.data import evidence, files, formats
from anysearch_jax.environment import scoring
from anysearch_jax.host import disk, listing

T = TypeVar("T")
SPLITS = ("train", "dev", "test")
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*")
_DATASETS = {
  "naturalquestions": "nq",
  "natural_questions": "nq",
  "nq_open": "nq",
  "trivia_qa": "triviaqa",
  "hotpot": "hotpotqa",
  "hotpot_qa": "hotpotqa",
  "2wiki": "2wikimultihopqa",
  "2wikimultihop": "2wikimultihopqa",
}
_SEED = 42  # Of the order of a mix.
_SPLITS = {"val": "dev", "valid": "dev", "validation": "dev"}


class Input(NamedTuple):
  """A file to read.

  Attributes:
    path: the file.
    dataset: name of its dataset; "": each row names its own.
    split: name of its split; "": each row names its own.
    format: a name of `formats.FORMATS`; "": recognised from the first row.
  """

  path: pathlib.Path
  dataset: str = ""
  split: str = ""
  format: str = ""


@dataclasses.dataclass(frozen=True)
class Settings:
  """How questions become training and evaluation sets.

  Attributes:
    mix: datasets whose training splits are mixed into `train.parquet`.
    skip_malformed: drop and count rows that are not questions, instead of
      raising an error.
    evidence: drop training questions without evidence (`data/evidence`), which
      the reward of StepSearch needs.
  """

  mix: tuple[str, ...] = ()
  skip_malformed: bool = False
  evidence: bool = False


class Entry(NamedTuple):
  """A question in the common schema; `metadata` is JSON."""

  id: str
  question: str
  golden_answers: tuple[str, ...]
  dataset: str
  split: str
  hops: int | None
  metadata: str


@dataclasses.dataclass
class Part:
  """One split of a dataset: its questions, and counts of the other rows.

  Attributes:
    entries: the questions.
    read: number of rows read.
    dropped: number of rows that are not among the entries, by reason.
    unmatched: number of evaluation questions whose answers all normalise to "".
      They remain, so that a dataset has its published size; their exact match
      is 0.
  """

  entries: list[Entry] = dataclasses.field(default_factory=list)
  read: int = 0
  dropped: Counter[str] = dataclasses.field(default_factory=Counter)
  unmatched: int = 0

  def keep(self, entries: Sequence[Entry], reason: str) -> None:
    """Keeps these entries only, and counts the others as dropped."""
    if lost := len(self.entries) - len(entries):
      self.dropped[reason] += lost
    self.entries = list(entries)


Parts = dict[str, Part]


def dataset_name(name: str) -> str:
  """Returns the canonical name of a dataset.

  Raises:
    formats.DataError: the name has characters that are not allowed.
  """
  # Recipes of verl write searchR1_nq.
  plain_name = name.lower().removeprefix("searchr1_")
  name = _DATASETS.get(plain_name, plain_name)
  if not _NAME.fullmatch(name):
    raise formats.DataError(f"Found dataset {name!r}, expected a plain name.")
  return name


def split_name(name: str) -> str:
  """Returns the canonical name of a split, one of `SPLITS`.

  Raises:
    formats.DataError: the split is unknown.
  """
  name = _SPLITS.get(name.lower(), name.lower())
  if name not in SPLITS:
    raise formats.DataError(
      f"Found split {name!r}, expected one of {', '.join(SPLITS)}."
    )
  return name


def prepare(
  inputs: Sequence[Input],
  settings: Settings,
  *,
  aliases: Mapping[str, Sequence[str]] = {},
  corpus: pathlib.Path | None = None,
  canary: str = "",
  train_share: float = 0.0,
) -> tuple[Parts, list]:
  """Reads and cleans all files.

  Args:
    inputs: the files; questions keep this order.
    settings: which questions are kept.
    aliases: by `answer_id`, the names that 2WikiMultihopQA's script accepts.
    corpus: file with the passages that training questions name by
      `gold_doc_ids`.
    canary: decrypts encrypted rows without a canary of their own, see
      `evidence.decrypted`.
    train_share: share of the questions that become `train`, the others `test`,
      where neither file nor row names a split; 0: each must. The text of a
      question decides, so that it stays where it is when others are added.

  Returns:
    The parts by `<dataset>_<split>`, and a line of the manifest for each input.

  Raises:
    formats.DataError: a row is not a question (the error has its file and
      number) or has no known dataset or split; two questions have the same id;
      or a file cannot be read.
  """
  parts: Parts = collections.defaultdict(Part)
  listed = [
    _read_input(x, parts, settings, aliases, canary, train_share)
    for x in inputs
  ]
  training = {n: part for n, part in parts.items() if n.endswith("_train")}
  for name, part in parts.items():
    reason = "asked twice, answers merged" if name in training else "read twice"
    part.keep(_merge_repeated(part.entries), reason)
  evaluated = {
    formats.question_key(entry.question)
    for name, part in parts.items()
    if name not in training
    for entry in part.entries
  }
  for part in training.values():
    kept_entries = [
      entry
      for entry in part.entries
      if formats.question_key(entry.question) not in evaluated
    ]
    part.keep(kept_entries, "in an evaluation split")
  if corpus:
    entries = [e for part in training.values() for e in part.entries]
    texts = iter(add_supporting([e.metadata for e in entries], corpus))
    for part in training.values():
      part.entries = [e._replace(metadata=next(texts)) for e in part.entries]
  if settings.evidence:
    for part in training.values():
      evidence_of_entries = (
        evidence.of_metadata(json.loads(e.metadata)) for e in part.entries
      )
      kept_entries = [
        e
        for e, found_evidence in zip(part.entries, evidence_of_entries)
        if any(found_evidence)
      ]
      part.keep(kept_entries, "no evidence")
  return dict(sorted(parts.items())), listed


def mix(parts: Parts, settings: Settings) -> list[Entry]:
  """Returns the training questions of `settings.mix`, shuffled.

  Raises:
    formats.DataError: a dataset of the mix has no training questions.
  """
  entries: list[Entry] = []
  for dataset in settings.mix:
    part = parts.get(f"{dataset}_train")
    if part is None or not part.entries:
      available = [
        n.removesuffix("_train") for n in parts if n.endswith("_train")
      ]
      reasons = part.dropped if part else {}
      lost = ", ".join(f"{n:,} {reason}" for reason, n in reasons.items())
      left_out = f" (left out: {lost})" if lost else ""
      raise formats.DataError(
        f"The mix asks for {dataset}, which has no training questions here"
        f"{left_out}; choose from {listing.first_names(available) or 'none'}, "
        "or leave the mix out: anysearch prepare_data --mix=."
      )
    entries += part.entries
  seed = np.random.SeedSequence((_SEED, len(entries)))
  rng = np.random.Generator(np.random.PCG64(seed))
  return [entries[i] for i in rng.permutation(len(entries))]


def shuffled(id_: str) -> bytes:
  """Returns a sort key of an id, whose order is pseudo-random and fixed."""
  return hashlib.sha256(id_.encode()).digest()


def _read_input(
  source: Input,
  parts: Parts,
  settings: Settings,
  aliases: Mapping[str, Sequence[str]],
  canary: str,
  train_share: float,
) -> dict[str, Any]:
  """Adds a file's questions to `parts` and returns its manifest line."""
  format_ = source.format
  count = 0
  for number, row in files.rows(source.path):
    count += 1
    dataset = source.dataset
    split = source.split
    try:
      if isinstance(row, formats.MalformedError):
        raise row
      format_ = format_ or formats.recognize(row) or ""
      if not format_:
        raise formats.DataError(
          f"{source.path}, row {number}: found columns "
          f"{listing.first_names(row)}; "
          f"expected those of {', '.join(formats.FORMATS)}, or the name of a "
          "format."
        )
      if canary:
        row = {"canary": canary, **row}
      raw = formats.read(row, format_)
      dataset, split = _dataset_and_split(raw, source, train_share)
      raw = formats.clean(raw, aliases)
      _add_entry(raw, parts[f"{dataset}_{split}"], dataset, split)
    except formats.MalformedError as error:
      if not settings.skip_malformed:
        raise formats.DataError(
          f"{source.path}, row {number}: {error}. Correct it, or have "
          "such rows left out: anysearch prepare_data --skip_malformed."
        ) from error
      part = parts[f"{dataset or 'unknown'}_{split or 'unknown'}"]
      part.read += 1
      part.dropped[f"malformed: {error}"] += 1
  return {
    "path": str(source.path),
    "dataset": source.dataset,
    "split": source.split,
    "format": format_,
    "rows": count,
    **disk.fingerprint(source.path),
  }


def name_of_file(path: pathlib.Path) -> str:
  """Returns the name of the dataset in a file whose rows name none."""
  stem = path.name.partition(".")[0].lower()
  return re.sub("[^a-z0-9]+", "-", stem).strip("-") or "own"


def _drawn_split(question: str, train_share: float) -> str:
  """Returns the split to which the text of a question assigns it."""
  number = int.from_bytes(shuffled(formats.question_key(question))[:8])
  return "train" if number < train_share * 2**64 else "test"


def _dataset_and_split(
  raw: formats.RawQuestion, source: Input, train_share: float
) -> tuple[str, str]:
  """Returns the dataset and the split of a row, named by its file or itself."""
  try:
    row_dataset = dataset_name(raw.dataset) if raw.dataset else ""
    # The file's split wins, because Search-R1 calls every evaluation set test.
    split = source.split or (split_name(raw.split) if raw.split else "")
  except formats.DataError as error:
    raise formats.MalformedError(str(error).rstrip(".")) from error
  if source.dataset and row_dataset and row_dataset != source.dataset:
    raise formats.MalformedError(
      f"a question of {row_dataset} in a file of {source.dataset}"
    )
  dataset = source.dataset or row_dataset
  if train_share:
    dataset = dataset or name_of_file(source.path)
    split = split or _drawn_split(raw.question, train_share)
  if not dataset or not split:
    raise formats.DataError(
      f"{source.path}: its rows do not name their "
      f"{'split' if dataset else 'dataset'}; name it, as in "
      f"--input=nq:train={source.path}, or have 80 % of the rows be for "
      "training: --split=0.8."
    )
  return dataset, split


def _add_entry(
  raw: formats.RawQuestion, part: Part, dataset: str, split: str
) -> None:
  """Adds a clean question to its part, or drops it if it has no answer."""
  part.read += 1
  accepted = formats.accepted_answers(raw.answers)
  if not accepted and split != "train":
    accepted = formats.distinct_answers(raw.answers)
    part.unmatched += bool(accepted)
  if not accepted:
    part.dropped["no answer"] += 1
    return
  metadata = json.dumps(dict(raw.metadata), ensure_ascii=False, sort_keys=True)
  id_ = raw.id or f"{split}_{part.read - 1}"
  question = raw.question.strip()
  if not raw.verbatim:
    question = formats.as_question(raw.question)
  part.entries.append(
    Entry(
      id=formats.line(f"{dataset}/{id_}"),
      question=question,
      golden_answers=accepted,
      dataset=dataset,
      split=split,
      hops=raw.hops,
      metadata=formats.without_surrogates(metadata),
    )
  )


def _merge_repeated(entries: Sequence[Entry]) -> list[Entry]:
  """Merges repeated questions and unites their answers.

  Training questions are merged if their normalised texts are equal. Evaluation
  questions are merged only if their ids are equal, so that a dataset keeps its
  published questions.
  """
  merged: dict[str, Entry] = {}
  ids: dict[str, Entry] = {}
  for entry in entries:
    normalized = scoring.normalize_answer(entry.question)
    same_id = ids.setdefault(entry.id, entry)
    if scoring.normalize_answer(same_id.question) != normalized:
      raise formats.DataError(
        f"Two questions have the id {entry.id!r} in {entry.dataset} "
        f"{entry.split}: {same_id.question!r} and {entry.question!r}. Read "
        "only one of their files, or correct it."
      )
    merge_key = normalized if entry.split == "train" else entry.id
    first_entry = merged.setdefault(merge_key, entry)
    if first_entry is not entry:
      answers = dict.fromkeys(first_entry.golden_answers + entry.golden_answers)
      merged[merge_key] = first_entry._replace(golden_answers=tuple(answers))
  return list(merged.values())


def _map_rows(
  path: pathlib.Path, read: Callable[[formats.Row], T], sentence: str
) -> Iterator[T]:
  """Yields the result of `read` for each row of a file.

  The error of a malformed row is `sentence`, with `{error}` filled in.
  """
  for number, row in files.rows(path):
    try:
      if isinstance(row, formats.MalformedError):
        raise row
      yield read(row)
    except (formats.MalformedError, KeyError, TypeError) as error:
      raise formats.DataError(
        f"{path}, row {number}: {sentence.format(error=error)}"
      ) from error


def read_aliases(path: pathlib.Path) -> dict[str, list[str]]:
  """Returns 2WikiMultihopQA's aliases and demonyms of entities, by their ids.

  Raises:
    formats.DataError: a row does not have the form of its `id_aliases.json`, or
      the file cannot be read.
  """

  def names_of_entity(row: formats.Row) -> tuple[str, list[str]]:
    id_ = row["Q_id"]
    names: list[str] = []
    for column in ("aliases", "demonyms"):
      names += map(formats.text, formats.listed(row, column))
    return id_, names

  sentence = (
    "found no Q_id with aliases and demonyms ({error}); expected "
    "2WikiMultihopQA's id_aliases.json."
  )
  aliases: dict[str, list[str]] = {}
  for id_, names in _map_rows(path, names_of_entity, sentence):
    aliases[id_] = [*aliases.get(id_, ()), *names]
  return aliases


def add_supporting(metadata: Sequence[str], corpus: pathlib.Path) -> list[str]:
  """Adds `supporting` to metadata that has `gold_doc_ids` but no texts.

  Args:
    metadata: the metadata of questions, as JSON.
    corpus: JSON lines in Search-R1's layout (`id`, `contents`), also `.gz`; it
      is read once.

  Returns:
    The metadata in the same order.

  Raises:
    formats.DataError: the corpus is not in this layout, lacks a passage or has
      two of one id, or cannot be read.
  """
  values_of_questions: list[dict[str, Any]] = list(map(json.loads, metadata))
  lacking = [
    values
    for values in values_of_questions
    if values.get("gold_doc_ids")
    and not any(p.get("text") for p in values.get("supporting", ()))
  ]
  ids = {id_ for values in lacking for id_ in values["gold_doc_ids"]}
  sentence = (
    "found no passage, expected an id and contents, as in corpora of "
    "anysearch build_index."
  )
  passages: dict[str, dict[str, str]] = {}

  def id_and_contents(row: formats.Row) -> tuple[str, str]:
    # Adding "" raises TypeError for contents that are no text.
    return str(row.get("id")), row["contents"] + ""

  for id_, contents in _map_rows(corpus, id_and_contents, sentence):
    if id_ in ids:
      title, _, text = contents.partition("\n")
      passage = {"title": title.strip('"'), "text": text}
      if passages.setdefault(id_, passage) != passage:
        raise formats.DataError(
          f"{corpus}: found two passages with the id {id_!r}, which questions "
          "name; give each an id of its own."
        )
  if missing := sorted(ids - passages.keys()):
    raise formats.DataError(
      f"{corpus}: {len(missing)} of {len(ids)} passages that questions name "
      f"are not in it ({listing.first_names(missing)}); name the corpus "
      "that their gold_doc_ids refer to."
    )
  for values in lacking:
    values["supporting"] = [passages[id_] for id_ in values["gold_doc_ids"]]
  return [
    json.dumps(values, ensure_ascii=False, sort_keys=True)
    for values in values_of_questions
  ]
