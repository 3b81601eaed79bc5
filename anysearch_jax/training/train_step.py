"""One optimizer step: a jitted, donated function of state and batch.

Gradients are summed over micro-batches in one buffer; every weight already
carries its global denominator, so the sum is the gradient of the step's loss
however the trajectories were packed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from anysearch_jax import config as config_lib
from anysearch_jax import objective, weights
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import lora, table, transformer
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


def init(
  params: transformer.Params, tx: optax.GradientTransformation
) -> TrainState:
  """Step 0 of a policy; the arrays are copied, for the step donates them."""
  params = jax.tree.map(lambda p: jnp.array(p, jnp.float32), params)
  return TrainState(params, tx.init(params), jnp.int32(0))


def grpo_loss(
  a: architecture_lib.Architecture,
  config: config_lib.ObjectiveConfig,
  *,
  temperature: float,
  dtype: Any = jnp.float32,
  remat: bool = False,
) -> LossFn:
  """The GRPO loss of a micro-batch (paper appendix "GRPO Objective").

  With adapters, `params` are these alone and `reference` is also the frozen
  base that they stand beside.
  """
  score = functools.partial(
    logprobs.token_logprobs, temperature=temperature, dtype=dtype
  )

  def loss_fn(params, reference, rows):
    inputs = (rows.tokens, rows.targets, rows.positions, rows.segment_ids)
    policy = params if a.lora is None else lora.combine(reference, params)
    logp, entropy = score(policy, a, *inputs, remat=remat)
    if config.kl_coefficient:
      reference_logp, _ = score(reference, a.without_lora(), *inputs)
      reference_logp = jax.lax.stop_gradient(reference_logp)
    else:
      reference_logp = jax.lax.stop_gradient(logp)
    loss, metrics = objective.grpo_loss(
      logp,
      rows.behaviour_logp,
      reference_logp,
      rows.advantage,
      rows.weight,
      config=config,
    )
    metrics = {f"loss/{name}": value for name, value in metrics.items()}
    metrics["policy/entropy"] = jnp.sum(rows.weight * entropy)
    return loss, metrics

  return loss_fn


def cross_entropy_loss(
  a: architecture_lib.Architecture, *, dtype: Any = jnp.float32
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
      dtype=dtype,
    )
    return -jnp.sum(rows.weight * logp), {}

  return loss_fn


def make(loss_fn: LossFn, tx: optax.GradientTransformation) -> Callable:
  """The jitted `step(state, reference, batch) -> (state, metrics)`.

  `state` is donated. A step whose loss or gradient is not finite leaves the
  parameters and the optimizer as they were and reports `finite` 0.

  Metrics: those of `loss_fn`, summed (or the maximum where the name ends in
  `_max`), `loss/total`, `grad_norm` before clipping, `finite`.
  """
  gradient = jax.value_and_grad(loss_fn, has_aux=True)

  def accumulate(params, reference, batch):
    def micro_batch(rows, i):
      return rows._replace(
        **{
          name: jax.lax.dynamic_index_in_dim(x, i, keepdims=False)
          for name, x in rows._asdict().items()
          if name != "used"
        }
      )

    def add(rows, i, carry):
      grads, metrics = carry
      (loss, extra), new = gradient(params, reference, micro_batch(rows, i))
      extra = {"loss/total": loss, **extra}
      return jax.tree.map(jnp.add, grads, new), {
        name: (jnp.maximum if name.endswith("_max") else jnp.add)(
          metrics[name], value
        )
        for name, value in extra.items()
      }

    shapes = jax.eval_shape(
      gradient, params, reference, micro_batch(batch[0], 0)
    )
    names = ("loss/total", *shapes[0][1])
    carry = (
      jax.tree.map(jnp.zeros_like, params),
      dict.fromkeys(names, jnp.float32(0)),
    )
    for rows in batch:
      carry = jax.lax.fori_loop(
        0, rows.used, functools.partial(add, rows), carry
      )
    return carry

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

  return jax.jit(step, donate_argnums=0)
