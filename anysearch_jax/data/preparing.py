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
from anysearch_jax.host import disk

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

  If `dataset` or `split` is "", each row names its own; if `format` is "", it
  is recognised from the first row.
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
    evidence: drop training questions without `data/evidence`, which
      StepSearch's reward needs.
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
      They are kept, so that a dataset has its published size; their exact match
      is 0.
  """

  entries: list[Entry] = dataclasses.field(default_factory=list)
  read: int = 0
  dropped: Counter[str] = dataclasses.field(default_factory=Counter)
  unmatched: int = 0

  def keep(self, kept: Sequence[Entry], reason: str) -> None:
    """Keeps the entries `kept` and counts the others as dropped."""
    if lost := len(self.entries) - len(kept):
      self.dropped[reason] += lost
    self.entries = list(kept)


Parts = dict[str, Part]


def dataset_name(name: str) -> str:
  """Returns the canonical name of a dataset.

  Raises:
    formats.DataError: the name has characters that are not allowed.
  """
  name = _DATASETS.get(name.lower(), name.lower())
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
) -> tuple[Parts, list]:
  """Reads and cleans all files.

  Args:
    inputs: the files; questions keep this order.
    settings: which questions are kept.
    aliases: by `answer_id`, the names that 2WikiMultihopQA's script accepts.
    corpus: file with the passages that training questions name by
      `gold_doc_ids`.
    canary: of encrypted rows that do not have their own, see `evidence`.

  Returns:
    The parts by `<dataset>_<split>`, and a line of the manifest for each input.

  Raises:
    formats.DataError: a row is not a question (the error has its file and
      number) or has no known dataset or split; two questions have the same id;
      or a file cannot be read.
  """
  parts: Parts = collections.defaultdict(Part)
  listed = [_read(x, parts, settings, aliases, canary) for x in inputs]
  training = {n: part for n, part in parts.items() if n.endswith("_train")}
  for name, part in parts.items():
    reason = "asked twice, answers merged" if name in training else "read twice"
    part.keep(_merged(part.entries), reason)
  evaluated = {
    formats.question_key(entry.question)
    for name, part in parts.items()
    if name not in training
    for entry in part.entries
  }
  for part in training.values():
    kept = [
      entry
      for entry in part.entries
      if formats.question_key(entry.question) not in evaluated
    ]
    part.keep(kept, "in an evaluation split")
  if corpus:
    entries = [e for part in training.values() for e in part.entries]
    texts = iter(filled([e.metadata for e in entries], corpus))
    for part in training.values():
      part.entries = [e._replace(metadata=next(texts)) for e in part.entries]
  if settings.evidence:
    for part in training.values():
      known = (
        evidence.of_metadata(json.loads(e.metadata)) for e in part.entries
      )
      kept = [e for e, found in zip(part.entries, known) if any(found)]
      part.keep(kept, "no evidence")
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
      there = [n.removesuffix("_train") for n in parts if n.endswith("_train")]
      raise formats.DataError(
        f"The mix asks for {dataset}, which has no training questions here; "
        f"choose from {', '.join(there) or 'none'}, or leave the mix out."
      )
    entries += part.entries
  seed = np.random.SeedSequence((_SEED, len(entries)))
  rng = np.random.Generator(np.random.PCG64(seed))
  return [entries[i] for i in rng.permutation(len(entries))]


def shuffled(id_: str) -> bytes:
  """Returns a sort key: the pseudo-random, fixed order of ids by their hash."""
  return hashlib.sha256(id_.encode()).digest()


def _read(
  source: Input,
  parts: Parts,
  settings: Settings,
  aliases: Mapping[str, Sequence[str]],
  canary: str,
) -> dict[str, Any]:
  """Adds a file's questions to `parts` and returns its manifest line."""
  format_, count = source.format, 0
  for number, row in files.rows(source.path):
    count += 1
    dataset, split = source.dataset, source.split
    try:
      if isinstance(row, formats.MalformedError):
        raise row
      format_ = format_ or formats.recognize(row) or ""
      if not format_:
        raise formats.DataError(
          f"{source.path}, row {number}: found columns {', '.join(row)}; "
          f"expected those of {', '.join(formats.FORMATS)}, or the name of a "
          "format."
        )
      if canary:
        row = {"canary": canary, **row}
      found = formats.read(row, format_)
      dataset, split = _belongs(found, source)
      found = formats.clean(found, aliases)
      _add(found, parts[f"{dataset}_{split}"], dataset, split)
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


