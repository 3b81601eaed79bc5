"""The training loop: take a rollout, step, publish, record, save."""

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
from anysearch_jax.generative_retrieval import text_model
from anysearch_jax.host import processes
from anysearch_jax.policy import hf
from anysearch_jax.rollout.jax_engine import kv_store
from anysearch_jax.training import (
  batching,
  checkpoint,
  collection,
  engines,
  learner,
  metrics,
  pipeline,
  resuming,
  rewards_and_advantages,
  run_folder,
  sampler,
  saving,
  staleness,
  timeline,
  validation,
)
from anysearch_jax.training import health as watch_lib


@dataclasses.dataclass(frozen=True)
class Event:
  """A rollout is done."""

  rollout: int
  rollouts: int
  values: dict[str, float]


class _StoppedError(Exception):
  """The run is to stop before the next optimizer step.

  sampled: the rollout that is being trained on; None between two of them.
  steps: metrics of its optimizer steps that were taken.
  """

  def __init__(self, sampled: sampler.Sampled | None = None, steps: Any = ()):
    self.sampled, self.steps = sampled, list(steps)


class Trainer:
  """One run's parts: what is sampled with, and what is stepped.

  Rollouts are sampled on a thread of their own, `pipeline.async_level` of them
  ahead of training, see `training/pipeline`. At every level a run that resumes
  goes on as if it had never stopped: a checkpoint waits for the rollouts that
  older weights sample, and holds them.

  With several processes (`jax.distributed`) each has a trainer of the same
  arguments; the training mesh spans their devices, and each samples its share
  of a rollout on its own. They sample and train by turns (async_level 0): two
  threads would talk to the other processes in an order that nothing fixes.

  Args:
    config: the whole configuration; `validation.validate` has passed.
    policy: the start, which is also the reference of the KL term; with several
      processes, on the mesh that trains.
    questions: the training stream; rollout r takes its r-th `config.questions`
      of them (and `pipeline.extra_groups`), from the start again when it ends.
      A `data.cursor.Stream` is in another order each epoch.
    retriever: answers the searches.
    folder: of the run; exists. Gets `source/` (what an export copies of the
      start), `prompts.json`, `metrics.jsonl`, `steps.jsonl`, `tensorboard/`,
      `checkpoints/`, `trajectories/` and, at the end, `policy/` (a Hugging
      Face folder) and, with adapters, `adapter/` (a PEFT folder).
    engine: samples, and is closed at the end if it can be; None makes the one
      that `config.engine` names.
    trace: write `timeline.json` to the folder, which Perfetto shows.
    allow_changes: whether settings of learning may differ from those of the
      checkpoint that the run resumes from, see `config_changes`.
    clock: seconds.

  Raises:
    ValueError: what the devices or the processes cannot run.
  """

  def __init__(
    self,
    config: config_lib.ExperimentConfig,
    *,
    policy: hf.Policy,
    questions: Sequence[types.Question],
    retriever: types.Retriever,
    folder: pathlib.Path,
    engine: collection.Engine | None = None,
    trace: bool = False,
    allow_changes: bool = False,
    clock: Callable[[], float] = time.monotonic,
  ):
    validation.validate_processes(config, jax.process_count())
    self._config = config
    # Without its weights, which the learner has from here on.
    self._policy = policy._replace(params={})
    self._questions = questions
    self._allow_changes = allow_changes
    self._folder = run_folder.RunFolder(folder)
    self._learner = learner.Learner(config, policy)
    self._timeline = timeline.Timeline(
      clock, folder / "timeline.json" if trace and processes.first() else None
    )
    self._watch = watch_lib.Watch(config)
    self._stopping = threading.Event()
    self._pace = saving.Pace(config.save_minutes, clock)
    self._stoppable = jax.process_count() == 1
    # Of the rollout that a stopped run was in the middle of.
    self._taken_steps: list[dict[str, float]] = []
    self._engine = engine or engines.make(config, policy, self._learner)
    validation.validate_engine(config, self._engine)
    text_model.attach(retriever, self._engine, policy.tokenizer)
    # Of what was trained on; the sampler may be ahead.
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
    """Has `run` save before the next optimizer step, and return; of any thread.

    Several processes stop together, before the next rollout.
    """
    self._stopping.set()

  def stop_seconds(self) -> float:
    """The seconds that a stop may take; any thread may ask."""
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

    Whatever ends it early stops the sampler too.

    Args:
      on_event: is told each rollout.
      on_start: is told the first rollout to train on, and the settings that
        differ from those of the checkpoint.

    Returns:
      Whether it came to the end; else it was stopped, and goes on from there.

    Raises:
      watch.NotFiniteError: steps in a row were not finite.
      watch.FailedEpisodesError: too many episodes of a rollout failed. What was
        trained until then is saved, as for `types.EngineError`.
      types.EngineError: the engine did not take new weights, or has others.
      watch.WrongWeightsError: several rollouts in a row were sampled with
        log-probabilities that are not the trainer's.
      staleness.StaleError: the engine sampled with weights it should not have.
      checkpoint.DamagedError: there are checkpoints and none is sound.
      checkpoint.MismatchError: the checkpoint is of another run, or settings of
        learning differ from its own and `allow_changes` is not set.
    """
    config, c = self._config, self._config.curriculum
    rollouts = c.total_steps // c.steps_per_rollout
    with (
      _closing(self._engine),
      self._writer() as writer,
      checkpoint.Checkpoints(self._checkpoints, config=config) as checkpoints,
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
        # The engine began with these; later ones are handed over.
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
            # One that is there already is of the rollout's beginning.
            if not checkpoints.has(rollout):
              checkpoints.save(self._saved(rollout, ahead, stopped), -math.inf)
            return False
          except (watch_lib.FailedEpisodesError, types.EngineError):
            # Raised before the rollout's first step. What was trained until
            # then is saved, because an outage says nothing against it.
            trained = self._stoppable and rollout > first
            if trained and not checkpoints.has(rollout):
              checkpoints.save(self._saved(rollout), -math.inf)
            raise
          if writer:
            writer.write(values["step"], values, steps)
          # The clocks of processes differ; one of them decides what is kept.
          quality = processes.by_first(
            lambda values=values: checkpoint.quality(
              values, config=config.checkpoint
            )
          )
          late, *_ = processes.share(self._pace.rollout)
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
    """Where metrics go; None in processes that write nothing."""
    if processes.first():
      return metrics.Writer(self._folder.path)
    return contextlib.nullcontext()

  def _rollout(
    self, rollout: int, ahead: pipeline.Pipeline
  ) -> tuple[
    dict[str, float], list[dict[str, float]], rewards_and_advantages.Experience
  ]:
    """Takes a rollout and trains on it.

    Returns:
      Metrics of the rollout and of each optimizer step, and what was seen.

    Raises:
      _StoppedError: `stop` was called.
    """
    level = self._config.pipeline.async_level
    if any(processes.share(self._stopping.is_set)):
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
      # Before anything else, so that the sampler need not wait for it.
      ahead.fill(rollout + 1, self._learner.published)
    seconds = timeline.metrics(self._timeline.take(rollout))
    values = {
      **sampler.metrics(sampled, config=self._config.curriculum),
      **metrics.over_steps(steps, on_policy=not ages.any()),
      **staleness.metrics(ages),
      **self._learner.speed(packed, seconds["time/train"]),
      "compile/prefill": kv_store.prefill._cache_size(),
      "compile/decode": kv_store.decode._cache_size(),
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
    packed: Sequence[batching.TrainBatch],
    ahead: pipeline.Pipeline,
  ) -> list[dict[str, float]]:
    """The optimizer steps of a rollout: their metrics."""
    steps, self._taken_steps = self._taken_steps, []
    # Old log-probs are those of a rollout's beginning, which is gone by then.
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
    """The run as it is before `rollout`, or in the middle of it.

    Args:
      rollout: the next one to train on, or the one that was stopped.
      ahead: has the rollouts that the checkpoint keeps; None keeps none.
      stopped: what stopped the run, if that was in the middle of a rollout.
    """
    within = stopped is not None and stopped.sampled is not None
    # The weights that rollouts ahead are sampled with are gone by then.
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


def _closing(engine: collection.Engine) -> contextlib.AbstractContextManager:
  if hasattr(engine, "close"):
    return contextlib.closing(engine)
  return contextlib.nullcontext()
