"""Rules are fitted to what ends earn; the last test plays a whole command."""

from __future__ import annotations

import json
import math
import random
import re
import runpy

import commands
import numpy as np
import pytest
import scipy.optimize
import scripted
from played_evaluation import configured, play, playing, rows_of

import anysearch_jax as aj
from anysearch_jax import config as config_lib
from research import branching, control_fit

control = aj.control

RETRIEVER = scripted.Retriever({"look": [aj.Passage("p", "T", "x")]})


def seen(made=0, left=3, written=20, turn=10.0, logp=-0.5):
  return control.Seen(made, left, written, turn, 0, logp)._asdict()


def row(question, kind, cut=0, *, stored, ends=None, tries=1, found=None):
  """Returns an end; `stored` and the ends are pairs of (em, tokens)."""
  return {
    "question_id": str(question),
    "budget": 3,
    "seed": 1,
    "kind": kind,
    "cut": cut,
    "tries": tries,
    "outcome": "answered",
    "seen": seen() if found is None else found,
    "discarded": 30 * (tries - 1),
    "stored_em": stored[0],
    "stored_tokens": stored[1],
    "sampled": {
      name: {"em": em, "tokens": tokens}
      for name, (em, tokens) in (ends or {}).items()
    },
  }


def plan(kind="stopping", tokens=(), tries=2, penalty=0.0, most=4096):
  return control_fit.Plan(kind, tokens, most, tries, penalty)


def test_regression_is_the_optimum_of_its_likelihood():
  draw = random.Random(0)
  rows = []
  for i in range(300):
    logp = -draw.random()
    left = draw.randint(1, 8)
    right = draw.random() < 1 / (1 + math.exp(-4 * (-logp - 0.5) - left / 8))
    rows.append(
      row(
        i,
        "stop",
        stored=(float(right), 30),
        ends={"refused": (float(draw.random() < 0.5), 30)},
        found=seen(left=left, logp=logp),
      )
    )
  values, fitted = control_fit.fit(rows, plan())
  found = values["ask"]
  x = np.array(
    [control_fit.features(control.Seen(**r["seen"]), 4096) for r in rows]
  )
  search = np.array([r["stored_em"] for r in rows])
  answer = np.array([r["sampled"]["refused"]["em"] for r in rows])
  one = search != answer  # Ends that are both right or both wrong say nothing.
  mean, scale = x[one].mean(0), x[one].std(0)
  scale[scale < 1e-6] = 1
  standard = (x - mean) / scale

  def loss(weights):
    score = standard[one] @ weights[:-1] + weights[-1]
    fits = np.logaddexp(0, np.where(search[one] > 0, -score, score)).sum()
    return fits + (weights[:-1] @ weights[:-1] + 1e-3 * weights[-1] ** 2) / 2

  best = scipy.optimize.minimize(loss, np.zeros(6), tol=1e-10).x
  assert found["mean"] == pytest.approx(mean, abs=1e-5)
  assert found["scale"] == pytest.approx(scale, abs=1e-5)
  assert [*found["weights"], found["bias"]] == pytest.approx(best, abs=1e-3)
  # Unlikely turns, and many searches left, speak for searching.
  assert found["weights"][4] < -0.5 and found["weights"][1] > 0
  assert fitted["ask"]["rule"] >= max(
    fitted["ask"]["accept"], fitted["ask"]["replace"]
  )
  assert fitted["ask"]["turns"] == 300


@pytest.mark.parametrize("kind", control_fit.SCORES)
def test_search_that_leaves_no_tokens_for_an_answer_is_refused(kind):
  # Searching is right with 60 tokens, answering at once in half of the cases
  # with 30.
  rows = [
    row(
      i,
      "stop",
      stored=(1.0, 60),
      ends={"refused": (float(i % 2), 30)},
      found=seen(left=1, logp=-0.01 * (i % 7)),
    )
    for i in range(200)
  ]
  values, fitted = control_fit.fit(rows, plan(kind, tokens=(25, 40, 80)))
  rule = control_fit.rule(values)
  found = control.Seen(**seen(left=1, logp=-0.03))
  assert rule.searches("ask", found, 4096)
  assert rule.searches("ask", found, 80)
  assert not rule.searches("ask", found, 40)
  assert "answer" not in values
  # At caps of 25, 40 and 80 and without one: 0, .5, 1 and 1.
  assert fitted["ask"]["accept"] == 0.5
  assert fitted["ask"]["rule"] == pytest.approx(2.5 / 4)


