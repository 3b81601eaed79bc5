"""Computes rewards, advantages and train batches of a rollout's groups.

A method's `measure` may be a coroutine function, such as one that asks a judge.
Then the trajectories of a rollout are measured concurrently, each within a
deadline. A trajectory that cannot be measured says nothing about the policy: it
becomes a failed one.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import itertools
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.algorithms import grpo
from anysearch_jax.algorithms import method as method_lib
from anysearch_jax.environment import protocol, scoring
from anysearch_jax.environment import records as records_lib
from anysearch_jax.host import loop, processes
from anysearch_jax.training import batching, turn_advantages

Place = turn_advantages.Place
# Limit on the trajectories that are measured at the same time.
_CONCURRENCY = 256
_log = logging.getLogger(__name__)


class Experience(NamedTuple):
  """A scored rollout; arrays are `[Q, G]`, a dropped group's row is invalid.

  Attributes:
    groups: one for each question; None where a group was dropped.
    verdicts: of the valid trajectories, by place (q, g).
    budgets: int32 `[Q]`.
    valid: bool, False for failed episodes.
    em: exact match of the answer, 0 or 1.
    rewards: by name, `total` among them, see `method.Method`.
    steps: extra rewards of a trajectory's searches, by its place; empty unless
      the method rewards single searches.
    turns: what is added to a trajectory's advantage in the turns of its
      searches (`turn_advantages`) and, with baselines of turns, in what follows
      them; empty without these and `steps`, or with a critic.
    advantages: relative to the group; None if a critic estimates them.
    reduction: how a step weighs tokens, see `grpo.token_weights`.
    unmeasured: for each trajectory whose measures a server did not give, the
      reason.
  """

  groups: list[types.Group | None]
  verdicts: Mapping[Place, scoring.Verdict]
  budgets: np.ndarray
  valid: np.ndarray
  em: np.ndarray
  rewards: Mapping[str, np.ndarray]
  steps: Mapping[Place, np.ndarray]
  turns: Mapping[Place, np.ndarray]
  advantages: np.ndarray | None
  reduction: str
  unmeasured: tuple[str, ...] = ()


def score(
  groups: Sequence[types.Group | None],
  budgets: np.ndarray,
  *,
  samples: int,
  method: method_lib.TrainedMethod,
  objective: config_lib.ObjectiveConfig,
  progress: method_lib.Progress = method_lib.BEGINNING,
  run: Callable[[Coroutine], Any] = loop.run,
  searchless: int = 0,
) -> Experience:
  """Computes verdicts, rewards and advantages of a whole rollout.

  Args:
    groups: one for each question, None where it was dropped.
    budgets: int `[Q]`, searches assigned to each group.
    samples: number of trajectories of a group, G.
    method: the system that is trained.
    objective: how advantages are made of rewards.
    progress: how far the training is.
    run: runs a measure that asks a server.
    searchless: number of samples at the end of each group that are a group of
      their own.
  """
  trajectories = {
    (q, g): trajectory
    for q, group in enumerate(groups)
    for g, trajectory in enumerate(group.trajectories if group else ())
    if not trajectory.failed
  }
  values, reasons = measure(method, trajectories, run=run)
  if reasons:
    groups = with_failed(groups, reasons)
    trajectories = {place: trajectories[place] for place in values}
  verdicts = {
    place: method.environment.judge(trajectory)
    for place, trajectory in trajectories.items()
  }
  outcomes = method_lib.outcomes_of(
    trajectories,
    verdicts,
    values,
    budgets=budgets,
    samples=samples,
    measures=method.measures,
    progress=progress,
  )
  rewards = with_reported(method.reward(outcomes), trajectories)
  advantages = None
  if not objective.has_critic:
    ends = [0, samples - searchless]
    if searchless:
      ends.append(samples)
    advantages = jnp.concatenate(
      [
        grpo.advantages(
          rewards["total"][:, start:end],
          outcomes.valid[:, start:end],
          epsilon=objective.advantage_epsilon,
          normalize=objective.normalize,
          deviation=objective.deviation,
        )
        for start, end in itertools.pairwise(ends)
      ],
      axis=1,
    )
  rewards, advantages = jax.device_get((rewards, advantages))
  steps: dict[Place, np.ndarray] = {}
  if method.steps is not None:
    steps = {place: method.steps(t) for place, t in trajectories.items()}
  turns: dict[Place, np.ndarray] = {}
  if advantages is not None:
    turns = turn_advantages.added_advantages(
      trajectories,
      rewards["total"],
      advantages,
      steps,
      config=objective,
      system_turns=method.turns,
    )
  return Experience(
    groups=list(groups),
    verdicts=verdicts,
    budgets=budgets,
    valid=np.asarray(outcomes.valid),
    em=np.asarray(outcomes.em),
    rewards=rewards,
    steps=steps,
    turns=turns,
    advantages=advantages,
    reduction=objective.reduction,
    unmeasured=tuple(reasons.values()),
  )


def with_reported(
  rewards: Mapping[str, Any], trajectories: Mapping[Place, types.Trajectory]
) -> Mapping[str, Any]:
  """Returns rewards, with the totals that programs reported in place of them.

  Args:
    rewards: `[Q, G]` by name, `total` among them.
    trajectories: the valid ones.
  """
  reported = {
    place: trajectory.reported_reward
    for place, trajectory in trajectories.items()
    if trajectory.reported_reward is not None
  }
  if not reported:
    return rewards
  total = np.array(rewards["total"])
  for place, reward in reported.items():
    total[place] = reward
  return {**rewards, "total": jnp.asarray(total)}


def examples(
  experience: Experience, start: int = 0, stop: int | None = None
) -> list[batching.Example]:
  """Returns the valid trajectories with flat indices in a range, as examples.

  Trajectories are in (question, sample) order; a range may split a group. The
  token weights form a mean over those returned, which counts a trajectory whose
  prompt left no room for the model, although it is omitted.

  Args:
    experience: the scored rollout.
    start: first index of the range.
    stop: end of the range; None ends it at the last trajectory.
  """
  group = experience.valid.shape[1]
  indices = range(start, experience.valid.size if stop is None else stop)
  members = [divmod(i, group) for i in indices]
  members = [place for place in members if experience.valid[place]]
  trajectories = [experience.groups[q].trajectories[g] for q, g in members]
  masks = [t.authors == types.Author.MODEL for t in trajectories]
  weights = grpo.token_weights(masks, reduction=experience.reduction)
  segments: list[batching.Example] = []
  for place, trajectory, weight in zip(members, trajectories, weights):
    example = batching.Example(
      token_ids=trajectory.token_ids,
      weights=weight,
      logps=trajectory.logps,
      advantage=_advantage(experience, place, trajectory),
      rewards=_token_rewards(experience, place, trajectory),
      experts=trajectory.experts,
    )
    segments += example.split(trajectory.segment_starts)
  return [segment for segment in segments if segment.weights.any()]


def _advantage(
  experience: Experience, place: Place, trajectory: types.Trajectory
) -> float | np.ndarray:
  """Returns the advantage of a trajectory, or of its tokens if they differ."""
  if experience.advantages is None:
    return 0.0
  advantage = float(experience.advantages[place])
  turns = experience.turns.get(place)
  if turns is None or not turns.any():
    return advantage
  return turn_advantages.token_advantages(trajectory, advantage, turns)


def _token_rewards(
  experience: Experience, place: Place, trajectory: types.Trajectory
) -> np.ndarray:
  """Returns the reward of each token of a trajectory, float32 `[T]`.

  The last token that the model wrote has the trajectory's reward; those that
  end the turns of charged searches have those of the searches, if there are
  any.
  """
  rewards = np.zeros(len(trajectory.token_ids), np.float32)
  last = np.flatnonzero(trajectory.authors == types.Author.MODEL)[-1:]
  rewards[last] = float(experience.rewards["total"][place])
  steps = experience.steps.get(place)
  if steps is not None:
    rewards[list(trajectory.search_ends[: len(steps)])] += steps
  return rewards


def records(experience: Experience) -> list[dict[str, Any]]:
  """Returns the groups as JSON values, each trajectory with its scores.

  These are its verdict, its total `reward` and the `parts` of it by name, the
  extra rewards of its searches (`steps`), if any, and its `advantage` (None if
  a critic estimates it), with those of its searches (`turn_advantages`). A
  failed trajectory has none.
  """

  def scores(place: Place) -> dict[str, Any]:
    if not experience.valid[place]:
      return {}
    rewards = {k: float(v[place]) for k, v in experience.rewards.items()}
    advantages = experience.advantages
    values = {
      **dataclasses.asdict(experience.verdicts[place]),
      "reward": rewards.pop("total"),
      "parts": rewards,
    }
    if place in experience.steps:
      values["steps"] = experience.steps[place].tolist()
    values["advantage"] = None
    if advantages is not None:
      values["advantage"] = float(advantages[place])
    if place in experience.turns:
      values["turn_advantages"] = experience.turns[place].tolist()
    return values

  return [
    records_lib.group(
      group, [scores((q, g)) for g in range(len(group.trajectories))]
    )
    for q, group in enumerate(experience.groups)
    if group
  ]


def trial(
  *, group: int, budget: int, measures: Sequence[str]
) -> method_lib.Outcomes:
  """Returns artificial outcomes to test a function before a run begins.

  The first of two questions has right and wrong answers, with and without a
  search, and its last sample failed. All samples of the second question failed.

  Args:
    group: samples of a question.
    budget: searches of both groups.
    measures: the names of `outcomes.measures`.
  """
  trajectories = {}
  verdicts = {}
  measured = {}
  model = types.Author.MODEL
  environment = types.Author.ENVIRONMENT
  by_model = np.arange(6) >= 2
  passage = types.Passage("it", "it", "it is here")
  turn = (
    types.Span(model, "<think> so ; </think> <search> where </search>"),
    types.Span(environment, protocol.observation([passage])),
  )
  for g in range(max(1, group - 1)):
    is_right = g % 2 == 0
    searches = g % (budget + 1)
    answer = "here" if is_right else "there"
    answer_span = types.Span(model, f"<answer> {answer} </answer>")
    trajectories[0, g] = types.Trajectory(
      types.Address(0, 0, g),
      types.Question("trial", "where is it ?", ("here",)),
      budget=budget,
      scaffold=False,
      token_ids=np.arange(6, dtype=np.int32),
      authors=by_model.astype(np.int8),
      logps=np.zeros(6, np.float32),
      versions=by_model.astype(np.int32) - 1,
      spans=(*turn * searches, answer_span),
      searches=searches,
      queries=("where",) * searches,
      violation=False,
      outcome=types.Outcome.ANSWERED,
      observations=tuple(
        types.Observation(protocol.SEARCH, "where", n, (passage,))
        for n in range(searches)
      ),
      search_ends=(2,) * searches,
    )
    verdicts[0, g] = scoring.Verdict(answer, int(is_right), 1)
    measured[0, g] = dict.fromkeys(measures, 0.0)
  return method_lib.outcomes_of(
    trajectories,
    verdicts,
    measured,
    budgets=np.full(2, budget, np.int32),
    samples=group,
    measures=measures,
  )


def reward_metrics(
  method: method_lib.TrainedMethod,
  *,
  samples: int,
  max_budget: int,
  traced: bool,
) -> set[str]:
  """Returns the names of the reward metrics, those that begin with `reward/`.

  The reward gets artificial outcomes.

  Args:
    method: the system that is trained.
    samples: trajectories of a group.
    max_budget: the largest budget.
    traced: whether the reward is only traced. A user's reward is called,
      because JAX may be unable to trace it.

  Raises:
    PluginError: a user's reward cannot be used.
  """
  made_up = trial(group=samples, budget=max_budget, measures=method.measures)
  names = set(
    jax.eval_shape(lambda: method.reward(made_up))
    if traced
    else method.reward(made_up)
  )
  if method.environment.format is not None:
    names.add("format")
  if method.steps is not None:
    names.add("steps")
  return {f"reward/{name}" for name in ("em", *names)}


def metrics(experience: Experience) -> dict[str, float]:
  """Returns means over the valid trajectories, as one flat record."""
  valid = experience.valid
  trajectories = [
    trajectory
    for g in experience.groups
    if g
    for trajectory in g.trajectories
    if not trajectory.failed
  ]

  def mean(numbers) -> float:
    return float(np.mean(numbers)) if len(numbers) else 0.0

  rewards = {"em": experience.em, **experience.rewards}
  values = {
    f"reward/{name}": mean(part[valid]) for name, part in rewards.items()
  }
  formats = [v.format for v in experience.verdicts.values()]
  if None not in formats:
    values["reward/format"] = mean(formats)
  if experience.steps:
    values["reward/steps"] = mean([x.sum() for x in experience.steps.values()])
  if experience.advantages is not None:
    values["policy/advantage_share"] = mean(experience.advantages[valid] != 0)
  values |= {
    "rollout/searches": mean(
      [trajectory.searches for trajectory in trajectories]
    ),
    "rollout/generated_tokens": mean(
      [trajectory.generated_tokens for trajectory in trajectories]
    ),
    "rollout/total_tokens": mean(
      [len(trajectory.token_ids) for trajectory in trajectories]
    ),
    "rollout/violations": mean(
      [trajectory.violation for trajectory in trajectories]
    ),
  }
  for outcome in types.Outcome:
    if outcome is not types.Outcome.FAILED:
      share = mean(
        [trajectory.outcome is outcome for trajectory in trajectories]
      )
      values[f"rollout/{outcome.value}"] = share
  return values


def measure(
  method: method_lib.TrainedMethod,
  trajectories: Mapping[Place, types.Trajectory],
  *,
  run: Callable[[Coroutine], Any] = loop.run,
) -> tuple[dict[Place, Mapping[str, float]], dict[Place, str]]:
  """Measures trajectories that did not fail.

  If `method.measure` is asynchronous, the first process calls it, and the
  others get its results: a server may answer two processes differently.

  Args:
    method: the system that is trained.
    trajectories: by place.
    run: runs an asynchronous measure.

  Returns:
    The values of each trajectory that was measured, and why each other one was
    not.

  Raises:
    ValueError: asynchronous values have the wrong names.
  """
  if not inspect.iscoroutinefunction(method.measure):
    measure_now = cast(
      Callable[[types.Trajectory], Mapping[str, float]], method.measure
    )
    return {place: measure_now(t) for place, t in trajectories.items()}, {}
  results = processes.on_main(
    lambda: run(_all(method, list(trajectories.values())))
  )
  results_by_place = list(zip(trajectories, results, strict=True))
  reasons = {place: reason for place, (_, reason) in results_by_place if reason}
  if reasons:
    _log.warning(
      "%d of %d trajectories could not be measured and count as failed. The "
      "first: %s",
      len(reasons),
      len(trajectories),
      next(iter(reasons.values())),
    )
  measured = {
    place: measures
    for place, (measures, reason) in results_by_place
    if not reason
  }
  return measured, reasons


def with_failed(
  groups: Sequence[types.Group | None], reasons: Mapping[Place, str]
) -> list[types.Group | None]:
  """Returns groups whose trajectories at these places have failed."""
  members = [list(group.trajectories) if group else [] for group in groups]
  for (q, g), reason in reasons.items():
    members[q][g] = dataclasses.replace(
      members[q][g], outcome=types.Outcome.FAILED, reason=reason
    )
  return [
    group and dataclasses.replace(group, trajectories=tuple(trajectories))
    for group, trajectories in zip(groups, members)
  ]


async def _all(
  method: method_lib.TrainedMethod, trajectories: Sequence[types.Trajectory]
) -> list[tuple[dict[str, float], str]]:
  """Returns values and a reason for each; the reason is "" if it succeeded."""
  gate = asyncio.Semaphore(_CONCURRENCY)

  async def one(t: types.Trajectory) -> tuple[dict[str, float], str]:
    async with gate:
      try:
        async with asyncio.timeout(method.measure_deadline):
          values: Mapping[str, float] = await method.measure(t)  # type: ignore[misc]
      except TimeoutError:
        return {}, (
          f"It was not measured within {method.measure_deadline:g} seconds "
          "(method.measure_deadline)."
        )
      except (types.EngineError, types.RetrievalError) as error:
        return {}, f"It was not measured: {error}"
    if {*values} != {*method.measures}:
      raise ValueError(
        f"measure: found {', '.join(sorted(values)) or 'no values'}, expected "
        f"{', '.join(sorted(method.measures))}."
      )
    return {name: float(value) for name, value in values.items()}, ""

  async with asyncio.TaskGroup() as tasks:
    started = [tasks.create_task(one(t)) for t in trajectories]
  return [task.result() for task in started]
