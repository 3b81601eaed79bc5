"""The training loop: sample, score, step, sync, record."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import pathlib
import time
from collections import Counter
from collections.abc import Callable, Sequence

import jax
import numpy as np

from anysearch_jax import config as config_lib
from anysearch_jax import curriculum, records, types
from anysearch_jax.policy import hf, lora, transformer
from anysearch_jax.rollout import driver, episode
from anysearch_jax.rollout import engine as engine_lib
from anysearch_jax.training import (
  batching,
  checkpoint,
  experience,
  metrics,
  placement,
  train_step,
)


@dataclasses.dataclass(frozen=True)
class Event:
  """What the loop tells whoever watches: a rollout is done."""

  rollout: int
  rollouts: int
  values: dict[str, float]


class NotFiniteError(RuntimeError):
  """A loss or gradient was not finite; the step was not applied."""


class Trainer:
  """One run's parts: what is sampled with, and what is stepped.

  Args:
    config: the whole configuration; `validation.validate` has passed.
    policy: the start, which is also the reference of the KL term.
    questions: the training stream; rollout r takes its r-th `config.questions`
      of them, from the start again when it ends.
    retriever: answers the searches.
    folder: of the run; exists. Gets `source/` (what an export copies of the
      start), `prompts.json`, `metrics.jsonl`, `tensorboard/`, `checkpoints/`,
      `trajectories/` and, at the end, `policy/` (a Hugging Face folder) and,
      with adapters, `adapter/` (a PEFT folder).
    clock: seconds.
  """

  def __init__(
    self,
    config: config_lib.ExperimentConfig,
    *,
    policy: hf.Policy,
    questions: Sequence[types.Question],
    retriever: types.Retriever,
    folder: pathlib.Path,
    clock: Callable[[], float] = time.monotonic,
  ):
    self._config = config
    # Without its weights, which the state has from here on.
    self._policy = policy._replace(params={})
    self._questions = questions
    self._retriever = retriever
    self._folder = folder
    self._clock = clock
    self._a = a = lora.attach(policy.architecture, config.lora)
    self._placement = placed = placement.Placement.of(a, config)
    compute = placement.compute(config, a, placed.trainer)
    tx = train_step.optimizer(a, config.optimizer)
    shardings = train_step.shardings(a, tx, placed.trainer)
    trained = (
      policy.params if a.lora is None else lora.initialize(a, config.seed)
    )
    self._state = train_step.init(
      jax.device_put(trained, shardings.params), tx, shardings
    )
    self._reference = (
      placed.frozen(policy.params)
      if a.lora or config.objective.kl_coefficient
      else None
    )
    self._base = placed.to_engine(self._reference) if a.lora else {}
    how = {"temperature": config.sampling.temperature, "compute": compute}
    one_step = config.curriculum.steps_per_rollout == 1
    self._step = train_step.make(
      train_step.grpo_loss(a, config.objective, on_policy=one_step, **how),
      tx,
      shardings,
    )
    self._score_batch = train_step.make_scorer(a, sharding=placed.rows, **how)
    self._curriculum = curriculum.init(config.curriculum, config.seed)
    self._engine = engine_lib.JaxEngine(
      self._published(),
      a,
      policy.tokenizer,
      config=config.engine,
      sampling=config.sampling,
      seed=config.seed,
      dtype=placed.dtype,
      mesh=placed.rollout,
    )
    # Of the whole run, whatever it was resumed from.
    self._counters = {"run": Counter(), "engine": self._engine.counters}
    (folder / "trajectories").mkdir(exist_ok=True)
    self._write_source()
    self._write_prompts()

  def run(self, on_event: Callable[[Event], None] = lambda event: None) -> None:
    """Trains to the end, from the newest sound checkpoint if there is one.

    Raises:
      NotFiniteError: a step was not finite; its rollout is dumped.
      checkpoint.DamagedError: there are checkpoints and none is sound.
      checkpoint.MismatchError: the checkpoint is of a run with another seed,
        other questions or another policy.
      checkpoint.UnknownMetricError: `checkpoint.best_metric` is not a metric.
    """
    config, c = self._config, self._config.curriculum
    rollouts = c.total_steps // c.steps_per_rollout
    with (
      metrics.Writer(self._folder) as writer,
      checkpoint.Checkpoints(
        self._folder / "checkpoints", config=config
      ) as checkpoints,
    ):
      first = self._resume(checkpoints)
      writer.keep_before(first)
      for rollout in range(first, rollouts):
        values, scored = self._rollout(rollout)
        writer.write(values["step"], values)
        quality = checkpoint.quality(values, config=config.checkpoint)
        if (rollout + 1) % config.save_every == 0 or rollout == rollouts - 1:
          self._record(f"rollout-{rollout:05d}", scored)
          checkpoints.save(self._saved(rollout + 1), quality)
        on_event(Event(rollout, rollouts, values))
    self._write_policy()

  def _params(self) -> transformer.Params:
    """All of the policy's parameters as they stand."""
    if self._a.lora is None:
      return self._state.params
    return lora.combine(self._reference, self._state.params)

  def _published(self) -> transformer.Params:
    """The same for the engine."""
    trained = self._placement.publish(self._state.params)
    return lora.combine(self._base, trained) if self._a.lora else trained

  def _write_source(self) -> None:
    """Keeps what an export needs of the start, wherever that came from."""
    folder = self._folder / "source"
    if not folder.is_dir():
      with hf.appears_whole(folder) as beside:
        hf.save_files(beside, self._policy)

  def _write_policy(self) -> None:
    trained = self._policy._replace(
      params=self._params(),
      architecture=self._a,
      source=self._folder / "source",
    )
    dtype = self._config.checkpoint.export_dtype
    hf.save(self._folder / "policy", trained, dtype=dtype)
    if self._a.lora is not None:
      hf.save_adapter(
        self._folder / "adapter", trained, base=self._config.policy
      )

  def _write_prompts(self) -> None:
    """Stores both prompts as the policy reads them, for one question."""
    rendered = {
      name: episode.prompt(
        self._questions[0],
        budget=self._config.curriculum.max_budget,
        scaffold=scaffold,
        config=self._config.episode,
        codec=self._policy.tokenizer,
      )[0]
      for name, scaffold in (("scaffold", True), ("plain", False))
    }
    path = self._folder / "prompts.json"
    path.write_text(json.dumps(rendered, indent=2) + "\n")

  def _saved(self, rollout: int) -> checkpoint.Saved:
    """The run as it stands before `rollout`."""
    epoch, position = divmod(
      rollout * self._config.questions, len(self._questions)
    )
    progress = {
      "rollout": rollout,
      "seed": self._config.seed,
      "questions": {
        "epoch": epoch,
        "position": position,
        "of": len(self._questions),
      },
      "counters": {group: dict(c) for group, c in self._counters.items()},
    }
    return checkpoint.Saved(rollout, self._state, self._curriculum, progress)

  def _resume(self, checkpoints: checkpoint.Checkpoints) -> int:
    """Takes up the newest checkpoint; the rollout to start with."""
    like = self._saved(0)
    if not checkpoint.rollouts(self._folder / "checkpoints"):
      return 0
    # Only its shapes, so that two states are never held at once.
    self._state, state = (
      None,
      jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
        self._state,
      ),
    )
    saved = checkpoints.restore(like._replace(state=state))
    expected = self._saved(saved.rollout).progress
    for name in ("rollout", "seed", "questions"):
      if saved.progress[name] != expected[name]:
        raise checkpoint.MismatchError(
          f"The checkpoint of rollout {saved.rollout} has {name} "
          f"{saved.progress[name]}, this run has {expected[name]}; resume with "
          "what the run began with, or name another folder."
        )
    self._state, self._curriculum = saved.state, saved.curriculum
    for group, counts in saved.progress["counters"].items():
      self._counters[group].update(counts)
    self._engine.set_params(self._published(), saved.rollout)
    return saved.rollout

  def _rollout(
    self, rollout: int
  ) -> tuple[dict[str, float], experience.Experience]:
    """Samples, scores, steps and syncs once; the metrics and what was seen."""
    c = self._config.curriculum
    started = self._clock()
    probabilities = curriculum.probabilities(self._curriculum, config=c)
    assignment = curriculum.assign(
      self._curriculum, num_groups=self._config.questions, config=c
    )
    sampled = self._sample(rollout, assignment)
    generated = self._clock()
    scored = self._score(sampled, np.asarray(assignment.budgets))
    stepped = self._optimize(rollout, scored)
    self._engine.set_params(self._published(), rollout + 1)
    self._curriculum = curriculum.record(
      self._curriculum,
      np.repeat(scored.budgets, self._config.group),
      scored.em.reshape(-1),
      scored.valid.reshape(-1),
      config=c,
    )
    samplings = self._config.questions + sampled.resampled
    self._counters["run"].update(
      optimizer_steps=c.steps_per_rollout,
      trajectories=samplings * self._config.group,
      failed=sampled.failed,
      dropped_groups=sampled.dropped,
      resampled_groups=sampled.resampled,
    )
    step = rollout * c.steps_per_rollout
    values = {
      "rollout": rollout,
      "step": step + c.steps_per_rollout,
      "phase": 1 if step < c.phase1_steps else 2,
      "scaffold": int(assignment.scaffold),
      **_curriculum_metrics(np.asarray(probabilities), scored.budgets),
      **experience.metrics(scored),
      **stepped,
      "rollout/failed": sampled.failed,
      "rollout/dropped_groups": sampled.dropped,
      "rollout/resampled_groups": sampled.resampled,
      **{
        f"{group}/{name}": count
        for group, counts in self._counters.items()
        for name, count in counts.items()
      },
      "compile/train_step": self._step._cache_size(),
      "time/rollout": generated - started,
      "time/train": self._clock() - generated,
    }
    return values, scored

  def _sample(
    self, rollout: int, assignment: curriculum.Assignment
  ) -> driver.Rollout:
    start = rollout * self._config.questions
    budgets = np.asarray(assignment.budgets)
    scaffold = bool(assignment.scaffold)
    return asyncio.run(
      driver.run_groups(
        [
          driver.Assignment(
            i,
            self._questions[(start + i) % len(self._questions)],
            int(budget),
            scaffold,
          )
          for i, budget in enumerate(budgets)
        ],
        group=self._config.group,
        rollout=rollout,
        engine=self._engine,
        retriever=self._retriever,
        config=self._config.episode,
        codec=self._policy.tokenizer,
        max_concurrency=self._config.engine.slots,
      )
    )

  def _score(
    self, sampled: driver.Rollout, budgets: np.ndarray
  ) -> experience.Experience:
    groups: list[types.Group | None] = [None] * self._config.questions
    for group in sampled.groups:
      groups[group.trajectories[0].address.question] = group
    return experience.score(
      groups,
      budgets,
      group=self._config.group,
      reward=self._config.reward,
      objective_config=self._config.objective,
    )

  def _batches(
    self, scored: experience.Experience
  ) -> list[batching.TrainBatch]:
    """The batches of a rollout's optimizer steps, on the device.

    Where the ratio is to the trainer's own log-probs, they are computed here;
    a rollout of one step needs no pass, for they are those of that step.
    """
    steps = self._config.curriculum.steps_per_rollout
    batches = [
      self._placement.batch(batch)
      for batch in experience.batches(
        scored,
        steps=steps,
        config=self._config.batch,
        multiple=self._placement.row_multiple,
      )
    ]
    if self._config.objective.old_logp == "engine" or steps == 1:
      return batches
    return [
      tuple(
        rows._replace(old_logp=logp)
        for rows, logp in zip(
          batch, self._score_batch(self._state.params, self._reference, batch)
        )
      )
      for batch in batches
    ]

  def _optimize(
    self, rollout: int, scored: experience.Experience
  ) -> dict[str, float]:
    """The optimizer steps of a rollout, and their metrics."""
    steps = []
    for batch in self._batches(scored):
      self._state, values = self._step(self._state, self._reference, batch)
      values = jax.device_get(values)
      if not values["finite"]:
        path = self._record(f"not-finite-{rollout}", scored)
        raise NotFiniteError(
          f"Rollout {rollout}: loss {values['loss/total']}, gradient norm "
          f"{values['grad_norm']}. The step was not applied; its trajectories "
          f"are in {path}."
        )
      steps.append(values)
    # Before the first step the policy is the one that sampled: the gap is
    # what separates the engine's numerics from the trainer's.
    gap = float(steps[0]["loss/logp_difference_max"])
    return {"policy/engine_gap_max": gap} | {
      name: float(
        (np.max if name.endswith("_max") else np.mean)([v[name] for v in steps])
      )
      for name in steps[0]
    }

  def _record(self, name: str, scored: experience.Experience) -> pathlib.Path:
    path = self._folder / "trajectories" / f"{name}.jsonl"
    records.write(path, (records.group(g) for g in scored.groups if g))
    return path


def _curriculum_metrics(p: np.ndarray, budgets: np.ndarray) -> dict[str, float]:
  """Phase II's sampling probabilities as they stand, and what was drawn."""
  return {f"curriculum/p{b}": float(v) for b, v in enumerate(p, start=1)} | {
    f"curriculum/count{b}": int(np.sum(budgets == b))
    for b in range(1, len(p) + 1)
  }
