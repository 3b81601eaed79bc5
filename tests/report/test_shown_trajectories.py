"""Which trajectories a report shows, and what it says of them."""

from __future__ import annotations

import pytest
import study

from anysearch_jax.evaluation import episodes
from anysearch_jax.report import trajectories


def test_trajectories_are_chosen_by_rule():
  size = {"questions": 24, "budgets": (0, 1, 3, 6)}
  rows = [
    study.row("AnySearch", run="a", **size),
    study.row("γ=0", thrift=0.8, run="b", **size),
    study.row("AnySearch + scaffold", run="a", scaffold=True, **size),
  ]
  samples = [trajectories.Sample(r.label, r.episodes) for r in rows]
  chosen = trajectories.choose(samples, ["γ=0"], trained=5)
  assert len(chosen) == 12
  keys = [episodes.key_of(c.episode) for c in chosen]
  assert len(set(keys)) == 12
  by_why = {c.why: c for c in chosen}
  right = [c for c in chosen if c.why == "right, γ=0 wrong"]
  assert len(right) == 4
  assert all(c.episode["em"] > c.other["em"] for c in right)
  wrong = by_why["wrong, γ=0 right"]
  assert wrong.episode["em"] < wrong.other["em"]
  assert by_why["no search allowed (B = 0)"].episode["budget"] == 0
  assert by_why["a budget never trained"].episode["budget"] > 5
  assert by_why["tries to search beyond its budget"].episode["violation"]
  assert trajectories.verifies(by_why["verifies what it found"].episode)


@pytest.mark.parametrize(
  ("queries", "retries", "verifies"),
  [
    (["kel birthplace"], False, False),
    (["kel birthplace", "kel born"], True, False),
    (["kel birthplace", "kel birthplace tol"], False, True),
    (["verdict kel birthplace tol"], False, True),
  ],
)
def test_retries_and_verifications(queries, retries, verifies):
  fact = {
    "entity": "kel",
    "relation": "birthplace",
    "alternative": "born",
    "value": "tol",
  }
  episode = {"queries": queries, "spans": [], "metadata": {"facts": [fact]}}
  assert trajectories.retries(episode) is retries
  assert trajectories.verifies(episode) is verifies


def test_a_search_after_an_empty_result_is_a_retry():
  miss = {"author": "environment", "text": "No results found."}
  search = {"author": "model", "text": "<search>x</search>"}
  last = {"author": "model", "text": "<answer>x</answer>"}
  assert trajectories.retries({"spans": [search, miss, search], "queries": []})
  assert not trajectories.retries(
    {"spans": [search, miss, last], "queries": []}
  )


def test_adjacent_spans_of_one_author_are_joined():
  spans = [
    {"author": author, "text": text}
    for author, text in (
      ("model", "a"), ("model", "b"), ("environment", "c"), ("model", "d"),
    )
  ]  # fmt: skip
  told = trajectories.authored({"spans": spans})
  assert told == [("model", "ab"), ("environment", "c"), ("model", "d")]
