"""What docs/evidence.md found better than the published objective."""

from __future__ import annotations

from anysearch_jax import config as config_lib


def priced(config: config_lib.ExperimentConfig) -> config_lib.ExperimentConfig:
  """Returns the configuration with a price of .1 / B for right answers.

  A right answer earns alpha, .5, and loses .1 / B by each search. Advantages
  are divided by the rollout's deviation, so that the price holds
  (docs/objective.md). The price is R_abs alone, with a fixed gamma.
  """
  return config_lib.changed(
    config,
    reward={"gamma_mode": "fixed", "gamma_fixed": 0.1, "use_rel": False},
    objective={"normalize": "batch"},
  )
