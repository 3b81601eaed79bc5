"""`launch.score`: recorded groups in, scores out, all or nothing."""

from __future__ import annotations

import json
import os

import commands
import numpy as np
import pytest
from absl import flags
from format_table import A, I, S, T
from hypothesis import given, settings
from hypothesis import strategies as st

from anysearch_jax import config as config_lib
from anysearch_jax.host import run_lock
from anysearch_jax.launch import flags as launch_flags
from anysearch_jax.launch import score

CONFIG = config_lib.ExperimentConfig()
KEYS = [
  "answer", "em", "format", "length", "r_abs", "r_rel", "tool", "gamma",
  "total", "advantage",
]  # fmt: skip


def span(author, text):
  return {"author": author, "text": text}


def trajectory(searches=0, *, answer="a", tokens=100, **extra):
  """Returns a well-formed trajectory without the scaffold."""
  spans = [span("model", T + S), span("environment", I)] * searches
  spans.append(span("model", f"{T}<answer>{answer}</answer>"))
  counts = {"searches": searches, "generated_tokens": tokens}
  return {"spans": spans} | counts | extra


def group(*trajectories, **changes):
  asked = {"question": "q?", "golden_answers": ["a1", "gold"], "budget": 4}
  played = {"scaffold": False, "trajectories": list(trajectories)}
  return asked | played | changes


def run(folder, *groups, config=CONFIG):
  """Scores groups through files."""
  source, target = folder / "in.jsonl", folder / "out.jsonl"
  source.write_text("".join(json.dumps(line) + "\n" for line in groups))
  score.score_file(source, target, config)
  return [json.loads(line) for line in target.read_text().splitlines()]


def oracle(trajectories, budget):
  """Computes the paper's equations in float64; each row is valid.

  Args:
    trajectories: (em, format, generated tokens, searches) rows.
    budget: searches assigned.
  """
  em, form, tokens, used = np.array(trajectories, np.float64).T
  length = np.where(
    tokens <= 2048, 0.0, np.where(tokens <= 3072, (2048 - tokens) / 1024, -1.0)
  )
  r_abs = em * (budget - used) / budget if budget else np.zeros_like(em)
  r_rel = np.zeros_like(em)
  if em.any():
    low, high = used[em == 1].min(), used[em == 1].max()
    r_rel = em * (1 - (used - low) / (high - low + 1e-6))
  gamma = np.full_like(em, 0.3 * em.mean())
  tool = r_abs * r_rel
  total = 0.5 * em + 0.15 * form + 0.05 * length + gamma * tool
  spread = total - total.mean()
  same = total.max() == total.min()
  advantage = np.zeros_like(em) if same else spread / (total.std() + 1e-6)
  names = ("em", "format", "length", "r_abs", "r_rel", "tool", "gamma")
  columns = (em, form, length, r_abs, r_rel, tool, gamma, total, advantage)
  return dict(zip((*names, "total", "advantage"), columns))


def assert_scores(scored, expected):
  for key, column in expected.items():
    found = [row[key] for row in scored]
    np.testing.assert_allclose(found, column, atol=1e-5, rtol=0, err_msg=key)


def test_a_group_by_hand(tmp_path):
  (line,) = run(
    tmp_path,
    group(
      trajectory(1, answer="Gold"),
      trajectory(3, answer="the gold!", tokens=2560),
      trajectory(0, answer="lead", tokens=9999),
    ),
  )
  first, second, third = line["trajectories"]
  assert list(first) == KEYS
  assert first["answer"] == "Gold"
  # gamma = .3 * 2/3; the two correct ones used 1 and 3 of 4.
  assert [row["em"] for row in line["trajectories"]] == [1, 1, 0]
  assert [row["format"] for row in line["trajectories"]] == [1, 1, 1]
  gammas = [row["gamma"] for row in line["trajectories"]]
  assert gammas == pytest.approx([0.2] * 3)
  assert first["r_abs"] == pytest.approx(0.75)
  assert first["r_rel"] == pytest.approx(1.0)
  assert first["total"] == pytest.approx(0.5 + 0.15 + 0.2 * 0.75)
  assert second["length"] == pytest.approx(-0.5)
  assert second["tool"] == pytest.approx(0.0, abs=1e-5)
  assert second["total"] == pytest.approx(0.5 + 0.15 - 0.025, abs=1e-5)
  assert third["length"] == -1.0
  assert third["r_abs"] == third["r_rel"] == third["tool"] == 0.0
  assert third["total"] == pytest.approx(0.15 - 0.05)
  assert all(isinstance(row["em"], int) for row in line["trajectories"])


