"""A reward function written by the user: `reward.function` of a configuration.

It replaces the reward of the configured system and is called in the same way,
with outcomes and the configuration (docs/your_reward.md). Its results are
checked here, because no test of the project covers it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.machinery
import importlib.util
import pathlib
import sys
import traceback
import types as python_types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.environment import protocol
from anysearch_jax.methods import outcomes as outcomes_lib

# The metrics `reward/<name>` with these names have other meanings already.
_RECORDED = ("em", "format", "steps")


class RewardError(ValueError):
  """A reward function cannot be loaded, raised, or returned no rewards."""


class OwnReward(NamedTuple):
  """A loaded function, the path of its file, and the hash of the file."""

  function: Callable[[outcomes_lib.Outcomes, config_lib.ExperimentConfig], Any]
  path: pathlib.Path
  sha256: str


@functools.cache
def load(name: str) -> OwnReward:
  """Imports a reward function, once: editing its file does not change a run.

  Args:
    name: `module:function`, or `path/to/file.py:function`.

  Raises:
    RewardError: the name is malformed, the file, module or function does not
      exist, or importing it raises.
  """
  source, _, function = name.rpartition(":")
  if not source or not function.isidentifier():
    raise RewardError(
      f"reward.function: found {name!r}, expected module:function or "
      "path/to/file.py:function."
    )
  if source.endswith(".py"):
    path = pathlib.Path(source).absolute()
    if not path.is_file():
      raise RewardError(
        f"reward.function: found no file {source} in {pathlib.Path.cwd()}; "
        "expected path/to/file.py:function."
      )
    text = path.read_bytes()
    with _as_sentence(name, path):
      module = _run(path, text)
  else:
    with _as_sentence(name):
      module = importlib.import_module(source)
    file = getattr(module, "__file__", None)  # Built-in modules have none.
    if not file:
      raise RewardError(
        f"reward.function: found {source!r}, a module without a file; expected "
        "one whose source can be hashed."
      )
    path = pathlib.Path(file)
    text = path.read_bytes()
  found = vars(module).get(function)
  if not callable(found):
    raise RewardError(
      f"reward.function: found no function {function!r} in {path}; expected "
      f"def {function}(outcomes, config)."
    )
  return OwnReward(found, path, hashlib.sha256(text).hexdigest())


def reward(
  name: str, config: config_lib.ExperimentConfig
) -> Callable[[outcomes_lib.Outcomes], dict[str, chex.Array]]:
  """Returns a user's function, called with the configuration of the run.

  Rewards are converted to float32, and to 0 where a trajectory is not valid.
  The returned function raises RewardError if the user's function raises or its
  result has the wrong names, shapes or values.

  Args:
    name: as for `load`.
    config: the second argument of the user's function.
  """
  own = load(name)

  def checked(outcomes: outcomes_lib.Outcomes) -> dict[str, chex.Array]:
    with _as_sentence(name, own.path):
      returned = own.function(jax.tree.map(_read_only, outcomes), config)
      if not isinstance(returned, Mapping):
        returned = {"total": returned}
      # JAX is asynchronous: errors of a device are raised when values are read.
      parts = {key: np.asarray(value) for key, value in returned.items()}
    try:
      _check_names(list(parts))
      return {key: _part(key, parts[key], outcomes.valid) for key in parts}
    except RewardError as error:
      raise RewardError(f"reward.function {name!r}: {error}") from error

  return checked


def trial(
  *, group: int, budget: int, measures: Sequence[str]
) -> outcomes_lib.Outcomes:
  """Returns artificial outcomes to test a function before a run begins.

  The first of two questions has right and wrong answers, with and without a
  search, and its last sample failed. All samples of the second question failed.

  Args:
    group: number of samples of a question.
    budget: budget of both questions.
    measures: names of `outcomes.measures`.
  """
  shape = (2, group)
  valid = np.zeros(shape, bool)
  valid[0, : max(1, group - 1)] = True
  searches = np.where(valid, np.arange(group) % (budget + 1), 0)
  right = valid & (np.arange(group) % 2 == 0)
  answers, trajectories = (np.full(shape, None, object) for _ in range(2))
  for q, g in np.argwhere(valid):
    answers[q, g] = "here" if right[q, g] else "there"
    trajectories[q, g] = _trajectory(
      types.Address(0, int(q), int(g)),
      answers[q, g],
      searches=int(searches[q, g]),
      budget=budget,
    )
  units = ("tokens", "dollars", "seconds")
  return outcomes_lib.Outcomes(
    em=right.astype(np.int32),
    f1=right.astype(np.float32),
    format=valid.astype(np.int32),
    answered=valid,
    generated_tokens=np.where(valid, 4, 0).astype(np.int32),
    searches=searches.astype(np.int32),
    violation=np.zeros(shape, bool),
    budget=np.full(2, budget, np.int32),
    valid=valid,
    measures={name: np.zeros(shape, np.float32) for name in measures},
    spent={unit: np.zeros(shape, np.float32) for unit in units},
    caps={unit: np.full(2, np.inf, np.float32) for unit in units},
    answers=answers,
    trajectories=trajectories,
  )


def _trajectory(
  address: types.Address, answer: str, *, searches: int, budget: int
) -> types.Trajectory:
  query = "<think> so ; </think> <search> where </search>"
  passages = "<information>Doc 1(Title: it) it is here</information>"
  authors = np.array([types.Author.PROMPT] * 2 + [types.Author.MODEL] * 4)
  return types.Trajectory(
    address,
    types.Question("trial", "where is it ?", ("here",)),
    budget=budget,
    scaffold=False,
    token_ids=np.arange(len(authors), dtype=np.int32),
    authors=authors.astype(np.int8),
    logps=np.zeros(len(authors), np.float32),
    versions=np.where(authors == types.Author.MODEL, 0, -1).astype(np.int32),
    spans=(
      *(
        types.Span(types.Author.MODEL, query),
        types.Span(types.Author.ENVIRONMENT, passages),
      )
      * searches,
      types.Span(types.Author.MODEL, f"<answer> {answer} </answer>"),
    ),
    searches=searches,
    queries=("where",) * searches,
    violation=False,
    outcome=types.Outcome.ANSWERED,
    observations=tuple(
      types.Observation(
        protocol.SEARCH, "where", n, (types.Passage("it", "it", "it is here"),)
      )
      for n in range(searches)
    ),
    search_ends=(2,) * searches,
  )


class _FromText(importlib.machinery.SourceFileLoader):
  """Loads a module from the text that was hashed.

  Python reuses bytecode from `__pycache__` if the source has the same size and
  modification time in seconds, so it would miss a quick edit of one digit.
  """

  def __init__(self, name: str, path: pathlib.Path, text: bytes):
    super().__init__(name, str(path))
    self._text = text

  def get_code(self, fullname: str) -> python_types.CodeType:
    return self.source_to_code(self._text, self.path)


def _run(path: pathlib.Path, text: bytes) -> python_types.ModuleType:
  name = f"own_reward_{hashlib.sha256(text).hexdigest()[:16]}"
  loader = _FromText(name, path, text)
  spec = importlib.machinery.ModuleSpec(name, loader, origin=str(path))
  spec.has_location = True  # `__file__` is the origin.
  module = importlib.util.module_from_spec(spec)
  sys.modules[name] = module  # Dataclasses look their module up there.
  loader.exec_module(module)
  return module


@contextlib.contextmanager
def _as_sentence(name: str, path: pathlib.Path | None = None) -> Iterator[None]:
  """Converts errors of the user's code to RewardError, with their line."""
  try:
    yield
  except Exception as error:  # User code may raise any error.
    line = next(
      (
        f", line {frame.lineno}"
        for frame in reversed(traceback.extract_tb(error.__traceback__))
        if frame.filename == str(path)
      ),
      "",
    )
    raise RewardError(
      f"reward.function {name!r}{line}: {type(error).__name__}: {error}"
    ) from error


