"""Trainings whose episodes a program plays, to the bit of those played here."""

import dataclasses
import json

import commands
import jax
import numpy as np
import pytest
import small_run
import source_tree

from anysearch_jax import config as config_lib
from anysearch_jax.evaluation import journal
from anysearch_jax.launch import evaluate
from anysearch_jax.policy import hf
from anysearch_jax.sessions import player

PROGRAM = source_tree.ROOT / "examples" / "outside_agent.py"
AGENTS = config_lib.AgentsConfig(program=f"{PROGRAM}:play", states_budget=False)

_IN_TAGS = (
  "--config.episode.prompts=world",
  "--config.agents.states_budget=false",
)


def train(folder, config, *, program):
  parts = small_run.parts()
  if program is None:
    small_run.train(folder, parts, config)
    return
  opened = player.ProgramPlayer(program, config.sampling)
  try:
    small_run.train(folder, {**parts, "player": opened}, config)
  finally:
    opened.close()


def test_an_outside_loop_trains_the_policy_of_an_episode(tmp_path):
  """Phase I with its budget lines, then Phase II; random policies err a lot."""
  config = small_run.CONFIG
  train(tmp_path / "inside", config, program=None)
  outside_config = dataclasses.replace(config, agents=AGENTS)
  train(tmp_path / "outside", outside_config, program=AGENTS)
  # What a metric names differs: a session is refused where an episode ends.
  inside, outside = (
    [json.loads(line) for line in (f / "steps.jsonl").read_text().splitlines()]
    for f in (tmp_path / "inside", tmp_path / "outside")
  )
  names = [name for name in inside[0] if not name.startswith("time")]
  assert [[row[n] for n in names] for row in outside] == [
    [row[n] for n in names] for row in inside
  ]
  ours, theirs = (
    hf.load(tmp_path / name / "policy").params for name in ("inside", "outside")
  )
  jax.tree.map(np.testing.assert_array_equal, ours, theirs)
  last = small_run.records(tmp_path / "outside")[-1]
  assert last["engine/agents/sessions"] == 4 * 4 * 2
  assert last["engine/agents/forks"] == 0


@pytest.mark.slow
def test_an_evaluation_by_a_program_is_that_of_an_episode(tmp_path):
  rows = []
  for name, flags in (
    ("inside", ()),
    ("outside", (f"--agents={AGENTS.program}", *_IN_TAGS)),
  ):
    folder = tmp_path / name
    ended, text = commands.printed(
      evaluate,
      "--config=configs/quickstart.py",
      *("--budgets=0,1,3", "--config.evaluation.questions=6", "--seeds=1"),
      *flags,
      f"--output={folder}",
    )
    assert ended == 0, text
    rows.append(list(journal.read(folder / "episodes.jsonl")))
  names = ("question_id", "budget", "answer", "em", "searches", "spans")
  inside, outside = ([[r[n] for n in names] for r in part] for part in rows)
  assert inside == outside and len(inside) == 18
