"""A folder of prepared questions: `write` fills it, `Prepared` reads it.

<dataset>_<split>.parquet   the questions, in the order of their files
train.parquet               the training mix, shuffled
manifest.json               inputs, settings, counts, hashes
"""

from __future__ import annotations

import collections
import functools
import hashlib
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from absl import logging

from anysearch_jax import types
from anysearch_jax.data import dataset_iterator, files, formats, preparing
from anysearch_jax.environment import official_scoring
from anysearch_jax.host import json_files, listing, plugins

MANIFEST = "manifest.json"
MIX = "train"
SCHEMA = pa.schema(
  [
    pa.field("id", pa.string(), nullable=False),
    pa.field("question", pa.string(), nullable=False),
    pa.field("golden_answers", pa.list_(pa.string()), nullable=False),
    pa.field("dataset", pa.string(), nullable=False),
    pa.field("split", pa.string(), nullable=False),
    pa.field("hops", pa.int32()),
    pa.field("metadata", pa.string(), nullable=False),  # JSON.
  ]
)

_VERSION = 1


def write(
  folder: pathlib.Path,
  parts: preparing.Parts,
  mixed: Sequence[preparing.Entry],
  manifest: Mapping[str, Any],
  write_more: Callable[[pathlib.Path], None] | None = None,
) -> None:
  """Writes a folder of prepared questions atomically.

  Args:
    folder: a new or empty folder, or one that was written from equal arguments.
    parts: the questions by `<dataset>_<split>`.
    mixed: the training mix; without it there is no `train.parquet`.
    manifest: inputs and settings, to which counts and hashes are added.
    write_more: writes other files, which the manifest describes, into a folder.

  Raises:
    formats.DataError: the folder holds something else.
  """
  from anysearch_jax.policy import hf  # Imports JAX.

  tables = {name: part.entries for name, part in parts.items() if part.entries}
  if mixed:
    tables[MIX] = list(mixed)
  contents = {}
  for name, entries in tables.items():
    buffer = pa.BufferOutputStream()
    pq.write_table(_table(entries), buffer, compression="zstd")
    contents[f"{name}.parquet"] = buffer.getvalue()
  full_manifest = {
    "version": _VERSION,
    **manifest,
    "splits": {
      name: {
        "read": part.read,
        "kept": len(part.entries),
        "dropped": dict(sorted(part.dropped.items())),
        "unmatched": part.unmatched,
      }
      for name, part in parts.items()
    },
    "mixed": dict(collections.Counter(sorted(e.dataset for e in mixed))),
    "files": {
      name: {
        "bytes": content.size,
        "sha256": hashlib.sha256(content).hexdigest(),
      }
      for name, content in contents.items()
    },
  }
  text = json.dumps(full_manifest, indent=2) + "\n"
  if folder.is_dir() and any(folder.iterdir()):
    path = folder / MANIFEST
    if not path.is_file() or path.read_text() != text:
      raise formats.DataError(
        f"{folder} holds other data than these questions prepared this "
        "way; name another --output, or remove it."
      )
  with hf.atomic_directory(folder) as temporary:
    for name, content in contents.items():
      (temporary / name).write_bytes(content)
    if write_more:
      write_more(temporary)
    (temporary / MANIFEST).write_text(text)


class _Source:
  """Questions by split, without passages: searches use `retrieval`."""

  retriever = None
  rows: Any  # A method that returns the questions of a split.

  def questions(
    self, split: str, count: int, seed: int
  ) -> dataset_iterator.Stream:
    """Returns the training stream: a split's questions, epoch by epoch.

    Args:
      split: name of the split.
      count: length of the stream; it may be longer than the split.
      seed: seeds the permutations of the epochs, >= 0.
    """
    return dataset_iterator.Stream(self.rows(split), count=count, key=seed)


