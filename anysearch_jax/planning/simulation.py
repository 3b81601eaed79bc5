"""Simulates runs on clusters that need not be present.

`play` is a discrete-event simulation of one rollout. A server either prefills
what waits, or samples a token of every row at a time: a step takes
`step + row * rows` seconds, so all rows of a server advance together, and its
next event is the end of the row with the fewest tokens left. Events are those
of turns and searches, never of tokens. `schedule` then arranges rollouts as
`training/pipeline` does:

    sample k    begins after sampling k - 1, with the weights after k - level
    train k     begins after training k - 1 and sampling k

Everything is a pure function of its arguments.
"""

from __future__ import annotations

import collections
import heapq
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

_ARRIVES, _PREFILLED, _SAMPLED = range(3)  # Events of a server.
_CLOSE = 1e-9  # Tokens; rows that end within them end together.
_WARM = 8  # How often the simulated rollouts repeat, until a run is steady.


class Turn(NamedTuple):
  """One turn: tokens to prefill, tokens to sample, and the search after it.

  search: seconds until the next turn begins; the last turn's is ignored.
  """

  given: float
  sampled: float
  search: float = 0.0


Episode = Sequence[Turn]


class Server(NamedTuple):
  """One sampler.

  prefill: seconds of a prefilled token; a prefill takes at least a `step`.
  step: seconds of a step of decode; row: what each of its rows adds.
  rows: the most rows of a step. slots: the most episodes at a time.
  """

  prefill: float
  step: float
  row: float = 0.0
  rows: int = 32
  slots: int = 80


class Played(NamedTuple):
  """A simulated rollout.

  seconds: until its last episode ended. busy: the share of them in which a
  server worked, on average. turns: mean seconds of a turn, with its waiting.
  searches: when each search began, ascending.
  """

  seconds: float
  busy: float
  turns: float
  searches: np.ndarray

  def queries(self) -> tuple[float, float]:
    """Returns searches a second: the mean, and the most in any one second."""
    if not len(self.searches):
      return 0.0, 0.0
    ends = np.searchsorted(self.searches, self.searches + 1.0)
    most = int(np.max(ends - np.arange(len(ends))))
    return len(self.searches) / self.seconds, float(most)


class _State:
  """What one server does; `clock` is when `tokens` was true.

  tokens: that every row has sampled since the beginning.
  rows: a heap of (`tokens` at its end, order, episode).
  """

  def __init__(self) -> None:
    self.clock = self.tokens = self.busy = 0.0
    self.rows: list[tuple[float, int, int]] = []
    self.arrived: list[int] = []
    self.waiting: collections.deque[int] = collections.deque()
    self.prefilling: list[int] = []
    self.stamp = 0  # An event with another stamp is outdated.


