"""The asyncio driver of episodes: it waits, so that `episode` need not.

`run_groups` samples a rollout: it starts every episode at once, in one event
loop, and lets the engine and the retriever decide what runs. `run_episode`
plays one episode: it takes the request of a state, waits for the answer, and
passes the answer to `episode.step`.

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
from typing import NamedTuple, Protocol, TypeVar

from anysearch_jax import budgets, types
from anysearch_jax import config as config_lib
from anysearch_jax.environment import spec
from anysearch_jax.host import turns
from anysearch_jax.rollout import episode, episode_state

T = TypeVar("T")

_log = logging.getLogger(__name__)

# The share of an episode's seconds after which it is asked for its answer.
LANDING = 0.75
# Tokenizing more characters than this blocks the event loop for milliseconds.
_LONG_TEXT = 16384
# A gate that lets every episode run at once.
_NO_GATE = contextlib.nullcontext()
# The request that an episode waits for. An episode that waits for permission to
# run (max_concurrency) has no request yet; its address stands for one.
Request = (
  types.GenerateRequest
  | types.SearchRequest
  | types.ScoreRequest
  | types.Address
)
_REQUEST_NAMES = {
  types.GenerateRequest: "a turn",
  types.ScoreRequest: "scores",
  types.SearchRequest: "a search",
  types.Address: "a place",
}
# Seconds that a request may queue before the engine or retriever begins it. Its
# deadline stands still meanwhile (`host.turns`); an hour means a broken queue.
LONGEST_WAIT = 3600.0
_NOT_FINITE = (
  "the policy's log-probabilities are not finite (NaN or infinite), so its "
  "tokens mean nothing; its weights are damaged, or too large for the "
  "compute_dtype. Export or download them again, or compute in float32."
)
_NUMBER = re.compile(r"\d+")
_QUERY_CHARACTERS = (
  80  # Shown of a query: a policy wrote it, so it may be long.
)
_LISTED_REASONS = 5  # Of failures, in one log line.


@dataclasses.dataclass(frozen=True)
class Assignment:
  """One group to sample.

  Attributes:
    index: the question's position in the rollout, a part of every address.
    question: the question of all its episodes.
    budget: the budget of all its episodes.
    scaffold: whether they are played with the Phase I scaffold.
  """

  index: int
  question: types.Question
  budget: budgets.Assigned
  scaffold: bool


class Player(Protocol):
  """Plays episodes in a way of its own, in place of `rollout.episode`."""

  # Events since they were last cleared.
  counters: Counter[str]

  async def play(
    self,
    question: types.Question,
    parts: EpisodeParts,
    *,
    budget: budgets.Budget,
    scaffold: bool,
    address: types.Address,
    inflight: InFlight,
    deadline: float,
  ) -> types.Trajectory:
    """Plays one episode to its end.

    Args:
      question, parts, scaffold, address, inflight, deadline: as in
        `run_episode`.
      budget: what the episode may spend.

    Returns:
      The trajectory; `failed`, with the reason, if it could not be played.
    """


@dataclasses.dataclass(frozen=True)
class EpisodeParts:
  """The parts that all episodes of a rollout share.

  Attributes:
    engine: samples the turns.
    retriever: answers the searches.
    config: limits and deadlines.
    codec: the text side of the policy's tokenizer.
    environment: its texts and turn rules. Its `step` advances the episodes;
      `episode.step` does if it has none.
    trains: whether a training counts the log-probabilities that are not finite.
      Otherwise they end the episode as failed.
    player: plays the episodes; None: `run_episode` does.
  """

  engine: types.Engine
  retriever: types.Retriever
  config: config_lib.EpisodeConfig
  codec: types.TextCodec
  environment: spec.Environment
  trains: bool = False
  player: Player | None = None


class Rollout(NamedTuple):
  """The groups that remain after resampling, in the order of the assignments.

  Groups that `keep` cancelled are counted nowhere.

  Attributes:
    groups: the remaining groups.
    dropped: number of groups with fewer than two valid trajectories after their
      second sampling; they are not in `groups`.
    resampled: number of groups that were sampled a second time.
    failed: number of failed trajectories in all samplings, kept or not.
    reason: why the first of these trajectories failed; "" if none did.
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
    self._quiet_seconds = quiet_seconds
    self._warn = warn
    self._clock = clock
    self._span = span
    # Requests, and since when episodes wait for them.
    self._waits: dict[object, tuple[Request, float]] = {}
    self._note_progress()

  def _note_progress(self) -> None:
    """Starts a new quiet period; the next warning is at its end."""
    self._progress_time = self._clock()
    self._warn_after = self._quiet_seconds

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
      self._note_progress()

  @contextlib.contextmanager
  def watch_progress(self) -> Iterator[None]:
    """Checks for progress on the running event loop inside the context."""
    if not self._quiet_seconds > 0:
      yield
      return

    async def watch() -> None:
      while True:
        await asyncio.sleep(self.check_progress())

    self._note_progress()
    watch_task = asyncio.create_task(watch())
    try:
      yield
    finally:
      watch_task.cancel()

  def check_progress(self) -> float:
    """Warns if the quiet period is over; returns seconds to the next check."""
    now = self._clock()
    quiet = now - self._progress_time
    if quiet >= self._warn_after:
      self._warn_after = 2 * quiet
      if self._waits:
        self._warn(self._warning(quiet, now))
    return self._warn_after - quiet

  def _warning(self, quiet: float, now: float) -> str:
    """Returns the number of episodes per kind of request, and the oldest."""
    waits = list(self._waits.values())
    kinds = Counter(_REQUEST_NAMES[type(request)] for request, _ in waits)
    counts = (f"{count} waiting for {kind}" for kind, count in kinds.items())
    # Queued episodes are blocked by running ones: report a running one first.
    oldest, since = min(
      waits, key=lambda wait: (isinstance(wait[0], types.Address), wait[1])
    )
    match oldest:
      case types.SearchRequest(query=query):
        name = f"the search for {query[:_QUERY_CHARACTERS]!r}"
      case types.GenerateRequest(address=address, turn=turn):
        name = f"turn {turn} of {address}"
      case _:
        name = str(oldest)
    return (
      f"Nothing moved for {round(quiet, 1):g} s; in flight: "
      f"{', '.join(counts)}. The oldest, since {round(now - since, 1):g} s: "
      f"{name}."
    )


