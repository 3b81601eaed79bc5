"""The asyncio driver of episodes: all waiting happens here, none in `episode`.

Every request to an engine or retriever has a deadline. If the engine or the
retriever cannot answer, the episode ends as `failed`. Any other exception is a
bug and stops the rollout.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.rollout import episode, episode_state
from anysearch_jax.rollout import inflight as inflight_lib

# Tokenizing more characters than this blocks the event loop for milliseconds.
_LONG = 16384


class Assignment(NamedTuple):
  """One group to sample; `index` is the question's position in the rollout."""

  index: int
  question: types.Question
  budget: int
  scaffold: bool


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
  *,
  budget: int,
  scaffold: bool,
  address: types.Address,
  engine: types.Engine,
  retriever: types.Retriever,
  config: config_lib.EpisodeConfig,
  codec: types.TextCodec,
  inflight: inflight_lib.InFlight = inflight_lib.OFF,
) -> types.Trajectory:
  """Plays one episode to its end.

  Args:
    question, budget, scaffold, address, config, codec: as in `episode.start`.
    engine: samples the turns; the episode is released from it at the end.
    retriever: answers the searches.
    inflight: records what the episode waits for.

  Returns:
    The trajectory. It is `failed`, with the reason, if the engine or the
    retriever could not answer in time.
  """
  try:
    state, request = episode.start(
      question,
      budget=budget,
      scaffold=scaffold,
      address=address,
      config=config,
      codec=codec,
    )
    return await play(
      state, request, engine=engine, retriever=retriever, inflight=inflight
    )
  finally:
    engine.release(address)


async def play(
  state: episode_state.Episode,
  request: episode_state.Request,
  *,
  engine: types.Engine,
  retriever: types.Retriever,
  inflight: inflight_lib.InFlight = inflight_lib.OFF,
) -> types.Trajectory:
  """Plays an episode from its current state to its end.

  Args:
    state, request: as returned by `episode.start` or `episode.step`.
    engine, retriever, inflight: as in `run_episode`; the caller releases the
      episode.
  """
  while not isinstance(request, episode_state.Done):
    with inflight.waiting(request):
      event = await answer(
        request, engine=engine, retriever=retriever, config=state.config
      )
    state, request = await _step(state, event)
  return request.trajectory


async def _step(
  state: episode_state.Episode, event: episode_state.Event
) -> tuple[episode_state.Episode, episode_state.Request]:
  """Calls `episode.step`, on a thread if it must tokenize a long text.

  On the event loop it would delay the deadlines of all other episodes.
  """
  if isinstance(event, episode_state.Retrieved):
    if sum(len(p.title) + len(p.text) for p in event.passages) > _LONG:
      return await asyncio.to_thread(episode.step, state, event)
  return episode.step(state, event)


async def run_groups(
  assignments: Sequence[Assignment],
  *,
  group: int,
  rollout: int,
  engine: types.Engine,
  retriever: types.Retriever,
  config: config_lib.EpisodeConfig,
  codec: types.TextCodec,
  max_concurrency: int | None = None,
  keep: int | None = None,
  on_done: Callable[[types.Trajectory], None] | None = None,
  inflight: inflight_lib.InFlight = inflight_lib.OFF,
) -> Rollout:
  """Samples `group` trajectories for every assignment, all at once.

  If fewer than two trajectories of a group of two or more are valid, no group
  statistic exists. Such a group is sampled once more, as attempt 1, and dropped
  if that fails too. A group of one is always kept, failed or not.

  Args:
    assignments: the groups; their indices differ.
    group: trajectories per group (the paper's G), >= 1.
    rollout: number of the rollout, a part of every address.
    engine, retriever, config, codec: as in `run_episode`.
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
  gate = (
    contextlib.nullcontext()
    if max_concurrency is None
    else asyncio.Semaphore(max_concurrency)
  )

  async def sample_one(
    assignment: Assignment, sample: int, attempt: int
  ) -> types.Trajectory:
    index, question, budget, scaffold = assignment
    address = types.Address(rollout, index, sample, attempt)
    with contextlib.ExitStack() as outside:
      outside.enter_context(inflight.waiting(address))
      async with gate:
        outside.close()
        trajectory = await run_episode(
          question,
          budget=budget,
          scaffold=scaffold,
          address=address,
          engine=engine,
          retriever=retriever,
          config=config,
          codec=codec,
          inflight=inflight,
        )
    if on_done is not None:
      on_done(trajectory)
    return trajectory

  async def sample_group(assignment: Assignment, attempt: int) -> types.Group:
    _, question, budget, scaffold = assignment
    async with asyncio.TaskGroup() as tasks:
      samples = [
        tasks.create_task(sample_one(assignment, sample, attempt))
        for sample in range(group)
      ]
    trajectories = tuple(task.result() for task in samples)
    return types.Group(question, budget, scaffold, trajectories)

  async def settle(assignment: Assignment) -> None:
    """Samples a group, and a second time if the first cannot be kept."""
    tries = [await sample_group(assignment, 0)]
    if not _stands(tries[0]):
      tries.append(await sample_group(assignment, 1))
    settled[assignment.index] = tries
    if keep and keep == sum(_stands(t[-1]) for t in settled.values()):
      for task in settling:
        if task is not asyncio.current_task():
          task.cancel()

  settled: dict[int, list[types.Group]] = {}
  with inflight.watched():
    async with asyncio.TaskGroup() as tasks:
      settling = [tasks.create_task(settle(each)) for each in assignments]
  samplings = [settled[a.index] for a in assignments if a.index in settled]
  groups = [tries[-1] for tries in samplings if _stands(tries[-1])]
  lost = [
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
    failed=len(lost),
    reason=lost[0].reason if lost else "",
  )


async def answer(
  request: types.GenerateRequest | types.SearchRequest,
  *,
  engine: types.Engine,
  retriever: types.Retriever,
  config: config_lib.EpisodeConfig,
) -> episode_state.Event:
  """Returns the event that answers a request; an outage is a `Failure`."""
  is_turn = isinstance(request, types.GenerateRequest)
  seconds = config.turn_deadline if is_turn else config.search_deadline
  try:
    async with asyncio.timeout(seconds):
      if is_turn:
        return await engine.generate(request)
      return episode_state.Retrieved(tuple(await retriever.search(request)))
  # A generative retriever asks an engine, so a search can raise both errors.
  except (types.EngineError, types.RetrievalError, TimeoutError) as error:
    who = (
      f"Turn {request.turn}" if is_turn else f"The search for {request.query!r}"
    )
    what = str(error) or f"no answer within {seconds:g} seconds."
    return episode_state.Failure(f"{who} failed: {what}")


def _stands(sampled: types.Group) -> bool:
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
  indices = [assignment[0] for assignment in assignments]
  if len(set(indices)) != len(indices):
    raise ValueError(
      f"Found {len(indices)} assignments with {len(set(indices))} indices; "
      "expected each index once, because episodes are addressed by it."
    )
