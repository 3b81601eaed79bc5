"""The training loop: sample, score, step, sync, record."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from anysearch_jax import config as config_lib
from anysearch_jax import curriculum, records, types
from anysearch_jax.policy import hf
from anysearch_jax.rollout import driver, sampling
from anysearch_jax.rollout import engine as engine_lib
from anysearch_jax.training import (
  checkpoint,
  experience,
  metrics,
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


def validate(config: config_lib.ExperimentConfig) -> None:
  """Refuses what cannot run before anything is allocated.

  Raises:
    ValueError: what was found, what was expected.
  """
  curriculum.validate(config.curriculum)
  sampling.validate_training(config.sampling)
  trajectories = config.questions * config.group
  if trajectories % config.curriculum.steps_per_rollout:
    raise ValueError(
      f"{config.questions} questions x {config.group} samples = {trajectories} "
      f"trajectories do not divide into "
      f"{config.curriculum.steps_per_rollout} optimizer steps a rollout."
    )
  if config.episode.max_context > config.batch.row_lengths[-1] + 1:
    raise ValueError(
      f"episode.max_context {config.episode.max_context} exceeds the longest "
      f"training row, batch.row_lengths[-1] {config.batch.row_lengths[-1]}."
    )
  longest = engine_lib.max_context(config.engine)
  if config.episode.max_context > longest:
    raise ValueError(
      f"episode.max_context {config.episode.max_context} exceeds the engine's "
      f"{longest}; raise the last of engine.kv_buckets."
    )


def train(
  config: config_lib.ExperimentConfig,
  *,
  policy: hf.Policy,
  questions: Sequence[types.Question],
  retriever: types.Retriever,
  folder: pathlib.Path,
  on_event: Callable[[Event], None] = lambda event: None,
  clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
  """Trains `policy` by GRPO under the budget curriculum.

  Resumes from the folder's latest checkpoint. Writes `metrics.jsonl`,
  `tensorboard/`, `checkpoints/`, `trajectories/` and, at the end, `policy/`
  (a Hugging Face folder).

  Args:
    config: the whole configuration; `validate` has passed.
    policy: the start, which is also the reference of the KL term.
    questions: the training stream; rollout r takes its r-th `config.questions`
      of them, from the start again when it ends.
    retriever: answers the searches.
    folder: of the run; exists.
    on_event: called after every rollout.
    clock: seconds.

  Returns:
    The trained parameters.

  Raises:
    NotFiniteError: a step was not finite; its rollout is dumped.
  """
  c = config.curriculum
  rollouts = c.total_steps // c.steps_per_rollout
  a = policy.architecture
  reference = jax.tree.map(jax.numpy.asarray, policy.params)
  tx = train_step.optimizer(a, config.optimizer)
  state = train_step.init(policy.params, tx)
  step = train_step.make(
    train_step.grpo_loss(
      a,
      config.objective,
      temperature=config.sampling.temperature,
      remat=config.batch.remat,
    ),
    tx,
  )
  budgets = curriculum.init(c, config.seed)
  engine = engine_lib.JaxEngine(
    reference,
    a,
    policy.tokenizer,
    config=config.engine,
    sampling=config.sampling,
    seed=config.seed,
  )
  (folder / "trajectories").mkdir(exist_ok=True)
  with (
    metrics.Writer(folder) as writer,
    checkpoint.Checkpoints(folder / "checkpoints") as checkpoints,
  ):
    saved = checkpoints.restore(checkpoint.Saved(0, state, budgets))
    first = 0
    if saved is not None:
      first, state, budgets = saved
      engine.set_params(state.params, first)
      writer.keep_before(first)
    for rollout in range(first, rollouts):
      started = clock()
      probabilities = curriculum.probabilities(budgets, config=c)
      assignment = curriculum.assign(
        budgets, num_groups=config.questions, config=c
      )
      sampled = asyncio.run(
        driver.run_groups(
          _assignments(questions, rollout, assignment, config),
          group=config.group,
          rollout=rollout,
          engine=engine,
          retriever=retriever,
          config=config.episode,
          codec=policy.tokenizer,
        )
      )
      generated = clock()
      scored = experience.score(
        _in_place(sampled.groups, rollout, questions, config),
        np.asarray(assignment.budgets),
        group=config.group,
        reward=config.reward,
        objective_config=config.objective,
      )
      batches = experience.batches(
        scored, steps=c.steps_per_rollout, config=config.batch
      )
      step_metrics = []
      for batch in batches:
        state, values = step(state, reference, batch)
        step_metrics.append(jax.device_get(values))
        if not step_metrics[-1]["finite"]:
          path = folder / "trajectories" / f"not-finite-{rollout}.jsonl"
          records.write(path, scored)
          raise NotFiniteError(
            f"Rollout {rollout}: loss {step_metrics[-1]['loss/total']}, "
            f"gradient norm {step_metrics[-1]['grad_norm']}; the step was not "
            f"applied. Its trajectories are in {path}."
          )
      engine.set_params(state.params, rollout + 1)
      budgets = curriculum.record(
        budgets,
        np.repeat(scored.budgets, config.group),
        scored.em.reshape(-1),
        scored.valid.reshape(-1),
        config=c,
      )
      trained = clock()
      values = {
        "rollout": rollout,
        "step": (rollout + 1) * c.steps_per_rollout,
        "phase": 1 if rollout * c.steps_per_rollout < c.phase1_steps else 2,
        "scaffold": int(assignment.scaffold),
        **_curriculum_metrics(probabilities, scored.budgets),
        **experience.metrics(scored),
        **_mean(step_metrics),
        "rollout/failed": sampled.failed,
        "rollout/dropped_groups": sampled.dropped,
        "rollout/resampled_groups": sampled.resampled,
        "time/rollout": generated - started,
        "time/train": trained - generated,
        **{f"engine/{k}": v for k, v in engine.counters.items()},
        "compile/train_step": step._cache_size(),
      }
      writer.write(values["step"], values)
      if rollout % config.save_every == 0 or rollout == rollouts - 1:
        records.write(
          folder / "trajectories" / f"rollout-{rollout:05d}.jsonl", scored
        )
        checkpoints.save(checkpoint.Saved(rollout + 1, state, budgets))
      on_event(Event(rollout, rollouts, values))
  hf.save(folder / "policy", policy._replace(params=state.params))
  return state.params


def _assignments(
  questions: Sequence[types.Question],
  rollout: int,
  assignment: curriculum.Assignment,
  config: config_lib.ExperimentConfig,
) -> list[driver.Assignment]:
  start = rollout * config.questions
  return [
    driver.Assignment(
      i,
      questions[(start + i) % len(questions)],
      int(budget),
      bool(assignment.scaffold),
    )
    for i, budget in enumerate(np.asarray(assignment.budgets))
  ]


def _in_place(
  groups: Sequence[types.Group],
  rollout: int,
  questions: Sequence[types.Question],
  config: config_lib.ExperimentConfig,
) -> list[types.Group | None]:
  """Groups at their question's place, None where one was dropped."""
  del rollout, questions
  out: list[types.Group | None] = [None] * config.questions
  for group in groups:
    out[group.trajectories[0].address.question] = group
  return out


def _curriculum_metrics(
  probabilities: jax.Array, budgets: np.ndarray
) -> dict[str, float]:
  p = np.asarray(probabilities)
  return {f"curriculum/p{b}": float(v) for b, v in enumerate(p, start=1)} | {
    f"curriculum/count{b}": int(np.sum(budgets == b))
    for b in range(1, len(p) + 1)
  }


def _mean(step_metrics: Sequence[dict[str, Any]]) -> dict[str, float]:
  """Over the steps of a rollout; the maximum where the name says so."""
  return {
    name: float(
      (np.max if name.endswith("_max") else np.mean)(
        [values[name] for values in step_metrics]
      )
    )
    for name in step_metrics[0]
  }


def save_config(config: config_lib.ExperimentConfig, folder: pathlib.Path) -> None:
  """Writes the resolved configuration as `config.json`."""
  (folder / "config.json").write_text(
    json.dumps(config_lib.to_dict(config), indent=2) + "\n"
  )
