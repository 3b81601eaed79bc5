"""Supervised training on demonstrations, before reinforcement learning.

It minimises the cross-entropy of the tokens that the demonstrations' policy
wrote, through the same packing, step, sharding, adapters, checkpoints and
export as reinforcement learning. While it trains it plays held-out questions.
"""

from __future__ import annotations

import math
import pathlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from anysearch_jax import budgets as budgets_lib
from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.algorithms import curriculum as curriculum_lib
from anysearch_jax.config import settings as config_settings
from anysearch_jax.data import dataset_iterator
from anysearch_jax.environment import spec
from anysearch_jax.host import loop
from anysearch_jax.policy import hf, lora
from anysearch_jax.rollout import driver, engines, episode
from anysearch_jax.training import batching, checkpoint, metrics
from anysearch_jax.training import learner as learner_lib

_ADDRESS = types.Address(rollout=0, question=0, sample=0)
# `encode_all` counts what is too long.
_NO_LIMITS = config_lib.EpisodeConfig(max_context=1 << 20)
_WARMUP = 0.1  # Share of the steps.


class Demonstration(NamedTuple):
  """An episode to imitate.

  Attributes:
    token_ids: int32 `[T]`.
    by_model: bool `[T]`, the tokens that are imitated.
  """

  token_ids: np.ndarray
  by_model: np.ndarray


def encode(
  row: Mapping[str, Any],
  *,
  environment: spec.Environment,
  codec: types.TextCodec,
) -> Demonstration:
  """Returns an episode in the tokens of a policy, whoever played it.

  Args:
    row: an episode as `records.episode` returns it.
    environment: the one that it was played in.
    codec: of the policy that is trained.
  """
  question = types.Question(
    row["question_id"], row["question"], tuple(row["golden_answers"])
  )
  start = episode.start(
    question,
    budget=budgets_lib.of_row(row),
    scaffold=row["scaffold"],
    address=_ADDRESS,
    config=_NO_LIMITS,
    environment=environment,
    codec=codec,
  )
  token_ids = [*start.chunks[0].token_ids]
  by_model = [False] * len(token_ids)
  for span in row["spans"]:
    span_ids = codec.encode(span["text"])
    token_ids += span_ids
    by_model += [span["author"] == "model"] * len(span_ids)
  return Demonstration(np.array(token_ids, np.int32), np.array(by_model))


def encode_all(
  rows: Iterable[Mapping[str, Any]],
  *,
  longest: int,
  environment: spec.Environment,
  codec: types.TextCodec,
) -> tuple[list[Demonstration], Counter[str]]:
  """Returns the demonstrations that fit, and counts the others by reason.

  Args:
    rows: episodes as `records.episode` returns them.
    longest: limit on the tokens of an episode.
    environment, codec: as for `encode`.
  """
  demonstrations = []
  left_out: Counter[str] = Counter()
  for row in rows:
    demonstration = encode(row, environment=environment, codec=codec)
    if len(demonstration.token_ids) > longest:
      left_out[f"longer than {longest} tokens"] += 1
    elif not demonstration.by_model.any():
      left_out["without a turn"] += 1
    else:
      demonstrations.append(demonstration)
  return demonstrations, left_out


def examples(demonstrations: Sequence[Demonstration]) -> list[batching.Example]:
  """Returns demonstrations as examples of a step, whose weights sum to 1."""
  total = sum(int(d.by_model[1:].sum()) for d in demonstrations)
  return [
    batching.Example(
      d.token_ids,
      d.by_model.astype(np.float32) / total,
      np.zeros(len(d.token_ids), np.float32),
    )
    for d in demonstrations
  ]


def learning_config(
  config: config_lib.ExperimentConfig,
) -> config_lib.ExperimentConfig:
  """Returns the configuration by which a learner imitates.

  Args:
    config: the whole configuration, with the settings of `sft`.
  """
  steps = config.sft.steps
  warmup = math.ceil(_WARMUP * steps)
  return config_lib.changed(
    config,
    optimizer={
      "learning_rate": config.sft.learning_rate,
      "warmup_steps": warmup,
      "decay": (steps - warmup) / steps,
    },
    curriculum={
      "total_steps": steps,
      "phase1_steps": 0,
      "steps_per_rollout": 1,
      "epochs": 1,
    },
    objective=config_lib.ObjectiveConfig(kl_coefficient=0.0),
    pipeline=config_lib.PipelineConfig(),
  )


class HeldOut(NamedTuple):
  """The questions that are played while a policy trains.

  Attributes:
    questions: none of them is demonstrated.
    retriever: answers their searches.
  """

  questions: Sequence[types.Question]
  retriever: types.Retriever


