"""The training loop: take a rollout, step, publish weights, record, save."""

from __future__ import annotations

import contextlib
import math
import pathlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.algorithms import curriculum as curriculum_lib
from anysearch_jax.algorithms import method as method_lib
from anysearch_jax.config import settings as config_settings
from anysearch_jax.environment import spec
from anysearch_jax.host import processes
from anysearch_jax.policy import decoder, hf, lora
from anysearch_jax.rollout import driver, engines, episode, searching
from anysearch_jax.rollout.jax_engine import engine as jax_engine
from anysearch_jax.rollout.jax_engine import kv_store
from anysearch_jax.training import (
  batching,
  checkpoint,
  collection,
  health,
  metrics,
  pipeline,
  rewards_and_advantages,
  sampler,
  throughput,
  trackers,
)
from anysearch_jax.training import learner as learner_lib
from anysearch_jax.training import timeline as timeline_lib

# A step that lasts longer may hang: the least seconds, and in units of the
# longest step so far.
_LEAST_HANG = 1800.0
_HANG_RATIO = 10
# Seconds of the first step, which compiles.
_FIRST_HANG = 7200.0


class Event(NamedTuple):
  """Reports that a rollout was trained on.

  Attributes:
    rollout: its number, from 0.
    rollouts: number of rollouts of the training.
    values: its metrics.
  """

  rollout: int
  rollouts: int
  values: dict[str, float]


class _StoppedError(Exception):
  """Ends the loop because `stop` was called.

  If training on the rollout had begun, its arguments are the rollout and the
  metrics of the optimizer steps that were taken in it.
  """


def samples(config: config_lib.ExperimentConfig) -> bool:
  """Returns whether this process samples, so that it needs a retriever.

  If servers sample, only the first of several processes does.
  """
  return processes.is_main() or config.engine.kind == "jax"


def _make_engine(
  policy: hf.Policy, config: config_lib.ExperimentConfig
) -> types.TrainableEngine | None:
  """Makes this process's engine, once all processes can make theirs."""

  def make() -> types.TrainableEngine | None:
    if not samples(config):
      return None
    with processes.alone():
      return engines.make(policy, config, seed=config.seed)

  return processes.barrier_call(make)


def _set_first(
  engine: types.TrainableEngine | None, params: decoder.Params
) -> None:
  """Gives an engine the first weights, in the process that has it."""

  def hand_over() -> None:
    with processes.alone():
      if engine is not None:
        engine.set_params(params, 0)

  processes.barrier_call(hand_over)


