"""The widened policy of the benchmarks equals the small one."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from anysearch_jax.policy import decoder, hf
from bench import widened
from configs import quickstart


@pytest.mark.slow
def test_width_changes_no_logit():
  small = hf.load(quickstart.get_config().policy)
  large = widened.widened(small, 3)
  tokens = jnp.arange(5, 45)[None]

  def logits(policy):
    hidden = decoder.forward(
      policy.params,
      policy.architecture,
      tokens,
      jnp.arange(40)[None],
      jnp.ones_like(tokens),
    )
    return decoder.logits(policy.params, hidden)

  assert large.params["layers"]["q"].shape == (3, 288, 12, 24)
  np.testing.assert_allclose(logits(large), logits(small), atol=1e-4)
