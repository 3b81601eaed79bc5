"""What a user wrote: a system, a reward, a judge, a tool, questions."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import pathlib
import re

import commands
import numpy as np
import pytest
import small_run

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.host import plugins
from anysearch_jax.launch import (
  evaluate,
  flags,
  node,
  parts,
  run_history,
  train,
)
from anysearch_jax.methods import systems
from anysearch_jax.training import rewards_and_advantages

FILE = "examples/own_system.py"
TOOL = f"--config.search.tools=count={FILE}:Count"
SETTINGS = """questions=2 group=2 curriculum.steps_per_rollout=1
curriculum.phase1_steps=0 curriculum.total_steps=1 curriculum.max_budget=2
episode.max_context=128 episode.max_generated=64 engine.max_context=128
engine.slots=4 engine.lanes=(4,) batch.row_lengths=(128,)
batch.micro_batch_tokens=256"""
SMALL = (
  "--config=configs/quickstart.py",
  "--cache=",
  *(f"--config.{each}" for each in SETTINGS.split()),
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

  def written(text, name="reward", file="mine.py"):
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
  return config_lib.changed(config, method=method)


def test_a_judge_of_the_users_replaces_the_systems(write):
  judge = write("def judge(t):\n  return {'found': 1}\n", "judge")
  method = systems.trained(selected("search_r1", judge=judge))
  trajectory = rewards_and_advantages.trial(
    group=1, budget=1, measures=()
  ).trajectories
  with pytest.raises(types.RetrievalError, match="KeyError: 'gold_found'"):
    asyncio.run(method.measure(trajectory[0, 0]))
  with pytest.raises(ValueError, match="'zerosearch' measures nothing"):
    systems.trained(selected("zerosearch", judge=judge))


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
  twice = f"{TOOL},count={FILE}:Other"
  said = commands.run(
    *(train, *SMALL, f"--method={FILE}:METHOD", twice),
    f"--output={tmp_path / 'twice'}",
  )
  assert "expected each tool once" in said


def test_questions_of_a_function(write):
  name = write(QUESTIONS, "source")
  config = small_run.CONFIG
  source = parts.source(
    config_lib.changed(
      config, data={"source": name}, retrieval={"kind": "http"}
    )
  )
  stream = source.questions("train", 5, 0)
  assert len(stream) == 5 and {q.id for q in [*stream][:3]} == {
    f"train/{n}" for n in range(3)
  }
  assert [q.id for q in source.evaluation_questions(per_dataset=2)] == [
    "test/0",
    "test/1",
  ]
  for text, sentence in (
    (QUESTIONS.replace("{n}", ""), "found an id twice"),
    ("def source(split):\n  return []\n", "at least one"),
    ("def source(split):\n  1 / 0\n", "line 2: ZeroDivisionError"),
  ):
    broken = parts.source(
      config_lib.changed(
        config, data={"source": write(text, "source", f"{hash(text)}.py")}
      )
    )
    with pytest.raises(plugins.PluginError, match=sentence):
      broken.questions("train", 5, 0)


def test_the_environment_and_reward_are_checked_together():
  config = selected(f"{FILE}:METHOD")
  systems.validate(config)
  other = config_lib.changed(config, episode={"prompts": "world"})
  with pytest.raises(ValueError, match="#own"):
    systems.validate(other)


TRIAL = rewards_and_advantages.trial(group=3, budget=2, measures=())


OPTIONS = """
import dataclasses

import anysearch_jax as aj
from helper import DEFAULT


@dataclasses.dataclass(frozen=True)
class Options:
  price: float = aj.settings.learning(DEFAULT, aj.settings.SHARE)
  plain: int = 1


