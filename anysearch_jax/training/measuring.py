"""Measures what a reward needs of trajectories, also by asking a server.

A method's `measure` may be a coroutine function, such as one that asks a judge.
Then the trajectories of a rollout are measured concurrently, each within a
deadline. A trajectory that cannot be measured says nothing about the policy: it
becomes a failed one.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, cast

from anysearch_jax import types
from anysearch_jax.host import processes
from anysearch_jax.methods import method as method_lib

# A trajectory's question and its sample.
Place = tuple[int, int]
# Trajectories that are measured at a time.
_CONCURRENCY = 256
_log = logging.getLogger(__name__)


class Measured(NamedTuple):
  """The result of measuring a rollout.

  values: the values of each trajectory that was measured.
  reasons: why each other trajectory could not be measured.
  """

  values: dict[Place, Mapping[str, float]]
  reasons: dict[Place, str]


def measure(
  method: method_lib.TrainedMethod,
  trajectories: Mapping[Place, types.Trajectory],
  *,
  run: Callable[[Coroutine], Any] = asyncio.run,
) -> Measured:
  """Measures trajectories that did not fail.

  If `measure` is asynchronous, the first process asks and the others get its
  results, because a server may answer two processes differently.

  Args:
    method: what is trained.
    trajectories: by place.
    run: runs a coroutine.

  Raises:
    ValueError: asynchronous values have the wrong names.
  """
  if not inspect.iscoroutinefunction(method.measure):
    plain = cast(
      Callable[[types.Trajectory], Mapping[str, float]], method.measure
    )
    return Measured({place: plain(t) for place, t in trajectories.items()}, {})
  results = processes.on_main(
    lambda: run(_all(method, list(trajectories.values())))
  )
  values, reasons = {}, {}
  for place, (value, reason) in zip(trajectories, results, strict=True):
    if reason:
      reasons[place] = reason
    else:
      values[place] = value
  if reasons:
    _log.warning(
      "%d of %d trajectories could not be measured and count as failed. The "
      "first: %s",
      len(reasons),
      len(trajectories),
      next(iter(reasons.values())),
    )
  return Measured(values, reasons)


def failed(
  groups: Sequence[types.Group | None], reasons: Mapping[Place, str]
) -> list[types.Group | None]:
  """Returns groups whose trajectories at these places have failed."""

  def changed(q: int, group: types.Group | None) -> types.Group | None:
    if group is None:
      return None
    members = (
      dataclasses.replace(t, outcome=types.Outcome.FAILED, reason=reasons[q, g])
      if (q, g) in reasons
      else t
      for g, t in enumerate(group.trajectories)
    )
    return dataclasses.replace(group, trajectories=tuple(members))

  return [changed(q, group) for q, group in enumerate(groups)]


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
