"""Tests the metrics of evaluation against small tables."""

from __future__ import annotations

import json

import point_values
import pytest
import study

from anysearch_jax.evaluation import columns, metrics


def _episode(**changes):
  base = {
    "question_id": "q0",
    "question": "where?",
    "golden_answers": ["x"],
    "budget": 2,
    "scaffold": False,
    "seed": 1,
    "spans": [],
    "answer": "x",
    "em": 1,
    "format": 1,
    "searches": 1,
    "queries": ["kelmar birthplace"],
    "violation": False,
    "outcome": "answered",
    "reason": "",
    "generated_tokens": 10,
    "retrieved_tokens": 30,
    "total_tokens": 40,
    "metadata": {},
  }
  return base | changes


_FACT = {
  "entity": "kelmar",
  "relation": "birthplace",
  "alternative": "born in",
  "value": "tol",
  "known": True,
  "stale": False,
}


def test_failed_episodes_are_counted_and_excluded():
  cell = point_values.cell(
    [
      _episode(),
      _episode(
        question_id="q1",
        em=0,
        searches=2,
        outcome="invalid",
        format=0,
        violation=True,
      ),
      _episode(
        question_id="q2", searches=0, retrieved_tokens=0, total_tokens=10
      ),
      _episode(
        question_id="q3", em=0, outcome="truncated", generated_tokens=40
      ),
      _episode(question_id="q4", em=0, outcome="failed", total_tokens=999),
    ]
  )
  assert (cell.n, cell.failed) == (4, 1)
  rates = cell.invalid_rate, cell.truncated_rate, cell.violation_rate
  assert rates == (0.25, 0.25, 0.25)
  assert (cell.accuracy, cell.searches, cell.tp) == (0.5, 1.0, 0.5)
  assert (cell.format_rate, cell.unused) == (0.75, 1.0)
  assert (cell.generated_tokens, cell.retrieved_tokens) == (17.5, 22.5)
  assert cell.total_tokens == 32.5
  assert cell.retrieval_share == pytest.approx(90 / 130)


def test_only_failures_have_no_mean():
  cell = point_values.cell([_episode(outcome="failed")])
  assert (cell.n, cell.failed) == (0, 1)
  assert cell.accuracy is cell.tp is cell.retrieval_share is None


def test_productivity_pools_searches_and_excludes_closed_book_answers():
  found = [
    _episode(budget=0, searches=0, em=1),
    _episode(budget=1, searches=1, em=1),
    _episode(budget=2, searches=2, em=0),
  ]
  cells = point_values.by_budget(found)
  assert (cells[0].tp, cells[0].accuracy) == (None, 1.0)
  assert (cells[1].tp, cells[2].tp) == (1.0, 0.0)
  assert point_values.cell(found).tp == pytest.approx(1 / 3)
  assert point_values.cell(found).accuracy == pytest.approx(2 / 3)


def test_budget_use_counts_the_searches_of_each_budget():
  found = [
    _episode(budget=0, searches=0),
    _episode(budget=2, searches=2),
    _episode(budget=2, searches=0, question_id="q1"),
    _episode(budget=2, searches=2, question_id="q2"),
    _episode(budget=2, searches=1, question_id="q3", outcome="failed"),
  ]
  assert metrics.budget_use(found) == {0: (1,), 2: (1, 0, 2)}
  shares = metrics.search_shares(found)
  assert [share.value for share in shares[2]] == pytest.approx(
    [1 / 3, 0, 2 / 3]
  )


@pytest.mark.parametrize(
  ("query", "asks"),
  [
    ("kelmar birthplace", True),
    ("Where was Kelmar born in?", True),
    ("verdict kelmar birthplace tol", True),
    ("kelmarine birthplace", False),
    ("kelmar country", False),
    ("birthplace", False),
    ("", False),
  ],
)
def test_asks_for_matches_whole_words_of_either_wording(query, asks):
  assert columns.asks_for(query, _FACT) is asks


def test_a_fact_without_another_wording_matches_only_its_own():
  fact = _FACT | {"alternative": ""}
  assert not columns.asks_for("kelmar", fact)


def test_first_hop_sorts_by_memory_and_needs_budget():
  def asked(budget=1, queries=(), **fact):
    return _episode(
      budget=budget,
      queries=list(queries),
      metadata={"facts": [_FACT | fact, _FACT]},
    )

  found = [
    columns.first_hop(episode)
    for episode in (
      asked(queries=["kelmar born in"]),
      asked(known=False),
      asked(stale=True, queries=["tol country", "kelmar birthplace"]),
      asked(budget=0),
      _episode(metadata={}),
    )
  ]
  assert found == [
    ("known", True),
    ("unknown", False),
    ("stale", True),
    None,
    None,
  ]


def test_episodes_are_read_as_they_were_written():
  row = study.row("a", questions=2, budgets=(0, 1))
  lines = [json.dumps(e) for e in row.episodes] + ["\n"]
  assert tuple(columns.parse(lines, source="x")) == row.episodes


@pytest.mark.parametrize(
  ("line", "sentence"),
  [
    ("{", "x.jsonl, line 1: found text that is not JSON"),
    ("{}", "x.jsonl, line 1: the episode lacks question_id"),
  ],
)
def test_invalid_lines_of_episodes_are_refused(line, sentence):
  with pytest.raises(ValueError, match=sentence):
    list(columns.parse([line], source="x.jsonl"))
