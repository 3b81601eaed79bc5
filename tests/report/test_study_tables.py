"""Tables of a report: their numbers are the metrics', JSON and CSV agree."""

from __future__ import annotations

import csv
import dataclasses
import io
import json

import numpy as np
import pytest
import study
from scipy import stats

from anysearch_jax import budgets as budgets_lib
from anysearch_jax.evaluation import columns, comparison, measures, metrics
from anysearch_jax.report import study as study_lib
from anysearch_jax.report import study_tables

_BUDGETS = (0, 2, 5)
_SIZE = {"questions": 20, "budgets": (1, 4)}


def _of_sets(label, **options):
  """Builds a row over two of the paper's datasets and one other."""
  names = ("musique", "nq", "own")
  row = study.row(label, questions=18, **options)
  return metrics.Row(
    label,
    tuple(
      e | {"dataset": names[int(e["question_id"][1:]) % 3]}
      for e in row.episodes
    ),
  )


@pytest.fixture(scope="module")
def rows():
  options = {"budgets": (0, 2, 5), "seeds": (1, 2)}
  return [
    _of_sets("A", **options),
    _of_sets("no R_abs", thrift=0.9, **options),
    _of_sets("lambda = 0", skill=0.2, **options),
  ]


@pytest.fixture(scope="module")
def built(rows, tmp_path_factory):
  folder = tmp_path_factory.mktemp("report")
  data = study.write(
    folder / "report.html",
    rows,
    training=[study.training("A")],
    groups={"A": "tool", "no R_abs": "tool", "lambda = 0": "sampling"},
  )
  return folder, data


def _lines(folder, name):
  text = (folder / f"{name}.csv").read_text("utf-8")
  return list(csv.DictReader(io.StringIO(text)))


def _lines_of(table):
  return {line["keys"]: line["cells"] for line in table["lines"]}


def _line(table, *keys):
  """Returns the cells of the line with these keys, by their full names."""
  heads = [column["full_name"] for column in table["columns"]]
  return dict(zip(heads, _lines_of(table)[keys], strict=True))


def _by_row(table, *keys):
  """Returns the lines of a table that begin with `keys`, by their last key."""
  return {
    line["keys"][-1]: line["cells"]
    for line in table["lines"]
    if line["keys"][: len(keys)] == keys
  }


def _parts(rows, table):
  """Yields the cells and the part of each line of set, B and row."""
  rows = {row.label: row for row in rows}
  for line in table["lines"]:
    dataset, budget, label = line["keys"]
    row, budget = rows[label], int(budget.rstrip("*"))
    if dataset == "average":
      yield line["cells"], row.curve.points[budget]
    else:
      yield line["cells"], row.cells[dataset, budget]


@pytest.mark.parametrize("name", ["scorers", "efficiency", "tokens", "curves"])
def test_every_cell_is_the_measure_of_its_column(rows, built, name):
  spec = study_tables._TABLES[name]["columns"]
  table = built[1]["tables"][name]
  shown = [
    c for c in spec if c["name"] in {x["name"] for x in table["columns"]}
  ]
  lines = list(_parts(rows, table))
  assert lines
  for cells, part in lines:
    for cell, column in zip(cells, shown, strict=True):
      assert cell["value"] == getattr(part, column["of"]).value
      assert cell["n"] == (part.n if column.get("n") else None)
  keys = {line["keys"][:2] for line in table["lines"]}
  if name == "scorers":  # `own` has no script, and so there is no average.
    assert {dataset for dataset, _ in keys} == {"nq", "musique"}
  if name == "efficiency":  # Those of the paper's budgets that were evaluated.
    assert keys == {(dataset, "5") for dataset in ("nq", "musique", "own")}
  if name == "curves":
    assert ("average", "2") in keys and ("own", "0") in keys


