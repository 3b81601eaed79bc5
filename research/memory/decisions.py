"""Trains the decision alone of a frozen policy: five rows, ten seeds, minutes.

    python -m research.memory.decisions --chains=R/forced --hidden=R/hidden \
        --predictions=R/predictions.json --output=R/decisions

The policy is a head on the hidden state before a decision, and on the budget.
It begins with the policy's own log-odds. A trajectory searches until its head
answers or its searches end; what it then answers is that of the stored chain of
this depth. Rewards, advantages, loss and curriculum are the project's own, with
the rows of `rows` and the settings of `configuration`; a rollout takes one
step. Of `reduction`, tokens are decisions: the policy writes no others.

Writes `outcomes.jsonl`, as `research.study` does of trainings of all weights:
answers of the evaluated questions at budgets 1 to 6, sampled and greedy; and
`optimum.json`. Of budgets beyond the depth of the chains, that depth is used.
Rows that the file has are not trained again.
"""

from __future__ import annotations

import functools
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags

import anysearch_jax as aj
from research import claims
from research import outcomes as outcomes_lib
from research.memory import chains as chains_lib
from research.memory import configuration
from research.memory import hidden as hidden_lib
from research.memory import rows as rows_lib

_SEEDS = 10
Head = Mapping[str, jax.Array]


class Cache(NamedTuple):
  """The chains of a split as arrays of JAX.

  Attributes:
    states: float32 `[N, D, H]`, standardised.
    right, well_formed, searches, tokens: float32 `[N, D + 1]`.
    limit: int32 `[N]`, see `chains.Chains.limit`.
  """

  states: jax.Array
  right: jax.Array
  well_formed: jax.Array
  searches: jax.Array
  tokens: jax.Array
  limit: jax.Array


class Played(NamedTuple):
  """Trajectories of the head.

  Attributes:
    stops: int `[Q, G]`, depths of the answers.
    searches: bool `[Q, G, D]`, whether a decision is to search.
    decides: bool `[Q, G, D]`, whether a decision is made.
  """

  stops: jax.Array
  searches: jax.Array
  decides: jax.Array


def caches(
  chains: Mapping[str, chains_lib.Chains],
  states: Mapping[str, np.ndarray],
  head: np.ndarray,
) -> tuple[dict[str, Cache], Head]:
  """Returns the caches of both splits, and the head that decides as the policy.

  States are standardised by the decisions of the trained questions.

  Raises:
    ValueError: there are none.
  """
  trained = chains["train"]
  decides = np.arange(trained.depth) < trained.limit[:, None]
  if not decides.any():
    raise ValueError(
      "found no chain that searches, expected some: there is no decision to "
      "learn. Train longer on the warm rows."
    )
  seen = states["train"][decides]
  mean = seen.mean(0)
  deviation = seen.std(0) + 1e-6
  both = {
    split: Cache(
      states=jnp.asarray((states[split] - mean) / deviation),
      right=jnp.asarray(own.right, jnp.float32),
      well_formed=jnp.asarray(own.well_formed, jnp.float32),
      searches=jnp.asarray(own.searches, jnp.float32),
      tokens=jnp.asarray(own.tokens, jnp.float32),
      limit=jnp.asarray(own.limit, jnp.int32),
    )
    for split, own in chains.items()
  }
  start = {
    "states": jnp.asarray(head * deviation),
    "budget": jnp.zeros(3),
    "bias": jnp.asarray(head @ mean),
  }
  return both, start


def log_odds(head: Head, states: jax.Array, budgets: jax.Array) -> jax.Array:
  """Returns the log-odds of searching, `[Q, D]`.

  Args:
    head: the policy.
    states: `[Q, D, H]`.
    budgets: `[Q]`.
  """
  depth = jnp.arange(states.shape[1])
  budget = budgets[:, None] + jnp.zeros_like(depth)
  features = jnp.stack(
    [budget, budget - depth, depth + jnp.zeros_like(budget)], -1
  )
  scaled = features / states.shape[1]
  return states @ head["states"] + scaled @ head["budget"] + head["bias"]


def play(
  odds: jax.Array, budgets: jax.Array, limit: jax.Array, uniform: jax.Array
) -> Played:
  """Returns trajectories that search where a uniform number is below P(search).

  Args:
    odds: log-odds `[Q, D]`.
    budgets, limit: `[Q]`.
    uniform: `[Q, G, D]`; 1/2 everywhere is greedy.
  """
  is_allowed = jnp.arange(odds.shape[1]) < jnp.minimum(budgets, limit)[:, None]
  searches = (uniform < jax.nn.sigmoid(odds)[:, None]) & is_allowed[:, None]
  went_on = jnp.cumprod(searches, -1).astype(bool)
  stops = went_on.sum(-1)
  reached = jnp.concatenate(
    [jnp.ones_like(went_on[..., :1]), went_on[..., :-1]], -1
  )
  return Played(stops, searches, reached & is_allowed[:, None])