METHOD = dataclasses.replace(
  aj.get_method("search_r1"),
  name="own",
  options=Options(),
  reward=lambda outcomes, options: outcomes.em * options.price,
)
"""


def test_a_system_imports_its_neighbours_and_reads_its_options(tmp_path):
  (tmp_path / "helper.py").write_text("DEFAULT = 0.25\n")
  file = tmp_path / "with_options.py"
  file.write_text(OPTIONS)

  def rewarded(*options):
    config = selected(f"{file}:METHOD", options=options)
    return systems.trained(config).reward(TRIAL)["total"].max()

  assert rewarded() == 0.25
  assert rewarded("price=0.5", "plain=2") == 0.5
  for option, sentence in (
    ("price=2", "config.method.options.price: found 2.0, expected a share"),
    ("prize=1", "found 'prize=1', expected NAME=VALUE of one of price, plain"),
    ("price", "found 'price', expected NAME=VALUE"),
    ("plain=x", "config.method.options plain: found 'x'"),
  ):
    with pytest.raises(ValueError, match=sentence):
      rewarded(option)


def test_a_system_without_options_refuses_them():
  with pytest.raises(ValueError, match="'anysearch' has no options"):
    systems.trained(selected("anysearch", options=("price=1",)))


def body(returned, before=""):
  return (
    "import numpy as np\nimport jax.numpy as jnp\n\n\n"
    f"def reward(outcomes, config):\n  {before}\n  return {returned}\n"
  )


def with_reward(function, config=small_run.CONFIG):
  return config_lib.changed(config, reward={"function": function})


def called(name, outcomes=TRIAL, config=small_run.CONFIG):
  return systems.trained(with_reward(name, config)).reward(outcomes)


def test_rewards_are_float32_and_zero_where_not_valid(write):
  for returned in (
    "outcomes.em - 0.5 * outcomes.searches",
    "{'total': jnp.asarray(outcomes.em - 0.5 * outcomes.searches)}",
    "np.where(outcomes.valid, outcomes.em - 0.5 * outcomes.searches, np.nan)",
  ):
    found = called(write(body(returned)))
    np.testing.assert_array_equal(
      found["total"], np.float32([[1, -0.5, 0], [0, 0, 0]])
    )
    assert found["total"].dtype == np.float32


def test_function_reads_texts_answers_and_constants(write):
  name = write("""
import numpy as np

def reward(outcomes, config):
  texts = np.zeros(outcomes.valid.shape)
  for q, g in np.argwhere(outcomes.valid):
    trajectory = outcomes.trajectories[q, g]
    assert trajectory.searches == outcomes.searches[q, g]
    texts[q, g] = sum("<search>" in span.text for span in trajectory.spans)
  here = outcomes.answers == "here"
  return {"total": config.reward.alpha * here, "texts": texts}
