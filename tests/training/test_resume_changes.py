"""Tests resuming with settings that differ from the checkpoint's."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import commands
import pytest
import scripted_runs as runs
import small_run

from anysearch_jax.policy import hf
from launch import flags, node, train

TESTS = pathlib.Path(__file__).parents[1] / "support"


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
