"""One optimizer step: a jitted, donated function of state and batch.

The backward pass of each micro-batch adds to one gradient buffer, layer by
layer; every weight already carries its global denominator, so the sum is the
gradient of the step's loss however the trajectories were packed. On a mesh,
state, gradients and batch are cut by the parameter table (`policy/sharding`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from anysearch_jax import config as config_lib
from anysearch_jax import objective, weights
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import lora, sharding, table, transformer
from anysearch_jax.training import batching, logprobs

# (params, reference, micro-batch) -> (loss, additive metrics).
LossFn = Callable[
  [transformer.Params, transformer.Params | None, batching.Rows],
  tuple[jax.Array, dict[str, jax.Array]],
]


class TrainState(NamedTuple):
  """What a step changes: float32 masters, optimizer state, steps taken.

  `params` are the adapters alone where the architecture has them.
  """

  params: transformer.Params
  opt_state: optax.OptState
  step: jax.Array


def optimizer(
  a: architecture_lib.Architecture,
  config: config_lib.OptimizerConfig,
  *,
  schedule: optax.Schedule | None = None,
) -> optax.GradientTransformation:
  """AdamW with global-norm clipping; decay on matrices only.

  Args:
    a: the architecture, whose table says what is a matrix.
    config: rates; `max_grad_norm` 0 is no clipping.
    schedule: learning rate by step, instead of the constant one.
  """
  matrices = weights.tree(
    table.trainable_rows(a), lambda row: len(row.file_shape) > 1
  )
  adamw = optax.adamw(
    schedule or config.learning_rate,
    b1=config.b1,
    b2=config.b2,
    eps=config.eps,
    weight_decay=config.weight_decay,
    mask=matrices,
  )
  if not config.max_grad_norm:
    return adamw
  return optax.chain(optax.clip_by_global_norm(config.max_grad_norm), adamw)


def shardings(
  a: architecture_lib.Architecture,
  tx: optax.GradientTransformation,
  mesh: jax.sharding.Mesh,
) -> TrainState:
  """The sharding of every array of the state; moments lie as their weights."""
  rows = table.trainable_rows(a)
  params = weights.shardings(rows, mesh, sharding.RULES)
  whole = jax.sharding.NamedSharding(mesh, jax.P())
  opt_state = optax.tree_utils.tree_map_params(
    tx,
    lambda _, of_param: of_param,
    jax.eval_shape(tx.init, weights.abstract(rows, None, jnp.float32)),
    params,
    transform_non_params=lambda _: whole,
  )
  return TrainState(params, opt_state, whole)


def init(
  params: transformer.Params,
  tx: optax.GradientTransformation,
  shardings: TrainState | None = None,
) -> TrainState:
  """Step 0 of a policy; the arrays are copied, for the step donates them."""

  def start(params):
    params = jax.tree.map(lambda p: jnp.array(p, jnp.float32), params)
    return TrainState(params, tx.init(params), jnp.int32(0))

  return jax.jit(start, out_shardings=shardings)(params)


def grpo_loss(
  a: architecture_lib.Architecture,
  config: config_lib.ObjectiveConfig,
  *,
  temperature: float,
  compute: transformer.Compute = transformer.Compute(),  # noqa: B008
  on_policy: bool = False,
) -> LossFn:
  """The GRPO loss of a micro-batch (paper appendix "GRPO Objective").

  With adapters, `params` are these alone and `reference` is also the frozen
  base that they stand beside. Without a KL term there is no reference pass.
  `on_policy`: the trainer's old log-probs, where the configuration asks for
  them, are those of this very step.
  """
  score = functools.partial(
    logprobs.token_logprobs, temperature=temperature, compute=compute
  )

  def loss_fn(params, reference, rows):
    inputs = (rows.tokens, rows.targets, rows.positions, rows.segment_ids)
    policy = params if a.lora is None else lora.combine(reference, params)
    logp, entropy = score(policy, a, *inputs)
    if config.kl_coefficient:
      reference_logp, _ = score(reference, a.without_lora(), *inputs)
      reference_logp = jax.lax.stop_gradient(reference_logp)
    else:
      reference_logp = jax.lax.stop_gradient(logp)
    old_logp = None
    if config.old_logp == "trainer":
      old_logp = jax.lax.stop_gradient(logp) if on_policy else rows.old_logp
    loss, metrics = objective.grpo_loss(
      logp,
      rows.behaviour_logp,
      reference_logp,
      rows.advantage,
      rows.weight,
      old_logp=old_logp,
      config=config,
    )
    metrics = {f"loss/{name}": value for name, value in metrics.items()}
    metrics["policy/entropy"] = jnp.sum(rows.weight * entropy)
    return loss, metrics

  return loss_fn


def cross_entropy_loss(
  a: architecture_lib.Architecture,
  *,
  compute: transformer.Compute = transformer.Compute(),  # noqa: B008
) -> LossFn:
  """Weighted negative log-likelihood, for supervised warm starts."""

  def loss_fn(params, reference, rows):
    del reference
    logp, _ = logprobs.token_logprobs(
      params,
      a,
      rows.tokens,
      rows.targets,
      rows.positions,
      rows.segment_ids,
      compute=compute,
    )
    return -jnp.sum(rows.weight * logp), {}

  return loss_fn


def make(
  loss_fn: LossFn,
  tx: optax.GradientTransformation,
  shardings: TrainState | None = None,
) -> Callable:
  """The jitted `step(state, reference, batch) -> (state, metrics)`.

  `state` is donated and comes back as `shardings` has it. A step whose loss or
  gradient is not finite leaves the parameters and the optimizer as they were
  and reports `finite` 0.

  Metrics: those of `loss_fn`, summed (or the maximum where the name ends in
  `_max`), `loss/total`, `grad_norm` before clipping, `finite`.
  """

  def accumulate(params, reference, batch):
    zeros = jax.tree.map(jnp.zeros_like, params)
    if shardings is not None:
      zeros = jax.lax.with_sharding_constraint(zeros, shardings.params)
    buffer = jax.tree.map(jax.new_ref, zeros)

    def add(rows, i, metrics):
      loss, backward, extra = jax.vjp(
        lambda params: loss_fn(params, reference, micro_batch(rows, i)),
        params,
        has_aux=True,
      )
      backward.with_refs(buffer)(jnp.ones_like(loss))
      return {
        name: (jnp.maximum if name.endswith("_max") else jnp.add)(
          metrics[name], value
        )
        for name, value in {"loss/total": loss, **extra}.items()
      }

    _, extra = jax.eval_shape(
      loss_fn, params, reference, micro_batch(batch[0], 0)
    )
    metrics = dict.fromkeys(("loss/total", *extra), jnp.float32(0))
    for rows in batch:
      metrics = jax.lax.fori_loop(
        0, rows.used, functools.partial(add, rows), metrics
      )
    return jax.tree.map(jax.freeze, buffer), metrics

  def step(state, reference, batch):
    grads, metrics = accumulate(state.params, reference, batch)
    norm = optax.global_norm(grads)
    finite = jnp.isfinite(norm) & jnp.isfinite(metrics["loss/total"])
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    new = TrainState(
      optax.apply_updates(state.params, updates), opt_state, state.step + 1
    )
    new = jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, state)
    metrics |= {"grad_norm": norm, "finite": finite.astype(jnp.float32)}
    return new, metrics

  return jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))


def micro_batch(rows: batching.Rows, i: jax.Array | int) -> batching.Rows:
  """The i-th of `rows`: arrays are `[B, T]`."""
  return rows._replace(
    **{
      name: jax.lax.dynamic_index_in_dim(x, i, keepdims=False)
      for name, x in rows._asdict().items()
      if name != "used"
    }
  )


def make_scorer(
  a: architecture_lib.Architecture,
  *,
  temperature: float,
  compute: transformer.Compute = transformer.Compute(),  # noqa: B008
  sharding: jax.sharding.NamedSharding | None = None,
) -> Callable:
  """The jitted `score(params, reference, batch)`: a batch's log-probabilities.

  float32 `[A, B, T]` for each of the batch's `Rows`, 0 in micro-batches that
  hold no tokens, placed as `sharding`. `params` and `reference` are those of
  the step.
  """

  def score(params, reference, batch):
    policy = params if a.lora is None else lora.combine(reference, params)

    def of_rows(rows):
      def add(i, out):
        part = micro_batch(rows, i)
        logp, _ = logprobs.token_logprobs(
          policy,
          a,
          part.tokens,
          part.targets,
          part.positions,
          part.segment_ids,
          temperature=temperature,
          compute=compute,
        )
        return jax.lax.dynamic_update_index_in_dim(out, logp, i, 0)

      zeros = jnp.zeros_like(rows.old_logp)
      return jax.lax.fori_loop(0, rows.used, add, zeros)

    return tuple(of_rows(rows) for rows in batch)

  return jax.jit(score, out_shardings=sharding)