class Prepared(_Source):
  """The questions of a folder; each file is verified when it is first read.

  Attributes:
    manifest: inputs, settings, counts and hashes of the folder.
    names: names of the files, without their suffix.

  Raises:
    formats.DataError: the folder was not written by anysearch prepare_data.
  """

  def __init__(self, folder: str | pathlib.Path):
    self._folder = pathlib.Path(folder)
    path = self._folder / MANIFEST
    if not path.is_file():
      raise formats.DataError(
        f"{self._folder}: found no {MANIFEST}, expected a folder of "
        "anysearch prepare_data."
      )
    self.manifest = json_files.read(path)
    version = self.manifest.get("version")
    entries = self.manifest.get("files")
    if version != _VERSION or not isinstance(entries, dict):
      raise formats.DataError(
        f"{path}: found version {version!r} of prepared data, expected "
        f"{_VERSION}; prepare it again."
      )
    self.names = tuple(name.removesuffix(".parquet") for name in entries)
    for name, entry in entries.items():
      # A name from a stranger's manifest must not lead out of the folder.
      plain = pathlib.PurePath(name).name == name and name.endswith(".parquet")
      if not plain or not isinstance(entry, dict) or "sha256" not in entry:
        raise formats.DataError(
          f"{path}: found {name!r} among the files, expected Parquet files of "
          "this folder with their SHA-256; prepare it again."
        )

  @functools.cache  # noqa: B019 - a folder is open as long as its process.
  def rows(self, name: str) -> Rows:
    """Returns the questions of a file, `train` or `<dataset>_<split>`.

    Raises:
      formats.DataError: the file is missing, or was changed afterwards.
    """
    if name not in self.names:
      raise formats.DataError(
        f"{self._folder} has no {name!r}, expected one of "
        f"{listing.first_names(self.names)}; or prepare it too "
        "(anysearch prepare_data)."
      )
    path = self._folder / f"{name}.parquet"
    expected = self.manifest["files"][path.name]
    try:
      content = path.read_bytes()
      digest = hashlib.sha256(content).hexdigest()
      if digest != expected["sha256"]:
        raise formats.DataError(
          f"{path}: found SHA-256 {digest}, its manifest says "
          f"{expected['sha256']}; prepare the data again."
        )
      table = pq.read_table(pa.BufferReader(content))
    except (OSError, pa.ArrowException) as error:
      raise formats.DataError(
        f"{path}: {error}; prepare the data again."
      ) from error
    return Rows(table)

  def evaluation_questions(
    self, datasets: Sequence[str] = (), per_dataset: int = 0, *, split: str = ""
  ) -> list[types.Question]:
    """Returns the evaluation questions, dataset by dataset.

    The order inside a dataset depends on the questions' ids only. A smaller
    selection is therefore a prefix of a larger one.

    Args:
      datasets: names of datasets; empty: all with an evaluation split here.
      per_dataset: limit of the questions of each dataset; 0: all.
      split: name of the split; "": test if there is one, otherwise dev.

    Raises:
      formats.DataError: a dataset does not have the split.
    """
    questions: list[types.Question] = []
    for dataset in datasets or self.evaluated(split):
      name = self._evaluation_name(dataset, split)
      if name is None:
        others = listing.first_names(self.evaluated(split)) or "none"
        raise formats.DataError(
          f"{self._folder} has no {split or 'evaluation'} split of {dataset}; "
          f"expected some of {others}."
        )
      rows = self.rows(name)
      ranks = [preparing.shuffled(id_) for id_ in rows.column("id")]
      order = sorted(range(len(ranks)), key=ranks.__getitem__)
      questions += [rows[i] for i in order[: per_dataset or None]]
    return questions

  def evaluated(self, split: str = "") -> list[str]:
    """Returns the datasets of a split ("": test or dev); the paper's first."""
    datasets = sorted({name.rpartition("_")[0] for name in self.names} - {""})
    ordered = dict.fromkeys((*official_scoring.DATASETS, *datasets))
    return [d for d in ordered if self._evaluation_name(d, split)]

  def _evaluation_name(self, dataset: str, split: str) -> str | None:
    splits = (split,) if split else ("test", "dev")
    names = (f"{dataset}_{split_name}" for split_name in splits)
    return next((name for name in names if name in self.names), None)


class Rows(Sequence[types.Question]):
  """Questions in columnar form; an item is built when it is accessed."""

  def __init__(self, table: pa.Table):
    self._table = table.combine_chunks()

  def __len__(self) -> int:
    return len(self._table)

  def __getitem__(self, index: int) -> types.Question:  # type: ignore[override]
    (row,) = self._table.slice(range(len(self))[index], 1).to_pylist()
    metadata: dict[str, Any] = json.loads(row["metadata"])
    metadata |= {"dataset": row["dataset"], "split": row["split"]}
    if row["hops"] is not None:
      metadata["hops"] = row["hops"]
    return types.Question(
      row["id"],
      row["question"],
      tuple(row["golden_answers"]),
      metadata=metadata,
    )

  def column(self, name: str) -> list[str]:
    """Returns a field of `SCHEMA` of all questions, in order."""
    return self._table.column(name).to_pylist()


