"""Tests resuming with settings that differ from the checkpoint's."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import commands
import fake_sglang
import pytest
import scripted
import scripted_runs as runs
import sglang_engines
import small_run

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.policy import hf
from anysearch_jax.training import loop
from launch import flags, node, train

TESTS = pathlib.Path(__file__).parents[1] / "support"


def test_the_real_learner_applies_a_change_of_learning(parts, tmp_path):
  objective = config_lib.ObjectiveConfig(old_logp="trainer", kl_coefficient=0.0)
  small_run.train(tmp_path, parts, rollouts=2)
  config = dataclasses.replace(small_run.CONFIG, objective=objective)
  loop.Trainer(config, folder=tmp_path, allow_changes=True, **parts).run()
  assert len(runs.metrics(tmp_path)) == 4


@pytest.mark.slow
def test_a_run_resumes_with_another_engine(tmp_path):
  """The run samples in this process first, then with an SGLang server."""
  given = {
    "policy": sglang_engines.policy(),
    "questions": [types.Question(str(i), "c", ("b",)) for i in range(16)],
    "retriever": scripted.Retriever(),
  }
  config = dataclasses.replace(
    small_run.CONFIG,
    episode=config_lib.EpisodeConfig(
      prompts="world", max_generated=20, max_context=112
    ),
  )
  small_run.train(tmp_path, given, config, rollouts=2)
  with fake_sglang.Server(
    lambda context: fake_sglang.ids(*"<", "answer", *">b", "</answer>")
  ) as server:
    served = dataclasses.replace(
      config,
      engine=dataclasses.replace(config.engine, kind="sglang"),
      sglang=config_lib.SglangConfig(
        urls=(server.url,), weights=str(tmp_path / "ram")
      ),
    )
    small_run.train(tmp_path, given, served)
  records = runs.metrics(tmp_path)
  assert [r["rollout"] for r in records] == [0, 1, 2, 3]
  assert [r["rollout/failed"] for r in records] == [0] * 4


CONFIG = """
import dataclasses, sys
sys.path.insert(0, {tests!r})
import small_run

def get_config():
  return dataclasses.replace(small_run.CONFIG, policy={policy!r})
"""


@pytest.fixture
def config_file(parts, tmp_path):
  hf.save(tmp_path / "start", parts["policy"])
  path = tmp_path / "small.py"
  path.write_text(
    CONFIG.format(tests=str(TESTS / "support"), policy=str(tmp_path / "start"))
  )
  return path


def said(command, *arguments, capfd):
  """Returns a command's standard error, or the error that ended it."""
  with commands.defined(command):
    try:
      argv = flags._parse_argv(["command", "--cache=", *arguments])
      flags.called(command.main, argv)
    except SystemExit as ended:
      return str(ended.code)
  return capfd.readouterr().err


@pytest.mark.slow
def test_the_command_resumes_on_another_mesh_and_notes_what_changed(
  config_file, tmp_path, capfd
):
  folder = tmp_path / "run"
  config = flags.load_config(str(config_file))
  world = train.parts.source(config)
  small_run.train(
    folder,
    {
      "policy": hf.load(config.policy),
      "questions": world.questions("train", 16, config.seed),
      "retriever": world.retriever,
    },
    config,
    rollouts=2,
  )
  given = [f"--config={config_file}", f"--output={folder}"]
  moved = [*given, "--config.mesh.data=2", "--config.engine.slots=4"]
  learns = [*moved, "--config.optimizer.learning_rate=0.002"]
  sentence = said(train, *learns, capfd=capfd)
  assert "optimizer.learning_rate 0.001 -> 0.002" in sentence
  assert "--allow_changes" in sentence
  assert len(runs.metrics(folder)) == 2
  # The refused start did not hide the run's configuration.
  stored = json.loads((folder / "config.json").read_text())
  assert stored["optimizer"]["learning_rate"] == 0.002
  told = said(train, *learns, "--allow_changes", capfd=capfd)
  assert (
    "changed from rollout 2 on: optimizer.learning_rate 0.001 -> 0.002 "
    "(learning), engine.slots 8 -> 4 (placement), mesh.data 1 -> 2 (placement)"
  ) in told
  assert [r["rollout"] for r in runs.metrics(folder)] == [0, 1, 2, 3]
  (change,) = json.loads((folder / "provenance.json").read_text())["changes"]
  assert change == {
    "rollout": 2,
    "settings": {
      "optimizer.learning_rate": [0.001, 0.002],
      "engine.slots": [8, 4],
      "mesh.data": [1, 2],
    },
  }


def test_a_node_refuses_before_it_starts_a_server(config_file, tmp_path, capfd):
  folder = tmp_path / "run"
  folder.mkdir()
  config = flags.load_config(str(config_file))
  train.run_history.check(folder, config, allow=False)  # There is no run.
  stored = dataclasses.asdict(config)
  (folder / "config.json").write_text(json.dumps(stored))
  given = [f"--config={config_file}", f"--output={folder}", "--dry_run"]
  for setting, sentence in (
    ("seed=7", "seed 42 -> 7"),
    ("reward.alpha=0.1", "reward.alpha 0.5 -> 0.1"),
  ):
    assert sentence in said(node, *given, f"--config.{setting}", capfd=capfd)
  free = "--config.pipeline.async_level=1"
  assert said(node, *given, free, capfd=capfd) == ""
  learns = [*given, "--config.reward.alpha=0.1", "--allow_changes"]
  with commands.defined(node):
    node.main(flags._parse_argv(["command", *learns]))
  assert "--allow_changes=True" in capfd.readouterr().out
