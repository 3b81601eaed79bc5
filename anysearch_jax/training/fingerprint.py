"""Verifies an engine's weights: engine and trainer both score a fixed prompt.

An engine may have wrong weights, because a server loaded only some of them or
because another run replaced them. Before and after each rollout it therefore
scores a prompt, and its log-probabilities are compared with those of the
trainer's forward pass with the weights it was given. This uses no random
numbers and leaves the engine's cache unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from anysearch_jax import types
from anysearch_jax.host import processes
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import decoder
from anysearch_jax.rollout import trainable_engine
from anysearch_jax.training import logprobs

# Tokens of the prompt: enough to distinguish policies, and cheap at any size.
_TOKENS = 128


class Gap(NamedTuple):
  """Distance between engine and trainer in nats; 0 if nothing was compared.

  parts: number of the engine's parts that were compared. mean, largest: over
    tokens, of the part with the largest mean.
  """

  parts: int
  mean: float
  largest: float


class Fingerprint:
  """Compares the engine's log-probabilities of a prompt with the trainer's.

  Args:
    engine: it is verified if it is a `trainable_engine.ScoringEngine`.
    architecture: of the policy, with its adapters.
    dtype: of the trainer's computation.
    prompt: token ids; their beginning is scored.
    bound: `watch.max_fingerprint_gap`.
  """

  def __init__(
    self,
    engine: trainable_engine.TrainableEngine,
    *,
    architecture: architecture_lib.Architecture,
    dtype: str,
    prompt: Sequence[int],
    bound: float,
  ):
    self._bound = bound
    self._engine = (
      engine if isinstance(engine, trainable_engine.ScoringEngine) else None
    )
    self._a, self._dtype = architecture, jnp.dtype(dtype)
    self._ids = prompt[:_TOKENS]
    self._expected: np.ndarray | None = None
    self._version = 0

  def expect(self, params: decoder.Params, version: int) -> None:
    """Scores the prompt with the weights that the engine is given.

    Args:
      params: the weights, as the engine gets them.
      version: of the weights.
    """
    if self._engine is not None and len(self._ids) > 1:
      ids = np.asarray(self._ids, np.int32)
      self._expected = np.asarray(
        _score(params, ids, a=self._a, dtype=self._dtype)
      )
      self._version = version

  def check(self, rollout: int) -> Gap:
    """Makes the engine score the prompt, and compares the result.

    Args:
      rollout: number of the rollout, for the error message.

    Raises:
      types.EngineError: the engine's weights are not those of `expect`.
    """
    engine, expected = self._engine, self._expected
    if engine is None or expected is None:
      return Gap(0, 0.0, 0.0)

    def gaps() -> dict[str, list[float]]:
      return {
        part: [float(np.mean(gap)), float(np.max(gap))]
        for part, scores in engine.scores(self._ids).items()
        for gap in [_difference(np.asarray(scores), expected)]
      }

    # Processes exchange their gaps, so that all of them raise the same error.
    shares = processes.all_gather(gaps)
    found = [
      (mean, largest, part)
      for share in shares
      for part, (mean, largest) in share.items()
    ]
    if not found:
      return Gap(0, 0.0, 0.0)
    mean, largest, part = max(found)
    # Written so that NaN is too large as well.
    if not all(each <= self._bound for each, _, _ in found):
      raise types.EngineError(
        f"Rollout {rollout}: {part} of the engine scores the prompt of the "
        f"first question {mean:.2g} nats a token ({largest:.2g} at most) away "
        f"from the trainer's policy of version {self._version}, expected "
        f"{self._bound:g} at most (watch.max_fingerprint_gap): it has other "
        "weights than it was given. Nothing that it sampled in this rollout "
        "was trained on. Make sure that only this run sends weights to it, "
        "then run the same command again: it resumes and sends them again."
      )
    return Gap(len(found), mean, largest)


def _difference(scores: np.ndarray, expected: np.ndarray) -> np.ndarray:
  """Returns the distance of each token's log-probabilities.

  It is 0 where both are NaN: the engine then has the weights that it was given,
  and `health` reports that they are not finite. One NaN alone stays NaN.
  """
  both = np.isnan(scores) & np.isnan(expected)
  return np.where(both, 0.0, np.abs(scores - expected))


@functools.partial(jax.jit, static_argnames=("a", "dtype"))
def _score(
  params: decoder.Params,
  ids: jax.Array,
  *,
  a: architecture_lib.Architecture,
  dtype: Any,
) -> jax.Array:
  """Scores all tokens but the first with the trainer's forward pass."""
  tokens, targets = ids[None, :-1], ids[None, 1:]
  logps, _ = logprobs.token_logprobs(
    params,
    a,
    tokens,
    targets,
    jnp.arange(tokens.shape[1])[None],
    jnp.ones_like(tokens),
    compute=decoder.Compute(dtype=dtype),
  )
  return logps[0]