""")
  found = called(name)
  np.testing.assert_array_equal(found["total"], [[0.5, 0, 0], [0, 0, 0]])
  np.testing.assert_array_equal(found["texts"], [[0, 1, 0], [0, 0, 0]])


@pytest.mark.parametrize(
  ("text", "sentence"),
  [
    (body("outcomes.em.sum()"), "'total' of shape (), expected (2, 3)"),
    (body("{'reward': outcomes.em}"), "the parts reward; expected 'total'"),
    (body("{'total': outcomes.em, 'a b': 1}"), "a part named 'a b', expected"),
    (
      body("{'total': outcomes.em, 'em': outcomes.em}"),
      "'em', but reward/em is recorded anyway; expected another name",
    ),
    (body("outcomes.em * 1j"), "'total' of dtype complex128, expected real"),
    (body("1e39 * outcomes.em"), "with inf at [0, 0], expected a finite"),
    (body("1 / 0"), "line 7: ZeroDivisionError: division by zero"),
    (
      body("outcomes.em", "outcomes.em[:] = 1"),
      "line 6: ValueError: assignment destination is read-only",
    ),
    ("def reward():\n  pass\n", "TypeError: reward() takes 0 positional"),
    ("reward = 3\n", "expected a function (outcomes, config)."),
    ("import nowhere\n", "line 1: ModuleNotFoundError: No module named 'no"),
    ("def reward(:\n", "SyntaxError: invalid syntax (mine.py, line 1)"),
  ],
)
def test_wrong_function_is_refused_before_a_run_begins(text, sentence, write):
  # The trial has 3 samples; episodes still divide into two steps.
  config = dataclasses.replace(small_run.CONFIG, group=3)
  with pytest.raises(plugins.PluginError, match=re.escape(sentence)):
    systems.validate(with_reward(write(text), config))


@pytest.mark.parametrize(
  ("name", "sentence"),
  [
    ("reward", "found 'reward', expected module:NAME or path/to/file.py:NAME"),
    ("a.py:x y", "found 'a.py:x y', expected module:NAME or path/to/file.py"),
    ("absent.py:reward", "found no file "),
    ("absent_module:reward", "No module named 'absent_module'"),
    ("sys:exit", "has no attribute '__file__'"),
    ("anysearch_jax.methods.anysearch:nothing", "found no 'nothing'"),
  ],
)
def test_wrong_name_is_refused(name, sentence, tmp_path):
  said = commands.run(
    train,
    "--config=configs/quickstart.py",
    f"--output={tmp_path / 'run'}",
    "--cache=",
    f"--reward={name}",
  )
  assert said.startswith("anysearch train: reward.function")
  assert sentence in said
  assert not (tmp_path / "run").exists()


def test_metrics_have_the_names_of_the_functions_parts(write):
  name = write(body("{'total': outcomes.em, 'mine': outcomes.f1}"))
  config = with_reward(name)
  names = {"reward/em", "reward/total", "reward/mine"}
  found = rewards_and_advantages.reward_metrics(
    systems.trained(config), samples=2, max_budget=4, traced=False
  )
  assert found - {"reward/format"} == names
  best = config_lib.CheckpointConfig(keep_best=1, best_metric="reward/mine")
  systems.validate(dataclasses.replace(config, checkpoint=best))
  best = dataclasses.replace(best, best_metric="reward/tool")
  with pytest.raises(ValueError, match="found 'reward/tool', expected one of"):
    systems.validate(dataclasses.replace(config, checkpoint=best))


def test_error_in_a_rollout_is_a_sentence(write, tmp_path):
  """The function passes the trial of two questions; this run asks four."""
  name = write(body("outcomes.em", "assert len(outcomes.em) == 2, 'two'"))
  with pytest.raises(plugins.PluginError, match="line 6: AssertionError"):
    small_run.train(tmp_path / "run", small_run.parts(), with_reward(name))


def test_changed_source_is_refused_without_allow_changes(write, tmp_path):
  folder = tmp_path / "run"

  def start(text, *, allow=False, rollout=0):
    config = with_reward(write(text) if text else "")
    noted = {
      "policy": {"sha256": "p"},
      "questions": {"sha256": "q"},
      "retriever": {"sha256": "r"},
      "own": parts.user_code(config),
      "packages": {},
    }
    run_history.begin(folder, config, noted, allow=allow)
    return run_history.record_start(
      folder, config, noted, rollout=rollout, changes=[]
    )

  def saved():
    return json.loads((folder / "provenance.json").read_text())

  assert start("") == []
  assert saved()["own"] == {}
  # Earlier versions did not record it.
  old = {k: v for k, v in saved().items() if k != "own"}
  (folder / "provenance.json").write_text(json.dumps(old))
  with pytest.raises(ValueError, match="reward.function .*--allow_changes"):
    start(body("outcomes.em"))
  start(body("outcomes.em"), allow=True, rollout=2)
  first = saved()["own"]["reward.function"]["sha256"]
  assert start(body("outcomes.em"), rollout=3) == []
  with pytest.raises(ValueError, match="own.reward.function.sha256 "):
    start(body("outcomes.f1"))
  (change,) = start(body("outcomes.f1"), allow=True, rollout=4)
  assert (change.path, change.old) == ("own.reward.function.sha256", first)
  assert saved()["own"]["reward.function"]["sha256"] == change.new != first
  (_, later) = saved()["changes"]
  assert later["rollout"] == 4
  assert later["settings"] == {
    "own.reward.function.sha256": [first, change.new]
  }


def test_flag_is_short_for_the_configuration_and_a_node_hands_it_on(
  write, tmp_path, capsys
):
  name = write(body("outcomes.em"))
  given = ["x", "--config=configs/quickstart.py", f"--reward={name}"]
  with commands.defined(train):
    flags._parse_argv(given)
    assert flags.read_config().reward.function == name
  with commands.defined(node):
    node.main(
      flags._parse_argv([*given, f"--output={tmp_path / 'run'}", "--dry_run"])
    )
  assert f"--reward={name}" in capsys.readouterr().out


def test_example_of_the_page_runs_as_it_is_printed(write):
  page = pathlib.Path(__file__).parents[2] / "docs" / "own.md"
  (code, *_) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
  found = called(write(code))
  assert found.keys() == {"total", "search_cost", "repeated"}
  # The second sample is wrong, and only right answers pay for searches.
  np.testing.assert_array_equal(found["total"], [[1, 0, 0], [0, 0, 0]])
