"""One pass over all budgets: episodes, their file, and resuming."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys

import pytest
import scripted
import small_run
from played_evaluation import configured, jax_player, play, rows_of

from anysearch_jax import types
from anysearch_jax.evaluation import columns, harness
from anysearch_jax.rollout import searching


@pytest.fixture(scope="module")
def parts():
  return small_run.parts()


def for_random(**evaluation):
  """Returns a configuration for a random policy with few tokens."""
  return dataclasses.replace(
    configured(**evaluation), episode=small_run.CONFIG.episode
  )


def key(row):
  return row["seed"], row["budget"], row["question_id"]


def test_official_scores_are_recorded_beside_exact_match(parts, tmp_path):
  questions = [
    dataclasses.replace(q, metadata={**q.metadata, "dataset": name})
    for q, name in zip(parts["questions"], ("nq", "world"))
  ]
  made = {}
  for scorer in ("paper", "official"):
    config = for_random(scorer=scorer, budgets=(0,), seeds=(1,))
    made[scorer] = play(
      config,
      jax_player(parts, config),
      questions,
      parts["retriever"],
      tmp_path / scorer,
    )
  rows = rows_of(made["official"][1])
  scores = [(row.pop("official_em"), row.pop("official_f1")) for row in rows]
  assert scores == [(rows[0]["em"], 0), (None, None)]
  assert rows == rows_of(made["paper"][1])
  sums = [cell.get("official_em") for cell in made["official"][0]["cells"]]
  assert sums == [rows[0]["em"], None]


def test_every_cell_is_played_once_in_file_order(parts, tmp_path):
  config = for_random()
  questions = parts["questions"][:3]
  ticks = []
  summary, text = play(
    config,
    jax_player(parts, config),
    questions,
    parts["retriever"],
    tmp_path,
    on_done=lambda done, total: ticks.append((done, total)),
  )
  rows = rows_of(text)
  assert [key(row) for row in rows] == [
    (seed, budget, question.id)
    for seed in (1, 2)
    for budget in (0, 2)
    for question in questions
  ]
  assert ticks == [(i, 12) for i in range(1, 13)]
  assert sorted(p.name for p in tmp_path.iterdir()) == ["episodes.jsonl"]
  for row in rows:
    assert row["searches"] == len(row["observations"]) <= row["budget"]
    assert not row["scaffold"]
  assert summary["played"] == summary["episodes"] == 12
  for cell in summary["cells"]:
    mine = [row for row in rows if row["budget"] == cell["budget"]]
    assert cell["n"] == len(mine) == 6
    assert cell["input_tokens"] == sum(row["input_tokens"] for row in mine)


def test_one_pass_equals_a_run_for_each_budget_and_seed(parts, tmp_path):
  config = for_random()
  questions = parts["questions"][:6]
  _, whole = play(
    config,
    jax_player(parts, config),
    questions,
    searching.BatchingRetriever(parts["retriever"], config.search),
    tmp_path / "whole",
  )
  alone = []
  for seed in (1, 2):
    for budget in (0, 2):
      one = for_random(budgets=(budget,), seeds=(seed,))
      # Neither the other questions nor their order matter.
      _, text = play(
        one,
        jax_player(parts, one),
        questions[::-1],
        parts["retriever"],
        tmp_path / f"{seed}-{budget}",
      )
      alone += rows_of(text)
  assert sorted(rows_of(whole), key=key) == sorted(alone, key=key)
  texts = {
    (row["question_id"], row["budget"], json.dumps(row["spans"]))
    for row in alone
  }
  # Other seeds give other texts.
  assert len(texts) > len(questions) * 2


def test_budgets_share_their_random_numbers(tmp_path):
  seen = {}

  def say(request):
    seen.setdefault(request.address.variant, request.address)
    return scripted.answer("x")

  config = configured(budgets=(0, 1, 5), seeds=(7,))
  play(
    config,
    harness.Player(scripted.Engine(say), scripted.CODEC),
    [types.Question("a", "?", ("x",)), types.Question("b", "?", ("x",))],
    scripted.Retriever(),
    tmp_path,
  )
  assert len(seen) == 6
  drawn_from = {address[:4] for address in seen.values()}
  assert len(drawn_from) == 2  # One for each question.
  assert {address.rollout for address in seen.values()} == {7}


class KilledError(Exception):
  pass


def test_finished_episodes_are_not_played_again(tmp_path):
  config = configured(budgets=(0, 1, 2), seeds=(1,))
  questions = [types.Question(str(i), "?", ("x",)) for i in range(10)]

  def player(most=None):
    engine = scripted.Engine(lambda request: scripted.answer("x"))

    def count(done, total):
      if most and done >= most:
        raise KilledError

    return harness.Player(engine, scripted.CODEC), count

  one, none = player()
  _, expected = play(
    config, one, questions, scripted.Retriever(), tmp_path / "whole"
  )
  two, stop = player(11)
  with pytest.raises(ExceptionGroup):
    play(
      config,
      two,
      questions,
      scripted.Retriever(),
      tmp_path / "killed",
      on_done=stop,
    )
  partial = tmp_path / "killed" / "episodes.partial.jsonl"
  kept = len(partial.read_bytes().splitlines())
  assert 11 <= kept < 30
  # Simulate a kill while the last line was written.
  partial.write_bytes(partial.read_bytes()[:-40])
  three, ticks = player()[0], []
  summary, text = play(
    config,
    three,
    questions,
    scripted.Retriever(),
    tmp_path / "killed",
    on_done=lambda done, total: ticks.append(done),
  )
  assert text == expected
  assert summary["played"] == len(three.engine.requests) == 30 - (kept - 1)
  assert ticks == list(range(kept, 31))
  assert not partial.exists()


def test_failed_episode_is_played_again_by_the_next_start(tmp_path):
  config = configured(budgets=(1,), seeds=(1,))
  questions = [types.Question(str(i), "?", ("x",)) for i in range(4)]
  failed = json.dumps(
    {"seed": 1, "budget": 1, "question_id": "2", "failed": True}
  )
  (tmp_path / "episodes.partial.jsonl").write_text(failed + "\n")
  engine = scripted.Engine(lambda request: scripted.answer("x"))
  _, text = play(
    config,
    harness.Player(engine, scripted.CODEC),
    questions,
    scripted.Retriever(),
    tmp_path,
  )
  assert len(engine.requests) == 4
  assert [row["failed"] for row in rows_of(text)] == [False] * 4


def test_failed_episode_is_recorded_but_not_summed(tmp_path):
  config = configured(budgets=(1,), seeds=(1,))
  summary, text = play(
    config,
    harness.Player(
      scripted.Engine([scripted.search("a"), scripted.answer("x")]),
      scripted.CODEC,
    ),
    [types.Question("q", "?", ("x",))],
    scripted.Retriever(error=types.RetrievalError("The index is gone.")),
    tmp_path,
  )
  (row,) = rows_of(text)
  assert row["failed"] and "The index is gone." in row["reason"]
  (cell,) = summary["cells"]
  assert (cell["n"], cell["failed"], cell["em"]) == (0, 1, 0)


def test_running_episodes_never_exceed_slots(tmp_path):
  config = configured(budgets=(0, 1, 2), seeds=(1, 2, 3))
  config = dataclasses.replace(
    config, engine=dataclasses.replace(config.engine, slots=5)
  )
  engine = scripted.Engine(
    lambda request: scripted.answer("x"), seconds=scripted.shuffled_seconds(0)
  )
  play(
    config,
    harness.Player(engine, scripted.CODEC),
    [types.Question(str(i), "?", ("x",)) for i in range(20)],
    scripted.Retriever(),
    tmp_path,
  )
  assert engine.most == 5
  assert len(engine.released) == 180


def test_jobs_are_created_lazily():
  made, running = 0, 0

  def jobs():
    nonlocal made
    for i in range(100):
      made += 1
      yield i

  async def work(job):
    nonlocal running
    running += 1
    assert made <= job + 4
    assert running <= 4
    await asyncio.sleep(0)
    running -= 1

  asyncio.run(harness.each(jobs(), work, at_once=4))
  assert made == 100


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"budgets": ()}, "evaluation.budgets: found 0"),
    ({"seeds": (1, 1)}, "evaluation.seeds: found 2 values, 1 of them"),
    ({"budgets": (0, -1)}, "budget of -1 searches; expected 0 or more"),
    ({"seeds": (0, -1)}, "expected numbers from 0"),
    ({"pairs": ("3", "searches=0")}, "found 4 values, 3 of them"),
  ],
)
def test_invalid_evaluation_is_rejected(changes, message, tmp_path):
  engine = scripted.Engine([scripted.answer("x")])
  with pytest.raises(ValueError, match=message):
    play(
      configured(**changes),
      harness.Player(engine, scripted.CODEC),
      [types.Question("q", "?", ("x",))],
      scripted.Retriever(),
      tmp_path,
    )
  assert not engine.requests


_KILLED = """
import os, signal, sys, pathlib
sys.path.insert(0, "tests/support")
import played_evaluation as t, scripted
from anysearch_jax import types
from anysearch_jax.evaluation import columns, harness
engine = scripted.Engine(
  lambda request: scripted.answer("x"), seconds=scripted.shuffled_seconds(1)
)
def on_done(done, total):
  if done == 9:
    os.kill(os.getpid(), signal.SIGKILL)
