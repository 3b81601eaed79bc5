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
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from anysearch_jax import budgets, types
from anysearch_jax import config as config_lib
from anysearch_jax.rollout import episode, episode_state, steering
from anysearch_jax.rollout import inflight as inflight_lib

# The share of its seconds after which an episode is asked for its answer.
LANDING = 0.75
# Tokenizing more characters than this blocks the event loop for milliseconds.
_LONG = 16384
# Lets every episode run at once.
_OPEN = contextlib.nullcontext()


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
  gate: contextlib.AbstractAsyncContextManager[None] = _OPEN,
  started: float | None = None,
  deadline: float = math.inf,
  watch: Callable[[episode_state.Episode], None] | None = None,
) -> types.Trajectory:
  """Plays one episode to its end, and releases it from the engine.

  Args:
    question, budget, scaffold, address: as in `episode.start`.
    parts: what the episode is played with.
    inflight: records what the episode waits for.
    gate: entered while the episode is played.
    started, deadline, watch: as in `play`.

  Returns:
    The trajectory. It is `failed`, with the reason, if the engine or the
    retriever could not answer in time.
  """
  with contextlib.ExitStack() as outside:
    outside.enter_context(inflight.waiting(address))
    async with gate:
      outside.close()
      begin = functools.partial(
        episode.start,
        question,
        budget=budget,
        scaffold=scaffold,
        address=address,
        config=parts.config,
        codec=parts.codec,
      )
      try:
        is_long = len(question.text) > _LONG
        state, request = await asyncio.to_thread(begin) if is_long else begin()
        return await play(
          state,
          request,
          engine=parts.engine,
          retriever=parts.retriever,
          inflight=inflight,
          started=started,
          deadline=deadline,
          watch=watch,
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
  started: float | None = None,
  deadline: float = math.inf,
  watch: Callable[[episode_state.Episode], None] | None = None,
) -> types.Trajectory:
  """Plays an episode from its current state to its end.

  A rule of `episode.control` steers it, see `steering`. An episode whose time
  has passed by three quarters is asked for its answer.

  Args:
    state, request: as returned by `episode.start` or `episode.step`.
    engine, retriever, inflight: as in `run_episode`; the caller releases the
      episode's own address.
    started: when its time began, in event-loop time; None: now.
    deadline: seconds that it may take, besides those of its budget.
    watch: called with each state; an exception of it ends the episode.
  """
  clock, first = asyncio.get_running_loop().time, state.address
  started = clock() if started is None else started
  seconds = min(deadline, state.caps.seconds)
  try:
    while True:
      if watch is not None:
        watch(state)
      if isinstance(request, episode_state.Done):
        return request.trajectory
      limit = seconds * (1.0 if state.landing else LANDING)
      with inflight.waiting(request):
        event = await answer(
          request,
          engine=engine,
          retriever=retriever,
          config=state.config,
          until=None if limit == math.inf else started + limit,
        )
      if state.caps.seconds < math.inf:
        state = dataclasses.replace(state, elapsed=clock() - started)
      before = state.address
      if _is_long(event):
        state, request = await asyncio.to_thread(steering.step, state, event)
      else:
        state, request = steering.step(state, event)
      if state.address != before:  # A rule has a turn sampled again.
        engine.release(before)
  finally:
    if state.address != first:
      engine.release(state.address)


async def answer(
  request: types.GenerateRequest | types.SearchRequest,
  *,
  engine: types.Engine,
  retriever: types.Retriever,
  config: config_lib.EpisodeConfig,
  until: float | None = None,
) -> episode_state.Event | None:
  """Returns the event that answers a request; an outage is a `Failure`.

  Args:
    request: what an episode waits for.
    engine, retriever: answer it.
    config: has the deadlines.
    until: event-loop time after which the result is None.
  """
  is_turn = isinstance(request, types.GenerateRequest)
  seconds = config.turn_deadline if is_turn else config.search_deadline
  ending = asyncio.timeout_at(until)
  try:
    async with ending, asyncio.timeout(seconds):
      if isinstance(request, types.GenerateRequest):
        return await engine.generate(request)
      return episode_state.Retrieved(tuple(await retriever.search(request)))
  # A generative retriever asks an engine, so a search can raise both errors.
  except (types.EngineError, types.RetrievalError, TimeoutError) as error:
    if ending.expired():
      return None
    why = str(error) or f"no answer within {seconds:g} seconds."
    what = (
      f"Turn {request.turn}"
      if isinstance(request, types.GenerateRequest)
      else f"The search for {request.query!r}"
    )
    return episode_state.Failure(f"{what} failed: {why}")


def _is_long(event: episode_state.Event | None) -> bool:
  """Returns whether a step must tokenize a long text.

  On the event loop it would delay the deadlines of all other episodes.
  """
  return (
    isinstance(event, episode_state.Retrieved)
    and sum(len(p.title) + len(p.text) for p in event.passages) > _LONG
  )


async def run_groups(
  assignments: Sequence[Assignment],
  parts: EpisodeParts,
  *,
  group: int,
  rollout: int,
  max_concurrency: int | None = None,
  keep: int | None = None,
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
  gate = (
    _OPEN if max_concurrency is None else asyncio.Semaphore(max_concurrency)
  )
  # The samplings of each group that is settled, by its index.
  settled: dict[int, list[types.Group]] = {}

  async def play_group(assignment: Assignment) -> None:
    budget = budgets.of(assignment.budget)
    samplings: list[types.Group] = []
    while not samplings or (len(samplings) < 2 and not _is_kept(samplings[0])):
      async with asyncio.TaskGroup() as playing:
        samples = [
          playing.create_task(
            run_episode(
              assignment.question,
              parts,
              budget=assignment.budget,
              scaffold=assignment.scaffold,
              address=types.Address(
                rollout, assignment.index, sample, attempt=len(samplings)
              ),
              inflight=inflight,
              gate=gate,
            )
          )
          for sample in range(group)
        ]
      samplings.append(
        types.Group(
          assignment.question,
          budget.searches,
          assignment.scaffold,
          tuple(sample.result() for sample in samples),
          budget.beyond_searches,
        )
      )
    settled[assignment.index] = samplings
    if keep and keep == sum(_is_kept(t[-1]) for t in settled.values()):
      for task in groups:
        if task is not asyncio.current_task():
          task.cancel()

  with inflight.watched():
    async with asyncio.TaskGroup() as tasks:
      groups = [tasks.create_task(play_group(each)) for each in assignments]
  return _rollout([settled[a.index] for a in assignments if a.index in settled])


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
