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

_SUMS = ("weight", "returns", "returns_squared", "rest", "rest_squared")


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
  """

  def both(trained, reference, rows):
    params, critic = trained
    of_policy, metrics = loss_fn(params, reference, rows)
    of_critic, sums = ppo.value_loss(
      values(critic, reference, a, *rows.states, compute=compute),
      rows.old_value,
      rows.returns,
      rows.weight,
      clip=config.value_clip,
    )
    metrics |= {f"value/{name}": x for name, x in sums.items()}
    moves = jnp.sum(rows.weight * (rows.advantage != 0))
    return of_policy + of_critic, metrics | {"policy/advantage_share": moves}

  return both


def metrics(values: dict[str, float]) -> dict[str, float]:
  """Replaces a critic's summed metrics of a step by the explained variance."""
  names = {f"value/{name}": name for name in _SUMS}
  if not names.keys() <= values.keys():
    return values
  explained = ppo.explained_variance(
    **{argument: values[name] for name, argument in names.items()}
  )
  rest = {name: x for name, x in values.items() if name not in names}
  return rest | {"value/explained_variance": explained}


class Estimator:
  """Estimates advantages and returns of a rollout's batches with the critic.

  `a` has its adapters; `sharding` is that of the batches' arrays.
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

    They are packed with rewards. Adapters and the KL penalty need `reference`.
    """
    out = []
    for batch in batches:
      values = self.value(state.critic, reference, batch)
      # Without the penalty this argument is ignored; any array of this shape.
      own = tuple(rows._replace(experts=None) for rows in batch)
      logps = (
        self._reference_logp(reference, None, own)
        if self._config.reward_kl
        else values
      )
      found = self._estimate(batch, values, logps)
      out.append(
        tuple(
          rows._replace(
            reward=None, advantage=advantage, old_value=value, returns=returns
          )
          for rows, value, (advantage, returns) in zip(batch, values, found)
        )
      )
    if not self._config.whiten:
      return out
    white = self._whiten(
      [[rows.advantage for rows in batch] for batch in out],
      [[rows.weight > 0 for rows in batch] for batch in out],
    )
    return [
      tuple(rows._replace(advantage=x) for rows, x in zip(batch, advantages))
      for batch, advantages in zip(out, white)
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

  `critic` is laid out by `table.critic_rows`; `a` has its adapters, and `base`
  are the frozen weights under these. The rest is as for `decoder.forward`.

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
