"""AdamW as configurations describe it, also for a policy and its critic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax

from anysearch_jax import config as config_lib
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import decoder, table
from anysearch_jax.policy import parameters as weights

Both = tuple[decoder.Params, decoder.Params]
# A state of arrays, of their shapes, or of their shardings.
LeafT = TypeVar(
  "LeafT", jax.Array, jax.ShapeDtypeStruct, jax.sharding.NamedSharding
)


class PairState(NamedTuple, Generic[LeafT]):
  """Optimizer state of a `Pair`; `step` counts from 0."""

  policy: optax.OptState
  critic: optax.OptState
  step: LeafT


class Pair(NamedTuple):
  """Optimizes (policy, critic) with one `GradientTransformation` each.

  Attributes:
    policy, critic: the transformations.
    alone_steps: number of initial steps that train only the critic.
  """

  policy: optax.GradientTransformation
  critic: optax.GradientTransformation
  alone_steps: int = 0

  def init(self, trained: Both) -> PairState[jax.Array]:
    """Returns the state before the first step."""
    policy, critic = trained
    return PairState(
      self.policy.init(policy), self.critic.init(critic), jnp.int32(0)
    )

  def update(
    self, grads: Both, state: PairState[jax.Array], trained: Both
  ) -> tuple[Both, PairState[jax.Array]]:
    """Returns the updates of the parameters, and the next state.

    Args:
      grads: gradients of (policy, critic).
      state: the present state.
      trained: parameters of (policy, critic).
    """
    waits = state.step < self.alone_steps
    policy, of_policy = self.policy.update(grads[0], state.policy, trained[0])
    critic, of_critic = self.critic.update(grads[1], state.critic, trained[1])
    policy = jax.tree.map(lambda x: jnp.where(waits, 0, x), policy)
    of_policy = jax.tree.map(
      lambda new, old: jnp.where(waits, old, new), of_policy, state.policy
    )
    return (policy, critic), PairState(of_policy, of_critic, state.step + 1)


def adamw(
  a: architecture_lib.Architecture,
  config: config_lib.OptimizerConfig,
  *,
  schedule: optax.Schedule | None = None,
  critic: config_lib.CriticConfig | None = None,
  total_steps: int = 0,
) -> optax.GradientTransformation | Pair:
  """Returns AdamW with global-norm clipping and decay of `config.decayed`.

  Args:
    a: the architecture; its table says which weights are matrices.
    config: the settings of the policy.
    schedule: replaces the configuration's learning rate.
    critic: settings of a critic, whose gradient is clipped separately; None: no
      critic.
    total_steps: of the training; `config.decay` is a share of them.
  """

  def rates(peak: float, warmup: int) -> float | optax.Schedule:
    return learning_rate(peak, warmup, config.decay * total_steps, total_steps)

  schedule = schedule or rates(config.learning_rate, config.warmup_steps)
  policy = _adamw(table.trainable_rows(a), config, schedule)
  if critic is None:
    return policy
  critic_schedule = rates(critic.learning_rate, critic.warmup_steps)
  return Pair(
    policy,
    _adamw(table.critic_rows(a), config, critic_schedule),
    critic.alone_steps,
  )


def learning_rate(
  peak: float, warmup: int, decay: float, total: int
) -> float | optax.Schedule:
  """Returns `peak`, or its linear warm-up and decay.

  It is peak * (i + 1) / warmup at step i, and peak * (total - i) / decay in the
  last steps, so that no step has a rate of 0.

  Args:
    peak: the largest rate.
    warmup: steps over which it rises; 0: none.
    decay: steps at the end over which it falls; 0: none.
    total: steps of the training.
  """
  if not warmup and not decay:
    return peak

  def rate(count: jax.typing.ArrayLike) -> jax.Array:
    rising = jnp.minimum(1.0, (count + 1) / warmup) if warmup else 1.0
    falling = (total - count) / decay if decay else 1.0
    return peak * jnp.clip(falling, 0.0, rising)

  return rate


def _adamw(
  rows: Sequence[weights.Weight],
  config: config_lib.OptimizerConfig,
  rate: float | optax.Schedule,
) -> optax.GradientTransformation:
  every = config.decayed == "all"
  decayed = weights.tree(rows, lambda row: every or len(row.file_shape) > 1)
  adamw = optax.adamw(
    rate,
    b1=config.b1,
    b2=config.b2,
    eps=config.eps,
    weight_decay=config.weight_decay,
    mask=decayed,
  )
  if not config.max_grad_norm:
    return adamw
  return optax.chain(optax.clip_by_global_norm(config.max_grad_norm), adamw)
