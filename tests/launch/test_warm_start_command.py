"""The command of the warm start: its gates decide where the policy goes."""

from __future__ import annotations

import commands
import jax
import numpy as np
import pytest
import source_tree

from anysearch_jax.policy import hf
from launch import warm_start

POLICY = "configs/fair_policy"


def run(output, *options):
  return commands.run(
    warm_start,
    "--config=configs/fair.py",
    f"--start={POLICY}",
    "--config.warm_start.steps=1",
    "--config.warm_start.demonstrations=40",
    *options,
    f"--output={output}",
    "--cache=",
  )


@pytest.mark.slow
def test_the_shipped_policy_is_accepted_again(tmp_path, monkeypatch, capsys):
  """One step at rate 0 changes nothing, so these are its own gates."""
  monkeypatch.chdir(source_tree.ROOT)
  run(tmp_path / "policy", "--config.warm_start.learning_rate=0.0")
  before, after = hf.load(POLICY), hf.load(tmp_path / "policy")
  jax.tree.map(np.testing.assert_array_equal, before.params, after.params)


@pytest.mark.slow
def test_a_policy_of_another_expert_is_rejected(tmp_path, monkeypatch):
  monkeypatch.chdir(source_tree.ROOT)
  said = run(
    tmp_path / "policy",
    "--config.warm_start.expert=blind",
    "--config.warm_start.learning_rate=0.0",
  )
  assert "slope by change" in said and "copy" not in said
  assert (tmp_path / "policy.rejected" / "model.safetensors").is_file()
  assert not (tmp_path / "policy").exists()
