"""Frees device memory between sampling and training, if they take turns.

Where both use the same devices and never run at the same time, neither needs
the other's memory: the KV cache is freed while training, and the training state
may be in host memory while sampling (`pipeline.offload`). Host memory of a
sharding: https://docs.jax.dev/en/latest/201/memory-spaces.html
"""

from __future__ import annotations

from absl import logging

from anysearch_jax.rollout import trainable_engine
from anysearch_jax.training import learner as learner_lib
from anysearch_jax.training import placement
from anysearch_jax.training import timeline as timeline_lib


class Phases:
  """Frees what the next phase does not need; the trainer's thread calls it.

  Args:
    learner: its state is moved.
    engine: its cache is freed, if it is a `trainable_engine.CachingEngine`.
    free_kv: `engine.free_kv_while_training`.
    offload: `pipeline.offload`.
    async_level: `pipeline.async_level`.
    timeline: records durations.
  """

  def __init__(
    self,
    learner: learner_lib.Learner,
    engine: trainable_engine.TrainableEngine,
    *,
    free_kv: bool,
    offload: str,
    async_level: int,
    timeline: timeline_lib.Timeline,
  ):
    self._learner, self._offload = learner, offload
    frees = (
      free_kv
      and isinstance(engine, trainable_engine.CachingEngine)
      and placement.take_turns(learner.placement, async_level=async_level)
    )
    self._engine = engine if frees else None
    self._timeline = timeline
    self._logged: set[str] = set()

  def sample(self, rollout: int) -> None:
    """Moves the training state to host memory, before a rollout is sampled."""
    if self._offload == "none":
      return
    with self._timeline.span(rollout, timeline_lib.TRAINER, "sync"):
      self._log(
        "Moved %.2f GiB of the training state to host memory for sampling "
        "(pipeline.offload).",
        self._learner.offload(self._offload),
      )

  def train(self, rollout: int) -> None:
    """Frees the KV cache and fetches the state, before training."""
    if self._engine is None and self._offload == "none":
      return
    with self._timeline.span(rollout, timeline_lib.TRAINER, "sync"):
      if isinstance(self._engine, trainable_engine.CachingEngine):
        self._log(
          "Freed %.2f GiB of KV cache for training "
          "(engine.free_kv_while_training).",
          self._engine.free_cache(),
        )
      self._learner.fetch()

  def _log(self, sentence: str, size: int) -> None:
    """Logs bytes of a device once, the first time that there are any."""
    if size and sentence not in self._logged:
      self._logged.add(sentence)
      logging.info(sentence, size / 2**30)
