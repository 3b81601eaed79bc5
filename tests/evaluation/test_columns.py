"""Episodes as arrays: values, independence of order, error messages."""

from __future__ import annotations

import json

import growth
import numpy as np
import point_values
import pytest
import study

from anysearch_jax.environment import scoring
from anysearch_jax.evaluation import columns, metrics


def _file(path, found):
  path.write_text("".join(json.dumps(e) + "\n" for e in found), "utf-8")
  return path


def _of_sets(row, names):
  """Assigns the row's questions to datasets."""
  return [
    e | {"dataset": names[int(e["question_id"][1:]) % len(names)]}
    for e in row.episodes
  ]


def test_a_file_and_its_episodes_measure_the_same(tmp_path):
  row = study.row("a", questions=20, budgets=(0, 2, 5), seeds=(1, 2))
  table = columns.read(_file(tmp_path / "episodes.jsonl", row.episodes))
  assert point_values.by_budget(table) == point_values.by_budget(row.episodes)


def test_columns_are_aligned_with_episodes():
  row = study.row("a", questions=9, budgets=(0, 3, 1), seeds=(2, 1))
  table = columns.of(row.episodes)
  ordered = sorted(row.episodes, key=columns.key_of)
  assert list(table.ids[table.question]) == [e["question_id"] for e in ordered]
  for name in ("budget", "seed", "em", "searches", "format", "total_tokens"):
    assert list(getattr(table, name)) == [e[name] for e in ordered]
  assert [columns.OUTCOMES[o] for o in table.outcome] == [
    e["outcome"] for e in ordered
  ]
  assert list(table.hops) == [e["metadata"]["hops"] for e in ordered]
  told = [columns.first_hop(e) for e in ordered]
  assert [k != columns.NONE for k in table.kind] == [
    t is not None for t in told
  ]
  assert list(table.asked) == [float(t is not None and t[1]) for t in told]


def test_missing_format_is_not_measured():
  row = study.row("a", questions=4, budgets=(2,), seeds=(1,))
  found = point_values.cell([{**e, "format": None} for e in row.episodes])
  judged = point_values.cell(row.episodes)
  assert judged.format_rate is not None
  assert vars(found) == vars(judged) | {"format_rate": None}


def test_order_of_lines_does_not_matter():
  found = study.row("a", questions=9, budgets=(0, 3), seeds=(2, 1)).episodes
  one, two = columns.of(found), columns.of(found[::-1])
  for name in ("ids", "question", "budget", "seed", "em", "f1", "asked"):
    np.testing.assert_array_equal(getattr(one, name), getattr(two, name))


def test_runs_of_different_seeds_are_one_row(tmp_path):
  paths = [
    _file(tmp_path / f"{s}.jsonl", study.row("a", seeds=(s,)).episodes)
    for s in (4, 5)
  ]
  table = columns.read(*paths)
  assert list(columns.by_seed(table)) == [4, 5]
  with pytest.raises(ValueError, match="occurs twice at budget 0 and seed 4"):
    columns.read(paths[0], paths[0])


def test_datasets_are_in_the_papers_order(tmp_path):
  names = ["bamboogle", "aqa", "nq", "2wikimultihopqa"]
  found = _of_sets(study.row("a", questions=8, budgets=(1,)), names)
  parts = columns.by_dataset(found)
  assert list(parts) == ["nq", "2wikimultihopqa", "bamboogle", "aqa"]
  assert {len(part) for part in parts.values()} == {2}
  assert set(parts["nq"].ids[parts["nq"].question]) == {"q2", "q6"}


def test_dataset_may_come_from_question_metadata():
  (episode,) = study.row("a", questions=1, budgets=(1,)).episodes
  told = episode | {"metadata": {"dataset": "popqa"}}
  assert list(columns.by_dataset([told])) == ["popqa"]
  assert list(columns.by_dataset([episode])) == ["world"]


def test_question_in_two_datasets_is_rejected():
  row = study.row("a", questions=1, budgets=(1, 2))
  found = [e | {"dataset": f"set{e['budget']}"} for e in row.episodes]
  with pytest.raises(ValueError, match="'q0' is of dataset 'set1' and of"):
    columns.of(found)


def test_missing_values_are_undefined():
  row = study.row("a", questions=4, budgets=(1,), plain=True)
  cell = point_values.cell(row.episodes)
  assert (cell.cost, cell.input_tokens) == (None, None)
  told = [e | {"cost": 0.5, "input_tokens": 7} for e in row.episodes]
  cell = point_values.cell(told)
  assert (cell.cost, cell.input_tokens) == (0.5, 7.0)
  assert columns.by_hops(row.episodes) == {}