# An `InFlight` that never warns.
OFF = InFlight()


async def run_episode(
  question: types.Question,
  parts: EpisodeParts,
  *,
  budget: budgets.Assigned,
  scaffold: bool,
  address: types.Address,
  inflight: InFlight = OFF,
  gate: contextlib.AbstractAsyncContextManager[None] = _NO_GATE,
  started: float | None = None,
  deadline: float = math.inf,
  watch: Callable[[episode_state.Episode], None] | None = None,
) -> types.Trajectory:
  """Plays one episode to its end, and releases it from the engine.

  After three quarters of its time the episode is asked for its answer.

  Args:
    question, budget, scaffold, address: as in `episode.start`.
    parts: the engine, the retriever and the rules of play.
    inflight: records the requests that the episode waits for.
    gate: entered while the episode is played, for example a semaphore.
    started: event-loop time at which the episode's time began; None: now.
    deadline: seconds that the episode may take; its budget may allow fewer.
    watch: called with each state; an exception of it ends the episode.

  Returns:
    The trajectory. It is `failed`, with the reason, if the engine or the
    retriever could not answer in time.
  """
  with contextlib.ExitStack() as queueing:
    # Until the gate opens, the episode's address stands for its request.
    queueing.enter_context(inflight.waiting(address))
    async with gate:
      queueing.close()
      if parts.player is not None:
        return await parts.player.play(
          question,
          parts,
          budget=budgets.of(budget),
          scaffold=scaffold,
          address=address,
          inflight=inflight,
          deadline=deadline,
        )
      clock = asyncio.get_running_loop().time
      start_time = clock() if started is None else started
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
        elapsed=lambda: clock() - start_time,
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
          # The last quarter of the time is kept for the answer.
          until = start_time + seconds * (1.0 if state.landing else LANDING)
          with inflight.waiting(request):
            event = await answer_request(request, parts, until=until)
          if state.caps.seconds < math.inf:
            elapsed = clock() - start_time
            state = dataclasses.replace(state, elapsed=elapsed)
          characters = 0  # That `step` tokenizes.
          if isinstance(event, episode_state.Retrieved):
            characters = sum(
              len(passage.title) + len(passage.text)
              for passage in event.passages
            )
          advance = functools.partial(step, state, event)
          state = await _off_loop(characters, advance)
          # An environment's own `step` may continue at another address. Release
          # the old one first: if many episodes held one slot of the engine and
          # waited for a second one, none could continue.
          if state.address != address:
            parts.engine.release(address)
            address = state.address
      finally:
        parts.engine.release(address)


