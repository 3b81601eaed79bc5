"""Forecasts of searches: what is asked, by hand, by brute force."""

from __future__ import annotations

import json

import numpy as np
import pytest
import scripted
import study

import anysearch_jax as aj
from research import forecasts

WORLD = aj.World()


@pytest.mark.parametrize(
  ("reply", "found"),
  [
    ("<think>x</think><answer>[1, 3]</answer>", (1, 3)),
    ("<answer> [0,0] </answer>\n", (0, 0)),
    ("<think>[1, 2]</think><answer>\nImpossible </answer>", ()),
    ("<answer>[3, 1]</answer>", None),
    ("<answer>2</answer>", None),
    ("<answer>about [1, 2]</answer>", None),
    ("<answer>[1, 2]</answer><answer>[1, 2]</answer>", None),
    ("<answer>[1, 2]</answer> or so", None),
    ("<answer>[1, -2]</answer>", None),
    (f"<answer>[1, {'9' * 5000}]</answer>", None),
    ("impossible", None),
    ("", None),
  ],
)
def test_replies_are_read_strictly(reply, found):
  assert forecasts.parsed(reply) == found


def played(folder):
  """Returns an episode of two searches and an answer, budget 3."""
  turns = [*map(scripted.search, "ab"), scripted.answer("x")]
  aj.evaluate(
    aj.config.EvaluationConfig(budgets=(3,)),
    aj.Playing(aj.config.EpisodeConfig(), aj.get_environment("paper"), slots=1),
    player=aj.Player(scripted.Engine(turns), scripted.CODEC),
    questions=[scripted.QUESTION],
    retriever=scripted.Retriever({"a": (aj.Passage("1", "t", "<answer>"),)}),
    folder=folder,
  )
  return json.loads((folder / "episodes.jsonl").read_text())


async def asked_about(episode, engine, max_context=9000):
  return await forecasts.ask(
    episode,
    engine=engine,
    tokenizer=scripted.CODEC,
    address=aj.Address(0, 0, 0),
    max_context=max_context,
  )


def test_a_policy_is_asked_before_each_search_and_reads_what_came_before(
  tmp_path,
):
  episode = played(tmp_path)
  replies = ["<answer>[2, 3]</answer>", "?", ""]
  engine = scripted.Engine(
    lambda request: replies[request.address.attempt - forecasts._ATTEMPTS]
  )
  assert aj.run(asked_about(episode, engine)) == replies
  assert {r.address for r in engine.requests} == {*engine.released}
  for made, request in enumerate(engine.requests):
    text = scripted.CODEC.decode(request.token_ids)
    assert f"made {made} searches and may make {3 - made} more" in text
    seen = [f"‹search›{q}‹/search›" in text for q in "ab"]
    assert seen == [made > 0, made > 1] and "known" not in text
    assert ("(Title: t) ‹answer›" in text) == (made > 0)
  # An episode that its context cannot hold is not asked about.
  assert aj.run(asked_about(episode, engine, max_context=1)) == [""] * 3
  assert len(engine.requests) == 3


def test_what_was_said_by_hand():
  (base,) = study.row("A", questions=1, budgets=(3,)).episodes
  wide, exact, never = (
    f"<answer>{x}</answer>" for x in ("[0, 2]", "[1, 1]", "impossible")
  )
  said = {
    "a": (2, 1, [exact, exact, never]),
    "b": (1, 1, [wide, "?"]),
    "c": (1, 0, [never] * 2),
  }
  episodes = [
    base | {"outcome": "answered", "question_id": name, "searches": k, "em": em}
    for name, (k, em, _) in said.items()
  ]
  table = aj.columns.as_columns(episodes)
  sums = np.stack(
    [forecasts.reply_sums(replies, k) for k, _, replies in said.values()]
  )
  found = forecasts.measured_replies(table, sums)
  # [1, 1] holds not 2, but 1, with score 1; [0, 2] holds 1, with score 0.
  assert {name: x.value for name, x in found.items()} == pytest.approx(
    {"coverage": 2 / 3, "score": 1 / 5, "impossible_wrong": 1}
    | {"impossible_right": 1 / 5, "unparsable": 1 / 7, "width": 2 / 3}
  )
  sums = np.stack([forecasts.reply_sums([never] * 2, k) for k in (2, 1, 1)])
  none = forecasts.measured_replies(table, sums)
  assert none["coverage"].value is none["width"].value is None
  replies = {forecasts.key(e): said[e["question_id"]][2] for e in episodes}
  lines = forecasts.page(episodes, replies).splitlines()
  assert [line.split()[1] for line in lines[1:]] == ["fitted", "asked"]
  assert lines[2].split()[2] == "0.667"


def row(made, *, em=1, budget=3):
  """Returns episodes of questions q0, q1, ... with these searches."""
  (base,) = study.row("A", questions=1, budgets=(budget,)).episodes
  episodes = [
    base | {"question_id": f"q{i:03}", "searches": k, "em": em}
    for i, k in enumerate(made)
  ]
  return aj.columns.as_columns([e | {"outcome": "answered"} for e in episodes])


def test_halves_forecast_each_other_by_hand():
  # Even questions make 2 searches, odd ones 0 or 3.
  table = row([2, 0, 2, 3])
  # q0: [0, 3] holds 2, [2, 2] does not hold 1, [1, 1] not 0. q1: [2, 2] not 0.
  # q3: [2, 2] not 3, [1, 1] not 2, [0, 0] not 1; no search is left after it.
  assert forecasts.fitted(table).tolist() == [
    [3, 1, 3, 0],
    [1, 0, 0, 0],
    [3, 1, 3, 0],
    [3, 0, 0, 0],
  ]
  found = forecasts.measured(table, forecasts.fitted(table))
  assert found["coverage"].value == pytest.approx(0.2)
  assert found["width"].value == pytest.approx(0.6)
  assert found["score"].value == 0
  # A half without an episode to learn from tells nothing.
  assert forecasts.fitted(row([1])).tolist() == [[2, 2, 3 + 2, 0]]
  assert forecasts.measured(row([0], budget=0), np.zeros((1, 4))) == {}
  wrong = row([1, 1], em=0)
  assert forecasts.fitted(wrong).tolist() == [[2, 2, 0, 2]] * 2
  assert (
    forecasts.measured(wrong, forecasts.fitted(wrong))["score"].value is None
  )


def test_fitted_intervals_equal_quantiles_of_the_other_half():
  made = np.random.default_rng(0).binomial(5, 0.4, 60)
  expected = np.zeros((60, 4))
  for i, k in enumerate(made):
    for done in range(min(k + 1, 5)):
      others = [m - done for m in made[1 - i % 2 :: 2] if m >= done]
      low, high = np.quantile(others, [0.1, 0.9], method="inverted_cdf")
      held, width, follows = low <= k - done <= high, high - low, k - done
      score = max(0, 1 - width / follows) if follows else width == 0
      expected[i] += 1, held, width, held * score
  np.testing.assert_allclose(forecasts.fitted(row(made, budget=5)), expected)
