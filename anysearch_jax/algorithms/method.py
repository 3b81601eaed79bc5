"""The type of a compared system, and the outcomes that its reward reads.

A `Method` holds what differs between systems: environments, reward and
training settings. All systems share the driver, the engines, the train step
and the evaluation. A `TrainedMethod` is a method in one run: its functions have
the constants of the run's configuration. `systems` lists all of them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.config import settings
from anysearch_jax.environment import protocol, records, scoring, spec, wording

# An agent plays a method's environments without JAX, which only rewards need.
if TYPE_CHECKING:
  import chex


class Progress(NamedTuple):
  """How far a training is when a rollout is scored, for rewards in stages.

  A run that was resumed sees the same values.

  Attributes:
    rollout: index of the rollout, from 0.
    step: optimizer steps of all rollouts before this one.
    total: optimizer steps of the whole training, >= 1.
  """

  rollout: chex.Numeric = 0
  step: chex.Numeric = 0
  total: chex.Numeric = 1

  @property
  def share(self) -> chex.Numeric:
    """The share of the training that is done, in [0, 1)."""
    return self.step / self.total


BEGINNING = Progress()


class Outcomes(NamedTuple):
  """Outcomes of the trajectories of groups, which rewards see; `[..., G]`.

  Entries where `valid` is False are ignored.

  Attributes:
    em, f1: scores of the answer, in [0, 1]; 0 without an answer.
    format: 1 if the response is well formed, else 0.
    answered: bool, an answer was given, even an empty one.
    generated_tokens: number of tokens that the model wrote.
    searches: number of charged searches.
    violation: bool, the model tried to search beyond the budget.
    budget: `[...]`, searches assigned to the group.
    valid: bool, False for a failed episode.
    measures: values of the method's `measure`, by name.
    progress: how far the training is; three numbers.
    spent: generated tokens, dollars and seconds, by the name of the unit.
    caps: `[...]` what the group may spend of each, infinite without a cap.
    answers: str, the answer as the environment reads it, None without one.
    trajectories: `types.Trajectory`, None where `valid` is False. It and
      `answers` are object arrays; both are None while JAX traces a reward.
  """

  em: chex.Array
  f1: chex.Array
  format: chex.Array
  answered: chex.Array
  generated_tokens: chex.Array
  searches: chex.Array
  violation: chex.Array
  budget: chex.Array
  valid: chex.Array
  measures: Mapping[str, chex.Array]
  progress: Progress = BEGINNING
  spent: Mapping[str, chex.Array] = {}
  caps: Mapping[str, chex.Array] = {}
  answers: np.ndarray | None = None
  trajectories: np.ndarray | None = None


def outcomes_of(
  trajectories: Mapping[tuple[int, int], types.Trajectory],
  verdicts: Mapping[tuple[int, int], scoring.Verdict],
  measured: Mapping[tuple[int, int], Mapping[str, float]],
  *,
  budgets: np.ndarray,
  samples: int,
  measures: Sequence[str],
  progress: Progress = BEGINNING,
) -> Outcomes:
  """Returns the outcomes of a rollout, which rewards see.

  Args:
    trajectories: the valid ones, by question and sample.
    verdicts: of each of them.
    measured: values of the method's `measure`, by name, of each of them.
    budgets: int `[Q]`, searches assigned to each group.
    samples: number of trajectories of a group.
    measures: names of the measured values.
    progress: how far the training is.

  Returns:
    Arrays `[Q, samples]`.
  """

  def table(
    dtype: type,
    value: Callable[[types.Trajectory, scoring.Verdict], Any],
    empty: Any = 0,
  ) -> np.ndarray:
    array: np.ndarray = np.full((len(budgets), samples), empty, dtype)
    for place, trajectory in trajectories.items():
      array[place] = value(trajectory, verdicts[place])
    return array

  def column(name: str) -> np.ndarray:
    array = np.zeros((len(budgets), samples), np.float32)
    for place in trajectories:
      array[place] = measured[place][name]
    return array

  units = ("tokens", "dollars", "seconds")
  caps = {unit: np.full(len(budgets), np.inf, np.float32) for unit in units}
  for (question, _), t in trajectories.items():
    for unit, cap in t.caps.caps:
      caps[unit][question] = cap
  return Outcomes(
    em=table(np.int32, lambda t, v: v.em),
    f1=table(
      np.float32, lambda t, v: scoring.f1(v.answer, t.question.golden_answers)
    ),
    format=table(np.int32, lambda t, v: v.format or 0),
    answered=table(bool, lambda t, v: v.answer is not None),
    generated_tokens=table(np.int32, lambda t, v: t.generated_tokens),
    searches=table(np.int32, lambda t, v: t.searches),
    violation=table(bool, lambda t, v: t.violation),
    budget=budgets,
    valid=table(bool, lambda t, v: True),
    measures={name: column(name) for name in measures},
    progress=progress,
    spent={
      "tokens": table(np.float32, lambda t, v: t.written_tokens),
      "dollars": table(
        np.float32, lambda t, v: records.dollars(t) if t.caps.prices else 0
      ),
      "seconds": table(np.float32, lambda t, v: t.seconds),
    },
    caps=caps,
    answers=table(object, lambda t, v: v.answer, None),
    trajectories=table(object, lambda t, v: t, None),
  )


Terms = dict[str, "chex.Array"]  # float32 `[..., G]` by name.
Reward = Callable[[Outcomes, Any], Terms]
# Values by name; a coroutine function, if it asks a server for them.
Measure = Callable[
  [types.Trajectory], Mapping[str, float] | Awaitable[Mapping[str, float]]
]

# Advantages of the turns of trajectories, float32 `[searches + 1]` each.
Trajectories = Mapping[types.Place, types.Trajectory]
Turns = Callable[[Trajectories, Any], Mapping[types.Place, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Method:
  """A compared system.

  Attributes:
    name: the value of `method.name` that selects it.
    label: its name in tables.
    environments: its environments, by their value of `episode.prompts`; the
      first is for language models, the last for the generated world.
    wordings: the texts of those environments that `episode.prompt_file` may
      replace.
    constants: returns the part of a configuration that `reward`, `steps` and
      `turns` get as their second argument; the default is all of it.
    reward: maps the outcomes of groups to float32 arrays `[..., G]` by name;
      `total` is the reward, the others are its terms. None if the system is
      not trained.
    train: returns a configuration with this system's training settings; it
      does not choose the environment.
    measures: the keys of the dictionary that `measure` returns.
    measure: computes values that the reward needs from a trajectory.
      It is not called for failed trajectories. It may be a coroutine function
      that raises `types.EngineError` or `types.RetrievalError` if a server is
      out of reach; the trajectory then counts as failed, as one does that takes
      longer than `method.measure_deadline`.
    measurer: makes `measure` of a configuration, for one that needs more than
      the trajectory, such as a judge's address; None: it is `measure`.
    steps: returns the reward of each search of a trajectory, float32
      `[searches]`, in the order of `search_ends`. None if the system has no
      step rewards.
    turns: returns the advantages of the turns of a rollout's valid
      trajectories, float32 `[searches + 1]`, the last one that of what follows
      the last search. None: `objective.baseline` says how they are made.
    step: in training, in place of the environment's `step`.
    options: a frozen dataclass with the defaults of the system's own options,
      which `method.options` sets; those three get it in place of `constants`.
      None: the system has none.
  """

  name: str
  label: str
  environments: Mapping[str, spec.Environment]
  wordings: Mapping[str, wording.Wording] = dataclasses.field(
    default_factory=dict
  )
  constants: Callable[[config_lib.ExperimentConfig], Any] = lambda whole: whole
  reward: Reward | None = None
  train: Callable[
    [config_lib.ExperimentConfig], config_lib.ExperimentConfig
  ] = lambda config: config
  measures: tuple[str, ...] = ()
  measure: Measure = lambda trajectory: {}
  measurer: Callable[[config_lib.ExperimentConfig], Measure] | None = None
  steps: Callable[[types.Trajectory, Any], np.ndarray] | None = None
  turns: Turns | None = None
  step: spec.Step | None = None
  options: Any = None

  def constants_of(self, config: config_lib.ExperimentConfig) -> Any:
    """Returns the second argument of `reward`, `steps` and `turns` in a run.

    Raises:
      ValueError: `method.options` names an option that the system lacks, or a
        value that the option cannot have.
    """
    options = config.method.options
    if self.options is not None:
      return settings.with_options(
        self.options, options, path="config.method.options"
      )
    if options:
      raise ValueError(
        f"config.method.options: found {', '.join(options)}, but the system "
        f"{self.name!r} has no options; expected none."
      )
    return self.constants(config)

  @property
  def prompts(self) -> str:
    """The name of its environment for language models."""
    return tuple(self.environments)[0]


@dataclasses.dataclass(frozen=True)
class TrainedMethod:
  """A method as a run trains it; see `Method` for the other attributes.

  Attributes:
    environment: the one that the run plays, with the method's `step`.
    reward, steps, turns: without their second argument.
    measure_deadline: seconds in which an asynchronous `measure` ends.
  """

  environment: spec.Environment
  reward: Callable[[Outcomes], dict[str, chex.Array]]
  measures: tuple[str, ...]
  measure: Measure
  steps: Callable[[types.Trajectory], np.ndarray] | None = None
  measure_deadline: float = 120.0
  turns: Callable[[Trajectories], Mapping[types.Place, np.ndarray]] | None = (
    None
  )


def reward_terms(valid: chex.Array, **values: chex.Array) -> Terms:
  """Returns the terms of a reward, `total` among them.

  Args:
    valid: bool `[..., G]`.
    **values: each term, `[..., G]`.

  Returns:
    float32 arrays by name; 0 where not `valid`.
  """
  import chex
  import jax.numpy as jnp

  chex.assert_type(valid, bool)
  chex.assert_equal_shape([valid, *values.values()])
  return {
    name: jnp.where(valid, jnp.asarray(value, float), 0)
    for name, value in values.items()
  }


def jitted(reward: Callable[..., Mapping[str, chex.Array]]) -> Reward:
  """Makes a `Reward` of a function of numeric outcomes and constants.

  JAX traces it, without the texts among the outcomes. Its terms are float32,
  and 0 where `valid` is False.
  """

  def terms(outcomes: Outcomes, constants: Any) -> Terms:
    return reward_terms(outcomes.valid, **reward(outcomes, constants))

  @functools.cache
  def compiled() -> Reward:
    import jax

    return jax.jit(terms, static_argnums=1)

  @functools.wraps(reward)
  def called(outcomes: Outcomes, constants: Any) -> Terms:
    arrays = outcomes._replace(answers=None, trajectories=None)
    return compiled()(arrays, constants)

  return called


def contained(trajectory: types.Trajectory) -> dict[str, float]:
  """Measures `contained`: 1 if the answer holds an accepted answer, else 0."""
  answer = protocol.extract_answer(trajectory.spans) or ""
  accepted = trajectory.question.golden_answers
  return {"contained": float(scoring.contains(answer, accepted))}


def fixed_budget(
  config: config_lib.ExperimentConfig,
) -> config_lib.ExperimentConfig:
  """Replaces the curriculum: every group gets the largest budget."""
  budget = config.curriculum.max_budget
  curriculum = {"phase1_steps": 0, "fixed_budget": budget}
  return config_lib.changed(config, curriculum=curriculum)


def searching_with_policy(
  config: config_lib.ExperimentConfig, max_tokens: int, **retrieval: str
) -> config_lib.ExperimentConfig:
  """Returns a configuration in which the policy takes part in each search.

  A search then lasts as long as a turn of the policy more.

  Args:
    config: the configuration.
    max_tokens: that the policy may write in a search.
    **retrieval: settings of `config.retrieval`.
  """
  e = config.episode
  model = dataclasses.replace(
    config.retrieval.model, max_tokens=max_tokens, deadline=e.turn_deadline
  )
  return config_lib.changed(
    config,
    retrieval={"model": model, **retrieval},
    episode={"search_deadline": e.search_deadline + e.turn_deadline},
  )


def compared(
  name: str,
  label: str,
  wordings: Mapping[str, wording.Wording],
  reward: Reward | None = None,
  measures: tuple[str, ...] = (),
  measure: Measure = lambda trajectory: {},
  **values: Any,
) -> Method:
  """Returns a system that is trained with a fixed budget.

  Args:
    name: of the system.
    label: its name in tables.
    wordings: the texts of its environments, which are made of them.
    reward: see `Method`; None: the system is not trained.
    measures: keys of what `measure` returns.
    measure: what the reward needs of a trajectory.
    **values: other attributes of `Method`.
  """
  values.setdefault("train", fixed_budget)
  return Method(
    name,
    label,
    environments={key: words.environment() for key, words in wordings.items()},
    wordings=wordings,
    reward=reward,
    measures=measures,
    measure=measure,
    **values,
  )
