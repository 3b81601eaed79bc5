"""Counterfactual ends of stored episodes: sampling and measured value."""

from __future__ import annotations

import dataclasses
import json

import commands
import pytest
import scripted
import small_run
from played_evaluation import configured, jax_player, play, playing, rows_of

import anysearch_jax as aj
from anysearch_jax.configs import quickstart
from research import branching, methods
from research.methods import control

PAPER = aj.get_environment("paper")
ANSWERED = "<information>Doc"
QUESTIONS = [aj.Question(str(i), f"item {i}", ("x",)) for i in range(8)]
RETRIEVER = scripted.Retriever({"look": [aj.Passage("p", "T", "x")]})


def context(request):
  return scripted.CODEC.decode(request.token_ids)


def number(request):
  """Returns the question's number, which ends its prompt."""
  return int(context(request).partition("item ")[2][0])


def evaluated(folder, script, config, questions=QUESTIONS):
  _, text = play(
    config,
    aj.Player(scripted.Engine(script), scripted.CODEC),
    questions,
    RETRIEVER,
    folder,
  )
  return rows_of(text)


def branch(evaluation, folder, script, config, samples=2):
  folder.mkdir(exist_ok=True)
  engine = scripted.Engine(script)
  summary = branching.branch(
    playing(config),
    branching.Plan(episodes=0, samples=samples, tries=4),
    evaluation=evaluation,
    player=aj.Player(engine, scripted.CODEC),
    retriever=RETRIEVER,
    folder=folder,
  )
  return summary, rows_of((folder / "branches.jsonl").read_bytes()), engine


def hesitant(request):
  """Answers correctly if the number is even; searches at its third attempt.
  After a search it answers correctly, except for question 7; if the search is
  refused, only for question 0.
  """
  if ANSWERED in context(request):
    return scripted.answer("y" if number(request) == 7 else "x")
  if "No search is left" in context(request):
    return scripted.answer("x" if number(request) == 0 else "y")
  if request.address.attempt == 2:
    return scripted.search("look")
  return scripted.answer("x" if number(request) % 2 == 0 else "y")


def eager(request):
  """As `hesitant`, but the second end of 0 to 5 searches at once."""
  end = request.address.sample == 2 and number(request) < 6
  if end and not request.turn:
    return scripted.search("look")
  return hesitant(request)


def test_value_of_forced_search_counts_corrected_answers(tmp_path):
  config = configured(budgets=(0, 1), seeds=(1,))
  evaluated(tmp_path / "e", hesitant, config)
  summary, rows, engine = branch(tmp_path / "e", tmp_path / "b", eager, config)
  # Of six at which it asks at once, a search corrects 1, 3 and 5.
  found = summary["continue"]
  assert found["gain"]["value"] == pytest.approx(3 / 6)
  assert found["gain"]["low"] < 3 / 6 < found["gain"]["high"]
  # Refused, the policy is right for question 0 only.
  assert found["worth"]["value"] == pytest.approx(5 / 6)
  assert (found["gained"], found["lost"]) == (pytest.approx(5 / 6), 0)
  assert found["asks"]["value"] == pytest.approx(6 / 16)
  assert (found["ends"], found["cuts"], found["cuts_reached"]) == (16, 8, 8)
  # Over all cuts, question 7 is wrong if granted and if refused.
  bounds = found["worth_bounds"]
  assert bounds["low"] < 6 / 8 < bounds["high"]
  assert "stop" not in summary
  for row in rows:
    granted, refused = row["sampled"]["granted"], row["sampled"]["refused"]
    assert (granted["searches"], refused["searches"]) == (1, 0)
    # Both ends are of one turn that asked.
    assert granted["spans"][0] == refused["spans"][0]
  # The engine's cache is empty afterwards.
  assert {r.address for r in engine.requests} == set(engine.released)


def searcher(request):
  """Searches twice; without the second result it is right for even numbers."""
  text = context(request)
  if "No search is left" in text:
    return scripted.answer("x" if number(request) % 2 == 0 else "y")
  if text.count(ANSWERED) < 2:
    return scripted.search("look")
  return scripted.answer("x")


def test_value_of_denied_search_counts_lost_answers(tmp_path):
  config = configured(budgets=(2, 3), seeds=(1,))
  stored = evaluated(tmp_path / "e", searcher, config)
  summary, rows, engine = branch(
    tmp_path / "e", tmp_path / "b", searcher, config, samples=1
  )
  found = summary["stop"]
  # Each of 16 episodes branches at each of its two searches.
  assert (found["ends"], found["cuts"]) == (32, 32)
  assert found["worth"]["value"] == pytest.approx(1 / 2)
  assert sum(row["cut"] == 0 for row in rows) == 16
  refused = [r["sampled"]["refused"] for r in rows if r["kind"] == "stop"]
  assert {end["searches"] for end in refused} == {0, 1}
  # Everything up to the stored search is as stored; then it is refused.
  contexts = [scripted.CODEC.decode(row["tokens"]["ids"]) for row in stored]
  split = [context(r).partition(PAPER.over_budget) for r in engine.requests]
  asked = [before for before, line, _ in split if line]
  assert len(asked) == 32
  for before in asked:
    assert before.rstrip().endswith("</search>")
    assert any(known.startswith(before) for known in contexts)


