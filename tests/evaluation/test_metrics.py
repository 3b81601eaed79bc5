"""Tests the metrics of evaluation against small tables."""

from __future__ import annotations

import json

import pytest
import study

from anysearch_jax.evaluation import episodes, metrics


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


def test_cell_excludes_failed_episodes_and_counts_them():
  cell = metrics.cell(
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
  assert (cell.n, cell.failed, cell.invalid, cell.truncated) == (4, 1, 1, 1)
  assert (cell.correct, cell.searches_total, cell.violations) == (2, 4, 1)
  assert (cell.accuracy, cell.searches, cell.tp) == (0.5, 1.0, 0.5)
  assert cell.format_rate == 0.75
  assert (cell.generated_tokens, cell.retrieved_tokens) == (17.5, 22.5)
  assert cell.total_tokens == 32.5
  assert cell.retrieval_share == pytest.approx(90 / 130)


def test_productivity_is_undefined_without_a_search():
  cell = metrics.cell([_episode(searches=0, budget=0)])
  assert cell.tp is None
  assert cell.accuracy == 1.0
  assert metrics.productivity(0, 3) == 0.0


def test_cell_of_only_failures_has_no_mean():
  cell = metrics.cell([_episode(outcome="failed")])
  assert (cell.n, cell.failed) == (0, 1)
  assert cell.accuracy is None
  assert cell.tp is None
  assert cell.retrieval_share is None


def test_spread_over_seeds():
  one = [_episode(seed=1, question_id=q, em=e) for q, e in zip("ab", (1, 1))]
  two = [_episode(seed=2, question_id=q, em=e) for q, e in zip("ab", (1, 0))]
  assert metrics.cell(one).accuracy_spread is None
  # Accuracies 1.0 and 0.5: sample standard deviation 0.5 / sqrt(2).
  assert metrics.cell(one + two).accuracy_spread == pytest.approx(0.35355339)


def test_average_weighs_budgets_alike_and_pools_productivity():
  cells = metrics.by_budget(
    [
      _episode(budget=0, searches=0, em=0),
      _episode(budget=1, searches=1, em=1),
      _episode(budget=1, searches=1, em=1, question_id="q1"),
      _episode(budget=2, searches=2, em=1),
    ]
  )
  average = metrics.average(list(cells.values()))
  assert list(cells) == [0, 1, 2]
  assert average.accuracy == pytest.approx(2 / 3)  # 0, 1, 1
  assert average.searches == pytest.approx(1.0)  # 0, 1, 2
  assert average.tp == pytest.approx(3 / 4)
  assert average.n == 4


def test_productivity_excludes_closed_book_answers():
  found = [
    _episode(budget=0, searches=0, em=1),
    _episode(budget=1, searches=1, em=1),
    _episode(budget=2, searches=2, em=0),
  ]
  cells = metrics.by_budget(found)
  assert cells[0].tp is None
  assert metrics.average(list(cells.values())).tp == pytest.approx(1 / 3)
  assert metrics.cell(found).tp == pytest.approx(1 / 3)
  assert metrics.cell(found).accuracy == pytest.approx(2 / 3)


def test_budget_use_counts_the_searches_of_each_budget():
  found = [
    _episode(budget=0, searches=0),
    _episode(budget=2, searches=2),
    _episode(budget=2, searches=0, question_id="q1"),
    _episode(budget=2, searches=2, question_id="q2"),
    _episode(budget=2, searches=1, question_id="q3", outcome="failed"),
  ]
  assert metrics.budget_use(found) == {0: (1,), 2: (1, 0, 2)}
  assert metrics.by_budget(found)[2].unused == pytest.approx(2 / 3)


def test_by_dataset():
  found = [
    _episode(dataset="musique", question_id="a"),
    _episode(dataset="nq", question_id="b", em=0),
    _episode(dataset="nq", question_id="b", budget=3),
  ]
  cells = metrics.by_dataset(found)
  assert {
    d: {b: c.accuracy for b, c in t.items()} for d, t in cells.items()
  } == {
    "nq": {2: 0.0, 3: 1.0},
    "musique": {2: 1.0},
  }
  assert list(cells) == ["nq", "musique"]


def test_by_hops():
  episodes = [
    _episode(metadata={"hops": 2}),
    _episode(metadata={"hops": 1}, em=0, question_id="q1"),
    _episode(metadata={"hops": 2}, em=0, question_id="q2"),
    _episode(metadata={"hops": 2}, outcome="failed", question_id="q3"),
    _episode(metadata={}, question_id="q4"),
  ]
  assert metrics.by_hops(episodes) == {1: {2: (0, 1)}, 2: {2: (1, 2)}}


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
  assert episodes.asks_for(query, _FACT) is asks


def test_a_fact_without_another_wording_matches_only_its_own():
  fact = _FACT | {"alternative": ""}
  assert not episodes.asks_for("kelmar", fact)


def test_first_hop_sorts_by_memory_and_needs_budget():
  def asked(budget=1, queries=(), **fact):
    return _episode(
      budget=budget,
      queries=list(queries),
      metadata={"facts": [_FACT | fact, _FACT]},
    )

  found = [
    episodes.first_hop(episode)
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
  assert tuple(episodes.read(lines, source="x")) == row.episodes


@pytest.mark.parametrize(
  ("line", "sentence"),
  [
    ("{", "x.jsonl, line 1: found text that is not JSON"),
    ("{}", "x.jsonl, line 1: the episode lacks question_id"),
  ],
)
def test_invalid_lines_of_episodes_are_refused(line, sentence):
  with pytest.raises(ValueError, match=sentence):
    list(episodes.read([line], source="x.jsonl"))