def _belongs(found: formats.RawQuestion, source: Input) -> tuple[str, str]:
  """Returns dataset and split of a row, as its file or the row names them."""
  try:
    said = dataset_name(found.dataset) if found.dataset else ""
    # The file's split wins, because Search-R1 calls every evaluation set test.
    split = source.split or (split_name(found.split) if found.split else "")
  except formats.DataError as error:
    raise formats.MalformedError(str(error).rstrip(".")) from error
  if source.dataset and said and said != source.dataset:
    raise formats.MalformedError(
      f"a question of {said} in a file of {source.dataset}"
    )
  dataset = source.dataset or said
  if not dataset or not split:
    raise formats.DataError(
      f"{source.path}: its rows do not name their "
      f"{'split' if dataset else 'dataset'}; name it, as in "
      f"--input=nq:train={source.path}."
    )
  return dataset, split


def _add(
  found: formats.RawQuestion, part: Part, dataset: str, split: str
) -> None:
  """Adds a clean question to its part, or drops it if it has no answer."""
  part.read += 1
  accepted = formats.accepted_answers(found.answers)
  if not accepted and split != "train":
    accepted = formats.distinct_answers(found.answers)
    part.unmatched += bool(accepted)
  if not accepted:
    part.dropped["no answer"] += 1
    return
  metadata = dict(found.metadata)
  part.entries.append(
    Entry(
      formats.line(f"{dataset}/{found.id or f'{split}_{part.read - 1}'}"),
      found.question.strip()
      if found.verbatim
      else formats.as_question(found.question),
      accepted,
      dataset,
      split,
      found.hops,
      formats.without_surrogates(
        json.dumps(metadata, ensure_ascii=False, sort_keys=True)
      ),
    )
  )


def _merged(entries: Sequence[Entry]) -> list[Entry]:
  """Merges repeated questions and unites their answers.

  Training questions are merged if their normalised texts are equal. Evaluation
  questions are merged only if their ids are equal, so that a dataset keeps its
  published questions.
  """
  first: dict[str, Entry] = {}
  ids: dict[str, Entry] = {}
  for entry in entries:
    key = scoring.normalize_answer(entry.question)
    other = ids.setdefault(entry.id, entry)
    if scoring.normalize_answer(other.question) != key:
      raise formats.DataError(
        f"Two questions have the id {entry.id!r} in {entry.dataset} "
        f"{entry.split}: {other.question!r} and {entry.question!r}. Read only "
        "one of their files, or correct it."
      )
    same = key if entry.split == "train" else entry.id
    kept = first.setdefault(same, entry)
    if kept is not entry:
      both = dict.fromkeys(kept.golden_answers + entry.golden_answers)
      first[same] = kept._replace(golden_answers=tuple(both))
  return list(first.values())


def _each(
  path: pathlib.Path, read: Callable[[formats.Row], T], sentence: str
) -> Iterator[T]:
  """Yields what `read` makes of each row of a file.

  Of a malformed row `sentence` says with its `{error}` what was expected.
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

  def named(row: formats.Row) -> tuple[str, list[str]]:
    columns = (formats.listed(row, name) for name in ("aliases", "demonyms"))
    return row["Q_id"], [formats.text(x) for names in columns for x in names]

  sentence = (
    "found no Q_id with aliases and demonyms ({error}); expected "
    "2WikiMultihopQA's id_aliases.json."
  )
  return dict(_each(path, named, sentence))


def filled(metadata: Sequence[str], corpus: pathlib.Path) -> list[str]:
  """Adds `supporting` to metadata that has `gold_doc_ids` but no texts.

  `corpus` is JSON lines in Search-R1's layout (`id`, `contents`), also `.gz`;
  it is read once.

  Returns:
    The metadata in the same order.

  Raises:
    formats.DataError: the corpus is not in this layout, lacks a passage, or
      cannot be read.
  """
  known: list[dict[str, Any]] = list(map(json.loads, metadata))
  lacking = [
    values
    for values in known
    if values.get("gold_doc_ids")
    and not any(p.get("text") for p in values.get("supporting", ()))
  ]
  ids = {id_ for values in lacking for id_ in values["gold_doc_ids"]}
  sentence = (
    "found no passage, expected an id and contents, as in corpora of "
    "launch.build_index."
  )
  found: dict[str, dict[str, str]] = {}
  for id_, contents in _each(
    corpus, lambda row: (str(row.get("id")), row["contents"] + ""), sentence
  ):
    if id_ in ids:
      title, _, text = contents.partition("\n")
      found[id_] = {"title": title.strip('"'), "text": text}
  if missing := sorted(ids - found.keys()):
    raise formats.DataError(
      f"{corpus}: {len(missing)} of {len(ids)} passages that questions name "
      f"are not in it ({', '.join(missing[:5])}); name the corpus that their "
      "gold_doc_ids refer to."
    )
  for values in lacking:
    values["supporting"] = [found[id_] for id_ in values["gold_doc_ids"]]
  return [
    json.dumps(values, ensure_ascii=False, sort_keys=True) for values in known
  ]