def decision_weights(decides: jax.Array, reduction: str) -> jax.Array:
  """Returns `aj.grpo.token_weights` of decisions `[Q, G, D]`, under jit."""
  counts = decides.sum(-1, keepdims=True)
  trajectories = decides.shape[0] * decides.shape[1]
  denominator = counts * trajectories
  if reduction == "token-mean":
    denominator = counts.sum()
  return decides / jnp.maximum(denominator, 1)


def loss(
  head: Head,
  states: jax.Array,
  budgets: jax.Array,
  played: Played,
  advantages: jax.Array,
  *,
  behaviour: Head,
  reference: Head,
  objective: aj.config.ObjectiveConfig,
) -> jax.Array:
  """Returns the project's GRPO loss of decisions.

  Args:
    head: the policy that is trained.
    states, budgets: of the groups, `[Q, D, H]` and `[Q]`.
    played: their trajectories.
    advantages: `[Q, G]`.
    behaviour: the policy that played.
    reference: the policy of the KL penalty.
    objective: of the row.
  """

  def logps(policy: Head) -> jax.Array:
    odds = log_odds(policy, states, budgets)[:, None]
    return jax.nn.log_sigmoid(jnp.where(played.searches, odds, -odds))

  value, _ = aj.grpo.grpo_loss(
    logps(head),
    logps(behaviour),
    logps(reference),
    jnp.broadcast_to(advantages[..., None], played.decides.shape),
    decision_weights(played.decides, objective.reduction),
    config=objective,
  )
  return value


def rollout_advantages(
  cache: Cache,
  questions: jax.Array,
  budgets: jax.Array,
  stops: jax.Array,
  config: aj.ExperimentConfig,
) -> tuple[jax.Array, jax.Array]:
  """Returns advantages and correctness of trajectories, `[Q, G]`.

  Args:
    cache: of the questions' split.
    questions: int `[Q]`.
    budgets: int `[Q]`.
    stops: int `[Q, G]`.
    config: of the row.
  """

  def at(values: jax.Array) -> jax.Array:
    return jnp.take_along_axis(values[questions], stops, 1)

  valid = jnp.ones(stops.shape, bool)
  right = at(cache.right)
  reward = aj.rewards.composite(
    right,
    at(cache.well_formed),
    at(cache.tokens),
    at(cache.searches),
    budgets,
    valid,
    config=config.reward,
  )
  advantages = aj.grpo.advantages(
    reward.total,
    valid,
    epsilon=config.objective.advantage_epsilon,
    normalize=config.objective.normalize,
    deviation=config.objective.deviation,
  )
  return advantages, right


def train(
  cache: Cache, start: Head, config: aj.ExperimentConfig, seeds: Sequence[int]
) -> Head:
  """Returns the trained heads, stacked over the seeds.

  Args:
    cache: of the trained questions.
    start: the head before training.
    config: of the row; its learning rate is the head's.
    seeds: one training each.
  """
  curriculum = config.curriculum
  tx = optax.adam(config.optimizer.learning_rate)
  depth = cache.states.shape[1]
  count = len(cache.limit)

  def step(carry, key: jax.Array):
    head, state, levels = carry
    chosen, drawn = jax.random.split(key)
    assigned = aj.curriculum.assign(
      levels, num_groups=config.questions, config=curriculum
    )
    questions = jax.random.choice(
      chosen, count, (config.questions,), replace=config.questions > count
    )
    states = cache.states[questions]
    shape = (config.questions, config.group, depth)
    played = play(
      log_odds(head, states, assigned.budgets),
      assigned.budgets,
      cache.limit[questions],
      jax.random.uniform(drawn, shape),
    )
    advantages, right = rollout_advantages(
      cache, questions, assigned.budgets, played.stops, config
    )
    gradient = jax.grad(loss)(
      head,
      states,
      assigned.budgets,
      played,
      advantages,
      behaviour=head,
      reference=start,
      objective=config.objective,
    )
    updates, state = tx.update(gradient, state)
    levels = aj.curriculum.record(
      levels,
      jnp.repeat(assigned.budgets, config.group),
      right.ravel(),
      jnp.ones(right.size, bool),
      config=curriculum,
    )
    return (optax.apply_updates(head, updates), state, levels), None

  def run(key: jax.Array, levels: aj.curriculum.CurriculumState) -> Head:
    keys = jax.random.split(key, curriculum.total_steps)
    carry = (start, tx.init(start), levels)
    return jax.lax.scan(step, carry, keys)[0][0]

  keys = jnp.stack([jax.random.key(seed) for seed in seeds])
  levels = [aj.curriculum.init(curriculum, seed) for seed in seeds]
  stacked = jax.tree.map(lambda *x: jnp.stack(x), *levels)
  return jax.jit(jax.vmap(run))(keys, stacked)