t.play(
  t.configured(budgets=(0, 1), seeds=(1,)),
  harness.Player(engine, scripted.CODEC),
  [types.Question(str(i), "?", ("x",)) for i in range(12)],
  scripted.Retriever(),
  pathlib.Path(sys.argv[1]),
  on_done=on_done,
)
"""


def test_killed_process_resumes_to_the_same_bytes(tmp_path):
  killed = subprocess.run(
    [sys.executable, "-c", _KILLED, str(tmp_path / "killed")],
    env=os.environ | {"JAX_PLATFORMS": "cpu"},
    capture_output=True,
    check=False,
  )
  assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
  partial = tmp_path / "killed" / "episodes.partial.jsonl"
  assert len(partial.read_bytes().splitlines()) == 9
  config = configured(budgets=(0, 1), seeds=(1,))
  questions = [types.Question(str(i), "?", ("x",)) for i in range(12)]
  found = {}
  for name in ("killed", "whole"):
    engine = scripted.Engine(lambda request: scripted.answer("x"))
    _, found[name] = play(
      config,
      harness.Player(engine, scripted.CODEC),
      questions,
      scripted.Retriever(),
      tmp_path / name,
    )
  assert len(engine.requests) == 24
  assert found["killed"] == found["whole"]


def test_official_scores_are_summed_even_if_the_first_episode_failed():
  def row(failed, **scores):
    sums = dict.fromkeys(harness._SUMS, 0)
    return {"dataset": "nq", "budget": 1, "failed": failed, **sums, **scores}

  (cell,) = harness.cells(
    [
      row(True, official_em=None, official_f1=None),
      row(False, official_em=1, official_f1=0.5),
      row(False, official_em=1, official_f1=1.0),
    ]
  )
  assert (cell["n"], cell["failed"]) == (2, 1)
  assert (cell["official_em"], cell["official_f1"]) == (2, 1.5)


def test_pairs_are_cells_of_their_own_within_their_caps(tmp_path):
  config = configured(
    budgets=(1,),
    pairs=("searches=1,tokens=60", "searches=1,tokens=90"),
    seeds=(1,),
  )
  questions = [types.Question("q", "Who?", ("a",))]
  player = harness.Player(
    scripted.Engine(lambda r: scripted.answer("a") if r.turn else "x" * 999),
    scripted.CODEC,
  )
  summary, path = play(
    config, player, questions, scripted.Retriever(), tmp_path
  )
  assert [cell.get("caps") for cell in summary["cells"]] == [
    None,
    "searches=1,tokens=60",
    "searches=1,tokens=90",
  ]
  plain, small, large = rows_of(path)
  assert "caps" not in plain
  assert (small["caps"], large["caps"]) == ({"tokens": 60}, {"tokens": 90})
  assert small["generated_tokens"] <= 60 < large["generated_tokens"] <= 90
  table = columns.of(rows_of(path))
  assert sorted(table.token_cap.tolist()) == [60, 90, float("inf")]
