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
from typing import NamedTuple

import jax

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.algorithms import curriculum
from anysearch_jax.config import settings as config_settings
from anysearch_jax.host import processes
from anysearch_jax.methods import systems
from anysearch_jax.policy import hf
from anysearch_jax.rollout import engines, episode, searching
from anysearch_jax.rollout.jax_engine import kv_store
from anysearch_jax.training import (
  batching,
  checkpoint,
  collection,
  health,
  metrics,
  pipeline,
  resuming,
  rewards_and_advantages,
  sampler,
  throughput,
)
from anysearch_jax.training import learner as learner_lib
from anysearch_jax.training import timeline as timeline_lib


@dataclasses.dataclass(frozen=True)
class Event:
  """Reports that a rollout was trained on; `values` are its metrics."""

  rollout: int
  rollouts: int
  values: dict[str, float]


class _Unfinished(NamedTuple):
  """A rollout in training, and metrics of the optimizer steps so far."""

  sampled: sampler.ScoredRollout
  steps: list[dict[str, float]]


class _StoppedError(Exception):
  """Ends the loop because `stop` was called, maybe within a rollout."""

  def __init__(self, unfinished: _Unfinished | None = None):
    self.unfinished = unfinished


class _Trained(NamedTuple):
  """A rollout that was trained on: its metrics, and those of each step."""

  values: dict[str, float]
  steps: list[dict[str, float]]
  scored: rewards_and_advantages.Experience


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
    ValueError: the devices or the engine cannot run the configuration.
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
    self._config = config
    # Drop the weights: the learner owns them now.
    self._policy = policy._replace(params={})
    self._allow_changes = allow_changes
    self._folder = metrics.RunFolder(folder)
    self._timeline = timeline_lib.Timeline(
      clock,
      folder / "timeline.json" if trace and processes.is_main() else None,
    )
    self._stopping = threading.Event()
    self._pace = checkpoint.Pace(config.save_minutes, clock)
    self._stoppable = jax.process_count() == 1
    # Metrics of the steps that a stopped run took within its last rollout.
    self._taken_steps: list[dict[str, float]] = []
    made = make(
      config,
      policy=policy,
      questions=questions,
      retriever=retriever,
      engine=engine,
      timeline=self._timeline,
    )
    self._learner, self._engine, self._stream, self._sampler = made[:4]
    self._monitor, self._phases = made.monitor, made.phases
    # As of the last trained rollout; the sampler's own may be ahead.
    self._sampler_state = self._sampler.state
    self._folder.begin(
      self._policy,
      prompts(
        questions[0],
        policy.tokenizer,
        config=config.episode,
        budget=config.curriculum.max_budget,
      ),
    )

  def stop(self) -> None:
    """Makes `run` save a checkpoint before its next optimizer step and return.

    Thread-safe. The rollout in training is finished first if its steps depend
    on each other (see `Learner.steps_alone`) or if there are several processes.
    """
    self._stopping.set()

  def stop_seconds(self) -> float:
    """Returns the seconds that a stop may take. Thread-safe."""
    return checkpoint.stop_seconds(
      checkpoint.state_size(self._learner.state),
      last=checkpoint.read_save(self._checkpoints),
      longest_rollout=self._pace.longest,
    )

  def run(
    self,
    on_event: Callable[[Event], None] = lambda event: None,
    on_start: Callable[
      [int, list[config_settings.Change]], None
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
      sampler.StaleError: the engine sampled with weights of a wrong version.
      checkpoint.DamagedError: there are checkpoints, and all are damaged.
      checkpoint.MismatchError: the checkpoint belongs to another run, or
        settings of learning differ from it and `allow_changes` is not set.
    """
    config, rollouts = self._config, self._config.curriculum.rollouts
    with (
      contextlib.closing(self._engine),
      self._writer() as writer,
      checkpoint.Checkpoints(
        self._checkpoints,
        config=config_settings.to_dict(config),
        keep=config.checkpoint,
      ) as checkpoints,
      self._timeline,
    ):
      resumed = self._resume(checkpoints)
      on_start(resumed.rollout, resumed.changes)
      if writer:
        writer.keep_before(resumed.rollout)
      with pipeline.Pipeline(
        self._sampler,
        resumed.ready,
        first=resumed.rollout,
        rollouts=rollouts,
        level=config.pipeline.async_level,
        timeline=self._timeline,
      ) as ahead:
        for rollout in range(resumed.rollout, rollouts):
          try:
            trained = self._rollout(rollout, ahead)
          except _StoppedError as stopped:
            # A checkpoint with this number is from the rollout's start.
            if not checkpoints.has(rollout):
              saved = self._saved(rollout, ahead, stopped.unfinished)
              checkpoints.save(saved, -math.inf)
            return False
          except (health.FailedEpisodesError, types.EngineError):
            # Raised before the rollout's first step. An outage does not make
            # earlier training invalid, so save it.
            earlier = self._stoppable and rollout > resumed.rollout
            if earlier and not checkpoints.has(rollout):
              checkpoints.save(self._saved(rollout), -math.inf)
            raise
          if writer:
            writer.write(trained.values["step"], trained.values, trained.steps)
          self._save_if_due(rollout + 1, trained, checkpoints, ahead)
          on_event(Event(rollout, rollouts, trained.values))
    self._folder.export(
      self._policy._replace(
        params=self._learner.params(), architecture=self._learner.architecture
      ),
      base=config.policy,
      dtype=config.checkpoint.export_dtype,
    )
    return True

  def _resume(self, checkpoints: checkpoint.Checkpoints) -> resuming.Resumed:
    """Restores the newest checkpoint, or begins at rollout 0."""
    resumed = resuming.resume(
      checkpoints,
      changes_since=lambda saved: config_settings.changes(saved, self._config),
      stream=self._stream,
      learner=self._learner,
      sampler=self._sampler,
      allow_changes=self._allow_changes,
    )
    if not resumed.rollout:
      # The engine starts with these weights; it is only sent later ones.
      self._sampler.expect(self._learner.published(), 0)
    self._sampler_state = resumed.sampler_state
    self._taken_steps = resumed.steps
    return resumed

  def _save_if_due(
    self,
    done: int,
    trained: _Trained,
    checkpoints: checkpoint.Checkpoints,
    ahead: pipeline.Pipeline,
  ) -> None:
    """Saves and records trajectories, if it is time after `done` rollouts."""
    # Clocks differ between processes, so the first one decides.
    quality = processes.on_main(
      lambda: checkpoint.quality(trained.values, config=self._config.checkpoint)
    )
    late, *_ = processes.all_gather(self._pace.rollout)
    last = done == self._config.curriculum.rollouts
    due = last or done % self._config.save_every == 0
    if due:
      self._record(f"rollout-{done - 1:05d}", trained.scored)
    if due or late:
      self._pace.saved()
      saved = self._saved(done, ahead)
      with self._timeline.span(done, timeline_lib.TRAINER, "save"):
        checkpoints.save(saved, quality)

  @property
  def _checkpoints(self) -> pathlib.Path:
    return self._folder.path / "checkpoints"

  def _writer(self) -> contextlib.AbstractContextManager:
    """Returns the metrics writer; the context is None except on process 0."""
    if processes.is_main():
      return metrics.Writer(self._folder.path)
    return contextlib.nullcontext()

  def _rollout(self, rollout: int, ahead: pipeline.Pipeline) -> _Trained:
    """Takes a rollout and trains on it.

    Raises:
      _StoppedError: `stop` was called.
    """
    level = self._config.pipeline.async_level
    if any(processes.all_gather(self._stopping.is_set)):
      raise _StoppedError
    ahead.fill(rollout, self._learner.published, self._phases.sample)
    sampled = ahead.take(self._stopping if self._stoppable else None)
    if sampled is None:
      raise _StoppedError
    self._monitor.collected(rollout, sampled.counted)
    ages = sampler.token_ages(rollout, sampled.scored.groups)
    sampler.check_ages(rollout, ages, bound=level)
    self._phases.train(rollout)
    with self._timeline.span(rollout, timeline_lib.TRAINER, "train"):
      packed = self._learner.pack(sampled.scored)
      steps = self._optimize(sampled, packed, ahead)
    self._sampler_state = sampled.state
    if level:
      # Publish before computing metrics, so that the sampler does not wait.
      ahead.fill(rollout + 1, self._learner.published)
    seconds = timeline_lib.metrics(self._timeline.take(rollout))
    position = self._stream.position(rollout + 1)
    values = {
      **sampler.metrics(sampled, config=self._config.curriculum),
      **metrics.over_steps(steps, on_policy=not ages.any()),
      **sampler.age_metrics(ages),
      **self._learner.speed(packed, seconds["time/train"]),
      "compile/prefill": throughput.programs(kv_store.prefill),
      "compile/decode": throughput.programs(kv_store.decode),
      **{f"data/{name}": float(value) for name, value in position.items()},
      **seconds,
    }
    self._monitor.rollout(values)
    return _Trained(values, steps, sampled.scored)

  def _optimize(
    self,
    sampled: sampler.ScoredRollout,
    packed: Sequence[batching.HostBatch],
    ahead: pipeline.Pipeline,
  ) -> list[dict[str, float]]:
    """Takes the optimizer steps of a rollout and returns their metrics."""
    steps, self._taken_steps = self._taken_steps, []
    # Steps that need values from the rollout's start (old log-probs, a critic's
    # estimates) cannot resume in the middle: its weights are gone by then.
    stoppable = self._learner.steps_alone and self._stoppable
    for values in self._learner.steps(packed[len(steps) :]):
      self._monitor.step(
        sampled.rollout,
        values,
        lambda: self._record(f"not-finite-{sampled.rollout}", sampled.scored),
      )
      steps.append(values)
      ahead.check()
      if stoppable and self._stopping.is_set() and len(steps) < len(packed):
        raise _StoppedError(_Unfinished(sampled, steps))
    return steps

  def _saved(
    self,
    rollout: int,
    ahead: pipeline.Pipeline | None = None,
    unfinished: _Unfinished | None = None,
  ) -> checkpoint.Saved:
    """Returns what a checkpoint holds, before `rollout` or in the middle of it.

    Args:
      rollout: the next one to train on, or the one that was stopped.
      ahead: holds the rollouts to store; None stores no rollout.
      unfinished: the rollout that a stop interrupted, if any.
    """
    # After a resume these rollouts could not be sampled again: the checkpoint
    # has the current weights only, and they use older ones.
    version = rollout + (unfinished is not None)
    before = ahead.sampled_before(version) if ahead else []
    if unfinished is not None:
      before.insert(0, unfinished.sampled)
    return resuming.snapshot(
      rollout,
      self._learner.state,
      self._sampler_state,
      seed=self._config.seed,
      stream=self._stream,
      played=[s.collected for s in before],
      steps=() if unfinished is None else unfinished.steps,
    )

  def _record(
    self, name: str, scored: rewards_and_advantages.Experience
  ) -> pathlib.Path:
    return self._folder.record(name, rewards_and_advantages.records(scored))


class Parts(NamedTuple):
  """The parts of one training."""

  learner: learner_lib.Learner
  engine: types.TrainableEngine
  stream: collection.QuestionStream
  sampler: sampler.Sampler
  monitor: health.HealthMonitor
  phases: learner_lib.Phases


def make(
  config: config_lib.ExperimentConfig,
  *,
  policy: hf.Policy,
  questions: Sequence[types.Question],
  retriever: types.Retriever,
  engine: types.TrainableEngine | None,
  timeline: timeline_lib.Timeline,
) -> Parts:
  """Makes the parts; the arguments are those of `loop.Trainer`.

  Raises:
    ValueError: the devices cannot run the configuration, or the engine does not
      support `pipeline.async_level`.
  """
  learner = learner_lib.Learner(config, policy)
  if engine is None:
    engine = engines.make(
      policy._replace(
        params=learner.published(), architecture=learner.architecture
      ),
      config,
      seed=config.seed,
    )
  level = config.pipeline.async_level
  searching.attach(retriever, engine, policy.tokenizer)
  stream = collection.QuestionStream(
    questions,
    groups=config.questions,
    samples=config.group,
    extra_groups=config.pipeline.extra_groups,
  )
  made = sampler.Sampler(
    engine,
    collection.Collector(
      stream,
      engine=engine,
      retriever=retriever,
      codec=policy.tokenizer,
      config=config.episode,
      slots=config.engine.slots,
      quiet_seconds=config.watch.quiet_seconds,
      timeline=timeline,
      prices=systems.of_episode(config.episode).prices(
        config.evaluation.prices
      ),
    ),
    _fingerprint(config, engine, learner, policy.tokenizer, questions[0]),
    settings=sampler.Settings(
      config.curriculum,
      systems.trained(config),
      config.objective,
      async_level=level,
      max_failed=config.watch.max_failed,
    ),
    state=sampler.SamplerState(
      curriculum.init(config.curriculum, config.seed),
      {"run": Counter(), "engine": Counter()},
    ),
    timeline=timeline,
  )
  monitor = health.HealthMonitor(
    config.watch, stream=stream, curriculum=config.curriculum
  )
  turns = learner_lib.Phases(
    learner,
    engine,
    free_kv=config.engine.free_kv_while_training,
    offload=config.pipeline.offload,
    async_level=level,
    timeline=timeline,
  )
  return Parts(learner, engine, stream, made, monitor, turns)


def _fingerprint(
  config: config_lib.ExperimentConfig,
  engine: types.TrainableEngine,
  learner: learner_lib.Learner,
  codec: types.TextCodec,
  question: types.Question,
) -> health.Fingerprint:
  """Returns what verifies the engine's weights by a question's prompt."""
  _, prompt = episode.prompt(
    question,
    budget=config.curriculum.max_budget,
    scaffold=config.curriculum.phase1_scaffold,
    config=config.episode,
    codec=codec,
  )
  return health.Fingerprint(
    engine,
    architecture=learner.architecture,
    dtype=config.compute_dtype,
    prompt=prompt,
    bound=config.watch.max_fingerprint_gap,
  )


def prompts(
  question: types.Question,
  codec: types.TextCodec,
  *,
  config: config_lib.EpisodeConfig,
  budget: int,
) -> dict[str, str]:
  """Returns both prompts of a question, as the policy reads them, by name."""
  return {
    name: episode.prompt(
      question, budget=budget, scaffold=scaffold, config=config, codec=codec
    )[0]
    for name, scaffold in (("scaffold", True), ("plain", False))
  }
