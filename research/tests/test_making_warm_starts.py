"""The command of the warm start: its gates decide where the policy goes."""

from __future__ import annotations

import commands
import jax
import numpy as np

import anysearch_jax as aj
from research import warm_start

POLICY = "configs/graded_world_policy"
# One step.
CONFIG = """
from anysearch_jax.configs.quickstart import get_config
from research import warm_start_settings

def get_warm_start():
  return warm_start_settings.WarmStart(
    steps=1, demonstrations=40, learning_rate={rate}, kv_heads={kv_heads},
  )
"""


def run(folder, *, rate=0.0, kv_heads=2, start=()):
  path = folder / "config.py"
  path.write_text(CONFIG.format(rate=rate, kv_heads=kv_heads))
  named = f"--config={path}", f"--output={folder / 'policy'}"
  return commands.run(warm_start, *named, *start)


def test_the_shipped_policy_is_accepted_again(tmp_path):
  """One step at rate 0 changes nothing, so these are its own gates."""
  assert run(tmp_path, start=[f"--start={POLICY}"]) == ""
  before, after = aj.load_policy(POLICY), aj.load_policy(tmp_path / "policy")
  jax.tree.map(np.testing.assert_array_equal, before.params, after.params)


def test_impossible_sizes_are_refused(tmp_path):
  said = run(tmp_path, kv_heads=3)
  assert "kv_heads: found 3, expected a divisor of heads, 4" in said