def _read_only(array: chex.Array) -> np.ndarray:
  """Returns a read-only view, so that the function cannot change records."""
  view = np.asarray(array).view()
  view.flags.writeable = False
  return view


def _check_names(names: Sequence[Any]) -> None:
  for name in names:
    if not isinstance(name, str) or not name.isidentifier():
      raise RewardError(
        f"returned a part named {name!r}, expected a name of letters, digits "
        "and underscores."
      )
    if name in _RECORDED:
      raise RewardError(
        f"returned a part named {name!r}, but reward/{name} is recorded "
        "anyway; expected another name, or no such part."
      )
  if "total" not in names:
    raise RewardError(
      f"returned the parts {', '.join(names) or '(none)'}; expected 'total' "
      "among them, which is the reward."
    )


def _part(name: str, value: np.ndarray, valid: np.ndarray) -> np.ndarray:
  if value.shape != np.shape(valid):
    raise RewardError(
      f"returned {name!r} of shape {value.shape}, expected {np.shape(valid)} "
      "(questions, samples), one reward for each trajectory."
    )
  # jnp.issubdtype, because bfloat16 is not a number type for NumPy.
  if not any(
    jnp.issubdtype(value.dtype, kind)
    for kind in (jnp.floating, jnp.integer, jnp.bool_)
  ):
    raise RewardError(
      f"returned {name!r} of dtype {value.dtype}, expected real numbers."
    )
  with np.errstate(over="ignore"):  # It is refused as infinite.
    value = np.where(valid, value.astype(np.float32), np.float32(0))
  if not np.isfinite(value).all():
    q, g = np.argwhere(~np.isfinite(value))[0]
    raise RewardError(
      f"returned {name!r} with {value[q, g]} at [{q}, {g}], expected a finite "
      "number for each valid trajectory."
    )
  return value
