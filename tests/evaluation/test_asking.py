"""BAGEN's question: what is asked, how replies are read, what they come to."""

from __future__ import annotations

import json

import pytest
import scripted
import study

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.evaluation import asking, columns, forecast, harness
from anysearch_jax.methods import systems
from anysearch_jax.report import study_tables


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
  assert asking.parsed(reply) == found


def evaluated(folder, replies, error=None):
  """Evaluates an episode of two searches and an answer, asked for forecasts."""
  asked, turns = [], [*map(scripted.search, "ab"), scripted.answer("x")]

  def say(request):
    if request.address.attempt < asking._ATTEMPTS:
      return turns[request.turn]
    asked.append(scripted.CODEC.decode(request.token_ids))
    if error:
      raise error
    return replies[len(asked) - 1]

  engine = scripted.Engine(say)
  harness.evaluate(
    config_lib.EvaluationConfig(budgets=(3,), forecasts=True),
    harness.Playing(
      config_lib.EpisodeConfig(), systems.environment("paper"), slots=1
    ),
    player=harness.Player(engine, scripted.CODEC),
    questions=[scripted.QUESTION],
    retriever=scripted.Retriever({"a": (types.Passage("1", "t", "<answer>"),)}),
    folder=folder,
  )
  assert {r.address for r in engine.requests} <= {*engine.released}
  return json.loads((folder / harness.EPISODES).read_text()), asked


def test_a_policy_is_asked_before_each_search_and_reads_what_came_before(
  tmp_path,
):
  row, asked = evaluated(tmp_path, said := ["<answer>[2, 3]</answer>", "?", ""])
  assert (row["forecasts"], row["searches"]) == (said, 2)
  for made, text in enumerate(asked):
    assert f"made {made} searches and may make {3 - made} more" in text
    seen = [f"‹search›{q}‹/search›" in text for q in "ab"]
    assert seen == [made > 0, made > 1] and "known" not in text
    assert ("(Title: t) ‹answer›" in text) == (made > 0)


def test_an_outage_fails_the_episode(tmp_path):
  row, _ = evaluated(tmp_path, [], types.EngineError("gone"))
  assert row["outcome"] == "failed" and "gone" in row["reason"]
  assert "forecasts" not in row


def test_what_was_said_by_hand():
  (base,) = study.row("A", questions=1, budgets=(3,)).episodes
  wide, exact, never = (
    f"<answer>{x}</answer>" for x in ("[0, 2]", "[1, 1]", "impossible")
  )
  keys = "question_id", "searches", "em", "forecasts"
  episodes = [
    base | {"outcome": "answered"} | dict(zip(keys, values, strict=True))
    for values in (
      ("a", 2, 1, [exact, exact, never]),
      ("b", 1, 1, [wide, "?"]),
      ("c", 1, 0, [never] * 2),
    )
  ]
  found = forecast.asked(columns.of(episodes))
  # [1, 1] holds not 2, but 1, with score 1; [0, 2] holds 1, with score 0.
  assert {name: x.value for name, x in found.items()} == pytest.approx(
    {"coverage": 2 / 3, "score": 1 / 5, "impossible_wrong": 1}
    | {"impossible_right": 1 / 5, "unparsable": 1 / 7, "width": 2 / 3}
  )
  alone = [e | {"forecasts": [never] * 2} for e in episodes]
  none = forecast.asked(columns.of(alone))
  assert none["coverage"].value is none["width"].value is None
  rows = [study_tables.metrics.Row("A", tuple(episodes))]
  lines = study.told(rows)["tables"]["forecast"]["lines"]
  assert [line["keys"][1] for line in lines] == ["A", "A, asked"]