TOKENS = st.sampled_from([0, 1, 2047, 2048, 2049, 2600, 3072, 3073, 40000])
ROW = st.tuples(st.booleans(), TOKENS, st.integers(0, 6), st.booleans())


@given(rows=st.lists(ROW, min_size=1, max_size=9), budget=st.integers(0, 5))
@settings(max_examples=20, deadline=None)
def test_scores_agree_with_float64(rows, budget):
  lines = group(
    *(
      trajectory(n, answer=("lead", "gold")[right], tokens=t, failed=failed)
      for right, t, n, failed in rows
    ),
    budget=budget,
  )
  parsed = score.parse_group(json.dumps(lines).encode())
  scored = score.score_group(parsed, CONFIG)
  for (_, _, _, failed), row in zip(rows, scored, strict=True):
    assert list(row) == KEYS
    if failed:
      assert set(row.values()) == {None}
  valid = [
    (right, used <= budget, tokens, used)
    for right, tokens, used, failed in rows
    if not failed
  ]
  if valid:
    kept = [row for row in scored if row["total"] is not None]
    assert_scores(kept, oracle(valid, budget))


def test_a_difference_of_one_token_keeps_its_advantage():
  tokens = [2048, 2049, 2050, 2051, 2052]
  lines = group(*(trajectory(2, answer="gold", tokens=n) for n in tokens))
  parsed = score.parse_group(json.dumps(lines).encode())
  expected = oracle([(1, 1, n, 2) for n in tokens], 4)
  assert_scores(score.score_group(parsed, CONFIG), expected)


def test_unusual_but_valid_groups_are_scored(tmp_path):
  odd = [
    group(),
    group(trajectory(0, answer="gold")),
    group(trajectory(failed=True), trajectory(failed=True)),
    group({"spans": [], "searches": 0, "generated_tokens": 0}),
    group(trajectory(0, answer=" ")),
    group(trajectory(0, answer=""), golden_answers=["", "the", "?"]),
    group(trajectory(0, answer="gold"), golden_answers=[]),
    group(trajectory(2, answer="gold") | {"searches": 1}, trajectory(0)),
    group(trajectory(5, answer="gold")),
    group(trajectory(0, answer="gold"), budget=0),
    group(trajectory(0, answer="\ud800 \u2028")),
    group(trajectory(0, logps=[0.5], note=None), id="extra", meta={"x": [1]}),
  ]
  lines = [line["trajectories"] for line in run(tmp_path, *odd)]
  assert len(lines) == len(odd)
  empty, one, failed, no_spans, space, nothing, no_alias = lines[:7]
  disagrees, beyond, zero, surrogate, extra = lines[7:]
  assert empty == []
  assert one[0]["advantage"] == 0.0 and one[0]["em"] == 1
  assert failed == [dict.fromkeys(KEYS)] * 2
  assert no_spans[0]["answer"] is None
  assert no_spans[0]["em"] == no_spans[0]["format"] == 0
  assert space[0]["answer"] == "" and space[0]["format"] == 1
  assert nothing[0]["answer"] == "" and nothing[0]["em"] == 0
  assert no_alias[0]["answer"] == "gold" and no_alias[0]["em"] == 0
  assert disagrees[0]["format"] == 0
  assert disagrees[0]["r_abs"] == pytest.approx(0.75)
  assert beyond[0]["format"] == 0
  assert beyond[0]["r_abs"] == pytest.approx(-0.25)
  assert zero[0]["r_abs"] == 0.0 and zero[0]["r_rel"] == 1.0
  assert surrogate[0]["answer"] == "\ud800"
  assert extra[0]["format"] == 1


def test_scaffold_and_crlf_lines(tmp_path):
  budget = "<budget>remaining=4; used=0; total=4</budget>\n"
  spans = [span("environment", budget), span("model", T + A)]
  item = {"spans": spans, "searches": 0, "generated_tokens": 5}
  source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
  line = json.dumps(group(item, scaffold=True))
  source.write_bytes(f"{line}\r\n{line}".encode())
  score.score_file(source, target, CONFIG)
  lines = [json.loads(text) for text in target.read_text().splitlines()]
  assert [line["trajectories"][0]["format"] for line in lines] == [1, 1]


@pytest.mark.parametrize(
  "wrong",
  [
    "method.name=search_r1",
    "objective.normalize=batch",
    "objective.baseline=turn",
  ],
)
def test_what_a_line_does_not_tell_is_refused(tmp_path, wrong):
  config = launch_flags.override(CONFIG, [wrong])
  path, _, value = wrong.partition("=")
  with pytest.raises(ValueError, match=f"{path}: found '{value}', expected"):
    run(tmp_path, group(trajectory()), config=config)


