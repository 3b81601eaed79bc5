"""One optimizer step: a jitted, donated function of state and batch.

Every token weight already contains its global denominator, so the sum over
micro-batches is the gradient of the step's loss however the trajectories were
packed. On a mesh, state and gradients are sharded by the parameter table
(`policy/sharding`), and batches by rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple

import jax
import jax.numpy as jnp
import optax

from anysearch_jax import config as config_lib
from anysearch_jax.algorithms import grpo
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import decoder, experts, lora, sharding, table
from anysearch_jax.policy import parameters as weights
from anysearch_jax.training import batching, logprobs, optimizers

# The trained parameters: the policy's, or a pair (policy's, critic's).
Trained = decoder.Params | optimizers.Both
Rows = batching.Rows[jax.Array]
# (trained, reference, micro-batch) -> (loss, additive metrics)
LossFn = Callable[
  [Any, decoder.Params | None, Rows], tuple[jax.Array, dict[str, jax.Array]]
]


class TrainState(NamedTuple, Generic[optimizers.LeafT]):
  """The training state.

  Attributes:
    params: the policy's float32 masters, or only its adapters if it has any.
    opt_state: of the optimizer.
    step: optimizer steps taken, int32 `[]`.
    critic: the critic's masters, or its adapters and head; None without one.
  """

  params: decoder.Params
  opt_state: optax.OptState
  step: optimizers.LeafT
  critic: decoder.Params | None = None

  @property
  def trained(self) -> Trained:
    return self.params if self.critic is None else (self.params, self.critic)


def shardings(
  a: architecture_lib.Architecture,
  tx: optax.GradientTransformation | optimizers.Pair,
  mesh: jax.sharding.Mesh,
) -> TrainState[jax.sharding.NamedSharding]:
  """Returns the state's shardings; moments are sharded like their weights.

  Args:
    a: the architecture, with its adapters.
    tx: the optimizer.
    mesh: the training mesh.
  """
  replicated = jax.sharding.NamedSharding(mesh, jax.P())

  def network_shardings(
    rows: Sequence[weights.Weight], tx: optax.GradientTransformation
  ):
    params = weights.shardings(rows, mesh, sharding.rules(mesh))
    opt_state = optax.tree_utils.tree_map_params(
      tx,
      lambda _, sharding: sharding,
      jax.eval_shape(tx.init, weights.abstract(rows, None, jnp.float32)),
      params,
      transform_non_params=lambda _: replicated,
    )
    return params, opt_state

  if not isinstance(tx, optimizers.Pair):
    params, opt_state = network_shardings(table.trainable_rows(a), tx)
    return TrainState(params, opt_state, replicated)
  params, policy_state = network_shardings(table.trainable_rows(a), tx.policy)
  critic, critic_state = network_shardings(table.critic_rows(a), tx.critic)
  opt_state = optimizers.PairState(policy_state, critic_state, replicated)
  return TrainState(params, opt_state, replicated, critic)


def init(
  params: decoder.Params,
  tx: optax.GradientTransformation | optimizers.Pair,
  shardings: TrainState[jax.sharding.NamedSharding] | None = None,
  *,
  critic: decoder.Params | None = None,
) -> TrainState[jax.Array]:
  """Returns the state before the first step.

  The parameters are copied, because the step donates the state's arrays.

  Args:
    params: the policy's trained parameters.
    tx: the optimizer.
    shardings: of the state; None leaves them to JAX.
    critic: the critic's trained parameters; None without one.
  """

  def start(params, critic):
    params, critic = jax.tree.map(
      lambda p: jnp.array(p, jnp.float32), (params, critic)
    )
    trained = params if critic is None else (params, critic)
    return TrainState(params, tx.init(trained), jnp.int32(0), critic)

  return jax.jit(start, out_shardings=shardings)(params, critic)


def grpo_loss(
  a: architecture_lib.Architecture,
  config: config_lib.ObjectiveConfig,
  *,
  temperature: float,
  compute: decoder.Compute = decoder.Compute(),  # noqa: B008
) -> LossFn:
  """Returns the GRPO loss of a micro-batch (paper appendix "GRPO Objective").

  With adapters, only these are trained, and `reference` is their frozen base.
  Where the trainer's old log-probs are `batching.OWN`, they are this step's.
  With `exact` log-probs in the rows, the ratio is these over the behaviour's,
  and its gradient is that of this program; all metrics but the ratio's are too.

  Args:
    a: the architecture, with its adapters.
    config: the settings of the objective.
    temperature: of sampling.
    compute: as for `decoder.forward`.

  Raises:
    ValueError: a setting is for experts, and the policy has none.
  """
  for name, off in (("router_balance", 0), ("router", "own")):
    value = getattr(config, name)
    if not a.experts and value != off:
      raise ValueError(
        f"objective.{name}: found {value}, but the policy has no experts; "
        f"expected {off}."
      )
  score = functools.partial(
    logprobs.with_use, temperature=temperature, compute=compute
  )

  def loss_fn(params, reference, rows):
    policy = params if a.lora is None else lora.combine(reference, params)
    logp, entropy, use = score(
      policy, a, *rows.inputs, entropy_trains=bool(config.entropy_coefficient)
    )
    if config.kl_coefficient:
      # The reference is another policy, whose router makes its own choices.
      unrouted = rows._replace(experts=None)
      reference_logp, *_ = score(reference, a.without_lora(), *unrouted.inputs)
      reference_logp = jax.lax.stop_gradient(reference_logp)
    else:
      reference_logp = jax.lax.stop_gradient(logp)
    old_logp = None
    if config.old_logp == "trainer":
      step_logp = jax.lax.stop_gradient(logp)
      is_own = rows.old_logp == batching.OWN
      old_logp = jnp.where(is_own, step_logp, rows.old_logp)
    if rows.exact is not None:
      # It is 0 for tokens that the present weights sampled.
      drift = rows.exact - rows.behaviour_logp
      old_logp = jax.lax.stop_gradient(logp) - drift
    loss, metrics = grpo.grpo_loss(
      logp,
      rows.behaviour_logp,
      reference_logp,
      rows.advantage,
      rows.weight,
      old_logp=old_logp,
      config=config,
    )
    metrics = {f"loss/{name}": value for name, value in metrics.items()}
    mean_entropy = jnp.sum(rows.weight * entropy)
    metrics["policy/entropy"] = mean_entropy
    if config.entropy_coefficient:
      loss -= config.entropy_coefficient * mean_entropy
    if use is not None:
      total = rows.weight.sum()
      balance = total * experts.balance(use.load)
      if config.router_balance:
        loss += config.router_balance * balance
      metrics["router/balance"] = balance
      metrics["router/load_max"] = a.experts * use.load[:, 0].max()
      if use.recorded is not None and use.mismatch is not None:
        metrics["router/recorded"] = total * use.recorded.mean()
        metrics["router/mismatch"] = total * use.mismatch.mean()
    return loss, metrics

  return loss_fn


def cross_entropy_loss(
  a: architecture_lib.Architecture,
  *,
  compute: decoder.Compute = decoder.Compute(),  # noqa: B008
) -> LossFn:
  """Returns the weighted negative log-likelihood, for supervised training.

  Args:
    a: the architecture; with adapters, only these are trained, and `reference`
      is their frozen base.
    compute: as for `decoder.forward`.
  """

  def loss_fn(params, reference, rows):
    policy = params if a.lora is None else lora.combine(reference, params)
    logp, _ = logprobs.token_logprobs(policy, a, *rows.inputs, compute=compute)
    return -jnp.sum(rows.weight * logp), {}

  return loss_fn


def make(
  loss_fn: LossFn,
  tx: optax.GradientTransformation | optimizers.Pair,
  shardings: TrainState[jax.sharding.NamedSharding] | None = None,
) -> Callable:
  """Returns the jitted `step(state, reference, batch) -> (state, metrics)`.

  `state` is donated; the new one has the given `shardings`. A step whose loss,
  gradient or sampled log-probabilities are not finite leaves the state
  unchanged and reports `finite` 0. A batch without tokens leaves it unchanged
  too and reports `finite` 1.

  The metrics are those of `loss_fn`, summed over micro-batches (the maximum if
  the name ends in `_max`), `loss/total`, `grad_norm` before clipping (and the
  critic's, `value/grad_norm`), and `finite`.

  Args:
    loss_fn: the loss of a micro-batch.
    tx: the optimizer.
    shardings: of the state; None leaves them to JAX.
  """

  def accumulate(trained, reference, batch):
    zeros = jax.tree.map(jnp.zeros_like, trained)
    if shardings is not None:
      zeros = jax.lax.with_sharding_constraint(zeros, shardings.trained)
    buffer = jax.tree.map(jax.new_ref, zeros)

    # The backward pass adds into these refs in place; `jax.grad` would return a
    # second tree of the parameters' size for each micro-batch.
    # https://docs.jax.dev/en/latest/array_refs.html
    def add(rows, i, metrics):
      loss, backward, extra = jax.vjp(
        lambda trained: loss_fn(trained, reference, micro_batch(rows, i)),
        trained,
        has_aux=True,
      )
      with_refs = backward.with_refs  # type: ignore[attr-defined]  # Not in stubs.
      with_refs(buffer)(jnp.ones_like(loss))
      totals = {}
      for name, value in {"loss/total": loss, **extra}.items():
        combine = jnp.maximum if name.endswith("_max") else jnp.add
        totals[name] = combine(metrics[name], value)
      return totals

    _, extra = jax.eval_shape(
      loss_fn, trained, reference, micro_batch(batch[0], 0)
    )
    metrics = {"loss/total": jnp.float32(0)}
    metrics |= {name: jnp.zeros(x.shape) for name, x in extra.items()}
    # The trip count is an input: empty micro-batches cost nothing. Such a loop
    # has no reverse mode; the gradient is taken inside its body.
    for rows in batch:
      metrics = jax.lax.fori_loop(
        0, rows.used, functools.partial(add, rows), metrics
      )
    return jax.tree.map(jax.freeze, buffer), metrics

  def step(state, reference, batch):
    trained = state.trained
    grads, metrics = accumulate(trained, reference, batch)
    networks = (grads,) if state.critic is None else grads
    norms = [optax.tree.norm(gradient) for gradient in networks]
    # It holds the sampler's log-probabilities, also where the loss does not.
    difference = metrics.get("loss/logp_difference", 0.0)
    finite = jnp.isfinite(sum(norms) + metrics["loss/total"] + difference)
    # Without tokens gradients are zero, but momentum and decay would still move
    # the weights.
    applied = finite & (sum(rows.used for rows in batch) > 0)
    updates, opt_state = tx.update(grads, state.opt_state, trained)
    updated = optax.apply_updates(trained, updates)
    params, critic = (updated, None) if state.critic is None else updated
    next_state = TrainState(params, opt_state, state.step + 1, critic)
    next_state = jax.tree.map(
      lambda new, old: jnp.where(applied, new, old), next_state, state
    )
    metrics |= dict(zip(("grad_norm", "value/grad_norm"), norms))
    return next_state, metrics | {"finite": finite.astype(jnp.float32)}

  return jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))


def micro_batch(rows: Rows, i: jax.Array | int) -> Rows:
  """Returns the i-th micro-batch of `rows`; its arrays are `[B, T]`."""
  return rows._replace(
    **{
      name: jax.lax.dynamic_index_in_dim(x, i, keepdims=False)
      for name, x in rows._asdict().items()
      if name != "used" and x is not None
    }
  )


def make_scorer(
  a: architecture_lib.Architecture,
  *,
  temperature: float,
  compute: decoder.Compute = decoder.Compute(),  # noqa: B008
  sharding: jax.sharding.NamedSharding | None = None,
) -> Callable:
  """Returns the jitted `score(params, reference, batch)`: log-probabilities.

  `params` and `reference` are as for the step. The result is that of
  `over_micro_batches`.

  Args:
    a: the architecture, with its adapters.
    temperature: of sampling.
    compute: as for `decoder.forward`.
    sharding: of the result.
  """

  def score(params, reference, batch):
    policy = params if a.lora is None else lora.combine(reference, params)

    def logp(rows):
      return logprobs.token_logprobs(
        policy, a, *rows.inputs, temperature=temperature, compute=compute
      )[0]

    return over_micro_batches(logp, batch)

  return jax.jit(score, out_shardings=sharding)


def over_micro_batches(
  f: Callable[[Rows], jax.Array], batch: batching.TrainBatch
) -> tuple[jax.Array, ...]:
  """Applies `f`, which returns `[B, T]`, to every micro-batch of a batch.

  Returns float32 `[A, B, T]` for each of the batch's `Rows`, 0 in micro-batches
  without tokens.
  """

  def apply(rows):
    def add(i, results):
      result = f(micro_batch(rows, i))
      return jax.lax.dynamic_update_index_in_dim(results, result, i, 0)

    zeros = jnp.zeros_like(rows.old_logp)
    return jax.lax.fori_loop(0, rows.used, add, zeros)

  return tuple(apply(rows) for rows in batch)
