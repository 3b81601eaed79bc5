"""`launch.ask` with the shipped policy: a pipe, JSON, budgets side by side."""

from __future__ import annotations

import asyncio
import io
import json
import re

import commands
import pytest
import rich.console

from anysearch_jax import types
from anysearch_jax.agent import events
from anysearch_jax.configs import quickstart
from anysearch_jax.launch import agents, ask, parts, policies
from anysearch_jax.launch import flags as launch_flags
from anysearch_jax.methods import systems
from anysearch_jax.rollout import driver, searching

# Found at budget 3, after a search in other words; memory is wrong.
QUESTION = "gebos employer founder ?"
CONFIG = quickstart.get_config()
CHOSEN = policies.PolicyChoice("hf", CONFIG.policy)


@pytest.fixture(scope="module")
def agent():
  with agents.open_agent(agents.prepare(CONFIG, CHOSEN)) as loaded:
    yield loaded


def test_same_question_seed_and_budget_are_the_episode_of_an_evaluation(agent):
  """Token for token, while other questions are sampled at the same time."""
  source = parts.source(CONFIG)
  asked = [agent.examples[i] for i in (0, 7, 138)]
  retriever = searching.BatchingRetriever(source.retriever, CONFIG.search)

  async def evaluated(player):
    how = {
      "retriever": retriever,
      "config": CONFIG.episode,
      "environment": systems.of_episode(CONFIG.episode),
    }
    using = driver.EpisodeParts(engine=player.engine, codec=player.codec, **how)
    how = {"budget": 3, "scaffold": False}
    at = [types.evaluation_address(q.id, seed=42, variant=0) for q in asked]
    return [
      await driver.run_episode(question, using, **how, address=address)
      for question, address in zip(asked, at, strict=True)
    ]

  with policies.player(CHOSEN, CONFIG, source) as player:
    expected = asyncio.run(evaluated(player))
  replies = agent.ask_many([q.text for q in asked], budgets=[1, 3])
  for question, row, wanted in zip(asked, replies, expected, strict=True):
    found = row[1].trajectory
    assert found.question == question
    assert found.token_ids.tolist() == wanted.token_ids.tolist()
    assert found.spans == wanted.spans
  assert any(trajectory.searches for trajectory in expected)


def test_tokens_are_told_while_a_turn_is_sampled(agent):
  told = list(agent.stream(QUESTION, budget=3))
  first = next(i for i, e in enumerate(told) if isinstance(e, events.Searching))
  assert sum(isinstance(e, events.Thinking) for e in told[:first]) > 0
  assert isinstance(told[-1], events.Answer)
  reply = told[-1].reply
  assert reply.outcome is types.Outcome.ANSWERED
  assert sum(isinstance(e, events.Found) for e in told) == reply.searches <= 3


def output(*arguments):
  return commands.printed(ask, "--config=configs/quickstart.py", *arguments)[1]


def test_one_question_in_a_pipe_is_plain_text():
  said = output("--budget=3", QUESTION)
  lines = said.splitlines()
  assert lines[0] == "3 searches left"
  assert any(line.startswith("search 1: ") for line in lines)
  assert any(line.startswith("answer: ") for line in lines)
  assert "\x1b" not in said


def test_piped_questions_give_one_line_of_json_for_each_budget(
  capsys, monkeypatch
):
  piped = io.StringIO(f"{QUESTION}\n\nzzzz \udcff ?\n")
  monkeypatch.setattr("sys.stdin", piped)
  said = output("--json", "--compare=0,3")
  rows = [json.loads(line) for line in said.splitlines()]
  *rows, refused = rows
  assert [row["budget"] for row in rows] == [0, 3]
  assert {row["question"] for row in rows} == {QUESTION}
  assert refused["question"] == "zzzz \udcff ?"
  assert refused["outcome"] == "refused" and not refused["answer"]
  assert "no word for 'zzzz'" in refused["reason"]
  for row in rows:
    assert row["searches"] == len(row["queries"]) == len(row["documents"])
    assert row["searches"] <= row["budget"]


def test_budget_may_cap_tokens():
  row = json.loads(output("--json", "--budget=tokens=40", QUESTION))
  assert (row["budget"], row["caps"]) == (None, {"tokens": 40})
  assert row["tokens"] <= 40
  said = output("--budget=searches=2,tokens=40", QUESTION)
  assert "2 searches left" in said


def test_budgets_are_shown_side_by_side():
  said = output("--compare=0,1,3", QUESTION)
  header = re.findall(r"\d+|budget", said.splitlines()[1])
  assert header == ["budget", "0", "1", "3"]
  assert "answer" in said and "searches" in said


def test_a_question_in_words_that_the_policy_has_not_is_refused(capsys):
  flags = ["ask", "--config=configs/quickstart.py", "--budget=0"]
  with commands.defined(ask), pytest.raises(SystemExit) as ended:
    ask.main(launch_flags._parse_argv([*flags, "Who founded IBM ?"]))
  said = capsys.readouterr()
  assert ended.value.code == 1 and not said.out
  assert "no word for 'Who', 'IBM'" in said.err
  assert "as in '" in said.err


@pytest.mark.parametrize(
  "arguments, expected",
  [
    (["--compare=x", QUESTION], "--compare=x: found 'x'"),
    (["--hf=nowhere", QUESTION], "nowhere: no config.json"),
    (["--budget=1", " "], "question: found no text"),
    (["--budget=pages=1", "x"], "--budget=pages=1: Found 'pages=1'"),
  ],
)
def test_bad_input_is_one_sentence(arguments, expected):
  said = commands.run(ask, "--config=configs/quickstart.py", *arguments)
  assert expected in said


def test_a_question_without_a_place_is_one_sentence(monkeypatch):
  """The questions before it hold all places, however fast the machine is."""

  async def unanswered(*_, **__):
    await asyncio.Event().wait()

  monkeypatch.setattr(driver, "run_episode", unanswered)
  flags = ("--compare=0..99", "--deadline=0.001")
  said = commands.run(ask, "--config=configs/quickstart.py", *flags, QUESTION)
  assert "places were taken" in said


def test_control_characters_and_markup_of_outside_text_are_shown(
  capsys, monkeypatch
):
  """On a terminal, where markup and escapes would act."""
  terminal = rich.console.Console(force_terminal=True, color_system=None)
  monkeypatch.setattr(ask, "_console", lambda **_: terminal)
  passage = types.Passage("1", "[red]t[/red]", "a\x1b[31mb\x07")
  with pytest.raises(ValueError, match="without an answer"):
    ask.show([events.Found(1, (passage,))])
  said = capsys.readouterr().out
  assert "[red]t[/red]" in said
  assert "\x1b[31m" not in said and "\x07" not in said