@functools.partial(jax.jit, static_argnames="greedy")
def evaluate(
  cache: Cache, head: Head, budget: jax.Array, key: jax.Array, *, greedy: bool
) -> tuple[jax.Array, jax.Array]:
  """Returns correctness and searches of all questions at a budget, `[N]`."""
  count, depth, _ = cache.states.shape
  budgets = jnp.full(count, budget)
  uniform = jax.random.uniform(key, (count, 1, depth))
  if greedy:
    uniform = jnp.full_like(uniform, 0.5)
  odds = log_odds(head, cache.states, budgets)
  stops = play(odds, budgets, cache.limit, uniform).stops
  return (
    jnp.take_along_axis(cache.right, stops, 1)[:, 0],
    jnp.take_along_axis(cache.searches, stops, 1)[:, 0],
  )


def outcomes(
  cache: Cache,
  chains: chains_lib.Chains,
  head: Head,
  *,
  row: str,
  seed: int,
  settings: str,
  greedy: bool,
) -> outcomes_lib.Outcomes:
  """Returns what a trained head answers, at all evaluated budgets."""
  budgets = configuration.BUDGETS
  # Budgets share their draws, as those of an evaluation do.
  key = jax.random.key(seed)
  cells = [
    evaluate(cache, head, jnp.int32(budget), key, greedy=greedy)
    for budget in budgets
  ]
  right, searches = (
    np.stack([np.asarray(x) for x in some]) for some in zip(*cells, strict=True)
  )
  return outcomes_lib.Outcomes(
    row,
    seed,
    settings,
    outcomes_lib.digest(chains.ids),
    (1,) * len(chains.ids),
    budgets,
    right > 0,
    searches.astype(np.int64),
  )


def best(chains: chains_lib.Chains) -> dict[str, list[float]]:
  """Returns the optimum's accuracy by budget, of each form and of `all`."""
  accuracies: dict[str, list[float]] = {}
  for budget in configuration.BUDGETS:
    stops = chains_lib.optimum(chains, budget)
    right = chains.right[np.arange(len(stops)), stops]
    cells = chains_lib.by_form(chains, right) | {"all": float(right.mean())}
    for name, value in cells.items():
      accuracies.setdefault(name, []).append(value)
  return accuracies


def define_flags() -> None:
  """Defines the command's flags; importing the module defines none."""
  flags.DEFINE_string("chains", None, "Folder of both splits.", required=True)
  flags.DEFINE_string("hidden", None, "Folder of states.", required=True)
  flags.DEFINE_string("predictions", None, "Written before.", required=True)
  flags.DEFINE_string("output", None, "Folder to write to.", required=True)
  flags.DEFINE_integer("seeds", _SEEDS, "Trainings of a row.", lower_bound=1)
  flags.DEFINE_integer("rollouts", 0, "0: the configuration's.", lower_bound=0)
  flags.DEFINE_float("learning_rate", 1e-3, "Of the head.", lower_bound=0)


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected argument {argv[1]!r}.")
  f = flags.FLAGS
  if not pathlib.Path(f.predictions).is_file():
    sys.exit(
      f"{f.predictions}: found no file, expected the predictions, which are "
      "written before any training (research.memory.predictions)."
    )
  output = pathlib.Path(f.output)
  output.mkdir(parents=True, exist_ok=True)
  path = output / "outcomes.jsonl"
  base = configuration.get_config()
  steps = f.rollouts or base.curriculum.total_steps
  base = aj.config.changed(
    base,
    curriculum=configuration.curriculum(steps),
    optimizer={"learning_rate": f.learning_rate},
  )
  try:
    chains = chains_lib.read(f.chains)
    states = {
      split: hidden_lib.read(f.hidden, split, own.ids)
      for split, own in chains.items()
    }
    known = outcomes_lib.read(path) if path.is_file() else []
    both, start = caches(chains, states, hidden_lib.read_head(f.hidden))
  except ValueError as error:
    sys.exit(f"research.memory.decisions: {error}")
  seeds = range(claims.FIRST_SEED, claims.FIRST_SEED + f.seeds)
  finished = {one.key: one for one in known}
  for name, changes in rows_lib.CHANGES.items():
    config = aj.config.changed(base, **changes)
    settings = outcomes_lib.digest(
      [json.dumps(aj.settings.to_dict(config), sort_keys=True)]
    )
    if any(one.settings != settings for one in known if one.row == name):
      sys.exit(
        f"{path}: found trainings of {name} with other settings, expected "
        "these; name another folder, or remove it."
      )
    missing = [seed for seed in seeds if (name, seed) not in finished]
    if missing:
      heads = train(both["train"], start, config, missing)
    for place, seed in enumerate(missing):
      head = jax.tree.map(lambda x, place=place: x[place], heads)
      for ending, greedy in (("", False), (rows_lib.GREEDY, True)):
        one = outcomes(
          both["test"],
          chains["test"],
          head,
          row=name + ending,
          seed=seed,
          settings=settings,
          greedy=greedy,
        )
        finished[one.key] = one
    outcomes_lib.write(path, finished.values())
    print(f"trained: {name}, {len(missing)} seeds", flush=True)
  text = json.dumps(best(chains["test"]), indent=2) + "\n"
  (output / "optimum.json").write_text(text)
  print(f"written: {path}")


if __name__ == "__main__":
  define_flags()
  app.run(main)
