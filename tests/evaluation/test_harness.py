"""One pass over all budgets: episodes, their file, and resuming."""

from __future__ import annotations

import dataclasses
import json

import pytest
import scripted
import small_run
from played_evaluation import configured, jax_player, play, rows_of

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.evaluation import columns, harness, journal
from anysearch_jax.rollout import searching


@pytest.fixture(scope="module")
def parts():
  return small_run.parts()


def for_random(**evaluation):
  """Returns a configuration for a random policy with few tokens."""
  return dataclasses.replace(
    configured(**evaluation), episode=small_run.CONFIG.episode
  )


def played(parts, config, questions, folder, **options):
  """Plays by the policy of `parts`; returns the summary and the rows."""
  player = jax_player(parts, config)
  summary, text = play(
    config, player, questions, parts["retriever"], folder, **options
  )
  return summary, rows_of(text)


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
    made[scorer] = played(parts, config, questions, tmp_path / scorer)
  summary, rows = made["official"]
  scores = [(row.pop("official_em"), row.pop("official_f1")) for row in rows]
  assert scores == [(rows[0]["em"], 0), (None, None)]
  assert rows == made["paper"][1]
  sums = [cell.get("official_em") for cell in summary["cells"]]
  assert sums == [rows[0]["em"], None]


def test_every_cell_is_played_once_in_file_order(parts, tmp_path):
  config = for_random()
  questions = parts["questions"][:3]
  ticks = []
  summary, rows = played(
    parts,
    config,
    questions,
    tmp_path,
    on_done=lambda *counts: ticks.append(counts),
  )
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
  assert summary["last_start"]["played"] == summary["episodes"] == 12
  for cell in summary["cells"]:
    mine = [row for row in rows if row["budget"] == cell["budget"]]
    assert cell["n"] == len(mine) == 6
    assert cell["input_tokens"] == sum(row["input_tokens"] for row in mine)


def test_one_pass_equals_a_run_for_each_budget_and_seed(parts, tmp_path):
  config = for_random()
  questions = parts["questions"][:6]
  batching = searching.BatchingRetriever(parts["retriever"], config.search)
  batched = parts | {"retriever": batching}
  _, whole = played(batched, config, questions, tmp_path / "whole")
  alone = []
  for seed in (1, 2):
    for budget in (0, 2):
      one = for_random(budgets=(budget,), seeds=(seed,))
      # Neither the other questions nor their order matter.
      folder = tmp_path / f"{seed}-{budget}"
      alone += played(parts, one, questions[::-1], folder)[1]
  assert sorted(whole, key=key) == sorted(alone, key=key)
  parts_of = ("question_id", "budget", "spans")
  texts = {json.dumps([row[name] for name in parts_of]) for row in alone}
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


def answering(**options):
  """Returns a player that answers every question at once."""
  engine = scripted.Engine(lambda request: scripted.answer("x"), **options)
  return harness.Player(engine, scripted.CODEC)


def questions_of(count):
  return [types.Question(str(i), "?", ("x",)) for i in range(count)]


def test_finished_episodes_are_not_played_again(tmp_path):
  config = configured(budgets=(0, 1, 2), seeds=(1,))
  asked = questions_of(10), scripted.Retriever()

  def stop(done, total):
    if done >= 11:
      raise KilledError

  _, expected = play(config, answering(), *asked, tmp_path / "whole")
  with pytest.raises(ExceptionGroup):
    play(config, answering(), *asked, tmp_path / "killed", on_done=stop)
  partial = tmp_path / "killed" / "episodes.partial.jsonl"
  kept = len(partial.read_bytes().splitlines())
  assert 11 <= kept < 30
  # Simulate a kill while the last line was written.
  partial.write_bytes(partial.read_bytes()[:-40])
  player, ticks = answering(), []
  summary, text = play(
    config,
    player,
    *asked,
    tmp_path / "killed",
    on_done=lambda done, total: ticks.append(done),
  )
  assert text == expected
  assert summary["episodes"] == sum(cell["n"] for cell in summary["cells"])
  played = summary["last_start"]["played"]
  assert played == len(player.engine.requests) == 30 - (kept - 1)
  assert ticks == list(range(kept, 31))
  assert not partial.exists()