class Trainer:
  """One training run: samples rollouts and trains the policy on them.

  At every `pipeline.async_level` a resumed run gives the same results as one
  that never stopped: before the run writes a checkpoint, it waits for the
  rollouts that use older weights, which the checkpoint stores.

  With several processes (`jax.distributed`), each one has a trainer with the
  same arguments; the training mesh spans their devices. Over servers the first
  process drives: it alone has the engine, the retriever and the sampler, at any
  async_level, and the others get the batches that it packs. With in-process
  engines each process samples its share of a rollout, and sampling and training
  alternate (async_level 0): with two threads, processes could start their
  collectives in different orders and deadlock.

  Args:
    config: the whole configuration; `validation.validate` has passed.
    method: the system that is trained, with its environment.
    policy: as for `learner.Learner`.
    questions: the training stream, repeated when it ends. A
      `dataset_iterator.Stream` reshuffles them every epoch.
    retriever: answers the searches; None in a process that samples nothing,
      see `samples`.
    folder: an existing folder, which gets the files of `metrics`, and
      `checkpoints/`.
    engine: samples; `run` closes it. None makes the engine that
      `config.engine` names.
    player: plays the episodes; None: this project's episodes are played.
    trace: whether JAX's profiler traces the run, into `profile/`.
    allow_changes: whether settings of learning may differ from those of the
      checkpoint that the run resumes from.
    sinks: get the metrics too, see `trackers.open_senders`.
    clock: returns the time in seconds.
    hangs: called, on another thread, when a step has taken half an hour and ten
      times as long as any before (the first: two hours): devices may hang.

  Raises:
    ValueError: the devices or the engine cannot run the configuration.
  """

  def __init__(
    self,
    config: config_lib.ExperimentConfig,
    *,
    method: method_lib.TrainedMethod,
    policy: hf.Policy,
    questions: Sequence[types.Question],
    retriever: types.Retriever | None,
    folder: pathlib.Path,
    engine: types.TrainableEngine | None = None,
    player: driver.Player | None = None,
    trace: bool = False,
    allow_changes: bool = False,
    sinks: Sequence[trackers.Sender] = (),
    clock: Callable[[], float] = time.monotonic,
    hangs: Callable[[], None] = lambda: None,
  ):
    self._config = config
    self._hangs = hangs
    self._longest_step = 0.0
    self._level = config.pipeline.async_level
    self._allow_changes = allow_changes
    self._sinks = sinks
    self._folder = folder
    self._checkpoints = folder / "checkpoints"
    self._timeline = timeline_lib.Timeline(clock)
    self._trace = trace and processes.is_main()
    self._stopping = threading.Event()
    self._pace = checkpoint.Pace(config.save_minutes, clock)
    # Processes may see a stop at different steps, so several of them finish the
    # rollout.
    self._stoppable = jax.process_count() == 1
    self._stepped = False
    # Metrics of the steps that a stopped run took within its last rollout.
    self._taken_steps: list[dict[str, float]] = []
    a = lora.attach(policy.architecture, config.lora)
    without_weights = policy._replace(params={}, architecture=a)
    is_given = engine is not None
    if not is_given and config.servers_share:
      # Made first: servers release the memory that the learner needs.
      engine = _make_engine(without_weights, config)
    self._learner = learner_lib.Learner(config, policy)
    if not is_given:
      published = self._learner.published()
      if config.servers_share:
        _set_first(engine, published)
      else:
        engine = _make_engine(
          without_weights._replace(params=published), config
        )
      # Only the engine keeps these weights, so that it can free them.
      del published
    # Without the weights: the learner owns them now.
    self._policy = policy._replace(params={})
    self._stream = collection.QuestionStream(
      questions,
      groups=config.questions,
      samples=config.group,
      extra_groups=config.pipeline.extra_groups,
      searchless=config.searchless,
    )
    plain = self._prompt(method.environment, scaffold=False)
    scaffolded = self._prompt(method.environment, scaffold=True)
    prompts = {"scaffold": scaffolded[0], "plain": plain[0]}
    fingerprint = scaffolded if config.curriculum.phase1_scaffold else plain
    self._fingerprint = fingerprint[1]
    self._engine = engine
    if config.engine.exact:
      assert isinstance(engine, jax_engine.JaxEngine)
      self._learner.scorer = engine.score_exactly
    # Whether several processes sample together, see the class.
    self._together = jax.process_count() > 1 and config.engine.kind == "jax"
    self._sampler: sampler.Sampler | None = None
    if samples(config):
      assert engine is not None and retriever is not None
      searching.attach(retriever, engine, policy.tokenizer)
      self._sampler = sampler.Sampler(
        config,
        self._stream,
        method=method,
        prompt=self._fingerprint,
        codec=policy.tokenizer,
        engine=engine,
        retriever=retriever,
        timeline=self._timeline,
        player=player,
      )
    # The state at the last trained rollout; the sampler's own state may be
    # some rollouts ahead of it.
    self._sampler_state = sampler.initial_state(config)
    self._monitor = health.HealthMonitor(
      config.watch, stream=self._stream, curriculum=config.curriculum
    )
    self._phases = learner_lib.Phases(
      self._learner, self._engine, config=config, timeline=self._timeline
    )
    metrics.begin(folder, self._policy, prompts)

  def _prompt(
    self, environment: spec.Environment, *, scaffold: bool
  ) -> tuple[str, list[int]]:
    """Returns the first question's prompt, as the policy reads it."""
    return episode.prompt(
      self._stream.questions[0],
      budget=self._config.curriculum.max_budget,
      scaffold=scaffold,
      environment=environment,
      codec=self._policy.tokenizer,
    )

  def stop(self) -> None:
    """Makes `run` save a checkpoint before its next optimizer step and return.

    Thread-safe. The rollout in training is finished first unless
    `Learner.steps_alone`, and if there are several processes. So is the rollout
    that several processes sample together.
    """
    self._stopping.set()

  def stop_seconds(self) -> float:
    """Returns the seconds that a stop may take. Thread-safe."""
    return checkpoint.stop_seconds(
      self._checkpoints,
      sum(x.nbytes for x in jax.tree.leaves(self._learner.state)),
      longest_rollout=self._pace.longest,
      stepped=self._stepped,
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
      health.NotFiniteError, health.WrongWeightsError, sampler.StaleError,
      health.NoGradientError.
      health.FailedEpisodesError: earlier training is saved first.
      types.EngineError: the engine refused new weights, or has different ones.
        Earlier training is saved first.
      checkpoint.DamagedError: there are checkpoints, and all are damaged.
      checkpoint.MismatchError: the checkpoint belongs to another run, or
        settings of learning differ from it and `allow_changes` is not set.
    """
    config = self._config
    rollouts = self._config.curriculum.rollouts
    with (
      # A process without an engine has nothing to close.
      contextlib.closing(self._engine or contextlib.ExitStack()),
      # `writer` is None except on process 0.
      (
        metrics.Writer(self._folder, self._sinks)
        if processes.is_main()
        else contextlib.nullcontext()
      ) as writer,
      checkpoint.Checkpoints(
        self._checkpoints,
        config=config_settings.to_dict(config),
        keep=config.checkpoint,
      ) as checkpoints,
      (
        jax.profiler.trace(self._folder / "profile")
        if self._trace
        else contextlib.nullcontext()
      ),
    ):
      first, stored, changes = self._resume(checkpoints)
      on_start(first, changes)
      if writer:
        writer.keep_before(first)
      with self._open_queue(first, stored) as queue:
        for rollout in range(first, rollouts):
          try:
            sampled = self._take(rollout, queue)
            steps, values = self._train(rollout, sampled, queue)
          except _StoppedError as stopped:
            # A checkpoint with this number is from the rollout's start.
            if not checkpoints.has(rollout):
              saved = self._saved(rollout, queue, *stopped.args)
              checkpoints.save(saved, -math.inf)
            return False
          except (health.FailedEpisodesError, types.EngineError):
            # Raised before the rollout's first step. An outage does not make
            # earlier training invalid, so save it.
            has_trained = self._stoppable and rollout > first
            if has_trained and not checkpoints.has(rollout):
              checkpoints.save(self._saved(rollout), -math.inf)
            raise
          if writer:
            writer.write(int(values["step"]), values, steps)
          self._save_if_due(rollout, sampled, values, checkpoints, queue)
          on_event(Event(rollout, rollouts, values))
    metrics.export(
      self._folder,
      self._policy._replace(
        params=self._learner.params(), architecture=self._learner.architecture
      ),
      base=config.policy,
      dtype=config.checkpoint.export_dtype,
    )
    return True

  def _open_queue(
    self, first: int, stored: collection.StoredRollouts | None
  ) -> pipeline.Pipeline:
    """Returns the pipeline that samples the rollouts from `first` on.

    `stored` has the rollouts that were sampled before, from `first` on.
    """
    driver = self._sampler
    ready = []
    if driver is not None:
      driver.state = self._sampler_state

    def score_stored() -> list[sampler.ScoredRollout]:
      if driver is None or stored is None:
        return []
      return driver.score_stored(first, stored)

    def score_stored_alone() -> list[sampler.ScoredRollout]:
      with processes.alone():
        return score_stored()

    if self._together:
      ready = score_stored()
    else:
      ready = processes.barrier_call(score_stored_alone)
    return pipeline.Pipeline(
      driver,
      ready,
      first=first,
      rollouts=self._config.curriculum.rollouts,
      level=self._level,
      timeline=self._timeline,
      partial=self._config.pipeline.partial,
      together=self._together,
    )

  def _published(self) -> sampler.HandedOver:
    """Returns the present weights for the engine."""
    scores = self._scores()
    return sampler.HandedOver(self._learner.published(), scores)

  def _scores(self) -> np.ndarray:
    """Scores the fingerprint's prompt with the present weights."""
    return self._learner.scores(self._fingerprint)

  def _take(
    self, rollout: int, queue: pipeline.Pipeline
  ) -> sampler.ScoredRollout | None:
    """Waits until a rollout is sampled, and checks its episodes and tokens.

    Returns the rollout; None in a process that has no sampler.
    """
    if any(processes.all_gather(self._stopping.is_set)):
      raise _StoppedError
    queue.fill(rollout, self._published, self._phases.sample)
    if not queue.wait(self._stopping.is_set):
      raise _StoppedError
    sampled = queue.take()

    def check() -> None:
      assert sampled is not None
      self._monitor.collected(rollout, sampled.counted)
      ages = sampler.token_ages(rollout, sampled.scored.groups)
      if stale := sampler.describe_stale(rollout, ages, bound=self._level):
        raise sampler.StaleError(stale)

    processes.on_main(check)
    return sampled

  def _train(
    self,
    rollout: int,
    sampled: sampler.ScoredRollout | None,
    queue: pipeline.Pipeline,
  ) -> tuple[list[dict[str, float]], dict[str, float]]:
    """Trains on a rollout; returns the metrics of its steps, and its own."""
    self._phases.train(rollout)
    with self._timeline.span(rollout, timeline_lib.TRAINER, "train"):
      packed = self._learner.pack(sampled.scored if sampled else None)
      steps = self._taken_steps
      self._taken_steps = []
      # Steps that need values from the rollout's start (old log-probs, a
      # critic's estimates) cannot resume in the middle: its weights are gone by
      # then.
      stoppable = self._learner.steps_alone and self._stoppable
      steps_per_rollout = self._config.curriculum.steps_per_rollout
      for values in self._timed(self._learner.steps(packed, len(steps))):
        self._monitor.step(
          rollout,
          values,
          lambda: self._record(f"not-finite-{rollout}", sampled),
        )
        steps.append(values)
        self._stepped = True
        queue.check()
        is_last = len(steps) == steps_per_rollout
        if stoppable and self._stopping.is_set() and not is_last:
          raise _StoppedError(sampled, steps)
    if sampled is not None:
      self._sampler_state = sampled.state
    if self._level:
      # Publish before computing metrics, so that the sampler does not wait.
      queue.fill(rollout + 1, self._published)
    seconds = timeline_lib.metrics(self._timeline.take(rollout))

    def measure() -> dict[str, float]:
      assert sampled is not None
      values = self._measured(sampled, steps, packed, seconds)
      scored = sampled.scored
      self._monitor.rollout(
        values,
        next((t for g in scored.groups if g for t in g.trajectories), None),
        turns_differ=any(x.any() for x in scored.turns.values()),
      )
      return values

    return steps, processes.on_main(measure)

  def _measured(
    self,
    sampled: sampler.ScoredRollout,
    steps: Sequence[dict[str, float]],
    packed: Sequence[batching.HostBatch],
    seconds: dict[str, float],
  ) -> dict[str, float]:
    """Returns the metrics of a rollout that was trained on."""
    ages = sampler.token_ages(sampled.rollout, sampled.scored.groups)
    position = self._stream.position(sampled.rollout + 1)
    values = sampler.metrics(sampled, ages, config=self._config.curriculum)
    values |= metrics.over_steps(steps, on_policy=not ages.any())
    values |= self._learner.speed(packed, seconds["time/train"])
    values["compile/prefill"] = throughput.programs(kv_store.prefill)
    values["compile/decode"] = throughput.programs(kv_store.decode)
    for name, value in position.items():
      values[f"data/{name}"] = float(value)
    values |= seconds
    # Servers sample on unknown devices.
    if self._engine and self._config.engine.kind == "jax":
      values["device/count"] = jax.device_count()
    return values

  def _timed(
    self, steps: Iterator[dict[str, float]]
  ) -> Iterator[dict[str, float]]:
    """Yields from `steps`; calls `hangs` if one of them lasts too long."""
    values: dict[str, float] | None = {}
    while values is not None:
      limit = _FIRST_HANG
      if self._longest_step:
        limit = max(_LEAST_HANG, _HANG_RATIO * self._longest_step)
      start = time.monotonic()
      timer = threading.Timer(limit, self._hangs)
      timer.daemon = True
      timer.start()
      try:
        values = next(steps, None)
      finally:
        timer.cancel()
      self._longest_step = max(self._longest_step, time.monotonic() - start)
      if values is not None:
        yield values

  def _record(
    self, name: str, sampled: sampler.ScoredRollout | None
  ) -> pathlib.Path:
    groups = rewards_and_advantages.records(sampled.scored) if sampled else []
    return metrics.record(self._folder, name, groups)

  def _save_if_due(
    self,
    rollout: int,
    sampled: sampler.ScoredRollout | None,
    values: dict[str, float],
    checkpoints: checkpoint.Checkpoints,
    queue: pipeline.Pipeline,
  ) -> None:
    """Saves a checkpoint and records trajectories, if it is time for them."""
    config = self._config
    next_rollout = rollout + 1
    # Clocks differ between processes, so the first one decides.
    quality = processes.on_main(
      lambda: checkpoint.quality(values, config=config.checkpoint)
    )
    is_late, *_ = processes.all_gather(self._pace.rollout)
    is_due = (
      next_rollout == config.curriculum.rollouts
      or next_rollout % config.save_every == 0
    )
    if is_due:
      self._record(f"rollout-{rollout:05d}", sampled)
    if is_due or is_late:
      self._pace.saved()
      saved = self._saved(next_rollout, queue)
      with self._timeline.span(next_rollout, timeline_lib.TRAINER, "save"):
        checkpoints.save(saved, quality)

  def _saved(
    self,
    rollout: int,
    queue: pipeline.Pipeline | None = None,
    unfinished: sampler.ScoredRollout | None = None,
    steps: Sequence[dict[str, float]] = (),
  ) -> checkpoint.Saved:
    """Returns what a checkpoint holds, before `rollout` or in the middle of it.

    Args:
      rollout: the next one to train on, or the one in training.
      queue: has the rollouts to store; None stores no rollout.
      unfinished: the rollout in training.
      steps: metrics of the optimizer steps that were taken in it.
    """
    # After a resume these rollouts could not be sampled again: the checkpoint
    # has the current weights only, and they use older ones.
    version = rollout if unfinished is None else rollout + 1
    played = queue.sampled_before(version) if queue else []
    if unfinished is not None:
      played.insert(0, unfinished)

    def sampling() -> dict[str, Any]:
      state = self._sampler_state
      pending: list[Any] = []
      if played:
        pending.extend(collection.serialize([s.collected for s in played]))
      return {
        "curriculum": [*map(np.asarray, jax.device_get(state.curriculum))],
        "counters": {group: dict(c) for group, c in state.counters.items()},
        "pending": pending,
      }

    # Orbax needs the same items in all processes; it writes these once, because
    # they are in host memory.
    host = processes.on_main(sampling)
    progress = {
      "rollout": rollout,
      "seed": self._config.seed,
      "questions": self._stream.position(rollout),
      "counters": host["counters"],
    }
    if steps:
      progress["steps"] = list(steps)
    pending = host["pending"]
    return checkpoint.Saved(
      rollout=rollout,
      state=self._learner.state,
      curriculum=curriculum_lib.CurriculumState(*host["curriculum"]),
      progress=progress,
      pending=collection.StoredRollouts(*pending) if pending else None,
    )

  def _resume(
    self, checkpoints: checkpoint.Checkpoints
  ) -> tuple[
    int, collection.StoredRollouts | None, list[config_settings.Change]
  ]:
    """Restores the newest checkpoint, or begins at rollout 0.

    Returns:
      The first rollout to train on, the rollouts from that one on that are
      already sampled, and the settings that differ from the checkpoint's. If
      one of learning does, nothing counts as sampled.
    """
    folder = checkpoints.folder
    saved_rollouts = processes.on_main(lambda: checkpoint.rollouts(folder))
    if not saved_rollouts:
      # The engine starts with these weights; it is only sent later ones.
      scores = self._scores()
      if self._sampler is not None:
        self._sampler.expect(scores, 0)
      return 0, None, []
    newest = saved_rollouts[-1]
    changes = config_settings.changes(
      checkpoint.read_json(folder, newest, "config"), self._config
    )
    if refusal := config_settings.refusal(changes, allow=self._allow_changes):
      raise checkpoint.MismatchError(f"{folder / str(newest)}: {refusal}")
    like = checkpoint.Saved(
      rollout=0,
      state=self._learner.release(),
      curriculum=jax.device_get(self._sampler_state.curriculum),
      progress={},
    )
    saved = checkpoints.restore(newest, like)
    progress = saved.progress
    if progress["questions"] != (expected := self._stream.position(newest)):
      raise checkpoint.MismatchError(
        f"The checkpoint of rollout {newest} is at position "
        f"{progress['questions']} in its questions, expected {expected}. "
        "Resume with the questions that the run began with, or name another "
        "folder."
      )
    self._learner.state = saved.state
    counters = {
      group: Counter(progress["counters"].get(group))
      for group in self._sampler_state.counters
    }
    self._sampler_state = sampler.SamplerState(saved.curriculum, counters)
    # Steps that were taken remain counted, even if their rollout is sampled
    # again: it then gives only the remaining steps, so that each question is
    # trained on once.
    self._taken_steps = progress.get("steps", [])
    stored = saved.pending
    learning = config_settings.describe(changes, config_settings.Kind.LEARNING)
    if stored is not None and learning:
      self._sampler_state = sampler.count_discarded(
        self._sampler_state,
        f"Found {learning}.",
        stale_rollouts=len(stored.values["rollouts"]),
      )
      stored = None
    return newest, stored, changes