class Trainer:
  """One supervised training.

  A training that was stopped resumes from its newest checkpoint and ends with
  the same weights as one that never stopped.

  Args:
    config: the whole configuration.
    policy: as for `learner.Learner`.
    demonstrations: the episodes to imitate, at least one; they repeat in new
      orders.
    held_out: the questions to play.
    environment: the one that is played.
    folder: an existing folder, which gets the files of `metrics`, and
      `checkpoints/`.
    allow_changes: as for `loop.Trainer`.
    clock: returns the time in seconds.
  """

  def __init__(
    self,
    config: config_lib.ExperimentConfig,
    *,
    policy: hf.Policy,
    demonstrations: Sequence[Demonstration],
    held_out: HeldOut,
    environment: spec.Environment,
    folder: pathlib.Path,
    allow_changes: bool = False,
    clock: Callable[[], float] = time.monotonic,
  ):
    self._config = config
    self._learner = learner_lib.Learner(
      learning_config(config), policy, supervised=True
    )
    self._policy = policy._replace(params={})
    self._stream: Sequence[Any] = dataset_iterator.Stream(
      demonstrations,  # type: ignore[arg-type]  # A stream holds any values.
      count=config.sft.steps * config.sft.demonstrations,
      key=config.seed,
    )
    self._held_out = held_out
    self._environment = environment
    self._folder = folder
    self._allow_changes = allow_changes
    self._clock = clock
    self._pace = checkpoint.Pace(config.save_minutes, clock)
    self._stopping = threading.Event()
    self._engine: types.TrainableEngine | None = None
    prompts = {
      name: episode.prompt(
        held_out.questions[0],
        budget=config.curriculum.max_budget,
        scaffold=scaffold,
        environment=environment,
        codec=policy.tokenizer,
      )[0]
      for name, scaffold in (("plain", False), ("scaffold", True))
    }
    metrics.begin(folder, self._policy, prompts)

  def stop(self) -> None:
    """Makes `run` save a checkpoint after its step and return. Thread-safe."""
    self._stopping.set()

  def stop_seconds(self) -> float:
    """Returns the seconds that a stop may take. Thread-safe."""
    return checkpoint.stop_seconds(
      self._folder / "checkpoints",
      sum(x.nbytes for x in jax.tree.leaves(self._learner.state)),
      longest_rollout=self._pace.longest,
      stepped=self._pace.longest > 0,
    )

  def run(
    self,
    on_step: Callable[[int, dict[str, float]], None] = lambda step, values: (
      None
    ),
    on_start: Callable[
      [int, list[config_settings.Change]], None
    ] = lambda step, changes: None,
  ) -> bool:
    """Trains to the end, from the newest sound checkpoint if there is one.

    Args:
      on_step: called with the number of steps taken and the step's metrics.
      on_start: called with the number of steps taken before, and the settings
        that differ from those of the checkpoint.

    Returns:
      True at the end of training; False if `stop` ended it and it was saved.

    Raises:
      checkpoint.DamagedError: there are checkpoints, and all are damaged.
      checkpoint.MismatchError: the checkpoint belongs to another training.
    """
    config = self._config
    with (
      metrics.Writer(self._folder) as writer,
      checkpoint.Checkpoints(
        self._folder / "checkpoints",
        config=config_settings.to_dict(config),
        keep=config.checkpoint,
      ) as checkpoints,
    ):
      first, changes = self._resume(checkpoints)
      on_start(first, changes)
      writer.keep_before(first)
      for step in range(first, config.sft.steps):
        values = self._step(step)
        steps_taken = step + 1
        is_last = steps_taken == config.sft.steps
        every = config.sft.play_every
        if every and (is_last or steps_taken % every == 0):
          values |= self._play()
        is_late = self._pace.rollout()
        is_stopped = self._stopping.is_set()
        writer.write(steps_taken, values, [])
        on_step(steps_taken, values)
        is_due = is_last or steps_taken % config.save_every == 0 or is_late
        if is_due or is_stopped:
          self._pace.saved()
          checkpoints.save(self._saved(steps_taken), -math.inf)
        if is_stopped and not is_last:
          return False
    metrics.export(
      self._folder,
      self._policy._replace(
        params=self._learner.params(), architecture=self._learner.architecture
      ),
      base=config.policy,
      dtype=config.checkpoint.export_dtype,
    )
    return True

  def _step(self, step: int) -> dict[str, float]:
    """Takes an optimizer step; returns its metrics."""
    began = self._clock()
    size = self._config.sft.demonstrations
    start = step * size
    demonstrations = [self._stream[i] for i in range(start, start + size)]
    packed = batching.pack(
      examples(demonstrations),
      config=self._config.batch,
      multiple=self._learner.placement.row_multiple,
    )
    (values,) = self._learner.steps([packed])
    seconds = self._clock() - began
    tokens = sum(
      len(demonstration.token_ids) for demonstration in demonstrations
    )
    return {
      "rollout": step,
      "step": step + 1,
      **values,
      "train/tokens": tokens,
      "train/tokens_per_second": tokens / seconds,
      "time/train": seconds,
      "data/passes": (start + size) / len(self._stream.rows),  # type: ignore[attr-defined]
    }

  def _play(self) -> dict[str, float]:
    """Plays the held-out questions with the present weights.

    Returns:
      Shares of well-formed episodes and of right answers, and mean searches,
      of all budgets and of each.
    """
    config = self._config
    evaluation = config.evaluation
    began = self._clock()
    params = self._learner.published()
    if self._engine is None:
      a = lora.attach(self._policy.architecture, config.lora)
      self._engine = engines.make(
        self._policy._replace(params=params, architecture=a),
        config,
        seed=config.seed,
        trains=False,
      )
    else:
      self._engine.set_params(params, 0)
    cells = [
      (budget, question)
      for question in self._held_out.questions
      for budget in evaluation.budgets
    ]
    played = loop.run(
      driver.run_groups(
        [
          driver.Assignment(i, question, budget, evaluation.scaffold)
          for i, (budget, question) in enumerate(cells)
        ],
        driver.EpisodeParts(
          self._engine,
          self._held_out.retriever,
          config.episode,
          self._policy.tokenizer,
          self._environment,
        ),
        group=1,
        rollout=0,
        max_concurrency=config.engine.slots,
        inflight=driver.InFlight(config.watch.quiet_seconds),
      )
    )
    if isinstance(self._engine, types.CachingEngine):
      self._engine.free_cache()
    trajectories = [t for g in played.groups for t in g.trajectories]
    values = {"time/play": self._clock() - began}
    for name, budget in [
      ("", None),
      *((str(budget), budget) for budget in evaluation.budgets),
    ]:
      values |= self._measured(
        name, [t for t in trajectories if budget in (None, t.budget)]
      )
    return values

  def _measured(
    self, name: str, trajectories: Sequence[types.Trajectory]
  ) -> dict[str, float]:
    """Returns the metrics of played episodes, whose names end in `name`."""
    valid = [t for t in trajectories if not t.failed]
    verdicts = [self._environment.judge(t) for t in valid]

    def mean(numbers: Sequence[float]) -> float:
      return float(np.mean(numbers)) if numbers else math.nan

    return {
      f"play/format{name}": mean([v.format or 0 for v in verdicts]),
      f"play/accuracy{name}": mean([v.em for v in verdicts]),
      f"play/searches{name}": mean([t.searches for t in valid]),
      f"play/failed{name}": len(trajectories) - len(valid),
    }

  def _saved(self, step: int) -> checkpoint.Saved:
    """Returns what a checkpoint holds after `step` steps."""
    return checkpoint.Saved(
      rollout=step,
      state=self._learner.state,
      curriculum=self._curriculum(),
      progress={
        "rollout": step,
        "seed": self._config.seed,
        "demonstrations": len(self._stream.rows),  # type: ignore[attr-defined]
      },
    )

  def _curriculum(self) -> curriculum_lib.CurriculumState:
    """Returns the state of a curriculum that has not begun."""
    config = self._config
    state = curriculum_lib.init(config.curriculum, config.seed)
    return curriculum_lib.CurriculumState(
      *map(np.asarray, jax.device_get(state))
    )

  def _resume(
    self, checkpoints: checkpoint.Checkpoints
  ) -> tuple[int, list[config_settings.Change]]:
    """Restores the newest checkpoint, or begins at step 0.

    Returns:
      The steps taken, and the settings that differ from the checkpoint's.
    """
    folder = checkpoints.folder
    saved_steps = checkpoint.rollouts(folder)
    if not saved_steps:
      return 0, []
    newest = saved_steps[-1]
    changes = config_settings.changes(
      checkpoint.read_json(folder, newest, "config"), self._config
    )
    if refusal := config_settings.refusal(changes, allow=self._allow_changes):
      raise checkpoint.MismatchError(f"{folder / str(newest)}: {refusal}")
    like = checkpoint.Saved(
      rollout=0,
      state=self._learner.release(),
      curriculum=self._curriculum(),
      progress={},
    )
    saved = checkpoints.restore(newest, like)
    trained_on = saved.progress.get("demonstrations")
    expected = len(self._stream.rows)  # type: ignore[attr-defined]
    if trained_on != expected:
      raise checkpoint.MismatchError(
        f"The checkpoint of step {newest} was trained on {trained_on} "
        f"demonstrations, expected {expected}. Resume with those that the "
        "training began with, or name another folder."
      )
    self._learner.state = saved.state
    return newest, changes