@pytest.mark.parametrize("finished", [False, True])
def test_failed_episode_is_played_again_by_the_next_start(finished, tmp_path):
  failed = {"seed": 1, "budget": 1, "question_id": "2", "failed": True}
  name = "episodes.jsonl" if finished else "episodes.partial.jsonl"
  (tmp_path / name).write_text(json.dumps(failed) + "\n")
  player = answering()
  _, text = play(
    configured(budgets=(1,), seeds=(1,)),
    player,
    questions_of(4),
    scripted.Retriever(),
    tmp_path,
  )
  assert len(player.engine.requests) == 4
  assert [row["failed"] for row in rows_of(text)] == [False] * 4


def test_failed_episode_is_recorded_but_not_summed(tmp_path):
  engine = scripted.Engine([scripted.search("a"), scripted.answer("x")])
  summary, text = play(
    configured(budgets=(1,), seeds=(1,)),
    harness.Player(engine, scripted.CODEC),
    questions_of(1),
    scripted.Retriever(error=types.RetrievalError("The index is gone.")),
    tmp_path,
  )
  (row,) = rows_of(text)
  assert row["failed"] and "The index is gone." in row["reason"]
  (cell,) = summary["cells"]
  assert (cell["n"], cell["failed"], cell["em"]) == (0, 1, 0)


def test_running_episodes_never_exceed_slots(tmp_path):
  config = configured(budgets=(0, 1), seeds=(1, 2))
  config = config_lib.changed(config, engine={"slots": 5})
  player = answering(seconds=scripted.shuffled_seconds(0))
  play(config, player, questions_of(10), scripted.Retriever(), tmp_path)
  assert player.engine.most == 5
  assert len(player.engine.released) == 40


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"budgets": ()}, "evaluation.budgets: found 0"),
    ({"seeds": (1, 1)}, "evaluation.seeds: found 2 values, 1 of them"),
    ({"budgets": (0, -1)}, "budget of -1 searches; expected 0 to"),
    ({"pairs": ("3", "searches=0")}, "found 4 values, 3 of them"),
  ],
)
def test_invalid_evaluation_is_rejected(changes, message, tmp_path):
  player = answering()
  config, asked = configured(**changes), questions_of(1)
  with pytest.raises(ValueError, match=message):
    play(config, player, asked, scripted.Retriever(), tmp_path)
  assert not player.engine.requests


def test_official_scores_are_summed_even_if_the_first_episode_failed():
  def row(failed, **scores):
    sums = dict.fromkeys(harness._SUMS, 0)
    return {"dataset": "nq", "budget": 1, "failed": failed, **sums, **scores}

  none = {"official_em": None, "official_f1": None}
  cell, world = harness.cells(
    [
      row(True, **none),
      row(False, official_em=1, official_f1=0.5),
      row(False, official_em=1, official_f1=1.0),
      row(False, **none) | {"dataset": "world"},
    ]
  )
  assert not none.keys() & world.keys()
  assert (cell["n"], cell["failed"]) == (2, 1)
  assert (cell["official_em"], cell["official_f1"]) == (2, 1.5)


def test_pairs_are_cells_of_their_own_within_their_caps(tmp_path):
  pairs = ("searches=1,tokens=60", "searches=1,tokens=90")
  config = configured(budgets=(1,), pairs=pairs, seeds=(1,))
  asked = [types.Question("q", "Who?", ("a",))], scripted.Retriever()
  player = harness.Player(
    scripted.Engine(lambda r: scripted.answer("a") if r.turn else "x" * 999),
    scripted.CODEC,
  )
  summary, path = play(config, player, *asked, tmp_path)
  assert [cell.get("caps") for cell in summary["cells"]] == [None, *pairs]
  plain, small, large = rows_of(path)
  assert "caps" not in plain
  assert (small["caps"], large["caps"]) == ({"tokens": 60}, {"tokens": 90})
  assert small["generated_tokens"] <= 60 < large["generated_tokens"] <= 90
  table = columns.as_columns(rows_of(path))
  assert sorted(table.token_cap.tolist()) == [60, 90, float("inf")]


