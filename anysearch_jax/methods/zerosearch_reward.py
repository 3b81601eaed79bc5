"""ZeroSearch's reward, and the noise schedule of its simulated search engine.

Deviations from the released code: a missing answer scores 0 (there, it crashes
the run), and exact match compares whole answers (there, substrings).
"""

from __future__ import annotations

import functools

import chex
import jax

from anysearch_jax.config import methods as config_methods
from anysearch_jax.methods import outcomes as outcomes_lib


@functools.partial(jax.jit, static_argnames="config")
def reward(
  outcomes: outcomes_lib.Outcomes, *, config: config_methods.ZeroSearchConfig
) -> dict[str, chex.Array]:
  """Returns the answer's F1.

  Args:
    outcomes: outcomes of groups.
    config: unused; every reward takes the constants of its system.

  Returns:
    `f1` and `total`, which are equal.
  """
  del config
  return outcomes_lib.parts(outcomes.valid, f1=outcomes.f1, total=outcomes.f1)


def noise(progress: float, config: config_methods.ZeroSearchConfig) -> float:
  """Returns the probability that a search gets noisy passages.

      p = p_s + (b^progress - 1) / (b - 1) * (p_e - p_s)

  For b = 1 this is linear in `progress`.

  Args:
    progress: completed share of the training steps, in [0, 1].
    config: `noise_start` (p_s), `noise_end` (p_e) and `noise_base` (b).

  Raises:
    ValueError: the progress is outside [0, 1], or the base is not positive.
  """
  if not 0 <= progress <= 1:
    raise ValueError(
      f"Found a progress of {progress}; expected steps done / steps in all, in "
      "[0, 1]."
    )
  base = config.noise_base
  if base <= 0:
    raise ValueError(
      f"Found noise_base {base}; expected more than 0 (1 is a straight line)."
    )
  risen = progress if base == 1 else (base**progress - 1) / (base - 1)
  return config.noise_start + risen * (config.noise_end - config.noise_start)
