"""Rules as values: what they see, how they score, and what a file holds."""

from __future__ import annotations

import json
import math

import pytest
import scripted

from anysearch_jax import budgets, types
from anysearch_jax import config as config_lib
from anysearch_jax.rollout import control, episode

SEEN = control.Seen(1, 3, 30, 10.0, 0, -0.5)
STOPPING = {
  "mean": [1.0, 2.0, 4.0, 0.0, -1.0],
  "scale": [1.0, 2.0, 1.0, 1.0, 0.5],
  "weights": [0.25, 1.0, 0.5, -2.0, -1.0],
  "bias": 0.125,
}
VALUE = {
  "left": [0, 2],
  "turns_left": [0, 1.5, 3],
  "logp": [-2, -0.1],
  "search": [[[0.0] * 2, [0.2] * 2, [0.3] * 2], [[0.1, 0], [0.5, 0], [0.6, 0]]],
  "answer": [[[0.2] * 2, [0.2] * 2, [0.2] * 2], [[0.2, 1], [0.3, 1], [0.3, 1]]],
  "penalty": 0.0,
}


def file_of(kind="stopping", ask=STOPPING, answer=None, **more):
  return {
    "kind": kind,
    "features": list(control.FEATURES),
    "tries": 2,
    "ask": ask,
    "answer": answer,
  } | more


def test_regression_scores_standardised_features():
  # Of 60 tokens 30 are left, three turns of 10:
  # .25 * 0 + 1 * .5 + .5 * -1 - 0 - 1 * 1 + .125
  score = control.parse(file_of()).scores["ask"]
  assert score(SEEN, 60.0) == pytest.approx(-0.875)
  # Without a cap, ten turns are left: + .5 * 7.
  assert score(SEEN, math.inf) == pytest.approx(-0.875 + 3.5)


def test_value_is_by_what_a_search_takes_of_both_budgets():
  # In the cell (3 left, 3 turns left): .6 - .3, and (1/3 + 1/3) / 2 is taken.
  rule = control.parse(file_of("value", VALUE))
  score = rule.scores["ask"]
  assert score(SEEN, 60.0) == pytest.approx(0.9)
  # The likelier turn is in another cell: 0 - 1.
  sure = SEEN._replace(logp=-0.05)
  assert rule.scores["ask"](sure, 60.0) == pytest.approx(-3.0)
  # Half a turn left: .1 - .2, and (1/3 + 2) / 2 is taken.
  assert score(SEEN, 35.0) == pytest.approx(-0.1 * 6 / 7)
  # A quarter of the searches and half of the tokens are spent.
  paid = control.parse(file_of("value", VALUE | {"penalty": 4.0}))
  assert paid.scores["ask"](SEEN, 60.0) == pytest.approx(0.9 - 4 * 0.375)
  assert rule.searches("ask", SEEN, 60.0)
  assert not paid.searches("ask", SEEN, 60.0)


def test_proposal_without_a_score_is_accepted():
  rule = control.parse(file_of(ask=None))
  assert rule.searches("ask", SEEN, 60.0)
  assert not rule.searches("answer", SEEN, 60.0)


def test_what_is_seen_of_an_episode():
  config = config_lib.EpisodeConfig(max_generated=900, max_context=5000)
  state, _ = episode.start(
    types.Question("q", "Q?", ()),
    budget=budgets.Budget(searches=3, tokens=300),
    scaffold=False,
    address=types.Address(0, 0, 0),
    config=config,
    codec=scripted.CODEC,
  )
  written = 0
  for query, repeated in (("a", 0), ("b", 0), ("a", 1)):
    turn = scripted.turn(state.request, scripted.search(query))
    state, request = episode.step(state, turn)
    written += len(turn.token_ids)
    found = control.seen(state)
    assert found[:3] == (state.used, 3 - state.used, written)
    assert found.turn == written / state.turns
    assert found.repeated == repeated
    mean = sum(turn.logps) / len(turn.logps)
    assert found.logp == pytest.approx(mean, abs=1e-5)
    assert control.cap(state.caps.tokens, 4096) == 300
    assert isinstance(request, types.SearchRequest)
    state, _ = episode.step(state, episode.episode_state.Retrieved(()))


@pytest.mark.parametrize(
  ("values", "expected"),
  [
    (None, "No such file"),
    ([], "a JSON object"),
    ({}, "'kind'"),
    (file_of("oracle"), "'oracle', expected stopping or value"),
    (file_of(features=["made"]), "others than made, left"),
    (file_of(tries=-1), "tries: found -1"),
    (file_of(ask={"bias": 1.0}), "missing"),
    (file_of(ask=STOPPING | {"bias": math.nan}), "bias: found a number that"),
    (file_of(ask=STOPPING | {"bias": 10**400}), "other values than a number"),
    (file_of(ask=STOPPING | {"bias": "1"}), "other values than a number"),
    (file_of(ask=STOPPING | {"mean": [0.0]}), "mean: found other values than"),
    (file_of(ask=STOPPING | {"scale": [0.0] * 5}), "scale: expected numbers"),
    (file_of(ask=[1]), "ask: found [1], expected a JSON object"),
    (file_of(tries=True), "tries: found True"),
    # Cells that an episode may come to are as they must be, each of them.
    (file_of("value", VALUE | {"search": []}), "of the shape [2, 3, 2]"),
    (
      file_of("value", VALUE | {"search": VALUE["search"][:1]}),
      "ask.search: found other values than numbers of the shape [2, 3, 2]",
    ),
    (
      file_of("value", VALUE | {"answer": [[[0, 1], [0]], [[0, 1]]]}),
      "ask.answer: found other values than",
    ),
    (file_of("value", VALUE | {"left": [2, 0]}), "left: expected ascending"),
    (file_of("value", VALUE | {"logp": []}), "logp: expected ascending"),
  ],
)
def test_file_without_a_rule_is_refused(tmp_path, values, expected):
  path = tmp_path / "rule.json"
  if values is not None:
    path.write_text(json.dumps(values))
  config = config_lib.EpisodeConfig(control=str(path))
  with pytest.raises(ValueError) as error:
    control.of(config)
  assert expected in str(error.value)
  assert "expected a file of research.control_fit" in str(error.value)


def test_hash_is_of_what_decides(tmp_path):
  one = control.parse(file_of())
  assert control.parse(file_of(fitted={"ask": 1})).sha256 == one.sha256
  assert control.parse(file_of(tries=3)).sha256 != one.sha256


def test_environment_that_verifies_is_refused(tmp_path):
  path = tmp_path / "rule.json"
  path.write_text(json.dumps(file_of()))
  config = config_lib.EpisodeConfig(prompts="bats_verify", control=str(path))
  with pytest.raises(ValueError, match="verifies answers"):
    control.of(config)
