"""The asyncio driver of episodes: all waiting happens here, none in `episode`.

Every request to an engine or retriever has a deadline. If the engine or the
retriever cannot answer, the episode ends as `failed`. Any other exception is a
bug and stops the rollout.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from anysearch_jax import budgets, types
from anysearch_jax import config as config_lib
from anysearch_jax.rollout import answering, episode, episode_state, steering
from anysearch_jax.rollout import inflight as inflight_lib

# Tokenizing more characters than this blocks the event loop for milliseconds.
_LONG = 16384


@dataclasses.dataclass(frozen=True)
class Assignment:
  """One group to sample; `index` is the question's position in the rollout."""

  index: int
  question: types.Question
  budget: budgets.Assigned
  scaffold: bool


@dataclasses.dataclass(frozen=True)
class EpisodeParts:
  """What every episode of a rollout is played with.

  Attributes:
    engine: samples the turns.
    retriever: answers the searches.
    config: limits and environment.
    codec: the text side of the policy's tokenizer.
  """

  engine: types.Engine
  retriever: types.Retriever
  config: config_lib.EpisodeConfig
  codec: types.TextCodec


class Rollout(NamedTuple):
  """The groups that remain after resampling, in the order of the assignments.

  dropped: number of groups with fewer than two valid trajectories after their
    second sampling; they are not in `groups`.
  resampled: number of groups that were sampled a second time.
  failed: number of failed trajectories in all samplings, kept or not.
  reason: why the first of these trajectories failed; "" if none did.

  Groups that `keep` cancelled are counted nowhere.
  """

  groups: list[types.Group]
  dropped: int
  resampled: int
  failed: int
  reason: str = ""


async def run_episode(
  question: types.Question,
  parts: EpisodeParts,
  *,
  budget: budgets.Assigned,
  scaffold: bool,
  address: types.Address,
  inflight: inflight_lib.InFlight = inflight_lib.OFF,
) -> types.Trajectory:
  """Plays one episode to its end, and releases it from the engine.

  Args:
    question, budget, scaffold, address: as in `episode.start`.
    parts: what the episode is played with.
    inflight: records what the episode waits for.

  Returns:
    The trajectory. It is `failed`, with the reason, if the engine or the
    retriever could not answer in time.
  """
  try:
    state, request = await start(
      question, parts, budget=budget, scaffold=scaffold, address=address
    )
    return await play(
      state,
      request,
      engine=parts.engine,
      retriever=parts.retriever,
      inflight=inflight,
    )
  finally:
    parts.engine.release(address)


async def play(
  state: episode_state.Episode,
  request: episode_state.Request,
  *,
  engine: types.Engine,
  retriever: types.Retriever,
  inflight: inflight_lib.InFlight = inflight_lib.OFF,
) -> types.Trajectory:
  """Plays an episode from its current state to its end.

  A rule of `episode.control` steers it, see `steering`.

  Args:
    state, request: as returned by `episode.start` or `episode.step`.
    engine, retriever, inflight: as in `run_episode`; the caller releases the
      episode.
  """
  clock = asyncio.get_running_loop().time
  started, seconds, first = clock(), state.caps.seconds, state.address
  try:
    while not isinstance(request, episode_state.Done):
      until = answering.time_limit(started, seconds, landed=state.landing)
      with inflight.waiting(request):
        event = await answering.in_time(
          request,
          engine=engine,
          retriever=retriever,
          config=state.config,
          until=until,
        )
      if until is not None:
        state = dataclasses.replace(state, elapsed=clock() - started)
      if event is None:
        state, request = episode.land(state)
      else:
        state, request = await steered(
          state, event, engine=engine, retriever=retriever, until=until
        )
    return request.trajectory
  finally:
    if state.address != first:  # A rule replaced an answer.
      engine.release(state.address)


async def start(
  question: types.Question,
  parts: EpisodeParts,
  *,
  budget: budgets.Assigned,
  scaffold: bool,
  address: types.Address,
) -> tuple[episode_state.Episode, episode_state.Request]:
  """Calls `episode.start`, on a thread if it must tokenize a long text."""
  begin = functools.partial(
    episode.start,
    question,
    budget=budget,
    scaffold=scaffold,
    address=address,
    config=parts.config,
    codec=parts.codec,
  )
  if len(question.text) > _LONG:
    return await asyncio.to_thread(begin)
  return begin()


async def step(
  state: episode_state.Episode, event: episode_state.Event
) -> tuple[episode_state.Episode, episode_state.Request]:
  """Calls `episode.step`, on a thread if it must tokenize a long text.

  On the event loop it would delay the deadlines of all other episodes.
  """
  if isinstance(event, episode_state.Retrieved):
    if sum(len(p.title) + len(p.text) for p in event.passages) > _LONG:
      return await asyncio.to_thread(episode.step, state, event)
  return episode.step(state, event)


async def steered(
  state: episode_state.Episode,
  event: episode_state.Event,
  *,
  engine: types.Engine,
  retriever: types.Retriever,
  until: float | None,
) -> tuple[episode_state.Episode, episode_state.Request]:
  """Calls `step`, and lets the rule of `episode.control` replace the turn."""
  after, request = await step(state, event)
  if not state.config.control or not isinstance(event, types.Generation):
    return after, request
  return await steering.steer(
    state, event, after, engine=engine, retriever=retriever, until=until
  )


