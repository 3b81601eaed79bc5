"""What PPO adds to the train step: values, advantages and a critic's loss.

Before a rollout's first step, the critic scores all of its tokens, and so does
the reference if the reward has a KL penalty. Advantages and returns are
computed from these scores once and stay fixed in all of the rollout's steps.

The critic is the policy's network with a value head instead of its LM head. Its
body starts with the policy's weights and is trained like the policy: either all
weights, or its own adapters beside the same frozen base. It is sharded by rows
of the same kind (`table.critic_rows`).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from anysearch_jax import config as config_lib
from anysearch_jax.algorithms import ppo
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import decoder, lora, table
from anysearch_jax.training import batching, train_step

# The arguments of `ppo.explained_variance`, which are sums over a step.
_SUMS = ("weight", "returns", "returns_squared", "residual", "residual_squared")


def with_critic(
  loss_fn: train_step.LossFn,
  a: architecture_lib.Architecture,
  config: config_lib.CriticConfig,
  *,
  compute: decoder.Compute = decoder.Compute(),  # noqa: B008
) -> train_step.LossFn:
  """Returns the sum of a policy's loss and its critic's, of (policy, critic).

  The two share no parameter, so the sum needs no coefficient. The metrics named
  `value/` are inputs of `metrics`. `policy/advantage_share` counts tokens here,
  not trajectories.

  Args:
    loss_fn: the policy's loss.
    a: the architecture, with its adapters.
    config: clip range of the values.
    compute: as for `decoder.forward`.
  """

  def combined_loss(trained, reference, rows):
    params, critic = trained
    policy_loss, metrics = loss_fn(params, reference, rows)
    critic_loss, sums = ppo.value_loss(
      values(critic, reference, a, *rows.states, compute=compute),
      rows.old_value,
      rows.returns,
      rows.weight,
      clip=config.value_clip,
    )
    metrics |= {f"value/{name}": x for name, x in sums.items()}
    has_advantage = rows.advantage != 0
    moves = jnp.sum(rows.weight * has_advantage)
    return policy_loss + critic_loss, metrics | {
      "policy/advantage_share": moves
    }

  return combined_loss


def metrics(values: dict[str, float]) -> dict[str, float]:
  """Replaces a critic's summed metrics of a step by the explained variance."""
  names = {f"value/{name}": name for name in _SUMS}
  if not names.keys() <= values.keys():
    return values
  explained = ppo.explained_variance(
    **{argument: values[name] for name, argument in names.items()}
  )
  remaining = {name: x for name, x in values.items() if name not in names}
  return remaining | {"value/explained_variance": explained}


class Estimator:
  """Estimates advantages and returns of a rollout's batches with the critic.

  Attributes:
    value: the jitted function of (critic, reference, batch) that returns the
      value of each token's state.

  Args:
    a: the architecture, with its adapters.
    config: discounts, the KL penalty, and whether advantages are whitened.
    temperature: of sampling.
    compute: as for `decoder.forward`.
    sharding: of the batches' arrays.
  """

  def __init__(
    self,
    a: architecture_lib.Architecture,
    config: config_lib.CriticConfig,
    *,
    temperature: float,
    compute: decoder.Compute = decoder.Compute(),  # noqa: B008
    sharding: jax.sharding.NamedSharding | None = None,
  ):
    self._config = config

    def value(critic, reference, batch):
      return train_step.over_micro_batches(
        lambda rows: values(
          critic, reference, a, *rows.states, compute=compute
        ),
        batch,
      )

    def of_rows(rows, value, reference_logp):
      reward = rows.reward
      if config.reward_kl:
        reward -= config.reward_kl * (rows.behaviour_logp - reference_logp)
      return ppo.gae(
        reward,
        value,
        rows.weight > 0,
        rows.segment_ids,
        gamma=config.gamma,
        lam=config.lam,
      )

    def estimate(batch, values, reference_logp):
      """Returns advantage and return of each token."""
      return tuple(map(of_rows, batch, values, reference_logp))

    self.value = jax.jit(value, out_shardings=sharding)
    self._reference_logp = train_step.make_scorer(
      a.without_lora(),
      temperature=temperature,
      compute=compute,
      sharding=sharding,
    )
    self._estimate = jax.jit(estimate, out_shardings=sharding)
    self._whiten = jax.jit(ppo.whiten, out_shardings=sharding)

  def __call__(
    self,
    state: train_step.TrainState,
    reference: decoder.Params | None,
    batches: Sequence[batching.TrainBatch],
  ) -> list[batching.TrainBatch]:
    """Returns batches with advantages, old values and returns filled in.

    Args:
      state: has the critic.
      reference: the frozen base of adapters, or the reference of the KL
        penalty; None without both.
      batches: of a rollout, packed with rewards.
    """
    estimated = []
    for batch in batches:
      values = self.value(state.critic, reference, batch)
      # The reference's router makes its own choices.
      without_experts = tuple(rows._replace(experts=None) for rows in batch)
      # Without the penalty this argument is ignored; any array has its shape.
      logps = values
      if self._config.reward_kl:
        logps = self._reference_logp(reference, None, without_experts)
      estimates = self._estimate(batch, values, logps)
      estimated.append(
        tuple(
          rows._replace(
            reward=None, advantage=advantage, old_value=value, returns=returns
          )
          for rows, value, (advantage, returns) in zip(batch, values, estimates)
        )
      )
    if not self._config.whiten:
      return estimated
    whitened = self._whiten(
      [[rows.advantage for rows in batch] for batch in estimated],
      [[rows.weight > 0 for rows in batch] for batch in estimated],
    )
    return [
      tuple(rows._replace(advantage=x) for rows, x in zip(batch, advantages))
      for batch, advantages in zip(estimated, whitened)
    ]


def initialize(
  trained: decoder.Params, a: architecture_lib.Architecture
) -> decoder.Params:
  """Returns the initial critic of a policy, whose values are all 0.

  The critic refers to the arrays of `trained`, weights or adapters.
  """
  body = {name: x for name, x in trained.items() if name != "head"}
  return body | {"value": np.zeros(a.d_model, np.float32)}


def values(
  critic: decoder.Params,
  base: decoder.Params | None,
  a: architecture_lib.Architecture,
  tokens: jax.Array,
  positions: jax.Array,
  segment_ids: jax.Array,
  *,
  compute: decoder.Compute = decoder.Compute(),  # noqa: B008
) -> jax.Array:
  """Returns the value of each state of packed rows.

  Args:
    critic: parameters, laid out by `table.critic_rows`.
    base: the frozen weights under the critic's adapters; None without adapters.
    a: the architecture, with its adapters.
    tokens, positions, segment_ids, compute: as for `decoder.forward`.

  Returns:
    float32 `[B, T]`: index t has the value of the state after `tokens[..t]`, in
    which token t + 1 is sampled. Values at padding are meaningless.
  """
  body = {name: x for name, x in critic.items() if name != "value"}
  if a.lora is not None:
    assert base is not None  # Adapters lie beside a base.
    body = lora.combine(base, body)
  hidden = decoder.forward(
    body, table.headless(a), tokens, positions, segment_ids, compute=compute
  )
  # An elementwise product and a sum: accelerators may compute a float32 matrix
  # product at lower precision (TF32, bfloat16).
  value = jnp.sum(hidden.astype(jnp.float32) * critic["value"], -1)
  layout = compute.layout
  return value if layout is None else layout.constrain(value, None)
