"""What `research.warm_start` fits: the policy's size and the fit's settings.

A file of a configuration may say it in `get_warm_start(preset)`; the defaults
are those of the shipped policy of the generated world.
"""

from __future__ import annotations

import dataclasses
import runpy


@dataclasses.dataclass(frozen=True)
class WarmStart:
  """A supervised fit on demonstrations.

  Attributes:
    steps: optimizer steps, at least 1.
    learning_rate: the peak learning rate.
    batch_tokens: tokens of a batch.
    demonstrations: number of generated demonstrations; training repeats them.
    decision_weight: weight of the tokens that decide whether to search; all
      others have 1.
    layers: layers of a policy that is made new.
    hidden: its width.
    heads: its query heads.
    kv_heads: its key and value heads, a divisor of `heads`.
    mlp: the width of its feed-forward layers.
  """

  steps: int = 2000
  learning_rate: float = 4e-3
  batch_tokens: int = 4096
  demonstrations: int = 24000
  decision_weight: float = 3.0
  layers: int = 3
  hidden: int = 96
  heads: int = 4
  kv_heads: int = 2
  mlp: int = 192

  def __post_init__(self) -> None:
    if self.heads % self.kv_heads:
      raise ValueError(
        f"kv_heads: found {self.kv_heads}, expected a divisor of heads, "
        f"{self.heads}."
      )
    if self.hidden % (2 * self.heads):
      raise ValueError(
        f"hidden: found {self.hidden}, expected a multiple of twice heads, "
        f"{2 * self.heads}: rotary positions need heads of an even size."
      )


def load(name: str) -> WarmStart:
  """Returns the warm start of `FILE` or `FILE:PRESET`.

  Raises:
    ValueError: the file's sizes do not fit together.
  """
  path, _, preset = name.partition(":")
  get = runpy.run_path(path).get("get_warm_start", WarmStart)
  return get(preset) if preset and get is not WarmStart else get()
