"""ZeroSearch's reward, and how noisy its simulated search engine is.

Deviations from the released code: no answer is worth 0 (there it crashes the
run), and exact match is exact match (there, a substring).
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
  """The answer's F1.

  Args:
    outcomes: of groups.
    config: of no use here; every reward function takes its system's.

  Returns:
    `f1` and `total`, which are equal.
  """
  del config
  return outcomes_lib.parts(outcomes.valid, f1=outcomes.f1, total=outcomes.f1)


def noise(progress: float, config: config_methods.ZeroSearchConfig) -> float:
  """The probability that a search is answered by noisy passages.

      p = p_s + (b^progress - 1) / (b - 1) * (p_e - p_s)

  Args:
    progress: share of the training steps that are done, in [0, 1].
    config: p_s, p_e and b.

  Raises:
    ValueError: a progress outside [0, 1], or a base that is not positive.
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
