"""Which played episodes are imitated."""

from __future__ import annotations

from anysearch_jax.demonstrations import selection


def row(question, budget, searches, *, tokens=9, **values):
  return {
    "question_id": question,
    "dataset": "nq",
    "budget": budget,
    "searches": searches,
    "generated_tokens": tokens,
    "em": 1,
    "format": 1,
    "answer": "it",
    "failed": False,
  } | values


def test_right_and_well_formed_episodes_are_kept_the_cheapest_of_each():
  rows = [
    row("a", 2, 2),
    row("a", 2, 1),
    row("a", 2, 1, tokens=8),
    row("a", 1, 1, em=0),
    row("b", 2, 0, format=0),
    row("b", 1, 0, failed=True),
    row("c", 1, 1, format=None),
    row("c", 2, 1, em=0, answer="unknown"),
    row("c", 3, 1, em=0, answer=None),
  ]
  kept, reasons = selection.chosen(rows, pareto=False)
  assert kept == [rows[2], rows[6]]
  assert reasons == [
    *("costlier than another", "costlier than another", ""),
    *("wrong answer", "malformed", "failed", ""),
    *("answer not found", "no answer"),
  ]


def test_the_pareto_front_leaves_out_searches_that_were_not_needed():
  rows = [row("a", 0, 0), row("a", 2, 2), row("b", 0, 0, em=0), row("b", 2, 2)]
  kept, reasons = selection.chosen(rows, pareto=True)
  assert kept == [rows[0], rows[3]]
  assert reasons[1] == "right with fewer searches at a lower budget"
  assert selection.chosen(rows, pareto=False)[0] == [
    *(rows[0], rows[1], rows[3]),
  ]


def test_every_episode_is_counted():
  rows = [row("a", 1, 1), row("b", 1, 1, em=0), row("a", 0, 0)]
  _, reasons = selection.chosen(rows, pareto=False)
  counts = selection.counted(rows, reasons)
  assert counts["nq", 1] == (1, 1, 9, {"wrong answer": 1})
  assert counts["nq", 0].kept == 1
