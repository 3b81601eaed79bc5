"""Every compared system, `--config=FILE[:backbone[:original]]`.

Without a backbone, a system is trained in the generated world like the
quickstart, with the same policy, questions, steps and batch. The backbones
`qwen2_5_7b`, `qwen3_4b` and `llama3_1_8b` are the paper's; each uses the
configuration of that name.

A backbone has two recipes. Without `:original`, all systems share the paper's
optimizer, lengths and budget, so that a comparison is of methods and not of
recipes. With it, a system is trained as its authors published it.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable

from anysearch_jax import config as config_lib

BACKBONES = ("qwen2_5_7b", "qwen3_4b", "llama3_1_8b")
ORIGINAL = "original"
_WORLD = "quickstart"

Change = Callable[[config_lib.ExperimentConfig], config_lib.ExperimentConfig]


def experiment(
  method: str,
  preset: str = "",
  change: Change = lambda config: config,
  original: Change | None = None,
) -> config_lib.ExperimentConfig:
  """Returns the configuration of a system on a backbone or in the world.

  Args:
    method: name of the system in `anysearch_jax.methods.systems`.
    preset: one of `BACKBONES`, with or without `:original`; "" is the world.
    change: a further change of the configuration of the equal recipe.
    original: returns the original recipe of the system on a backbone; None if
      its authors published none.

  Raises:
    ValueError: the preset is unknown, or has no original recipe.
  """
  # Imported late, because it imports JAX and importing configs must not.
  from anysearch_jax.methods import systems

  backbone, _, recipe = preset.partition(":")
  if backbone not in ("", *BACKBONES) or recipe not in ("", ORIGINAL):
    raise ValueError(
      f"{method}: found preset {preset!r}, expected one of "
      f"{', '.join(BACKBONES)}, with or without :{ORIGINAL}, or none for the "
      "generated world."
    )
  if recipe and not backbone:
    raise ValueError(
      f"{method}: found preset {preset!r}; the original recipe is one for "
      f"language models, expected a backbone before it "
      f"({BACKBONES[0]}:{ORIGINAL})."
    )
  if recipe and original is None:
    raise ValueError(
      f"{method}: found preset {preset!r}, but its authors published no recipe "
      "of their own (docs/fidelity.md); expected the backbone alone."
    )
  base = importlib.import_module(f"configs.{backbone or _WORLD}").get_config()
  name = "-".join(filter(None, (method, backbone, recipe)))
  trained = systems.select(dataclasses.replace(base, name=name), method)
  if recipe and original is not None:
    return original(trained)
  return change(trained)


def critic(
  config: config_lib.ExperimentConfig, *, ratio: float = 10.0
) -> config_lib.ExperimentConfig:
  """Adds PPO's critic, with `ratio` times the policy's learning rate."""
  return dataclasses.replace(
    config,
    objective=dataclasses.replace(config.objective, advantage="gae"),
    critic=dataclasses.replace(
      config.critic, learning_rate=ratio * config.optimizer.learning_rate
    ),
  )