def test_read_errors_have_messages(tmp_path):
  path = tmp_path / "episodes.jsonl"
  for text, sentence in (
    ("", "episodes.jsonl: found no episode"),
    ("\n{", "line 2: found text that is not JSON"),
    ("{}", "line 1: the episode lacks question_id"),
  ):
    path.write_text(text)
    with pytest.raises(ValueError, match=sentence):
      columns.read(path)


def test_unknown_outcome_is_rejected():
  (episode,) = study.row("a", questions=1, budgets=(1,)).episodes
  with pytest.raises(ValueError, match="'q0' ended as 'lost'; expected one of"):
    columns.of([episode | {"outcome": "lost"}])


def test_unpaired_surrogate_can_be_read(tmp_path):
  (episode,) = study.row("a", questions=1, budgets=(1,)).episodes
  path = _file(tmp_path / "x", [episode | {"question": study.HOSTILE}])
  assert len(columns.read(path)) == 1
  assert _sampled(path, 1)[0]["question"] == study.HOSTILE


def _sampled(path, n, seed=0):
  sample = columns.Sample(n, seed)
  columns.read(path, sample=sample)
  return sample.episodes()


def test_samples_of_two_rows_are_of_the_same_episodes(tmp_path):
  size = {"questions": 40, "budgets": (0, 2, 5)}
  one = _file(tmp_path / "a", study.row("a", **size).episodes)
  other = _file(tmp_path / "b", study.row("b", **size).episodes[::-1])
  first, second = (_sampled(p, 25) for p in (one, other))
  keys = [columns.key_of(e) for e in first]
  assert keys == [columns.key_of(e) for e in second] == sorted(keys)
  assert len(set(keys)) == 25
  assert {k[1] for k in keys} == {0, 2, 5}
  assert keys != [columns.key_of(e) for e in _sampled(one, 25, 1)]
  assert len(_sampled(one, 1000)) == 120


def test_a_row_keeps_a_sample_and_measures_all(tmp_path):
  row = study.row("a", questions=30, budgets=(1, 2))
  path = _file(tmp_path / "episodes.jsonl", row.episodes)
  found = metrics.read_row("a", path, run="r", sample=10)
  assert (len(found.episodes), len(found.columns), found.run) == (10, 60, "r")
  assert point_values.by_budget(found.columns) == point_values.by_budget(
    row.columns
  )


@pytest.mark.parametrize(
  ("answer", "aliases", "expected"),
  [
    ("a cat sat on the mat", ["cat on mat"], 6 / 7),  # 3 of 4, 3 of 3.
    ("cat cat", ["cat"], 2 / 3),  # A word counts as often as it is in both.
    ("cat", ["dog", "the big cat", "cat dog bird"], 2 / 3),
    ("The", ["the"], 0.0),  # Both normalise to nothing.
    ("", [], 0.0),
    (None, ["cat"], 0.0),
  ],
)
def test_f1_by_hand(answer, aliases, expected):
  assert scoring.f1(answer, aliases) == pytest.approx(expected)


def test_f1_is_token_based_and_one_if_em_is_one():
  (base,) = study.row("a", questions=1, budgets=(1,)).episodes
  told = {
    "the Eiffel tower": 1.0,
    "tower of London": 2 / 5,  # One common word; two and three words.
    "Big Ben": 0.0,
    None: 0.0,
  }
  found = [
    base
    | {
      "question_id": str(i),
      "answer": answer,
      "golden_answers": ["Eiffel Tower!", "La dame"],
      "em": int(answer == "the Eiffel tower"),
      "outcome": "answered",
    }
    for i, answer in enumerate(told)
  ]
  np.testing.assert_allclose(columns.of(found).f1, list(told.values()))


def test_a_hundred_thousand_episodes_are_measured_in_linear_time():
  (base,) = study.row("a", questions=1, budgets=(1,)).episodes

  def measure(numbers):
    table = columns.of(
      base | {"question_id": f"q{i // 25}", "budget": i % 25} for i in numbers
    )
    cells = point_values.by_budget(table)
    assert len(cells) == 25
    assert sum(x.n + x.failed for x in cells.values()) == len(numbers)

  growth.assert_linear(measure, range(100_000))
