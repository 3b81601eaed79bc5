"""The training loop: take a rollout, step, publish weights, record, save."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pathlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.algorithms import curriculum
from anysearch_jax.config import changes as config_changes
from anysearch_jax.config import values as config_values
from anysearch_jax.host import processes
from anysearch_jax.policy import hf
from anysearch_jax.rollout import engines, searching
from anysearch_jax.rollout.jax_engine import kv_store
from anysearch_jax.training import (
  batching,
  checkpoint,
  learner,
  metrics,
  pipeline,
  resuming,
  rewards_and_advantages,
  run_folder,
  sampler,
  saving,
  staleness,
  throughput,
  timeline,
  validation,
)
from anysearch_jax.training import health as watch_lib


@dataclasses.dataclass(frozen=True)
class Event:
  """Reports that a rollout was trained on; `values` are its metrics."""

  rollout: int
  rollouts: int
  values: dict[str, float]


class _StoppedError(Exception):
  """Ends the loop before the next optimizer step because `stop` was called.

  sampled: the rollout that is being trained on; None between two rollouts.
  steps: metrics of the optimizer steps taken so far in that rollout.
  """

  def __init__(self, sampled: sampler.Sampled | None = None, steps: Any = ()):
    self.sampled, self.steps = sampled, list(steps)


class Trainer:
  """One training run: samples rollouts and trains the policy on them.

  A separate thread samples rollouts, up to `pipeline.async_level` of them ahead
  of training (see `training/pipeline`). At every level a resumed run gives the
  same results as one that never stopped: before the run writes a checkpoint, it
  waits for the rollouts that use older weights, which the checkpoint stores.

  With several processes (`jax.distributed`), each one has a trainer with the
  same arguments; the training mesh spans their devices, and each process
  samples its share of a rollout. Sampling and training then alternate
  (async_level 0): with two threads, processes could start their collectives in
  different orders and deadlock.

  Args:
    config: the whole configuration; `validation.validate` has passed.
    policy: the initial policy, also the reference of the KL term; with several
      processes, its arrays are on the training mesh.
    questions: the training stream, repeated when it ends. Each rollout consumes
      the next `config.questions` + `pipeline.extra_groups` questions.
      A `dataset_iterator.Stream` reshuffles them every epoch.
    retriever: answers the searches.
    folder: an existing folder. Gets `source/` (files of the initial policy, for
      exports), `prompts.json`, `metrics.jsonl`, `steps.jsonl`, `tensorboard/`,
      `checkpoints/`, `trajectories/` and, at the end, `policy/` (a Hugging Face
      folder) and, with adapters, `adapter/` (a PEFT folder).
    engine: samples; `run` closes it. None makes the engine that
      `config.engine` names.
    trace: whether to write `timeline.json`, a trace for Perfetto.
    allow_changes: whether settings of learning may differ from those of the
      checkpoint that the run resumes from, see `config_changes`.
    clock: returns the time in seconds.

  Raises:
    ValueError: the devices or the processes cannot run the configuration.
  """

  def __init__(
    self,
    config: config_lib.ExperimentConfig,
    *,
    policy: hf.Policy,
    questions: Sequence[types.Question],
    retriever: types.Retriever,
    folder: pathlib.Path,
    engine: types.TrainableEngine | None = None,
    trace: bool = False,
    allow_changes: bool = False,
    clock: Callable[[], float] = time.monotonic,
  ):
    validation.validate_processes(config, jax.process_count())
    self._config = config
    # Drop the weights: the learner owns them now.
    self._policy = policy._replace(params={})
    self._questions = questions
    self._allow_changes = allow_changes
    self._folder = run_folder.RunFolder(folder)
    self._learner = learner.Learner(config, policy)
    self._timeline = timeline.Timeline(
      clock, folder / "timeline.json" if trace and processes.is_main() else None
    )
    self._watch = watch_lib.Watch(config)
    self._stopping = threading.Event()
    self._pace = saving.Pace(config.save_minutes, clock)
    self._stoppable = jax.process_count() == 1
    # Metrics of the steps that a stopped run took within its last rollout.
    self._taken_steps: list[dict[str, float]] = []
    self._engine = engine or engines.make(
      policy._replace(
        params=self._learner.published(),
        architecture=self._learner.architecture,
      ),
      config,
      seed=config.seed,
    )
    validation.validate_engine(config, self._engine)
    searching.attach(retriever, self._engine, policy.tokenizer)
    # As of the last trained rollout; the sampler's own may be ahead.
    self._seen = sampler.Seen(
      curriculum.init(config.curriculum, config.seed),
      {"run": Counter(), "engine": Counter()},
    )
    self._sampler = sampler.Sampler(
      config,
      stream=questions,
      engine=self._engine,
      architecture=self._learner.architecture,
      retriever=retriever,
      codec=policy.tokenizer,
      seen=self._seen,
      timeline=self._timeline,
    )
    self._folder.begin(self._policy, questions[0], config=config)

  def stop(self) -> None:
    """Makes `run` save a checkpoint before its next optimizer step and return.

    Thread-safe. The rollout in training is finished first if its steps depend
    on each other (see `Learner.steps_alone`) or if there are several processes.
    """
    self._stopping.set()

  def stop_seconds(self) -> float:
    """Returns the seconds that a stop may take. Thread-safe."""
    return saving.stop_seconds(
      saving.size(self._learner.state),
      last=saving.read(self._checkpoints),
      longest_rollout=self._pace.longest,
    )

  def run(
    self,
    on_event: Callable[[Event], None] = lambda event: None,
    on_start: Callable[
      [int, list[config_changes.Change]], None
    ] = lambda rollout, changes: None,
  ) -> bool:
    """Trains to the end, from the newest sound checkpoint if there is one.

    Args:
      on_event: called after each rollout.
      on_start: called with the number of the first rollout to train on, and the
        settings that differ from those of the checkpoint.

    Returns:
      True at the end of training; False if `stop` ended it and it was saved.

    Raises:
      health.NotFiniteError: `watch.bad_steps` steps in a row were not finite.
      health.FailedEpisodesError: too many episodes of a rollout failed.
        Earlier training is saved first, as for `types.EngineError`.
      types.EngineError: the engine refused new weights, or has different ones.
      health.WrongWeightsError: the engine's log-probabilities were too far from
        the trainer's in `watch.gap_rollouts` rollouts in a row.
      staleness.StaleError: the engine sampled with weights of a wrong version.
      checkpoint.DamagedError: there are checkpoints, and all are damaged.
      checkpoint.MismatchError: the checkpoint belongs to another run, or
        settings of learning differ from it and `allow_changes` is not set.
    """
    config, c = self._config, self._config.curriculum
    rollouts = c.total_steps // c.steps_per_rollout
    with (
      contextlib.closing(self._engine),
      self._writer() as writer,
      checkpoint.Checkpoints(
        self._checkpoints,
        config=config_values.to_dict(config),
        keep=config.checkpoint,
      ) as checkpoints,
      self._timeline,
    ):
      resumed = resuming.resume(
        checkpoints,
        self._checkpoints,
        config=config,
        questions=self._questions,
        learner=self._learner,
        sampler=self._sampler,
        allow_changes=self._allow_changes,
      )
      on_start(resumed.rollout, resumed.changes)
      if not resumed.rollout:
        # The engine starts with these weights; it is only sent later ones.
        self._sampler.expect(self._learner.published(), 0)
      first, self._seen = resumed.rollout, resumed.seen
      self._taken_steps = resumed.steps
      if writer:
        writer.keep_before(first)
      with pipeline.Pipeline(
        self._sampler,
        resumed.ready,
        first=first,
        rollouts=rollouts,
        level=config.pipeline.async_level,
        timeline=self._timeline,
      ) as ahead:
        for rollout in range(first, rollouts):
          try:
            values, steps, scored = self._rollout(rollout, ahead)
          except _StoppedError as stopped:
            # A checkpoint with this number is from the rollout's start.
            if not checkpoints.has(rollout):
              checkpoints.save(self._saved(rollout, ahead, stopped), -math.inf)
            return False
          except (watch_lib.FailedEpisodesError, types.EngineError):
            # Raised before the rollout's first step. An outage does not make
            # earlier training invalid, so save it.
            trained = self._stoppable and rollout > first
            if trained and not checkpoints.has(rollout):
              checkpoints.save(self._saved(rollout), -math.inf)
            raise
          if writer:
            writer.write(values["step"], values, steps)
          # Clocks differ between processes, so the first one decides when to
          # save and what to keep.
          quality = processes.on_main(
            lambda values=values: checkpoint.quality(
              values, config=config.checkpoint
            )
          )
          late, *_ = processes.all_gather(self._pace.rollout)
          done = rollout + 1
          if due := done % config.save_every == 0 or done == rollouts:
            self._record(f"rollout-{rollout:05d}", scored)
          if due or late:
            self._pace.saved()
            saved = self._saved(done, ahead)
            with self._timeline.span(done, timeline.TRAINER, "save"):
              checkpoints.save(saved, quality)
          on_event(Event(rollout, rollouts, values))
    self._folder.export(
      self._policy._replace(
        params=self._learner.params(), architecture=self._learner.architecture
      ),
      config=config,
    )
    return True

  @property
  def _checkpoints(self) -> pathlib.Path:
    return self._folder.path / "checkpoints"

  def _writer(self) -> contextlib.AbstractContextManager:
    """Returns the metrics writer; the context is None except on process 0."""
    if processes.is_main():
      return metrics.Writer(self._folder.path)
    return contextlib.nullcontext()

  def _rollout(
    self, rollout: int, ahead: pipeline.Pipeline
  ) -> tuple[
    dict[str, float], list[dict[str, float]], rewards_and_advantages.Experience
  ]:
    """Takes a rollout and trains on it.

    Returns:
      Metrics of the rollout and of each optimizer step, and the scored rollout.

    Raises:
      _StoppedError: `stop` was called.
    """
    level = self._config.pipeline.async_level
    if any(processes.all_gather(self._stopping.is_set)):
      raise _StoppedError
    ahead.fill(rollout, self._learner.published)
    sampled = ahead.take(self._stopping if self._stoppable else None)
    if sampled is None:
      raise _StoppedError
    self._watch.collected(rollout, sampled.collected)
    ages = staleness.ages(rollout, sampled.scored.groups)
    staleness.check(rollout, ages, bound=level)
    with self._timeline.span(rollout, timeline.TRAINER, "train"):
      packed = self._learner.pack(sampled.scored)
      steps = self._optimize(sampled, packed, ahead)
    self._seen = sampled.seen
    if level:
      # Publish before computing metrics, so that the sampler does not wait.
      ahead.fill(rollout + 1, self._learner.published)
    seconds = timeline.metrics(self._timeline.take(rollout))
    values = {
      **sampler.metrics(sampled, config=self._config.curriculum),
      **metrics.over_steps(steps, on_policy=not ages.any()),
      **staleness.metrics(ages),
      **self._learner.speed(packed, seconds["time/train"]),
      "compile/prefill": throughput.programs(kv_store.prefill),
      "compile/decode": throughput.programs(kv_store.decode),
      **{
        f"data/{name}": float(value)
        for name, value in resuming.position(
          rollout + 1, config=self._config, questions=self._questions
        ).items()
      },
      **seconds,
    }
    self._watch.rollout(values)
    return values, steps, sampled.scored

  def _optimize(
    self,
    sampled: sampler.Sampled,
    packed: Sequence[batching.HostBatch],
    ahead: pipeline.Pipeline,
  ) -> list[dict[str, float]]:
    """Takes the optimizer steps of a rollout and returns their metrics."""
    steps, self._taken_steps = self._taken_steps, []
    # Steps that need values from the rollout's start (old log-probs, a critic's
    # estimates) cannot resume in the middle: its weights are gone by then.
    stoppable = self._learner.steps_alone and self._stoppable
    for values in self._learner.steps(packed[len(steps) :]):
      self._watch.step(
        sampled.rollout,
        values,
        lambda: self._record(f"not-finite-{sampled.rollout}", sampled.scored),
      )
      steps.append(values)
      ahead.check()
      if stoppable and self._stopping.is_set() and len(steps) < len(packed):
        raise _StoppedError(sampled, steps)
    return steps

  def _saved(
    self,
    rollout: int,
    ahead: pipeline.Pipeline | None = None,
    stopped: _StoppedError | None = None,
  ) -> checkpoint.Saved:
    """Returns what a checkpoint holds, before `rollout` or in the middle of it.

    Args:
      rollout: the next one to train on, or the one that was stopped.
      ahead: holds the rollouts to store; None stores no rollout.
      stopped: the stop that ended the run, if there was one.
    """
    within = stopped is not None and stopped.sampled is not None
    # After a resume these rollouts could not be sampled again: the checkpoint
    # has the current weights only, and they use older ones.
    before = ahead.sampled_before(rollout + within) if ahead else []
    played = [s.collected for s in before]
    if within:
      played.insert(0, stopped.sampled.collected)
    return resuming.snapshot(
      rollout,
      self._learner.state,
      self._seen,
      config=self._config,
      questions=self._questions,
      played=played,
      steps=stopped.steps if within else (),
    )

  def _record(
    self, name: str, scored: rewards_and_advantages.Experience
  ) -> pathlib.Path:
    return self._folder.record(name, rewards_and_advantages.records(scored))
