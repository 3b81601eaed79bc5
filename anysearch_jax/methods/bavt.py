"""BAVT, inference only: a tree of steps, of which the policy is the critic.

`rollout/value_tree` plays it. After every step the policy is asked how much the
step achieved, in [-4, 4]. In the generated world a script reads the step.

No code is public; configs/fidelity_rules.csv lists what is ours.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from anysearch_jax.environment import prompts, spec, wording
from anysearch_jax.methods import method, search_r1

MOST = 4.0
_DELTA = re.compile(r'"delta"\s*:\s*"?([-+]?\d+)')
_ASKED = re.compile(r"<search>\s*(\S+) (\S+)\s*</search>")
_SHOWN = re.compile(r"\(Title: (\S+?) ?\) (\S+) (\S+)")


def progress(reply: str) -> float:
  """Returns the last delta of the critic's reply, 0 without one."""
  # A pattern and not a JSON parser, as in `bats.accepted`.
  found = _DELTA.findall(reply)
  return max(-MOST, min(MOST, float(found[-1]))) if found else 0.0


def found(step: str) -> float:
  """Returns the progress of a step of the world: by values found, 0 for two."""
  asked = _ASKED.findall(step)
  values = {value for *of, value in _SHOWN.findall(step) if tuple(of) in asked}
  return {0: -MOST, 1: MOST}.get(len(values), 0.0) if asked else 0.0


def _bavt(texts: Mapping[str, str]) -> spec.Environment:
  asks = wording.template(texts["critic"])
  return dataclasses.replace(
    search_r1.environment(texts), format=None, critic=progress, critic_asks=asks
  )


WORDINGS = {
  "bavt": wording.Wording(
    "bavt.toml", {**wording.ONE_PROMPT, "critic": wording.LINE}, _bavt
  ),
  "bavt_world": prompts.WORLD.then(
    lambda env: dataclasses.replace(env, format=None, critic=found)
  ),
}

METHOD = method.compared("bavt", "BAVT", WORDINGS, train=lambda config: config)
