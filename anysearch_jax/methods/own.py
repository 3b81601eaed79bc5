"""Checks the results of a user's own rewards, systems and judges.

`reward.function`, `method.name` and `method.judge` of a configuration name
them, see `plugins.load`. No test of the project covers these functions, so
their results are checked in every call: a wrong reward is an error, and a
trajectory that a judge cannot measure counts as failed.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from anysearch_jax import types
from anysearch_jax.algorithms import method
from anysearch_jax.host import plugins

# The metrics `reward/<name>` of these names are recorded for every system.
_RECORDED = ("em", "format", "steps")


def reward(
  loaded: plugins.Loaded, setting: str
) -> Callable[[method.Outcomes, Any], dict[str, chex.Array]]:
  """Returns a user's reward function whose results are checked.

  Rewards are converted to float32, and to 0 where a trajectory is not valid.
  The returned function raises PluginError if the user's function raises or its
  result has the wrong names, shapes or values.

  Args:
    loaded: the user's function of (outcomes, constants).
    setting: the setting that names the function, for errors.
  """

  def checked(
    outcomes: method.Outcomes, constants: Any
  ) -> dict[str, chex.Array]:
    with plugins.as_sentence(setting, loaded.path):
      returned = loaded.value(jax.tree.map(_read_only, outcomes), constants)
      if not isinstance(returned, Mapping):
        returned = {"total": returned}
      # JAX is asynchronous: errors of a device are raised when values are read.
      parts = {key: np.asarray(value) for key, value in returned.items()}
    for name, value in parts.items():
      if wrong := _wrong(name, value, outcomes.valid):
        raise plugins.PluginError(f"{setting}: returned {wrong}.")
    if "total" not in parts:
      raise plugins.PluginError(
        f"{setting}: returned the parts {', '.join(parts) or '(none)'}; "
        "expected 'total' among them, which is the reward."
      )
    return {key: _zeroed(parts[key], outcomes.valid) for key in parts}

  return checked


def _wrong(name: Any, value: np.ndarray, valid: np.ndarray) -> str:
  """Returns the error of a part of a reward; "" if it is right."""
  if not isinstance(name, str) or not name.isidentifier():
    return (
      f"a part named {name!r}, expected a name of letters, digits and "
      "underscores"
    )
  if name in _RECORDED:
    return (
      f"a part named {name!r}, but reward/{name} is recorded anyway; expected "
      "another name, or no such part"
    )
  if value.shape != np.shape(valid):
    return (
      f"{name!r} of shape {value.shape}, expected {np.shape(valid)} "
      "(questions, samples), one reward for each trajectory"
    )
  # jnp.issubdtype, because bfloat16 is not a number type for NumPy.
  if not any(
    jnp.issubdtype(value.dtype, kind)
    for kind in (jnp.floating, jnp.integer, jnp.bool_)
  ):
    return f"{name!r} of dtype {value.dtype}, expected real numbers"
  value = _zeroed(value, valid)
  for q, g in np.argwhere(~np.isfinite(value)):
    return (
      f"{name!r} with {value[q, g]} at [{q}, {g}], expected a finite number "
      "for each valid trajectory"
    )
  return ""


def _zeroed(value: np.ndarray, valid: np.ndarray) -> np.ndarray:
  with np.errstate(over="ignore"):  # A number too large is refused as infinite.
    return np.where(valid, value.astype(np.float32), np.float32(0))


def _read_only(array: chex.Array) -> np.ndarray:
  """Returns a read-only view, so that the function cannot change records."""
  view = np.asarray(array).view()
  view.flags.writeable = False
  return view


def judge(
  loaded: plugins.Loaded, setting: str, measures: Sequence[str]
) -> method.Measure:
  """Returns a user's measure of a trajectory whose results are checked.

  The returned coroutine function raises RetrievalError if the user's function
  raises or does not return a finite number for each measure; the trajectory
  then counts as failed.

  Args:
    loaded: a function or a coroutine function of a trajectory. A plain function
      runs in a thread, so it may wait for a server.
    setting: the setting that names the function, for errors.
    measures: names of the measures that the system needs.
  """

  async def measured(trajectory: types.Trajectory) -> dict[str, float]:
    try:
      with plugins.as_sentence(setting, loaded.path):
        if inspect.iscoroutinefunction(loaded.value):
          returned = await loaded.value(trajectory)
        else:
          returned = await asyncio.to_thread(loaded.value, trajectory)
        values = {name: float(returned[name]) for name in measures}
        finite = np.isfinite(list(values.values())).all()
        if len(returned) != len(measures) or not finite:
          raise ValueError(
            f"found {dict(returned)}, expected a finite number for each of "
            f"{', '.join(measures)}"
          )
    except plugins.PluginError as error:
      raise types.RetrievalError(str(error)) from error
    return values

  return measured


def _finite(values: Any, count: int, setting: str, noun: str) -> np.ndarray:
  """Returns a user's numbers; raises PluginError unless there are `count`."""
  array = np.asarray(values, np.float32)
  if array.shape != (count,) or not np.isfinite(array).all():
    raise plugins.PluginError(
      f"{setting}: returned {array}, expected a finite number for each of "
      f"{count} {noun}."
    )
  return array


def steps(
  loaded: plugins.Loaded, setting: str
) -> Callable[[types.Trajectory, Any], np.ndarray]:
  """Returns a user's rewards of single searches; raises as `reward`."""

  def checked(trajectory: types.Trajectory, constants: Any) -> np.ndarray:
    with plugins.as_sentence(setting, loaded.path):
      rewards = np.asarray(loaded.value(trajectory, constants), np.float32)
    return _finite(rewards, trajectory.searches, setting, "searches")

  return checked


def turns(loaded: plugins.Loaded, setting: str) -> method.Turns:
  """Returns a user's advantages of turns; raises as `reward`."""

  def checked(
    trajectories: method.Trajectories, constants: Any
  ) -> dict[types.Place, np.ndarray]:
    with plugins.as_sentence(setting, loaded.path):
      advantages = dict(loaded.value(trajectories, constants))
    return {
      place: _finite(
        advantages.get(place, ()),
        trajectory.searches + 1,
        setting,
        f"turns of {place}",
      )
      for place, trajectory in trajectories.items()
    }

  return checked