async def _off_loop(characters: int, step: Callable[[], T]) -> T:
  """Returns `step()`, which tokenizes a text of `characters` characters.

  A long text is tokenized on another thread: on the event loop it would delay
  the deadlines of all other episodes.
  """
  if characters > _LONG_TEXT:
    return await asyncio.to_thread(step)
  return step()


async def answer_request(
  request: types.GenerateRequest | types.SearchRequest | types.ScoreRequest,
  parts: EpisodeParts,
  *,
  until: float = math.inf,
) -> episode_state.Event | None:
  """Answers a request by the engine or the retriever.

  Args:
    request: a turn to sample, a search, or texts to score.
    parts: the engine, the retriever and their deadlines.
    until: event-loop time at which the episode must land.

  Returns:
    The event for `episode.step`; a `Failure` if the engine or the retriever
    could not answer before its own deadline, None after `until`.
  """
  seconds = parts.config.turn_deadline
  if isinstance(request, types.GenerateRequest):
    name = f"Turn {request.turn}"
  elif isinstance(request, types.ScoreRequest):
    name = "The scoring"
  else:
    seconds = parts.config.search_deadline
    name = f"The search for {request.query!r}"
  ending = asyncio.timeout_at(None if until == math.inf else until)
  limit = turns.Limit(seconds, LONGEST_WAIT)
  try:
    async with ending, limit:
      if isinstance(request, types.GenerateRequest):
        turn = await parts.engine.generate(request)
        if not parts.trains and not all(map(math.isfinite, turn.logps)):
          return episode_state.Failure(f"{name} failed: {_NOT_FINITE}")
        return turn
      if isinstance(request, types.ScoreRequest):
        return await asyncio.to_thread(_scored, parts.engine, request)
      passages = await parts.retriever.search(request)
      return episode_state.Retrieved(tuple(passages))
  # A generative retriever asks an engine, so a search can raise both errors.
  except (types.EngineError, types.RetrievalError, TimeoutError) as error:
    if ending.expired():
      return None
    return episode_state.Failure(f"{name} failed: {str(error) or limit.why()}")