def test_the_main_table_has_the_papers_columns(rows, built):
  table = built[1]["tables"]["main"]
  assert [c["full_name"] for c in table["columns"]] == [
    "General QA NQ†", "Multi-hop QA MuSiQue*", "own", "Avg.",
  ]  # fmt: skip
  assert len(table["lines"]) == 9
  for row in rows:
    parts = [row.cells[name, 2] for name in ("nq", "musique", "own")]
    *cells, average = _lines_of(table)["2", row.label]
    assert [c["value"] for c in cells] == [p.accuracy.value for p in parts]
    assert [c["n"] for c in cells] == [p.n for p in parts]
    mean = np.mean([p.accuracy.value for p in parts])
    assert average["value"] == pytest.approx(mean)


def test_the_overview_has_every_row_at_every_budget(rows, built):
  table = built[1]["tables"]["overview"]
  heads = [column["name"] for column in table["columns"]]
  assert heads == ["B = 0", "B = 2", "B = 5", "mean"]
  for row in rows:
    *_, last, mean = _by_row(table, "EM")[row.label]
    assert last["value"] == row.curve.points[5].accuracy.value
    assert mean["low"] < mean["value"] < mean["high"]
    assert _by_row(table, "TP")[row.label][0]["value"] is None
    assert _by_row(table, "searches")[row.label][0]["value"] == 0


@pytest.mark.parametrize(
  ("kept", "lacks"),
  [
    (lambda e: e["budget"] != 5, "B = 5"),
    (
      lambda e: e["dataset"] == "own" and e["budget"] < 5,
      "B = 5 and the sets nq, musique",
    ),
    (lambda e: (e["dataset"], e["budget"]) != ("nq", 5), "some sets at some"),
  ],
)
def test_incomplete_row_has_no_mean(rows, kept, lacks, tmp_path):
  less = metrics.Row("less", tuple(filter(kept, rows[0].episodes)))
  if lacks == "B = 5":
    data = study.write(tmp_path / "r.html", [rows[0], less])
    page = (tmp_path / "r.html").read_text("utf-8")
    assert f"less was not evaluated with {lacks}" in page
    assert f"(without {lacks}" in page  # In legends.
  else:
    data = study.told([rows[0], less])
  whole, other = data["rows"]
  assert whole["lacks"] == ""
  assert other["lacks"].startswith(lacks)
  cells = _by_row(data["tables"]["overview"], "EM")
  assert cells["A"][-1]["value"] is not None
  assert cells["less"][-1] is None
  # At a budget that was played on all datasets, the row is compared.
  for cell, budget in zip(cells["less"], data["budgets"]):
    sets = {e["dataset"] for e in less.episodes if e["budget"] == budget}
    assert (cell is None) == (len(sets) < 3)
  *_, a, b, c = _by_row(data["tables"]["ablation_rows"])["less"]
  assert a is b is c is None
  averages = _by_row(data["tables"]["area"], "average")
  assert ("less" in averages) == (lacks == "B = 5")
  assert "A" in averages


def test_each_ablation_is_a_table_led_by_the_system(built):
  folder, data = built
  names = [n for n in data["tables"] if n.startswith("ablation")]
  assert names == ["ablation_tool", "ablation_sampling"]
  rows = [line["row"] for line in _lines(folder, "ablation_sampling")]
  assert rows == ["A", "lambda = 0"]
  assert [row["index"] for row in data["rows"]] == [0, 1, 2]


def test_pairs_are_compared_within_their_table(built):
  lines = _lines(built[0], "pairwise_tool")
  assert {line["pair"] for line in lines} == {"A − no R_abs"}
  (line,) = (line for line in lines if (line["set"], line["B"]) == ("own", "5"))
  assert int(line["EM difference n"]) > 0
  assert float(line["EM difference low"]) < float(line["EM difference high"])


def test_free_costs_are_not_compared():
  rows = [study.row(label, questions=9, budgets=(1,)) for label in "AB"]
  table = study.told(rows)["tables"]["pairwise_rows"]
  assert "dollars" not in [column["group"] for column in table["columns"]]


