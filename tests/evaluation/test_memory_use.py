"""P(first fact searched) by how reliable the memory of it is."""

from __future__ import annotations

import copy

import pytest
import study

from anysearch_jax.evaluation import memory_use


def graded(row, reliabilities=(0.5, 0.8, 1.0)):
  """Gives the first fact of each question a reliability."""
  episodes = []
  for episode in copy.deepcopy(list(row.episodes)):
    i = int(episode["question_id"][1:]) % len(reliabilities)
    episode["metadata"]["facts"][0]["reliability"] = reliabilities[i]
    episodes.append(episode)
  return episodes


def test_shares_are_those_of_remembered_first_facts():
  episodes = graded(study.row("a", questions=80, budgets=(0, 1, 4), thrift=0.4))
  found = memory_use.searched(episodes)
  assert list(found) == [0.5, 0.8, 1.0]
  for reliability, by_budget in found.items():
    assert list(by_budget) == [1, 4]  # Without budget there is no decision.
    for budget, estimate in by_budget.items():
      asked = []
      for e in episodes:
        fact = e["metadata"]["facts"][0]
        if (
          e["budget"] == budget
          and fact["known"]
          and fact["reliability"] == reliability
          and e["outcome"] != "failed"
        ):
          query = f"{fact['entity']} birthplace"
          asked.append(any(query in q for q in e["queries"]))
      assert estimate.value == pytest.approx(sum(asked) / len(asked))
      assert 0 <= estimate.low < estimate.value < estimate.high <= 1


def test_questions_that_do_not_tell_have_no_shares():
  assert memory_use.searched(study.row("a", questions=5).episodes) == {}
  plain = study.row("a", questions=5, plain=True)
  assert memory_use.searched(plain.episodes) == {}


def test_equal_answers_to_one_question_count_once():
  one = graded(study.row("a", questions=400, budgets=(4,), thrift=0.4))
  three = [{**e, "seed": seed} for e in one for seed in (1, 2, 3)]
  for reliability, by_budget in memory_use.searched(one).items():
    again = memory_use.searched(three)[reliability]
    assert again[4].value == pytest.approx(by_budget[4].value)
    # As independent answers they would have 1 / sqrt(3) of the width.
    widths = [found.high - found.low for found in (by_budget[4], again[4])]
    assert widths[1] == pytest.approx(widths[0], rel=0.1)