def _table(entries: Sequence[preparing.Entry]) -> pa.Table:
  columns = zip(*entries, strict=True)
  arrays = [
    pa.array(column, field.type)
    for column, field in zip(columns, SCHEMA, strict=True)
  ]
  return pa.table(arrays, schema=SCHEMA)


class OwnQuestions(_Source):
  """A source of questions: a user's function, which returns those of a split.

  Args:
    name: `module:NAME` or `file.py:NAME`, see `plugins.load`.

  Raises:
    plugins.PluginError: the function cannot be loaded.
  """

  def __init__(self, name: str):
    self._where = f"data.source {name!r}"
    self._loaded = plugins.load(
      name, setting="data.source", expected="a function (split)"
    )

  @functools.cache  # noqa: B019 - a source lives as long as its process.
  def rows(self, split: str) -> tuple[types.Question, ...]:
    """Returns the questions of a split.

    Raises:
      plugins.PluginError: the function raises, returns no questions, or two
        questions with the same id.
    """
    with plugins.as_sentence(self._where, self._loaded.path):
      rows = tuple(self._loaded.value(split))
    if not rows or not all(isinstance(q, types.Question) for q in rows):
      raise plugins.PluginError(
        f"{self._where}: found {rows!r:.80} for the split {split!r}, expected "
        "anysearch_jax.Question(id, text, golden_answers), at least one."
      )
    if len({q.id for q in rows}) < len(rows):
      raise plugins.PluginError(
        f"{self._where}: found an id twice in the split {split!r}, expected "
        "an id of its own for each question."
      )
    return rows

  def evaluation_questions(
    self, datasets: Sequence[str] = (), per_dataset: int = 0, *, split: str = ""
  ) -> list[types.Question]:
    """Returns the first questions of a split, by default of `test`.

    Args:
      datasets: empty, because a function is one dataset.
      per_dataset: number of questions; 0: all.
      split: name of the split; "" is `test`.

    Raises:
      plugins.PluginError: as `rows`, or a dataset is named.
    """
    if datasets:
      raise plugins.PluginError(
        f"{self._where}: found the datasets "
        f"{listing.first_names(datasets)}, expected none, because a "
        "function is one dataset."
      )
    return list(self.rows(split or "test")[: per_dataset or None])


def _names_dataset(row: formats.Row) -> bool:
  format_ = formats.recognize(row)
  try:
    return bool(format_ and formats.read(row, format_).dataset)
  except formats.MalformedError:
    return False  # Its error is that of `preparing.prepare`.


class QuestionFile(OwnQuestions):
  """A source of evaluation questions: one file, prepared when it is read.

  Args:
    path: a file in one of `formats.FORMATS`, such as JSON lines or a table with
      `question` and `answer`.

  Raises:
    formats.DataError: the file cannot be read, or a row is not a question.
  """

  def __init__(self, path: str):
    self._where = path
    file = pathlib.Path(path)
    rows = (row for _, row in files.rows(file) if isinstance(row, dict))
    has_datasets = any(map(_names_dataset, rows))
    dataset = ""  # Each row names its own.
    if not has_datasets:
      dataset = preparing.name_of_file(file)
    source = preparing.Input(file, dataset, "test")
    parts, _ = preparing.prepare([source], preparing.Settings())
    entries = [entry for part in parts.values() for entry in part.entries]
    if not entries:
      raise formats.DataError(f"{path}: found no question with an answer.")
    for part in parts.values():
      for why, count in part.dropped.items():
        message = f"{path}: {count} of {part.read} rows are left out: {why}."
        logging.warning("%s", message)
    self._rows = tuple(Rows(_table(entries)))

  @functools.cache  # noqa: B019 - a source lives as long as its process.
  def rows(self, split: str) -> tuple[types.Question, ...]:
    """Returns the questions; raises DataError for a split besides `test`."""
    if split != "test":
      raise formats.DataError(
        f"{self._where}: found no split {split!r}; a file has `test` alone. "
        "anysearch prepare_data makes a folder with others."
      )
    return self._rows
