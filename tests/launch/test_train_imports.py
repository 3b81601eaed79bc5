"""What a training loads: the rooms that it uses, and no others."""

from __future__ import annotations

import json

import pytest
import source_tree

# Starts the quickstart's training and prints what is loaded where its first
# rollout would begin.
CODE = """
import json, sys
from anysearch_jax.launch import train
from absl import flags
train.define_flags()
flags.FLAGS(["train", *sys.argv[1:]])

def run(trainer, *unused):
  print(json.dumps(sorted(sys.modules)))
  sys.exit()

from anysearch_jax.training import loop
loop.Trainer.run = run
train.main(["train"])
"""
OURS = """
  algorithms budgets config data environment host methods policy rollout
  training types world launch retrieval configs
""".split()
ROOMS = {f"anysearch_jax.{room}" for room in OURS}


def rooms(modules):
  return {
    ".".join(name.split(".")[:2])
    for name in modules
    if name.startswith("anysearch_jax.")
  }


def test_a_training_loads_the_rooms_that_it_uses(tmp_path):
  done = source_tree.python(
    *("-c", CODE, "--config=configs/quickstart.py"),
    f"--output={tmp_path / 'run'}",
  )
  assert done.returncode == 0, done.stderr[-3000:]
  loaded = json.loads(done.stdout.splitlines()[-1])
  assert rooms(loaded) == ROOMS
  # Parts of rooms that other configurations need.
  others = {"anysearch_jax.launch.plan", "anysearch_jax.data.prepared"}
  others |= {"anysearch_jax.retrieval.encoder.encoder"}
  others |= {"anysearch_jax.retrieval.index.opening"}
  assert not others & set(loaded)
  unused = ("sglang", "http_calls", "http_retriever", "retrieval.service")
  assert not [m for m in loaded if any(name in m for name in unused)]


REFUSE = """
import importlib, sys
from anysearch_jax.launch import flags as launch_flags
module, *arguments = sys.argv[1:]
command = importlib.import_module("anysearch_jax.launch." + module)
command.define_flags()
try:
  argv = launch_flags._parse_argv(sys.argv[1:])
  launch_flags.call_command(command.main, argv)
finally:
  count = sum(name.split(".")[0] == "anysearch_jax" for name in sys.modules)
  print(count, "jax" in sys.modules)
"""


@pytest.mark.parametrize(
  ("module", "wrong", "sentence"),
  [
    ("train", "sead=1", "unknown key 'sead'"),
    ("train", "group=3", "48 trajectories do not divide"),
    ("evaluate", "objective.kl_estimator=k4", "found 'k4'"),
    pytest.param(
      *("serve", "retrieval.price=1", "retrieval.price: found 1.0"),
      marks=pytest.mark.slow,
    ),
    pytest.param(
      *("score", "reward.alpha=-1", "reward.alpha: found -1.0"),
      marks=pytest.mark.slow,
    ),
  ],
)
def test_a_wrong_value_is_refused_before_the_library_is_imported(
  module, wrong, sentence
):
  flags = {"evaluate": ["--output=x"], "score": ["--input=x", "--output=y"]}
  done = source_tree.python(
    *("-c", REFUSE, module, f"--config.{wrong}"),
    *("--config=configs/quickstart.py", *flags.get(module, [])),
  )
  count, has_jax = done.stdout.split()
  assert int(count) <= 60 and has_jax == "False"
  assert sentence in done.stderr