def test_early_stopping_has_counts_and_rates(rows, built):
  pairs = comparison.pair(*rows[:2])
  found = {line.budget: line for line in comparison.compare(pairs)}[5]
  (line,) = (
    line
    for line in _lines(built[0], "early_stopping")
    if (line["other"], line["B"]) == ("no R_abs", "5")
  )
  assert int(line["pairs"]) == found.n
  for name, count in (
    ("π wrong, other right", found.losses),
    ("of these, π left budget unused", found.losses_unused),
    ("π right, other wrong", found.wins),
  ):
    assert int(line[f"count {name}"]) == count > 0
    assert float(line[f"rate {name}"]) == pytest.approx(count / found.n)
  assert float(line["rate net gain"]) == pytest.approx(found.difference.value)


def test_json_equals_the_csv_files(built):
  folder, data = built
  stored = json.loads((folder / "report.json").read_text("utf-8"))
  assert stored == json.loads(json.dumps(data))
  for name, table in stored["tables"].items():
    if table["lines"]:
      assert len(_lines(folder, name)) == len(table["lines"])
    else:
      assert not (folder / f"{name}.csv").exists()


def test_prices_given_to_the_report_replace_the_episodes_costs(rows):
  data = study.told(rows[:1], prices=budgets_lib.Prices(search=5.0))
  for cells, part in _parts(rows, data["tables"]["curves"]):
    expected = part.searches.value * 5 / 1000
    assert cells[-1]["value"] == pytest.approx(expected)


def test_a_search_costs_the_papers_tokens_and_spending_is_in_one_currency():
  """Cells of the paper's table of prices, at $0.005 a search."""
  own = budgets_lib.Prices(search=2, input=0.5, output=4)
  made = study.row("A", questions=9, budgets=(1, 5), seeds=(1,))
  row = metrics.Row("A", tuple(e | {"input_tokens": 80} for e in made.episodes))
  tables = study.told([row], configured=own)["tables"]
  lines = _lines_of(tables["search_price"])
  each = {name: cells[-1]["value"] for (name,), cells in lines.items()}
  names = *study_lib.WORDS["paper_prices"], "this evaluation"
  papers = 50_000, 20_000, 100_000, 500
  assert each == pytest.approx(dict(zip(names, papers, strict=True)))
  assert [x["value"] for x in lines["this evaluation",]] == [2, 0.5, 4, 500]
  for budget, part in row.by_budget.items():
    at = "world", str(budget), "A"
    searches, written, per_right, *spent = _lines_of(tables["spending"])[at]
    assert searches["value"] == pytest.approx(part.table.searches.mean())
    all_tokens, all_right = part.table.total_tokens.sum(), part.table.em.sum()
    assert per_right["value"] == pytest.approx(all_tokens / all_right)
    assert per_right["low"] < per_right["value"] < per_right["high"]
    read = [0, 0, 0, 80 * 0.5 / 4]
    for cell, tokens, more in zip(spent, each.values(), read, strict=True):
      total = searches["value"] * tokens + written["value"] + more
      assert cell["value"] == pytest.approx(total)
      assert cell["low"] < cell["value"] < cell["high"]
  bare = study.told([row])["tables"]["search_price"]
  assert len(bare["lines"]) == 3  # No price, no line; none was read for.
  assert "dollars of a million tokens read" not in str(bare["columns"])


def test_device_hours_are_the_papers_for_one_policy_and_for_k():
  """500 steps of the paper on 8 devices: 328 GPU-hours, 320 of Search-R1."""
  runs, expected = [], {}
  for label, step, fixed, *cells in (
    *(("AnySearch", 295.2, -1, 328, 1, 328), ("R1", 288.0, 5, 320, 5, 1600)),
    *(("unmeasured", 0, 5, None, 5, None), ("?", 288.0, 0, 320, None, None)),
  ):
    measured = {"time/elapsed": step, "device/count": 8} if step else {}
    config = {"curriculum": {"fixed_budget": fixed}} if fixed else {}
    runs.append(study_lib.Training(label, (measured,) * 500, config))
    expected[label,] = cells
  rows = [study.row("AnySearch", questions=4, budgets=range(1, 6))]
  table = study_tables._training_cost(study_lib.measure(rows, runs))
  assert "K = 5 budgets" in table.title
  for line in table.lines:
    found = [cell and cell.value for cell in line.cells]
    assert found == pytest.approx(expected[line.keys])


