"""The asyncio driver of episodes: all waiting happens here, none in `episode`.

Every request to an engine or retriever has a deadline. If the engine or the
retriever cannot answer, the episode ends as `failed`. Any other exception is a
bug and stops the rollout. `InFlight` warns when no episode makes progress.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from anysearch_jax import budgets, types
from anysearch_jax import config as config_lib
from anysearch_jax.environment import spec
from anysearch_jax.host import turns
from anysearch_jax.rollout import episode, episode_state

T = TypeVar("T")

_log = logging.getLogger(__name__)

# The share of its seconds after which an episode is asked for its answer.
LANDING = 0.75
# Tokenizing more characters than this blocks the event loop for milliseconds.
_LONG = 16384
# Lets every episode run at once.
_OPEN = contextlib.nullcontext()
# What an episode waits for. An address: permission to run (max_concurrency).
Request = types.GenerateRequest | types.SearchRequest | types.Address
_STATES = {
  types.GenerateRequest: "a turn",
  types.SearchRequest: "a search",
  types.Address: "a place",
}
# Seconds that a request may wait for its turn (`turns`), whatever it waits for.
LONGEST_WAIT = 3600.0
_NUMBER = re.compile(r"\d+")
_QUERY = 80  # Show at most this many characters: a policy wrote the query.


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

  `codec` is the text side of the policy's tokenizer, `environment` what is
  played; its `step` advances the episodes, `episode.step` if it has none.
  """

  engine: types.Engine
  retriever: types.Retriever
  config: config_lib.EpisodeConfig
  codec: types.TextCodec
  environment: spec.Environment


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


class InFlight:
  """Warns when no running episode of an event loop makes progress.

  Until its deadline passes, an engine or retriever that hangs looks like one
  that works. Progress is a turn or search that ends, or an episode that starts
  to run. Tokens inside a turn are not visible here, so one long turn can also
  cause the warning. The warning never aborts anything; deadlines do.

  Args:
    quiet_seconds: warn after this many seconds without progress, and again
      each time the quiet period has doubled. 0 never warns.
    warn: called with the warning.
    clock: a monotonic clock in seconds.
    span: entered while an episode waits for a request, for example to time it.
  """

  def __init__(
    self,
    quiet_seconds: float = 0.0,
    *,
    warn: Callable[[str], None] = _log.warning,
    clock: Callable[[], float] = time.monotonic,
    span: Callable[[Request], contextlib.AbstractContextManager[None]] = (
      lambda request: contextlib.nullcontext()
    ),
  ):
    self._quiet, self._warn, self._clock = quiet_seconds, warn, clock
    self._span = span
    # Requests, and since when episodes wait for them.
    self._waits: dict[object, tuple[Request, float]] = {}
    # When something last moved, and the quiet seconds of the next warning.
    self._moved, self._due = clock(), quiet_seconds

  @contextlib.contextmanager
  def waiting(self, request: Request) -> Iterator[None]:
    """Marks one episode as waiting for `request` inside the context."""
    key = object()
    self._waits[key] = request, self._clock()
    try:
      with self._span(request):
        yield
    finally:
      del self._waits[key]
      self._moved, self._due = self._clock(), self._quiet

  @contextlib.contextmanager
  def watched(self) -> Iterator[None]:
    """Checks for progress on the running event loop inside the context."""
    if not self._quiet > 0:
      yield
      return

    async def watch() -> None:
      while True:
        await asyncio.sleep(self.look())

    self._moved, self._due = self._clock(), self._quiet
    watching = asyncio.create_task(watch())
    try:
      yield
    finally:
      watching.cancel()

  def look(self) -> float:
    """Warns if the quiet period is over; returns seconds to the next check."""
    now = self._clock()
    quiet = now - self._moved
    if quiet >= self._due:
      self._due = 2 * quiet
      if self._waits:
        self._warn(self._sentence(quiet, now))
    return self._due - quiet

  def _sentence(self, quiet: float, now: float) -> str:
    """Returns how many episodes wait for what, and the oldest request."""
    waits = list(self._waits.values())
    states = Counter(_STATES[type(request)] for request, _ in waits)
    counts = (f"{n} waiting for {state}" for state, n in states.items())
    # Queued episodes are blocked by running ones: report a running one first.
    oldest, since = min(
      waits, key=lambda wait: (isinstance(wait[0], types.Address), wait[1])
    )
    match oldest:
      case types.SearchRequest(query=query):
        name = f"the search for {query[:_QUERY]!r}"
      case types.GenerateRequest(address=address, turn=turn):
        name = f"turn {turn} of {address}"
      case _:
        name = str(oldest)
    return (
      f"Nothing moved for {round(quiet, 1):g} s; in flight: "
      f"{', '.join(counts)}. The oldest, since {round(now - since, 1):g} s: "
      f"{name}."
    )