def test_search_is_worth_what_follows_under_the_rule():
  # Two searches in a row. The second one takes too many tokens, and refusing
  # it is right; so the first is worth granting, which the stored end hides.
  rows = []
  for i in range(100):
    first = seen(made=0, left=3, written=10, logp=-0.01 * (i % 5))
    second = seen(made=1, left=2, written=20, logp=-0.01 * (i % 5))
    for cut, end, found in ((0, (0.0, 25), first), (1, (1.0, 35), second)):
      ends = {"refused": end}
      rows.append(row(i, "stop", cut, stored=(1.0, 90), ends=ends, found=found))
  values, fitted = control_fit.fit(rows, plan(tokens=(40,)))
  rule = control_fit.rule(values)
  assert not rule.searches("ask", control.Seen(**second), 40)
  assert rule.searches("ask", control.Seen(**first), 40)


@pytest.mark.parametrize("kind", control_fit.SCORES)
def test_unlikely_answer_is_replaced(kind):
  rows = [
    row(
      i,
      "continue",
      stored=(float(i % 2), 40),
      ends={"granted": (float(i % 4 < 2), 60)},
      found=seen(logp=-0.001 if i % 2 else -0.9),
    )
    for i in range(240)
  ]
  values, fitted = control_fit.fit(rows, plan(kind, tokens=(90,)))
  rule = control_fit.rule(values)
  guess, known = (control.Seen(**seen(logp=logp)) for logp in (-0.9, -0.001))
  assert rule.searches("answer", guess, 90)
  assert not rule.searches("answer", known, 90)
  assert fitted["answer"]["replaced"] == 0.5
  # Without tries no answer is replaced, whatever it would earn.
  values, _ = control_fit.fit(
    [*rows, row(0, "stop", stored=(1, 9), ends={"refused": (0, 9)})],
    plan(kind, tries=0),
  )
  assert "answer" not in values


def test_tries_are_charged():
  def earned(tokens, tries, allowed=2, granted=True):
    ends = {"granted": (1.0, 60)} if granted else {}
    rows = [row(0, "continue", stored=(0.0, 40), ends=ends, tries=tries)]
    _, fitted = control_fit.fit(rows, plan(tokens=(tokens,), tries=allowed))
    # The mean over the cap and no cap.
    return fitted["answer"]["replace"] * 2

  # The granted end has 60 tokens, and the discarded answer 10.
  assert earned(70, 1) == 2 and earned(69, 1) == 1
  # A failed try took 30 more.
  assert earned(100, 2) == 2 and earned(99, 2) == 1
  # The third try is beyond what the rule allows.
  assert earned(200, 3) == 0 == earned(200, 2, granted=False)


def test_no_cap_is_what_the_configuration_lets_an_episode_write():
  # The granted end takes 70 tokens with the discarded answer.
  rows = [row(0, "continue", stored=(0.0, 40), ends={"granted": (1.0, 60)})]
  for most, earned in ((70, 1.0), (69, 0.0)):
    _, fitted = control_fit.fit(rows, plan(most=most))
    assert fitted["answer"]["turns"] == 1
    assert fitted["answer"]["replace"] == earned
  # Caps beyond it are the same one.
  values, fitted = control_fit.fit(rows, plan(tokens=(50, 80, 90), most=70))
  assert fitted["answer"]["turns"] == 2
  # Where the rule is used, an episode without a cap has this one.
  assert control.cap(aj.budgets.UNCAPPED, 70) == control.cap(80, 70) == 70
  assert control.cap(50, 70) == 50


def test_rows_without_what_a_rule_sees_are_refused():
  old = row(0, "stop", stored=(1, 9))
  del old["seen"]
  with pytest.raises(ValueError, match="run research.branching"):
    control_fit.fit([old], plan())
  with pytest.raises(ValueError, match="no end that did not fail"):
    control_fit.fit([], plan())


def hesitant(request):
  """Searches at its second attempt or in half of its questions."""
  text = scripted.CODEC.decode(request.token_ids)
  if "<information>Doc" in text:
    return scripted.answer("x")
  asks = int(text.partition("item ")[2][0]) % 2 or request.address.attempt
  if asks and "No search is left" not in text:
    return scripted.search("look")
  return scripted.answer("y")


