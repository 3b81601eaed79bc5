"""The command of the warm start: its gates decide where the policy goes."""

from __future__ import annotations

import types

import jax
import numpy as np
import pytest

import anysearch_jax as aj
from research import warm_start

POLICY = "configs/graded_world_policy"
# One step.
CONFIG = """
import dataclasses
from configs import quickstart

def get_config():
  config = quickstart.get_config()
  w = dataclasses.replace(
    config.warm_start, steps=1, demonstrations=40, learning_rate={rate},
    kv_heads={kv_heads},
  )
  return dataclasses.replace(config, warm_start=w)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
  def run(*, rate=0.0, kv_heads=2, start=None):
    path = tmp_path / "config.py"
    path.write_text(CONFIG.format(rate=rate, kv_heads=kv_heads))
    given = {"config": str(path), "output": str(tmp_path / "policy")}
    values = types.SimpleNamespace(**given, start=start, save_every=50)
    monkeypatch.setattr(warm_start.flags, "FLAGS", values)
    warm_start.main(["warm_start"])

  return run


def test_the_shipped_policy_is_accepted_again(run, tmp_path):
  """One step at rate 0 changes nothing, so these are its own gates."""
  run(start=POLICY)
  before, after = aj.load_policy(POLICY), aj.load_policy(tmp_path / "policy")
  jax.tree.map(np.testing.assert_array_equal, before.params, after.params)


def test_impossible_sizes_are_refused(run):
  with pytest.raises(SystemExit, match="found 3, expected a divisor of warm_"):
    run(kv_heads=3)
