"""Makes the quickstart's policy larger without changing its output.

    python -m bench.widened --times=8 --output=DIR

Every width is padded with zeros: new channels are never written, new heads and
hidden units are never read, and norms are rescaled. With 8 times the width it
has 17.9 million parameters instead of 0.3 million, so that the time of a
rollout depends on the device and not on overheads.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import numpy as np
from absl import flags

from anysearch_jax.policy import hf
from configs import quickstart
from launch import flags as launch_flags

# The axes that are padded, by the name of the weight.
_AXES = {
  "embed": (1,),
  "q": (1, 2),
  "k": (1, 2),
  "v": (1, 2),
  "o": (1, 2),
  "gate": (1, 2),
  "up": (1, 2),
  "down": (1, 2),
  "q_norm": (),
  "k_norm": (),
}
_NORMS = {"norm": (0,), "attention_norm": (1,), "mlp_norm": (1,)}


def widened(policy: hf.Policy, times: int) -> hf.Policy:
  """Returns the policy with `times` the width; logits are equal up to rounding.

  Args:
    policy: a policy on one device, with the weights that `_AXES` names.
    times: factor of every width, at least 1.
  """
  a = policy.architecture

  def grow(path: tuple, x: jax.Array) -> np.ndarray:
    name = path[-1].key
    axes = (_AXES | _NORMS)[name]
    # RMSNorm averages squares over `times` as many channels, mostly zeros.
    scale = math.sqrt(times) if name in _NORMS else 1
    more = [(0, (times - 1) * n * (i in axes)) for i, n in enumerate(x.shape)]
    return np.pad(np.asarray(x) / np.asarray(scale, x.dtype), more)

  return policy._replace(
    params=jax.tree_util.tree_map_with_path(grow, policy.params),
    architecture=dataclasses.replace(
      a,
      d_model=times * a.d_model,
      heads=times * a.heads,
      kv_heads=times * a.kv_heads,
      mlp_dim=times * a.mlp_dim,
      norm_eps=a.norm_eps / times,
    ),
    source=None,
  )


def _main(argv) -> None:
  del argv
  policy = hf.load(quickstart.get_config().policy)
  hf.save(flags.FLAGS.output, widened(policy, flags.FLAGS.times))


if __name__ == "__main__":
  flags.DEFINE_integer("times", 8, "Of every width.", lower_bound=1)
  flags.DEFINE_string("output", None, "Folder; replaced.", required=True)
  launch_flags.run(_main)