# Never warns.
OFF = InFlight()


async def run_episode(
  question: types.Question,
  parts: EpisodeParts,
  *,
  budget: budgets.Assigned,
  scaffold: bool,
  address: types.Address,
  inflight: InFlight = OFF,
  gate: contextlib.AbstractAsyncContextManager[None] = _OPEN,
  started: float | None = None,
  deadline: float = math.inf,
  watch: Callable[[episode_state.Episode], None] | None = None,
) -> types.Trajectory:
  """Plays one episode to its end, and releases it from the engine.

  An episode whose time has passed by three quarters is asked for its answer.

  Args:
    question, budget, scaffold, address: as in `episode.start`.
    parts: what the episode is played with.
    inflight: records what the episode waits for.
    gate: entered while the episode is played.
    started: when its time began, in event-loop time; None: now.
    deadline: seconds that it may take, besides those of its budget.
    watch: called with each state; an exception of it ends the episode.

  Returns:
    The trajectory. It is `failed`, with the reason, if the engine or the
    retriever could not answer in time.
  """
  with contextlib.ExitStack() as outside:
    outside.enter_context(inflight.waiting(address))
    async with gate:
      outside.close()
      clock = asyncio.get_running_loop().time
      began = clock() if started is None else started
      step = parts.environment.step or episode.step
      begin = functools.partial(
        episode.start,
        question,
        budget=budget,
        scaffold=scaffold,
        address=address,
        config=parts.config,
        environment=parts.environment,
        codec=parts.codec,
        elapsed=lambda: clock() - began,
      )
      try:
        state = await _off_loop(len(question.text), begin)
        seconds = min(deadline, state.caps.seconds)
        while True:
          if watch is not None:
            watch(state)
          request = state.request
          if isinstance(request, episode_state.Done):
            return request.trajectory
          assert request is not None  # It is only inside `start`.
          until = began + seconds * (1.0 if state.landing else LANDING)
          with inflight.waiting(request):
            event = await answer(request, parts, until=until)
          if state.caps.seconds < math.inf:
            state = dataclasses.replace(state, elapsed=clock() - began)
          length = 0
          if isinstance(event, episode_state.Retrieved):
            length = sum(len(p.title) + len(p.text) for p in event.passages)
          state = await _off_loop(length, functools.partial(step, state, event))
          # Episodes that hold a slot of the engine each, and need a second one,
          # would wait for each other.
          if state.address != address:
            parts.engine.release(address)
            address = state.address
      finally:
        parts.engine.release(address)


async def _off_loop(characters: int, step: Callable[[], T]) -> T:
  """Returns `step()`, which encodes a text of this length.

  A long one would delay the deadlines of all other episodes on the event loop.
  """
  return await asyncio.to_thread(step) if characters > _LONG else step()


async def answer(
  request: types.GenerateRequest | types.SearchRequest,
  parts: EpisodeParts,
  *,
  until: float = math.inf,
) -> episode_state.Event | None:
  """Returns the event that answers a request; an outage is a `Failure`.

  It is None after the time `until` of the event loop.
  """
  if isinstance(request, types.GenerateRequest):
    seconds, what = parts.config.turn_deadline, f"Turn {request.turn}"
  else:
    seconds = parts.config.search_deadline
    what = f"The search for {request.query!r}"
  ending = asyncio.timeout_at(None if until == math.inf else until)
  limit = turns.Limit(seconds, LONGEST_WAIT)
  try:
    async with ending, limit:
      if isinstance(request, types.GenerateRequest):
        return await parts.engine.generate(request)
      found = await parts.retriever.search(request)
      return episode_state.Retrieved(tuple(found))
  # A generative retriever asks an engine, so a search can raise both errors.
  except (types.EngineError, types.RetrievalError, TimeoutError) as error:
    if ending.expired():
      return None
    return episode_state.Failure(f"{what} failed: {str(error) or limit.why()}")


