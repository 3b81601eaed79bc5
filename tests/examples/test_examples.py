"""The examples run, use public names only, and train as `launch.train` does."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys

import commands
import jax
import numpy as np
import pytest
import source_tree

import anysearch_jax as aj
from anysearch_jax.configs import quickstart
from anysearch_jax.launch import flags as launch_flags
from anysearch_jax.launch import train
from examples import own_retriever, own_reward, train_anysearch

ROOT = source_tree.ROOT
FILES = [p for p in source_tree.files("examples") if p.stem != "__init__"]
# Three rollouts: two of Phase I, one of Phase II.
SMALL = (
  *("questions=4", "group=3", "curriculum.max_budget=2"),
  *("curriculum.steps_per_rollout=2", "curriculum.phase1_steps=4"),
  *("curriculum.total_steps=6", "episode.max_context=128"),
  *("episode.max_generated=64", "engine.max_context=128", "engine.slots=12"),
  *("engine.lanes=(12,)", "batch.row_lengths=(128,)"),
  "batch.micro_batch_tokens=256",
)


def lines(path) -> list[dict]:
  return [json.loads(line) for line in path.read_text().splitlines()]


def test_training_in_one_file_is_launch_train_to_the_bit(tmp_path, monkeypatch):
  monkeypatch.chdir(ROOT)
  overrides = [f"--config.{value}" for value in SMALL]
  said = commands.run(
    train,
    "--config=configs/quickstart.py",
    *overrides,
    f"--output={tmp_path / 'run'}",
    "--cache=",
  )
  assert said == ""
  config = launch_flags.override(quickstart.get_config(), SMALL)
  world = aj.World()
  trained, history = train_anysearch.train(
    config,
    rollouts=3,
    policy=aj.load_policy(config.policy),
    questions=world.questions("train", 12, config.seed),
    retriever=aj.LexicalRetriever(world.corpus, reads=world.searched),
  )
  rollouts = lines(tmp_path / "run" / "metrics.jsonl")
  steps = lines(tmp_path / "run" / "steps.jsonl")
  assert len(history) == len(rollouts) == 3 and len(steps) == 6
  assert [r["phase"] for r in rollouts] == [1, 1, 2]
  for mine, theirs in zip(history, rollouts):
    assert mine["reward"] == theirs["reward/total"] != 0
    assert mine["em"] == theirs["reward/em"]
    assert mine["searches"] == theirs["rollout/searches"]
    assert mine["scaffold"] == bool(theirs["scaffold"])
  losses = [loss for metrics in history for loss in metrics["losses"]]
  assert losses == [step["loss/total"] for step in steps]
  exported = aj.load_policy(tmp_path / "run" / "policy")
  jax.tree.map(np.testing.assert_array_equal, trained.params, exported.params)


@pytest.mark.slow
def test_training_example_trains_and_evaluates(tmp_path, capsys):
  output = tmp_path / "run"
  train_anysearch.main(["--rollouts=1", "--questions=2", f"--output={output}"])
  assert len(lines(output / "episodes.jsonl")) == 2 * 6
  assert "budget 8: " in capsys.readouterr().out
  assert aj.load_policy(output / "policy").architecture.layers == 3
  with pytest.raises(SystemExit):  # The folder holds another run's episodes.
    train_anysearch.main([f"--output={output}"])


@pytest.mark.slow
def test_own_reward_is_trained_on(tmp_path, capsys):
  own_reward.main(["--rollouts=1", f"--output={tmp_path}"])
  (metrics,) = lines(tmp_path / "metrics.jsonl")
  expected = metrics["reward/em"] - metrics["reward/cost"]
  assert metrics["reward/total"] == pytest.approx(expected)
  assert metrics["reward/cost"] == pytest.approx(
    own_reward.PRICE * metrics["rollout/searches"]
  )
  assert "reward/cost" in capsys.readouterr().out


def test_own_retriever_answers_the_searches():
  world = aj.World()
  (question,) = world.questions("held-out", 1, seed=0)
  fact = question.metadata["facts"][0]
  words = f"{fact['entity']} {fact['relation']}"
  request = aj.SearchRequest(words, 3, question.corpus)
  alone = own_retriever.WordOverlap(world.corpus)
  best = own_retriever.best(quickstart.get_config())
  for retriever in (alone, best):
    passages = aj.run(retriever.search(request))
    assert 0 < len(passages) <= 3
    shown = {passages[0].title, *passages[0].text.split()}
    assert shown & set(words.split())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_examples_use_public_names_only(path):
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.ImportFrom) and node.module == "anysearch_jax":
      assert {alias.name for alias in node.names} <= {*aj.__all__}
    elif isinstance(node, ast.Import | ast.ImportFrom):
      names = [getattr(node, "module", None) or node.names[0].name]
      assert names[0] == "anysearch_jax.configs" or not names[0].startswith(
        "anysearch_jax."
      )
    elif isinstance(node, ast.Attribute):
      if isinstance(node.value, ast.Name) and node.value.id == "aj":
        assert node.attr in aj.__all__, node.attr
  most = 260 if path.stem == "train_anysearch" else 100
  assert len(path.read_text().splitlines()) <= most


def test_every_public_name_exists_and_hides_no_module():
  for name in aj.__all__:
    value = getattr(aj, name)
    # Importing a module of this name later would replace the value.
    if importlib.util.find_spec(f"anysearch_jax.{name}"):
      assert importlib.import_module(f"anysearch_jax.{name}") is value
  with pytest.raises(AttributeError):
    aj.no_such_name  # noqa: B018


def test_importing_the_package_imports_no_jax():
  code = (
    "import sys, anysearch_jax; anysearch_jax.ExperimentConfig;"
    "sys.exit('jax' in sys.modules)"
  )
  subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