def _beside(row: metrics.Row, seed: int = 0) -> metrics.Row:
  """Puts an invented optimum beside a row: equal questions, equal numbers."""
  table = row.columns
  best = np.random.default_rng(seed).random((len(table.ids), len(_BUDGETS)))
  return dataclasses.replace(row, table=table.with_optimum(best, _BUDGETS))


@pytest.fixture(scope="module")
def regretted():
  made = [study.row(label, budgets=_BUDGETS) for label in ("A", "B")]
  return [_beside(row) for row in made]


@pytest.fixture(scope="module")
def regrets(regretted):
  return study.told(regretted)


def test_regret_by_hand_with_its_interval():
  em = np.array([1, 0, 0, 1, 1], float)
  best = np.array([1, 0.5, 0.25, 1, 0.75])
  episodes = [
    e | {"em": int(right), "outcome": "answered"}
    for e, right in zip(
      study.row("A", questions=5, budgets=(2,)).episodes, em, strict=True
    )
  ]
  table = columns.as_columns(episodes).with_optimum(best[:, None], [2])
  found = measures.estimates(table, ("regret",))["regret"]
  missed = best - em
  assert found.value == pytest.approx(missed.mean()) == pytest.approx(0.1)
  reach = stats.t(4).ppf(0.975) * missed.std(ddof=1) / 5**0.5
  assert found.low == pytest.approx(0.1 - reach)  # Below 0, and not cut there.
  assert found.high == pytest.approx(0.1 + reach)
  assert found.low < 0
  # Where some questions have no optimum, the others count.
  best[1:] = np.nan
  half = columns.as_columns(episodes).with_optimum(best[:, None], [2])
  assert measures.estimates(half, ("regret",))["regret"].value == 1 - em[0]


def test_regret_is_shown_by_budget_pooled_and_in_the_papers_tables(
  regretted, regrets
):
  lines = _lines_of(regrets["tables"]["overview"])
  for row in regretted:
    *cells, pooled = lines["regret", row.label]
    parts = row.by_budget.values()
    assert [c["value"] for c in cells] == [p.regret.value for p in parts]
    assert pooled["value"] == pytest.approx(row.whole.regret.value)
  *cells, mean = lines["EM", "the optimum, computed"]
  tables = [part.table for part in regretted[0].by_budget.values()]
  means = [table.optimum.mean() for table in tables]
  assert [c["value"] for c in cells] == pytest.approx(means)
  assert mean["value"] == pytest.approx(np.mean(means))
  five = regretted[1].by_budget[5].regret.value
  over = regretted[1].whole.over([2, 5]).regret.value
  for name, keys, column, value in (
    ("main", ("5", "B"), "regret", five),
    ("efficiency", ("world", "5", "B"), "regret", five),
    ("ablation_rows", ("B",), "B = 5 regret", five),
    ("ablation_rows", ("B",), "all B ≥ 1 regret", over),
  ):
    cells = _line(regrets["tables"][name], *keys)
    assert cells[column]["value"] == pytest.approx(value)
  # It is shown only where the optimum is known.
  plain = study.told([study.row("A", budgets=_BUDGETS)])
  assert "egret" not in json.dumps(plain["tables"])


def _trained(label, trainings, **options):
  size = {"budgets": (0, 2), "questions": 12}
  return study.trained(label, trainings, **size, **options)


def _tables(*rows):
  return study.told(rows)["tables"]


def test_several_trainings_are_told_apart_from_seeds():
  one = [study.row(n, seeds=(1, 2), budgets=(0, 2), questions=9) for n in "AB"]
  tables = _tables(*one)
  assert "EM p" not in _line(tables["pairwise_rows"], "all", "2", "A − B")
  data = study.told([_trained("A", 3), _trained("B", 3, skill=0.1)])
  tables = data["tables"]
  assert data["trainings"] == 3
  line = _line(tables["pairwise_rows"], "all", "2", "A − B")
  assert 0 < line["EM p"]["value"] <= line["EM p, Holm"]["value"]
  assert line["EM detectable"]["value"] > 0