def play(episodes: Sequence[Episode], servers: int, server: Server) -> Played:
  """Simulates the episodes of one rollout on equal servers.

  Episodes begin in order, dealt evenly; one that waits takes the place of one
  that ends. An episode stays on its server. There is at least one of each.
  """
  states = [_State() for _ in range(servers)]
  at, began = [0] * len(episodes), [0.0] * len(episodes)
  order = itertools.count()
  # When, order, what, which server, and its stamp or the episode that arrives.
  events: list[tuple[float, int, int, int, int]] = []
  searches: list[float] = []
  turns, ended = 0.0, 0.0

  def speed(state: _State) -> float:
    return server.step + server.row * len(state.rows)

  def advance(state: _State, now: float) -> None:
    if state.rows and not state.prefilling:
      state.tokens += (now - state.clock) / speed(state)
      state.busy += now - state.clock
    state.clock = now

  def go_on(index: int, now: float) -> None:
    """Chooses what a server does next, after `advance`."""
    state = states[index]
    if state.prefilling:
      return
    state.stamp += 1
    if state.arrived:
      state.prefilling, state.arrived = state.arrived, []
      given = sum(episodes[e][at[e]].given for e in state.prefilling)
      took = max(server.step, server.prefill * given) if given else 0.0
      state.busy += took
      event, when = _PREFILLED, now + took
    else:
      while state.waiting and len(state.rows) < server.rows:
        e = state.waiting.popleft()
        end = state.tokens + episodes[e][at[e]].sampled
        heapq.heappush(state.rows, (end, next(order), e))
      if not state.rows:
        return
      left = max(0.0, state.rows[0][0] - state.tokens)
      event, when = _SAMPLED, now + left * speed(state)
    heapq.heappush(events, (when, next(order), event, index, state.stamp))

  # Neighbours, such as the samples of a group, share a server.
  count = min(len(episodes), servers * server.slots)
  queue = iter(range(count, len(episodes)))
  for e in range(count):
    states[e * servers // count].arrived.append(e)
  for index in range(servers):
    go_on(index, 0.0)
  while events:
    now, _, event, index, of = heapq.heappop(events)
    state = states[index]
    if event != _ARRIVES and of != state.stamp:
      continue
    advance(state, now)
    if event == _ARRIVES:
      began[of] = now
      state.arrived.append(of)
    elif event == _PREFILLED:
      state.waiting.extend(state.prefilling)
      state.prefilling = []
    else:
      done = state.rows[0][0]
      state.tokens = max(state.tokens, done)
      while state.rows and state.rows[0][0] <= done + _CLOSE:
        e = heapq.heappop(state.rows)[2]
        turns, ended = turns + now - began[e], now
        if at[e] + 1 < len(episodes[e]):
          searches.append(now)
          back = now + episodes[e][at[e]].search
          at[e] += 1
          heapq.heappush(events, (back, next(order), _ARRIVES, index, e))
        elif (e := next(queue, -1)) >= 0:
          began[e] = now
          state.arrived.append(e)
    go_on(index, now)
  number = sum(map(len, episodes))
  busy = sum(x.busy for x in states) / servers / ended if ended else 0.0
  return Played(ended, busy, turns / number, np.asarray(searches))


class Schedule(NamedTuple):
  """A steady run: seconds of a rollout, shares of sampling and training."""

  seconds: float
  sampling: float
  training: float


def schedule(
  sampling: Sequence[float],
  training: Sequence[float],
  *,
  level: int,
  hand_over: float = 0.0,
) -> Schedule:
  """Arranges sampling and training of rollouts, as `pipeline.async_level` does.

  Args:
    sampling: seconds of sampling each rollout.
    training: seconds of training on each.
    level: rollout k is sampled with the weights from before training on rollout
      k - level.
    hand_over: seconds of giving the servers new weights, which then wait.

  There are at least level + 3 rollouts.
  """
  count, first = len(sampling), level + 1
  sampled, trained = [0.0] * (count + 1), [0.0] * (count + 1)
  for k in range(count):  # The last item is the beginning: index -1.
    begin = sampled[k - 1]
    if k > level:
      begin = max(begin, trained[k - level - 1]) + hand_over
    sampled[k] = begin + sampling[k]
    trained[k] = max(trained[k - 1], sampled[k]) + training[k]
  took = trained[count - 1] - trained[first]
  return Schedule(
    took / (count - 1 - first),
    sum(sampling[first + 1 :]) / took,
    sum(training[first + 1 :]) / took,
  )


class Workload(NamedTuple):
  """What a run does, and how fast its parts are on one kind of device.

  draw: returns the episodes of a rollout. server: one sampler, on
  `server_devices`. train: seconds of training on a rollout, by the number of
  copies of the trainer, each on `trainer_devices`. hand_over: seconds, by
  copies and by servers. between: seconds of a rollout after its last episode,
  before training. level: `pipeline.async_level`. steps: of a rollout.
  """

  draw: Callable[[np.random.Generator], Sequence[Episode]]
  server: Server
  train: Callable[[int], float]
  hand_over: Callable[[int, int], float]
  level: int
  steps: int = 1
  server_devices: int = 1
  trainer_devices: int = 1
  between: float = 0.0


class Result(NamedTuple):
  """A simulated run.

  training, sampling: devices. seconds: of an optimizer step. samplers,
  trainers: shares of the time in which they work. staleness: optimizer steps
  between the weights that sampled a token and those that are trained on it, on
  average. queries: searches a second while sampling; most_queries: in the
  busiest second.
  """

  training: int
  sampling: int
  seconds: float
  samplers: float
  trainers: float
  staleness: float
  rollouts_an_hour: float
  queries: float
  most_queries: float


def run(
  work: Workload, trainers: int, servers: int, *, rollouts: int = 4, seed: int
) -> Result:
  """Simulates a run with copies of the trainer and servers.

  `rollouts` are simulated and then repeat, until the run is steady.
  """
  rng = np.random.default_rng(seed)
  played = [play(work.draw(rng), servers, work.server) for _ in range(rollouts)]
  count = _WARM * rollouts + work.level
  found = schedule(
    [played[k % rollouts].seconds + work.between for k in range(count)],
    [work.train(trainers)] * count,
    level=work.level,
    hand_over=work.hand_over(trainers, servers),
  )
  mean, most = zip(*(each.queries() for each in played), strict=True)
  return Result(
    trainers * work.trainer_devices,
    servers * work.server_devices,
    found.seconds / work.steps,
    found.sampling * float(np.mean([each.busy for each in played])),
    found.training,
    work.level * work.steps + (work.steps - 1) / 2,
    3600 / found.seconds,
    float(np.mean(mean)),
    max(most),
  )


def best_split(work: Workload, devices: int, *, seed: int) -> Result | None:
  """Returns the fastest split of devices; None if they are too few.

  Numbers of trainers that differ by a fifth are tried. Devices that make no
  whole trainer or server stay idle.
  """
  most = (devices - work.server_devices) // work.trainer_devices
  sizes = {n for i in range(50) if (n := int(1.2**i)) <= most}

  def split(trainers: int) -> Result:
    left = devices - trainers * work.trainer_devices
    servers = left // work.server_devices
    return run(work, trainers, servers, rollouts=2, seed=seed)

  found = map(split, sorted(sizes))
  return min(found, key=lambda each: each.seconds, default=None)
