"""Damaged and hostile files are read completely or refused."""

from __future__ import annotations

import json
import operator

import hostile
import hypothesis
import numpy as np
import orjson
import pytest
import safetensors.numpy
import study
from hostile_episode import episode_of, play

from anysearch_jax import budgets as budgets_lib
from anysearch_jax.environment import records
from anysearch_jax.evaluation import columns, journal
from anysearch_jax.host import json_files
from anysearch_jax.methods import systems
from anysearch_jax.policy import tensor_files


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp("hostile")


EPISODE = study.row("a", questions=1, budgets=(2,)).episodes[0]


@hostile.cases(6_000)
@hypothesis.given(hostile.tapes(100))
def test_line_is_a_valid_episode_or_refused(tape):
  value = tape.pick((EPISODE, EPISODE, EPISODE, tape.value()))
  if tape.below(4):
    value = tape.change(value)
  line = json.dumps(value, default=str).encode()
  line = tape.pick((line, line, tape.damage(line), tape.raw()))
  lines = line.splitlines() or [line]
  try:
    found = list(columns.parse(lines, source="rows"))
  except ValueError as error:
    assert str(error).startswith("rows") and len(str(error)) < 600
    return
  sample = columns.Sample(2)
  for each in found:
    assert isinstance(each["spans"], list)
    assert isinstance(columns.dataset_of(each), str)
    sample.add(each)
  assert len(sample.episodes()) == min(2, len(found))


@hostile.cases(1_500)
@hypothesis.given(hostile.tapes(120))
def test_episode_round_trips_through_its_file(folder, tape):
  budget = tape.below(3)
  trajectory = play(*episode_of(tape), budget=budget, scaffold=True).trajectory
  row = records.episode(
    trajectory,
    systems.environment("paper").judge(trajectory),
    seed=3,
    prices=budgets_lib.Prices(),
  )
  path = folder / "rows.jsonl"
  with journal.Journal(path, 1, lambda row: row["seed"] - 3) as rows:
    rows.add(row)
    rows.finish()
  (found,) = journal.read(path)
  with path.open("rb") as lines:
    assert list(columns.parse(lines, source="rows")) == [found]
  assert found.keys() == row.keys()
  assert found["tokens"] == row["tokens"]
  assert [(each["author"], each["text"]) for each in found["spans"]] == [
    (span.author.name.lower(), hostile.whole(span.text))
    for span in trajectory.spans
  ]


@hostile.cases(1_500)
@hypothesis.given(hostile.tapes(80))
def test_damaged_journal_has_only_written_rows_or_is_refused(folder, tape):
  path = folder / "journal.jsonl"
  partial = folder / "journal.partial.jsonl"
  rows = [{"i": i, "text": tape.text(3)} for i in range(3)]
  lines = [hostile.as_json(row) + b"\n" for row in rows]
  foreign = {"i": tape.value(), "text": ""}
  lines.append(tape.pick((b"", hostile.as_json(foreign) + b"\n")))
  partial.write_bytes(tape.damage(b"".join(lines)))
  try:
    with journal.Journal(path, 3, operator.itemgetter("i")) as opened:
      for i, row in enumerate(rows):
        if i not in opened:
          opened.add(row)
      opened.finish()
  except ValueError as error:
    assert str(partial) in str(error)
    partial.unlink()
    return
  found = list(journal.read(path))
  assert [row["i"] for row in found] == [0, 1, 2]
  path.write_bytes(tape.damage(path.read_bytes()))
  try:
    assert all(isinstance(row, dict) for row in journal.read(path))
  except ValueError as error:
    assert str(path) in str(error)


@hostile.cases(1_500)
@hypothesis.given(hostile.tapes(80))
def test_a_json_file_is_an_object_or_refused(folder, tape):
  path = folder / "object.json"
  data = hostile.as_json(tape.pick(({"a": tape.value()}, tape.value())))
  path.write_bytes(tape.pick((data, tape.damage(data), tape.raw())))
  try:
    found = json_files.read(path)
  except ValueError as error:
    assert str(error).startswith(f"{path}: ")
    assert not isinstance(orjson_value(path.read_bytes()), dict)
  else:
    assert isinstance(found, dict)


def orjson_value(data):
  """Parses JSON with orjson, which is stricter than Python's parser."""
  try:
    return orjson.loads(data)
  except ValueError:
    return None


TENSORS = safetensors.numpy.save(
  {"a": np.ones((2, 3), np.float32), "b": np.zeros(4, np.float16)}
)
INDEX = json.dumps({"weight_map": {"a": "x.safetensors"}}).encode()


@hostile.cases(1_000)
@hypothesis.given(hostile.tapes(60))
def test_headers_of_tensors_are_read_or_refused(tmp_path_factory, tape):
  folder = tmp_path_factory.getbasetemp()
  data, index = TENSORS, INDEX
  if tape.below(3):
    name, data = tensor_files.SINGLE_NAME, tape.damage(data)
  else:
    index = hostile.as_json({"weight_map": tape.value()})
    index, name = tape.pick((index, INDEX)), "x.safetensors"
  (folder / tensor_files.SINGLE_NAME).unlink(missing_ok=True)
  (folder / tensor_files.INDEX_NAME).write_bytes(index)
  (folder / name).write_bytes(data)
  try:
    found = tensor_files.headers(folder)
  except ValueError as error:
    assert str(folder) in str(error)
  else:
    assert all(each.path.parent == folder for each in found.values())
