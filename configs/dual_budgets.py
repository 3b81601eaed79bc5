"""The quickstart with budgets of searches and tokens, see docs/budgets.md.

Hardware and time: as configs/quickstart.py.

    python -m launch.train --config=configs/dual_budgets.py --output=runs/dual

Presets, `--config=configs/dual_budgets.py:<preset>`:
    dual        every group gets a pair of searches and tokens, and a right
                answer earns the mean of the shares of both that it saved; also
                without a preset
    searches    the same reward of searches alone, without a cap on tokens
Both divide advantages by the rollout's deviation, as the quickstart's `priced`.
"""

from __future__ import annotations

import dataclasses

from anysearch_jax import config as config_lib
from configs import quickstart

PRESETS = ("dual", "searches")
TOKENS = (40, 60, 90, 140)


def get_config(preset: str = "dual") -> config_lib.ExperimentConfig:
  if preset not in PRESETS:
    raise ValueError(
      f"configs/dual_budgets.py: found preset {preset!r}, expected one of "
      f"{', '.join(PRESETS)}."
    )
  config = quickstart.get_config("priced")
  config = dataclasses.replace(config, name=f"budgets-{preset}")
  if preset == "searches":
    return config
  return dataclasses.replace(
    config,
    reward=dataclasses.replace(config.reward, abs_tokens=1.0),
    curriculum=dataclasses.replace(config.curriculum, token_levels=TOKENS),
    # An answer of the world takes 7 tokens, and its thought a few more.
    episode=dataclasses.replace(config.episode, answer_room=16),
  )
