"""A user's reward function: loading, checks, provenance and training."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re

import commands
import numpy as np
import pytest
import small_run

from anysearch_jax import config as config_lib
from anysearch_jax.host import plugins
from anysearch_jax.methods import own, systems
from anysearch_jax.training import rewards_and_advantages, validation
from launch import flags, node, parts, run_history, train

TRIAL = own.trial(group=3, budget=2, measures=())
SHIPPED = """
from anysearch_jax.methods import anysearch

def reward(outcomes, config):
  return anysearch.reward(outcomes, config)
"""


@pytest.fixture
def write(tmp_path):
  """Writes a function's file, as a new process would find it."""

  def written(text, name="mine.py"):
    plugins._module.cache_clear()
    (tmp_path / name).write_text(text)
    return f"{tmp_path / name}:reward"

  yield written
  plugins._module.cache_clear()


def body(returned, before=""):
  return (
    "import numpy as np\nimport jax.numpy as jnp\n\n\n"
    f"def reward(outcomes, config):\n  {before}\n  return {returned}\n"
  )


def with_reward(function, config=small_run.CONFIG):
  return dataclasses.replace(
    config, reward=dataclasses.replace(config.reward, function=function)
  )


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
    (body("outcomes.em[:, :1]"), "'total' of shape (2, 1), expected (2, 3)"),
    (body("{'reward': outcomes.em}"), "the parts reward; expected 'total'"),
    (body("{'total': outcomes.em, 'a b': 1}"), "a part named 'a b', expected"),
    (
      body("{'total': outcomes.em, 'em': outcomes.em}"),
      "'em', but reward/em is recorded anyway; expected another name",
    ),
    (body("outcomes.em * 1j"), "'total' of dtype complex128, expected real"),
    (body("outcomes.answers"), "'total' of dtype object, expected real"),
    (body("outcomes.em - np.inf"), "with -inf at [0, 0], expected a fin"),
    (body("1e39 * outcomes.em"), "with inf at [0, 0], expected a finite"),
    (body("None"), "'total' of shape (), expected (2, 3)"),
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
  with pytest.raises(plugins.PluginError, match=re.escape(sentence)):
    validation.validate(with_reward(write(text), small_run_of(3)))


def small_run_of(group):
  # The trial has `group` samples; episodes still divide into two steps.
  return dataclasses.replace(small_run.CONFIG, group=group)


@pytest.mark.parametrize(
  ("name", "sentence"),
  [
    ("reward", "found 'reward', expected module:NAME or path/to/file.py:NAME"),
    ("a.py:x y", "found 'a.py:x y', expected module:NAME or path/to/file.py"),
    ("absent.py:reward", "found no file "),
    ("absent_module:reward", "No module named 'absent_module'"),
    ("sys:exit", "'sys', a module without a file"),
    (
      "anysearch_jax.methods.anysearch:nothing",
      "found no 'nothing'",
    ),
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
  assert said.startswith("launch.train: reward.function")
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
  validation.validate(dataclasses.replace(config, checkpoint=best))
  best = dataclasses.replace(best, best_metric="reward/tool")
  with pytest.raises(ValueError, match="found 'reward/tool', expected one of"):
    validation.validate(dataclasses.replace(config, checkpoint=best))


def test_equal_reward_trains_to_the_same_bits(write, tmp_path):
  read = {}
  made = small_run.parts()
  for which, function in (
    ("shipped", ""),
    ("own", write(SHIPPED)),
  ):
    folder = tmp_path / which
    small_run.train(folder, made, with_reward(function), rollouts=2)
    steps = (folder / "steps.jsonl").read_text().splitlines()
    clocks = ("time/", "compile/", "train/tokens_per_second")
    metrics = [
      {k: v for k, v in json.loads(line).items() if not k.startswith(clocks)}
      for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    files = sorted((folder / "trajectories").iterdir())
    read[which] = (
      [json.loads(line) for line in steps],
      metrics,
      [file.read_text() for file in files],
    )
  assert read["own"] == read["shipped"]
  assert len(read["own"][1]) == 2
  assert any(record["reward/length"] for record in read["own"][1])


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
      "own": parts.own(config),
      "packages": {},
    }
    run_history.begin(folder, config, noted, allow=allow)
    return run_history.resumed(
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
