"""A system of the user's own, `--method=FILE:NAME`, and its judge and tool."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import commands
import pytest
import small_run

from anysearch_jax import types
from anysearch_jax.host import plugins
from anysearch_jax.methods import systems
from anysearch_jax.training import validation
from launch import evaluate, parts, train

FILE = "examples/own_system.py"
TOOL = f"--config.search.tools=count={FILE}:Count"
SMALL = (
  "--config=configs/quickstart.py",
  "--cache=",
  "--config.questions=2",
  "--config.group=2",
  "--config.curriculum.steps_per_rollout=1",
  "--config.curriculum.phase1_steps=0",
  "--config.curriculum.total_steps=1",
  "--config.curriculum.max_budget=2",
  "--config.episode.max_context=128",
  "--config.episode.max_generated=64",
  "--config.engine.max_context=128",
  "--config.engine.slots=4",
  "--config.engine.lanes=(4,)",
  "--config.batch.row_lengths=(128,)",
  "--config.batch.micro_batch_tokens=256",
)
# Its judge fails for one question, without a server.
FAILING = """
import dataclasses
import pathlib
import sys
import anysearch_jax as aj

SYSTEM = pathlib.Path(aj.__file__).parents[1] / "examples" / "own_system.py"
namespace = {"__name__": "own_system"}
exec(SYSTEM.read_text(), namespace)

def measure(trajectory):
  if trajectory.address.question == 0:
    raise ConnectionError("the judge is away")
  return {"long_queries": 1.0}

METHOD = dataclasses.replace(namespace["METHOD"], measure=measure)
"""
QUESTIONS = """
import anysearch_jax as aj

def source(split):
  return [aj.Question(f"{split}/{n}", "who ?", ("her",)) for n in range(3)]
"""


@pytest.fixture
def write(tmp_path):
  """Returns the name of a value in a file with this text."""

  def written(text, name, file="mine.py"):
    plugins._module.cache_clear()
    (tmp_path / file).write_text(text)
    return f"{tmp_path / file}:{name}"

  yield written
  plugins._module.cache_clear()


@pytest.mark.slow
def test_a_failing_judge_fails_its_trajectories_and_the_system_trains(
  write, tmp_path
):
  run = tmp_path / "run"
  name = write(FAILING, "METHOD")
  said = commands.run(
    train, *SMALL, f"--method={name}", TOOL, f"--output={run}"
  )
  assert said == ""
  (metrics,) = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
  assert metrics["reward/price"] == pytest.approx(0.1)
  (file,) = (run / "trajectories").iterdir()
  groups = list(map(json.loads, file.read_text().splitlines()))
  reasons = {t["reason"] for g in groups for t in g["trajectories"]}
  said = "line 13: ConnectionError: the judge is away"
  assert any(said in reason for reason in reasons)
  noted = json.loads((run / "provenance.json").read_text())["own"]
  assert set(noted) == {"method.name", "search.tools.count"}
  assert noted["method.name"]["name"] == name


def test_the_example_is_evaluated(tmp_path):
  said = commands.run(
    evaluate,
    *SMALL,
    f"--method={FILE}:METHOD",
    TOOL,
    "--config.evaluation.questions=2",
    "--budgets=1",
    "--seeds=1",
    f"--output={tmp_path / 'e'}",
  )
  assert said == ""
  rows = (tmp_path / "e" / "episodes.jsonl").read_text().splitlines()
  texts = ["".join(s["text"] for s in json.loads(r)["spans"]) for r in rows]
  assert len(rows) == 2 and any("<found>" in text for text in texts)
  assert "own" in json.loads((tmp_path / "e" / "provenance.json").read_text())


def selected(name, **method):
  config = systems.select(small_run.CONFIG, name)
  return dataclasses.replace(
    config, method=dataclasses.replace(config.method, **method)
  )


def test_a_judge_of_the_users_replaces_the_systems(write):
  judge = write("def judge(t):\n  return {'optimal': 1}\n", "judge")
  method = systems.trained(selected("hiprag", judge=judge))
  trajectory = systems.own.trial(group=1, budget=1, measures=()).trajectories
  with pytest.raises(types.RetrievalError, match="KeyError: 'contained'"):
    asyncio.run(method.measure(trajectory[0, 0]))
  with pytest.raises(ValueError, match="'otc' measures nothing"):
    systems.trained(selected("otc", judge=judge))


@pytest.mark.parametrize(
  ("name", "sentence"),
  [
    (f"{FILE}:SEARCH", "of type Tool; expected a system"),
    (f"{FILE}:NOTHING", "found no 'NOTHING' in"),
    ("nowhere", "config.method.name: found 'nowhere', expected one of"),
  ],
)
def test_what_is_no_system_is_refused(name, sentence):
  with pytest.raises(ValueError, match=sentence):
    systems.select(small_run.CONFIG, name)


def test_a_tool_without_a_retriever_is_refused(tmp_path):
  said = commands.run(
    train, *SMALL, f"--method={FILE}:METHOD", f"--output={tmp_path / 'run'}"
  )
  assert "search.tools: found none for the tool 'count'" in said


def test_questions_of_a_function(write):
  name = write(QUESTIONS, "source")
  config = small_run.CONFIG
  source = parts.source(
    dataclasses.replace(
      config,
      data=dataclasses.replace(config.data, source=name),
      retrieval=dataclasses.replace(config.retrieval, kind="http"),
    )
  )
  stream = source.questions("train", 5, 0)
  assert len(stream) == 5 and {q.id for q in [*stream][:3]} == {
    f"train/{n}" for n in range(3)
  }
  assert [q.id for q in source.evaluation_questions(each=2)] == [
    "test/0",
    "test/1",
  ]
  for text, sentence in (
    (QUESTIONS.replace("{n}", ""), "found an id twice"),
    ("def source(split):\n  return []\n", "at least one"),
    ("def source(split):\n  1 / 0\n", "line 2: ZeroDivisionError"),
  ):
    broken = parts.source(
      dataclasses.replace(
        config,
        data=dataclasses.replace(
          config.data, source=write(text, "source", f"{hash(text)}.py")
        ),
      )
    )
    with pytest.raises(plugins.PluginError, match=sentence):
      broken.questions("train", 5, 0)


def test_the_environment_and_reward_are_checked_together():
  config = selected(f"{FILE}:METHOD")
  validation.validate(config)
  other = dataclasses.replace(
    config, episode=dataclasses.replace(config.episode, prompts="world")
  )
  with pytest.raises(ValueError, match="#own"):
    validation.validate(other)
