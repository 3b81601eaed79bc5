"""The fingerprint of weights: a fixed prompt, scored on both sides.

An engine may have been handed other weights than it says, by a server that
loaded half of them or by another run. So it scores a prompt before and after
it samples a rollout, and the log-probabilities are compared with those that the
trainer's own forward pass gives for the weights that were handed over. Nothing
is drawn for it, and the engine's cache is left alone.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.host import processes
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import decoder
from anysearch_jax.rollout import episode
from anysearch_jax.training import collection, logprobs

# Tokens of the prompt; enough to tell policies apart, cheap at any size.
_TOKENS = 128


class Gap(NamedTuple):
  """Nats between the two sides; 0 where no part of the engine was compared.

  parts: of the engine that were. mean, largest: over tokens, of the part that
    is furthest off.
  """

  parts: int
  mean: float
  largest: float


class Fingerprint:
  """Knows what the prompt's log-probabilities should be, and asks the engine.

  Args:
    config: of the run.
    engine: samples; one without `scores` is not asked.
    architecture: of the policy, with its adapters.
    question: whose prompt is scored.
    codec: the text side of the policy.
  """

  def __init__(
    self,
    config: config_lib.ExperimentConfig,
    *,
    engine: collection.Engine,
    architecture: architecture_lib.Architecture,
    question: types.Question,
    codec: types.TextCodec,
  ):
    self._bound = config.watch.max_fingerprint_gap
    self._engine = engine if hasattr(engine, "scores") else None
    self._a, self._dtype = architecture, jnp.dtype(config.compute_dtype)
    _, ids = episode.prompt(
      question,
      budget=config.curriculum.max_budget,
      scaffold=config.curriculum.phase1_scaffold,
      config=config.episode,
      codec=codec,
    )
    self._ids = ids[:_TOKENS]
    self._expected: np.ndarray | None = None
    self._version = 0

  def expect(self, params: decoder.Params, version: int) -> None:
    """Scores the prompt with weights that the engine is given.

    Args:
      params: as the engine gets them.
      version: of them.
    """
    if self._engine is not None and len(self._ids) > 1:
      ids = np.asarray(self._ids, np.int32)
      self._expected = np.asarray(
        _score(params, ids, a=self._a, dtype=self._dtype)
      )
      self._version = version

  def check(self, rollout: int) -> Gap:
    """Has the engine score the prompt.

    Args:
      rollout: that it samples, for the sentence.

    Raises:
      types.EngineError: it has other weights than those of `expect`.
    """
    if self._expected is None:
      return Gap(0, 0.0, 0.0)

    def gaps() -> dict[str, list[float]]:
      return {
        part: [float(np.mean(gap)), float(np.max(gap))]
        for part, scores in self._engine.scores(self._ids).items()
        for gap in [np.abs(np.asarray(scores) - self._expected)]
      }

    # Where one process finds a gap, all of them stop.
    shares = processes.share(gaps)
    found = [
      (mean, largest, part)
      for share in shares
      for part, (mean, largest) in share.items()
    ]
    if not found:
      return Gap(0, 0.0, 0.0)
    mean, largest, part = max(found)
    # NaN is a gap too.
    if not all(each <= self._bound for each, _, _ in found):
      raise types.EngineError(
        f"Rollout {rollout}: {part} of the engine scores the prompt of the "
        f"first question {mean:.2g} nats a token ({largest:.2g} at most) away "
        f"from the trainer's policy of version {self._version}, expected "
        f"{self._bound:g} at most (watch.max_fingerprint_gap): it has other "
        "weights than it was given. Nothing that it sampled in this rollout "
        "was trained on. See that nothing but this run hands weights to it; "
        "the same command resumes and hands them over anew."
      )
    return Gap(len(found), mean, largest)


@functools.partial(jax.jit, static_argnames=("a", "dtype"))
def _score(
  params: decoder.Params,
  ids: jax.Array,
  *,
  a: architecture_lib.Architecture,
  dtype: Any,
) -> jax.Array:
  """Log-probabilities of all tokens but the first, by the training forward."""
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