async def run_groups(
  assignments: Sequence[Assignment],
  parts: EpisodeParts,
  *,
  group: int,
  rollout: int,
  max_concurrency: int | None = None,
  keep: int | None = None,
  inflight: InFlight = OFF,
  searchless: int = 0,
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
    max_concurrency: the most episodes at a time, >= 1; None for no bound.
    keep: >= 1; once so many groups can be kept, all others are cancelled and
      released; which ones depends on timing. None waits for all groups.
    inflight: records what the episodes wait for, and warns if nothing moves.
    searchless: the last so many samples of each group get no search.

  Returns:
    The groups in the order of `assignments`, each with its samples in order,
    and counts.

  Raises:
    ValueError: `group`, `max_concurrency` or `keep` below 1, or two
      assignments with the same index.
    ExceptionGroup: an episode raised; the other episodes are cancelled.
  """
  counts = {"group": group, "max_concurrency": max_concurrency, "keep": keep}
  for name, value in counts.items():
    if value is not None and value < 1:
      raise ValueError(f"Found {name}={value}, expected 1 or more.")
  indices = {assignment.index for assignment in assignments}
  if len(indices) != len(assignments):
    raise ValueError(
      f"Found {len(assignments)} assignments with {len(indices)} indices; "
      "expected each index once, because episodes are addressed by it."
    )
  gate = (
    _OPEN if max_concurrency is None else asyncio.Semaphore(max_concurrency)
  )
  # The samplings of each group that is settled, by its index.
  settled: dict[int, list[types.Group]] = {}

  async def play_group(assignment: Assignment) -> None:
    budget = budgets.of(assignment.budget)
    without = dataclasses.replace(budget, searches=0)
    samplings: list[types.Group] = []
    while not samplings or (len(samplings) < 2 and not _is_kept(samplings[0])):
      async with asyncio.TaskGroup() as of_group:
        samples = [
          of_group.create_task(
            run_episode(
              assignment.question,
              parts,
              budget=budget if sample < group - searchless else without,
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
      played = tuple(sample.result() for sample in samples)
      given = assignment.question, budget.searches, assignment.scaffold
      samplings.append(types.Group(*given, played, budget.beyond_searches))
    settled[assignment.index] = samplings
    if keep and keep == sum(_is_kept(t[-1]) for t in settled.values()):
      for task in playing:
        if task is not asyncio.current_task():
          task.cancel()

  with inflight.watched():
    async with asyncio.TaskGroup() as tasks:
      playing = [tasks.create_task(play_group(each)) for each in assignments]
  samplings = [settled[a.index] for a in assignments if a.index in settled]
  groups = [tries[-1] for tries in samplings if _is_kept(tries[-1])]
  failed = [
    trajectory
    for tries in samplings
    for sampled in tries
    for trajectory in sampled.trajectories
    if trajectory.failed
  ]
  if failed:
    count = sum(len(g.trajectories) for tries in samplings for g in tries)
    _log.warning(
      "Rollout %d: %d of %d episodes failed and train nothing: %s",
      *(rollout, len(failed), count, reasons(failed)),
    )
  return Rollout(
    groups=groups,
    dropped=len(samplings) - len(groups),
    resampled=sum(len(tries) > 1 for tries in samplings),
    failed=len(failed),
    reason=failed[0].reason if failed else "",
  )


def reasons(failed: Iterable[types.Trajectory]) -> str:
  """Returns the five most frequent reasons why episodes failed, with counts.

  Reasons that differ only in the query, the turn or in numbers are one; the
  first of each is quoted.
  """
  first: dict[str, str] = {}
  count: Counter[str] = Counter()
  for trajectory in failed:
    kind = _NUMBER.sub("0", trajectory.reason.partition(" failed: ")[2])
    first.setdefault(kind, trajectory.reason)
    count[kind] += 1
  return " ".join(
    f"{n} times: {first[kind]}" for kind, n in count.most_common(5)
  )


def _is_kept(sampled: types.Group) -> bool:
  """Returns whether a group is kept: it has one sample, or two valid ones."""
  valid = sum(not trajectory.failed for trajectory in sampled.trajectories)
  return len(sampled.trajectories) == 1 or valid >= 2