def test_the_configuration_changes_the_weights(tmp_path):
  reward = config_lib.RewardConfig(alpha=2.0, gamma_mode="off")
  config = config_lib.ExperimentConfig(reward=reward)
  (line,) = run(tmp_path, group(trajectory(0, answer="gold")), config=config)
  assert line["trajectories"][0]["gamma"] == 0.0
  assert line["trajectories"][0]["total"] == pytest.approx(2.15)


def _without(key):
  return {name: value for name, value in group().items() if name != key}


def _item(**changes):
  return group(trajectory(), trajectory() | changes)


@pytest.mark.parametrize(
  ("line", "expected"),
  [
    ("", "no JSON"),
    ("[" * 100_000, "no JSON value"),
    ('{"budget": NaN}', "NaN is not JSON"),
    ("[]", "the line: found []. Input should be a"),
    (_without("question"), "question: found {"),
    (_without("trajectories"), "trajectories: found {"),
    (group(question=None), "question: found None"),
    (group(golden_answers=["a", 1]), "golden_answers.1: found 1"),
    (group(budget=True), "budget: found True. Input should be a valid integer"),
    (group(budget=-1), "budget: found -1. Input should be greater"),
    (group(budget=2**31), "budget: found 2147483648. Input should be less"),
    (group(scaffold=1), "scaffold: found 1. Input should be a valid boolean"),
    (group("x"), "trajectories.0: found 'x'. Input should be"),
    (_item(searches=-1), "trajectories.1.searches: found -1"),
    (_item(failed=None), "trajectories.1.failed: found None"),
    (
      _item(spans="x"),
      "trajectories.1.spans: found 'x'. Input should be a valid list",
    ),
    (_item(spans=["x"]), "trajectories.1.spans.0: found 'x'"),
    (
      _item(spans=[span("prompt", "")]),
      "spans.0.author: found 'prompt'. Input should be 'model'",
    ),
    (_item(spans=[{"author": "model"}]), "spans.0.text: found {"),
    (group({"spans": []}), "trajectories.0.searches: found {"),
  ],
)
def test_malformed_line_is_reported_with_its_number(tmp_path, line, expected):
  if isinstance(line, dict):
    line = json.dumps(line)
  raw = line if isinstance(line, bytes) else line.encode()
  source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
  good = json.dumps(group(trajectory())).encode()
  source.write_bytes(good + b"\n" + raw + b"\n" + good)
  with pytest.raises(ValueError) as caught:
    score.score_file(source, target, CONFIG)
  message = str(caught.value)
  assert "line 2: " in message and expected in message
  assert message.endswith(".") and len(message) < 400
  assert os.listdir(tmp_path) == ["in.jsonl"]


def test_the_command_scores_a_file_or_exits_with_2(tmp_path):
  source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
  flags = (f"--input={source}", f"--output={target}")
  source.write_text(json.dumps(group(trajectory(0, answer="gold"))) + "\n")
  assert commands.run(score, *flags, "--config.reward.alpha=1.0") == ""
  (line,) = target.read_text().splitlines()
  (row,) = json.loads(line)["trajectories"]
  assert row["total"] == pytest.approx(1.0 + 0.15 + 0.3)
  target.unlink()
  source.write_text(json.dumps(group()) + "\n\n")
  assert "line 2: found no JSON value" in commands.run(score, *flags)
  assert not target.exists()


EPISODE = {
  **{"seed": 1, "budget": 2, "question_id": "q", "question": "Who?"},
  **{"failed": False, "answer": "Ana", "golden_answers": ["Ana"]},
}


@pytest.mark.parametrize(
  ("lines", "expected"),
  [
    ([{"seed": 1}], "row 1: found no episode .KeyError..budget"),
    ([EPISODE, EPISODE | {"golden_answers": []}], "row 2: found no episode"),
    ([EPISODE, EPISODE], "row 2: .*'q'. a second time"),
    ([EPISODE], "run.lock: found it held by process"),
  ],
)
def test_a_judge_refuses_what_it_cannot_judge(tmp_path, lines, expected):
  path = tmp_path / "episodes.jsonl"
  path.write_text("".join(json.dumps(line) + "\n" for line in lines))
  given = f"--input={path}", f"--output={path}", "--judge_model=m"
  with commands.defined(score), run_lock.hold(tmp_path / run_lock.NAME):
    launch_flags._parse_argv(["command", *given, "--judge=http://host/v1"])
    with pytest.raises(ValueError, match=expected):
      score.judge_file(flags.FLAGS)
