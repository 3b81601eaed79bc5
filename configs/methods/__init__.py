"""Every compared system on every backbone, `--config=FILE[:backbone]`.

Without a backbone, a system is trained in the generated world like the
quickstart, with the same policy, questions, steps and batch. The backbones
`qwen2_5_7b`, `qwen3_4b` and `llama3_1_8b` are the paper's; each uses the
configuration of that name.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable

from anysearch_jax import config as config_lib

BACKBONES = ("qwen2_5_7b", "qwen3_4b", "llama3_1_8b")
_WORLD = "quickstart"

Change = Callable[[config_lib.ExperimentConfig], config_lib.ExperimentConfig]


def experiment(
  method: str, backbone: str = "", change: Change = lambda config: config
) -> config_lib.ExperimentConfig:
  """Returns the configuration of a system on a backbone or in the world.

  Args:
    method: name of the system in `anysearch_jax.methods.systems`.
    backbone: one of `BACKBONES`; "" is the world.
    change: a further change of the configuration.

  Raises:
    ValueError: the backbone is unknown.
  """
  # Imported late, because it imports JAX and importing configs must not.
  from anysearch_jax.methods import systems

  if backbone not in ("", *BACKBONES):
    raise ValueError(
      f"{method}: found preset {backbone!r}, expected one of "
      f"{', '.join(BACKBONES)}, or none for the generated world."
    )
  base = importlib.import_module(f"configs.{backbone or _WORLD}").get_config()
  system = systems.get(method)
  prompts = system.prompts if backbone else system.world_prompts
  named = dataclasses.replace(
    base,
    name="-".join(filter(None, (method, backbone))),
    method=dataclasses.replace(base.method, name=method),
    episode=dataclasses.replace(base.episode, prompts=prompts),
  )
  return change(system.train(named))


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