def test_budget_line_after_a_refusal_has_no_search_left(tmp_path):
  config = configured(budgets=(3,), seeds=(1,), scaffold=True)
  evaluated(tmp_path / "e", searcher, config, QUESTIONS[:1])
  _, _, engine = branch(
    tmp_path / "e", tmp_path / "b", searcher, config, samples=1
  )
  # The second cut: one search was made. What was read before names the budget.
  (asked,) = [
    text
    for text in map(context, engine.requests)
    if text.endswith("remaining=0; used=1; total=1</budget>\n")
  ]
  assert asked.count("used=1; total=3") == 1


def test_episodes_branch_where_they_searched_or_answered(tmp_path):
  def script(request):
    return scripted.search("a") if request.turn == 0 else scripted.answer("x")

  config = configured(budgets=(0, 1, 2), seeds=(1,))
  bad, full, left = evaluated(tmp_path / "e", script, config, QUESTIONS[:1])
  # Its search was beyond the budget.
  assert bad["violation"] and branching.cuts(bad) == []
  assert branching.cuts(full) == [("stop", 0, 0)]
  assert branching.cuts(left) == [("stop", 0, 0), ("continue", 1, 1)]
  for row in (bad, full, left):
    ids = row["tokens"]["ids"]
    for start, sampled in branching.turns(row):
      end = start + len(sampled.token_ids)
      assert tuple(ids[start:end]) == sampled.token_ids
      assert scripted.CODEC.decode(sampled.token_ids) == sampled.text


def test_finished_ends_are_not_played_again(tmp_path):
  config = configured(budgets=(0, 1), seeds=(1, 2))
  evaluated(tmp_path / "e", hesitant, config)
  whole, rows, _ = branch(tmp_path / "e", tmp_path / "a", hesitant, config)
  partial = tmp_path / "b" / "branches.partial.jsonl"
  partial.parent.mkdir()
  lines = (tmp_path / "a" / "branches.jsonl").read_text().splitlines()
  partial.write_text("\n".join(lines[5:20]) + '\n{"kind": "cont')
  again, _, engine = branch(tmp_path / "e", partial.parent, hesitant, config)
  assert again == whole
  assert (partial.parent / "branches.jsonl").read_text().splitlines() == lines
  # Each end takes three turns until one searches, and two that answer.
  assert len(engine.requests) == 5 * (len(rows) - 15)


def test_what_cannot_branch_is_refused(tmp_path):
  config = configured(budgets=(1,), seeds=(1,))
  (row,) = evaluated(tmp_path / "e", hesitant, config, QUESTIONS[:1])
  with pytest.raises(ValueError, match="stored without its tokens"):
    branching.turns({k: row[k] for k in row if k != "tokens"})
  path = tmp_path / "e" / "episodes.jsonl"
  row["tokens"]["ids"][0] += 1
  path.write_text(json.dumps(row) + "\n")
  with pytest.raises(ExceptionGroup) as raised:
    branch(tmp_path / "e", tmp_path / "b", hesitant, config)
  assert "name the policy" in str(raised.value.exceptions[0])
  steered = control.steered(
    aj.get_environment("paper"), control.Rule(lambda *seen: True)
  )
  verifying = aj.get_environment(methods.prompts_name("bats_verify"))
  by_turns = aj.get_environment("zerosearch")
  for environment in (verifying, by_turns, steered):
    with pytest.raises(ValueError, match="a step of its own"):
      branching.check(environment)


def test_the_command_plays_resumes_and_refuses_other_settings(tmp_path):
  source = small_run.parts()
  config = dataclasses.replace(
    quickstart.get_config(),
    engine=dataclasses.replace(small_run.CONFIG.engine, max_context=544),
    evaluation=configured(budgets=(1, 3), seeds=(1,)).evaluation,
  )
  start, where = "configs/graded_world_policy", tmp_path / "e"
  player = jax_player({"policy": aj.load_policy(start)}, config)
  _, text = play(
    config, player, source["questions"][:4], source["retriever"], where
  )
  noted = json.loads(json.dumps(dataclasses.asdict(config)))
  (where / "config.json").write_text(json.dumps(noted))

  def run(output="branches", tries=2):
    named = f"--policy={start}", f"--output={where / output}"
    counts = "--samples=1", f"--tries={tries}"
    return commands.run(branching, f"--evaluation={where}", *named, *counts)

  files = []
  for output in ("branches", "branches", "again"):
    assert run(output) == ""
    names = "branches.jsonl", "summary.json"
    files.append([(where / output / name).read_bytes() for name in names])
  assert files[0] == files[1] == files[2]
  assert "worth" in json.loads(files[0][1])["stop"]
  stored = {cell(row): row for row in rows_of(text)}
  for row in rows_of(files[0][0]):
    before, ends = stored[cell(row)], row["sampled"]
    assert row["stored_em"] == before["em"]
    if row["kind"] == "stop":
      assert ends["refused"]["searches"] == row["cut"] < before["searches"]
    elif row["reached"]:
      assert row["cut"] == ends["refused"]["searches"] == before["searches"]
      assert row["cut"] < ends["granted"]["searches"]
  assert "tries is 2 there and 3 now" in run(tries=3)
  noted["episode"]["prompts"] = "paper"
  (where / "config.json").write_text(json.dumps(noted))
  assert "name that configuration" in run()


def cell(row):
  return row["question_id"], row["budget"], row["seed"]