@pytest.mark.parametrize(
  ("policies", "limits", "sentence"),
  [
    ("pq", (9, 9), "found more than one policy: p ({}/a), q ({}/b); expected"),
    ("pp", (9, 8), "found more than one max_generated: 9 ({}/a), 8 ({}/b)"),
  ],
)
def test_branches_of_several_policies_or_limits_are_refused(
  tmp_path, policies, limits, sentence
):
  folders = []
  for name, policy, most in zip("ab", policies, limits):
    folders.append(tmp_path / name)
    folders[-1].mkdir()
    (folders[-1] / "branches.jsonl").write_text("")
    noted = {"policy": policy, "max_generated": most}
    (folders[-1] / "config.json").write_text(json.dumps(noted))
  said = sentence.format(tmp_path, tmp_path)
  with pytest.raises(ValueError, match=re.escape(said)):
    control_fit.branches(folders)


def test_command_writes_a_rule_that_raises_accuracy(tmp_path):
  questions = [aj.Question(str(i), f"item {i}", ("x",)) for i in range(8)]
  player = aj.Player(scripted.Engine(hesitant), scripted.CODEC)

  def right(config, folder):
    _, text = play(config, player, questions, RETRIEVER, folder)
    return sum(each["em"] for each in rows_of(text))

  config = configured(budgets=(1,), seeds=(1,))
  assert right(config, tmp_path / "e") == 4
  (tmp_path / "b").mkdir()
  branching.branch(
    playing(config),
    branching.Plan(0, 2, 4),
    evaluation=tmp_path / "e",
    player=player,
    retriever=RETRIEVER,
    folder=tmp_path / "b",
  )
  noted = {"policy": "p", "max_generated": config.episode.max_generated}
  (tmp_path / "b" / "config.json").write_text(json.dumps(noted))
  rule = tmp_path / "rule.py"
  flags = f"--branches={tmp_path / 'b'}", f"--output={rule}", "--tokens=900"
  assert commands.run(control_fit, *flags) == ""
  noted = runpy.run_path(str(rule))["FITTED"]
  assert noted["to"] == ["p"] and noted["answer"]["turns"] > 0
  steered = config_lib.changed(config, episode={"control": f"{rule}:rule"})
  assert right(steered, tmp_path / "s") == 8


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


def test_regression_scores_standardised_features():
  # Of 60 tokens 30 are left, three turns of 10:
  # .25 * 0 + 1 * .5 + .5 * -1 - 0 - 1 * 1 + .125
  score = control_fit.Stopping(**STOPPING)
  assert score(SEEN, 60.0) == pytest.approx(-0.875)
  # Without a cap, ten turns are left: + .5 * 7.
  assert score(SEEN, math.inf) == pytest.approx(-0.875 + 3.5)


def test_value_is_by_what_a_search_takes_of_both_budgets():
  # In the cell (3 left, 3 turns left): .6 - .3, and (1/3 + 1/3) / 2 is taken.
  score = control_fit.Value(**VALUE)
  assert score(SEEN, 60.0) == pytest.approx(0.9)
  # The likelier turn is in another cell: 0 - 1.
  sure = SEEN._replace(logp=-0.05)
  assert score(sure, 60.0) == pytest.approx(-3.0)
  # Half a turn left: .1 - .2, and (1/3 + 2) / 2 is taken.
  assert score(SEEN, 35.0) == pytest.approx(-0.1 * 6 / 7)
  # A quarter of the searches and half of the tokens are spent.
  paid = control_fit.Value(**VALUE | {"penalty": 4.0})
  assert paid(SEEN, 60.0) == pytest.approx(0.9 - 4 * 0.375)
  rules = (
    control_fit.rule(
      {"kind": "value", "tries": 0, "ask": VALUE | {"penalty": p}}
    )
    for p in (0.0, 4.0)
  )
  assert [rule.searches("ask", SEEN, 60.0) for rule in rules] == [True, False]


def test_proposal_without_a_score_is_accepted():
  rule = control_fit.rule({"kind": "stopping", "tries": 1})
  assert rule.searches("ask", SEEN, 60.0)
  assert not rule.searches("answer", SEEN, 60.0)