async def run_groups(
  assignments: Sequence[Assignment],
  parts: EpisodeParts,
  *,
  group: int,
  rollout: int,
  max_concurrency: int | None = None,
  keep: int | None = None,
  on_done: Callable[[types.Trajectory], None] = lambda trajectory: None,
  inflight: inflight_lib.InFlight = inflight_lib.OFF,
) -> Rollout:
  """Samples `group` trajectories for every assignment, all at once.

  If fewer than two trajectories of a group of two or more are valid, no group
  statistic exists. Such a group is sampled once more, as attempt 1, and dropped
  if that fails too. A group of one is always kept, failed or not.

  Args:
    assignments: the groups; their indices differ.
    parts: what the episodes are played with.
    group: trajectories per group (the paper's G), >= 1.
    rollout: number of the rollout, a part of every address.
    max_concurrency: maximum number of concurrent episodes; None for no bound.
    keep: once `keep` groups can be kept, all others are cancelled and released;
      which ones depends on timing. None waits for all groups.
    on_done: called with every trajectory as it finishes, in any order.
    inflight: records what the episodes wait for, and warns if nothing moves.

  Returns:
    The groups in the order of `assignments`, each with its samples in order,
    and counts.

  Raises:
    ValueError: `group`, `max_concurrency` or `keep` below 1, or two
      assignments with the same index.
    ExceptionGroup: an episode raised; the other episodes are cancelled.
  """
  _check(assignments, group=group, max_concurrency=max_concurrency, keep=keep)
  sampler = _GroupSampler(
    parts,
    group=group,
    rollout=rollout,
    max_concurrency=max_concurrency,
    on_done=on_done,
    inflight=inflight,
  )
  # The samplings of each group that is settled, by its index.
  settled: dict[int, list[types.Group]] = {}

  async def settle(assignment: Assignment) -> None:
    settled[assignment.index] = await sampler.settled(assignment)
    if keep and keep == sum(_is_kept(t[-1]) for t in settled.values()):
      for task in settling:
        if task is not asyncio.current_task():
          task.cancel()

  with inflight.watched():
    async with asyncio.TaskGroup() as tasks:
      settling = [tasks.create_task(settle(each)) for each in assignments]
  return _rollout([settled[a.index] for a in assignments if a.index in settled])


class _GroupSampler:
  """Samples groups of trajectories; arguments as in `run_groups`."""

  def __init__(
    self,
    parts: EpisodeParts,
    *,
    group: int,
    rollout: int,
    max_concurrency: int | None,
    on_done: Callable[[types.Trajectory], None],
    inflight: inflight_lib.InFlight,
  ):
    self._parts, self._group, self._rollout = parts, group, rollout
    self._on_done, self._inflight = on_done, inflight
    self._gate: contextlib.AbstractAsyncContextManager[None] = (
      contextlib.nullcontext()
      if max_concurrency is None
      else asyncio.Semaphore(max_concurrency)
    )

  async def settled(self, assignment: Assignment) -> list[types.Group]:
    """Samples a group, and a second time if the first cannot be kept."""
    samplings = [await self._sample_group(assignment, 0)]
    if not _is_kept(samplings[0]):
      samplings.append(await self._sample_group(assignment, 1))
    return samplings

  async def _sample_group(
    self, assignment: Assignment, attempt: int
  ) -> types.Group:
    async with asyncio.TaskGroup() as tasks:
      samples = [
        tasks.create_task(self._sample(assignment, sample, attempt))
        for sample in range(self._group)
      ]
    budget = budgets.of(assignment.budget)
    return types.Group(
      assignment.question,
      budget.searches,
      assignment.scaffold,
      tuple(task.result() for task in samples),
      budget.beyond_searches,
    )

  async def _sample(
    self, assignment: Assignment, sample: int, attempt: int
  ) -> types.Trajectory:
    address = types.Address(self._rollout, assignment.index, sample, attempt)
    with contextlib.ExitStack() as outside:
      outside.enter_context(self._inflight.waiting(address))
      async with self._gate:
        outside.close()
        trajectory = await run_episode(
          assignment.question,
          self._parts,
          budget=assignment.budget,
          scaffold=assignment.scaffold,
          address=address,
          inflight=self._inflight,
        )
    self._on_done(trajectory)
    return trajectory


def _rollout(samplings: Sequence[Sequence[types.Group]]) -> Rollout:
  """Returns the last sampling of each group if it is kept, and counts.

  Args:
    samplings: one or two samplings of each group, in order.
  """
  groups = [tries[-1] for tries in samplings if _is_kept(tries[-1])]
  failed = [
    trajectory
    for tries in samplings
    for sampled in tries
    for trajectory in sampled.trajectories
    if trajectory.failed
  ]
  return Rollout(
    groups=groups,
    dropped=len(samplings) - len(groups),
    resampled=sum(len(tries) > 1 for tries in samplings),
    failed=len(failed),
    reason=failed[0].reason if failed else "",
  )


def _is_kept(sampled: types.Group) -> bool:
  """Returns whether a group is kept: it has one sample, or two valid ones."""
  valid = sum(not trajectory.failed for trajectory in sampled.trajectories)
  return len(sampled.trajectories) == 1 or valid >= 2


def _check(
  assignments: Sequence[Assignment],
  *,
  group: int,
  max_concurrency: int | None,
  keep: int | None,
) -> None:
  """Raises ValueError for arguments that cannot work."""
  if group < 1:
    raise ValueError(f"Found group={group}, expected 1 or more trajectories.")
  if max_concurrency is not None and max_concurrency < 1:
    raise ValueError(
      f"Found max_concurrency={max_concurrency}, expected 1 or more episodes, "
      "or None for no bound."
    )
  if keep is not None and keep < 1:
    raise ValueError(
      f"Found keep={keep}, expected 1 or more groups, or None for all of them."
    )
  indices = [assignment.index for assignment in assignments]
  if len(set(indices)) != len(indices):
    raise ValueError(
      f"Found {len(indices)} assignments with {len(set(indices))} indices; "
      "expected each index once, because episodes are addressed by it."
    )