def test_row_records_texts_tokens_and_cost(tmp_path):
  passages = [types.Passage(f"p{i}", "Title", "text") for i in (1, 2)]
  prices = {"search_price": 5.0, "input_price": 2.0, "output_price": 10.0}
  config = configured(budgets=(2,), seeds=(3,), **prices)
  engine = scripted.Engine([scripted.search("a"), scripted.answer("x")])
  _, text = play(
    config,
    harness.Player(engine, scripted.CODEC),
    [types.Question("nq/1", "?", ("x",), metadata={"dataset": "nq"})],
    scripted.Retriever({"a": passages}),
    tmp_path,
  )
  (row,) = rows_of(text)
  assert row["dataset"] == "nq"
  (shown,) = row["observations"]
  assert (shown["tool"], shown["argument"], shown["turn"]) == ("search", "a", 0)
  assert [types.Passage(**p) for p in shown["passages"]] == [
    dataclasses.replace(p, score=0.0) for p in passages
  ]
  first, second = (len(request.token_ids) for request in engine.requests)
  assert row["prompt_tokens"] == first
  assert row["input_tokens"] == first + second
  assert row["cost"] == pytest.approx(
    0.005 + (first + second) * 2e-6 + row["generated_tokens"] * 1e-5
  )
  tokens = row["tokens"]
  authors = [author for author, _ in tokens["authors"]]
  assert authors == ["prompt", "model", "environment", "model"]
  assert sum(n for _, n in tokens["authors"]) == len(tokens["ids"])
  assert tokens["ids"][:second] == list(engine.requests[1].token_ids)
  turns = [n for author, n in tokens["authors"] if author == "model"]
  assert sum(turns) == len(tokens["logps"]) == row["generated_tokens"]
  # The scripted engine reports a new version each turn, starting from 7.
  assert tokens["versions"] == [[7, turns[0]], [8, turns[1]]]


def test_damaged_line_or_missing_row_is_rejected(tmp_path):
  path = tmp_path / "rows.jsonl"
  (tmp_path / "rows.partial.jsonl").write_text('{"i": 0}\n{"i": \n{"i": 1}\n')
  with pytest.raises(ValueError, match="line 2: .*not a row"):
    journal.Journal(path, 2, lambda row: row["i"])
  (tmp_path / "rows.partial.jsonl").write_text('{"i": 1}\n')
  with journal.Journal(path, 2, lambda row: row["i"]) as rows:
    with pytest.raises(ValueError, match="lacks 1 of 2 rows"):
      rows.finish()
    rows.add({"i": 0})
    rows.finish()
  assert path.read_text() == '{"i": 0}\n{"i": 1}\n'


def test_a_folder_belongs_to_one_evaluation(tmp_path):
  files = {"config.json": {"a": {"b": (1, 2)}, "c": 1}}
  journal.claim_folder(tmp_path, files)
  journal.claim_folder(tmp_path, files)
  with pytest.raises(ValueError, match=r"a.b is \[1, 2\] there and \[1, 3\]"):
    journal.claim_folder(
      tmp_path, {"config.json": {"a": {"b": (1, 3)}, "c": 1}}
    )


def test_answers_in_sentences_are_credited_beside_exact_match():
  def row(answer):
    sums = dict.fromkeys(harness._SUMS, 0)
    texts = {"answer": answer, "golden_answers": ["June 2027"]}
    return {"dataset": "mine", "budget": 1, "failed": False} | sums | texts

  answers = {
    "June 2027": 1,
    "The lease ends in June 2027.": 0,
    "In June 20270": 0,
    None: 0,
  }
  (cell,) = harness.cells(row(x) | {"em": em} for x, em in answers.items())
  assert (cell["n"], cell["em"], cell["cover_em"]) == (4, 1, 2)
  # Words besides the article: lease ends in june 2027, in june 20270.
  assert cell["f1"] == pytest.approx(1 + 4 / 7 + 2 / 5)