def _scored(
  engine: types.Engine, request: types.ScoreRequest
) -> episode_state.Scored:
  """Returns what the first part of an engine scores; raises `EngineError`."""
  if not isinstance(engine, types.ScoringEngine):
    raise types.EngineError(
      f"found the engine {type(engine).__name__}, which scores no text; "
      "expected a ScoringEngine, such as that of engine.kind=jax."
    )
  logps = []
  for sequence in request.sequences:
    part_logps = [*engine.scores(sequence).values()]
    if not part_logps:
      raise types.EngineError("no part of the engine scored a text.")
    logps.append(tuple(part_logps[0]))
  return episode_state.Scored(tuple(logps))


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

  Advantages compare the trajectories of a group (the paper's appendix "GRPO
  Optimization Objective"), so a group needs two valid ones. A group with
  fewer is sampled once more, as attempt 1, and dropped if that fails too. A
  group of one is always kept, failed or not.

  Args:
    assignments: the groups; their indices differ.
    parts: the engine, the retriever and the rules of play.
    group: trajectories per group (the paper's G), >= 1.
    rollout: number of the rollout, a part of every address.
    max_concurrency: limit on the episodes that run at a time, >= 1; None: none.
    keep: number of groups to keep, >= 1: once that many can be kept, all others
      are cancelled and released. Which ones depends on timing. None waits for
      all groups.
    inflight: records the requests that episodes wait for, and warns if no
      episode makes progress.
    searchless: number of samples of each group, its last ones, that get a
      budget without searches.

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
    _NO_GATE if max_concurrency is None else asyncio.Semaphore(max_concurrency)
  )
  # The samplings of each group that has ended, one or two, by its index.
  finished: dict[int, list[types.Group]] = {}

  async def play_group(assignment: Assignment) -> None:
    budget = budgets.of(assignment.budget)
    no_searches = dataclasses.replace(budget, searches=0)
    samplings: list[types.Group] = []
    while not samplings or (len(samplings) < 2 and not _is_kept(samplings[0])):
      async with asyncio.TaskGroup() as group_tasks:
        samples = [
          group_tasks.create_task(
            run_episode(
              assignment.question,
              parts,
              budget=budget if sample < group - searchless else no_searches,
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
          question=assignment.question,
          budget=budget.searches,
          scaffold=assignment.scaffold,
          trajectories=tuple(sample.result() for sample in samples),
          caps=budget.beyond_searches,
        )
      )
    finished[assignment.index] = samplings
    kept_groups = sum(_is_kept(tries[-1]) for tries in finished.values())
    if keep and keep == kept_groups:
      for task in tasks:
        if task is not asyncio.current_task():
          task.cancel()

  with inflight.watch_progress():
    async with asyncio.TaskGroup() as rollout_tasks:
      tasks = [
        rollout_tasks.create_task(play_group(assignment))
        for assignment in assignments
      ]
  # In the order of the assignments, without groups that `keep` cancelled.
  all_samplings = [
    finished[assignment.index]
    for assignment in assignments
    if assignment.index in finished
  ]
  groups = [
    samplings[-1] for samplings in all_samplings if _is_kept(samplings[-1])
  ]
  trajectories = [
    trajectory
    for samplings in all_samplings
    for sampling in samplings
    for trajectory in sampling.trajectories
  ]
  failed = [trajectory for trajectory in trajectories if trajectory.failed]
  if failed:
    _log.warning(
      "Rollout %d: %d of %d episodes failed and train nothing: %s",
      rollout,
      len(failed),
      len(trajectories),
      failure_summary(failed),
    )
  return Rollout(
    groups=groups,
    dropped=len(all_samplings) - len(groups),
    resampled=sum(len(samplings) > 1 for samplings in all_samplings),
    failed=len(failed),
    reason=failed[0].reason if failed else "",
  )


def failure_summary(failed: Iterable[types.Trajectory]) -> str:
  """Returns the five most frequent reasons why episodes failed, with counts.

  Reasons that differ only in the query, the turn or in numbers count as one;
  the first of each is quoted.
  """
  examples: dict[str, str] = {}
  counts: Counter[str] = Counter()
  for trajectory in failed:
    # `answer_request` writes "the search ... failed: CAUSE".
    cause = trajectory.reason.partition(" failed: ")[2] or trajectory.reason
    kind = _NUMBER.sub("0", cause)
    examples.setdefault(kind, trajectory.reason)
    counts[kind] += 1
  return " ".join(
    f"{count} times: {examples[kind]}"
    for kind, count in counts.most_common(_LISTED_REASONS)
  )


def _is_kept(group: types.Group) -> bool:
  """Returns whether a group is kept: it has one sample, or two valid ones."""
  valid = sum(not trajectory.failed for trajectory in group.trajectories)
  return len(group.trajectories) == 1 or valid >= 2
