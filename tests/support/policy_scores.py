"""A policy's log-probabilities of a context, by one forward pass."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from anysearch_jax.policy import decoder, hf


def log_probs(policy: hf.Policy, context: Sequence[int]) -> list[float]:
  """Returns the log-probabilities of all tokens except the first."""
  ids = np.asarray([context])
  places = np.arange(len(context))[None]
  hidden = decoder.forward(
    policy.params, policy.architecture, ids, places, np.ones_like(ids)
  )
  logps = jax.nn.log_softmax(decoder.logits(policy.params, hidden))[0]
  return np.asarray(logps)[places[0, :-1], ids[0, 1:]].tolist()
