"""Builds the programs of a run with abstract arguments; allocates nothing."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from anysearch_jax import config as config_lib
from anysearch_jax.planning import program
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import decoder, lora, sharding, table
from anysearch_jax.policy import parameters as weights
from anysearch_jax.policy.attention import paged_attention
from anysearch_jax.rollout.jax_engine import kv_memory, kv_store
from anysearch_jax.training import batching, placement, ppo, train_step


def programs(
  config: config_lib.ExperimentConfig,
  a: architecture_lib.Architecture,
  *,
  devices: Sequence[jax.Device],
  micro_batches: int,
) -> list[program.Program]:
  """Returns the train step, the passes before it, prefill and decode.

  Args:
    config: the whole configuration.
    a: the policy's architecture, without adapters.
    devices: of the target. Training uses those of `config.mesh`; sampling those
      of `config.mesh.rollout`, by default the training devices.
    micro_batches: number of micro-batches that one optimizer step fills.

  Raises:
    ValueError: the mesh does not suit the devices or the policy.
  """
  a = lora.attach(a, config.lora)
  placed = placement.Placement.of(a, config, devices)
  training = _training(config, placed, micro_batches)
  return [*training, *_engine(config, placed)]


def _training(
  config: config_lib.ExperimentConfig,
  placed: placement.Placement,
  micro_batches: int,
) -> list[program.Program]:
  a = placed.a
  how: dict[str, Any] = {
    "temperature": config.sampling.temperature,
    "compute": placement.compute(config, a, placed.trainer),
  }
  critic = config.critic if config.objective.has_critic else None
  tx = train_step.optimizer(a, config.optimizer, critic=critic)
  shardings = train_step.shardings(a, tx, placed.trainer)
  trained = weights.abstract(
    table.trainable_rows(a), shardings.params, jnp.float32
  )
  of_critic = critic and weights.abstract(
    table.critic_rows(a), shardings.critic, jnp.float32
  )
  state = _placed(
    jax.eval_shape(
      lambda params, critic: train_step.init(params, tx, critic=critic),
      trained,
      of_critic,
    ),
    shardings,
  )
  reference = _reference(config, placed)
  batch = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=placed.rows if x.shape else placed.whole
    ),
    batching.abstract(config.batch, multiple=placed.row_multiple),
  )
  loss = train_step.grpo_loss(
    a,
    config.objective,
    on_policy=config.curriculum.steps_per_rollout == 1,
    **how,
  )
  if critic is not None:
    loss = ppo.with_critic(loss, a, critic, compute=how["compute"])
    batch = tuple(
      rows._replace(old_value=rows.advantage, returns=rows.advantage)
      for rows in batch
    )
  step = train_step.make(loss, tx, shardings)
  # Each row length has its own loop; micro-batches are assumed to be divided
  # evenly among them.
  trips = math.ceil(micro_batches / len(batch))
  tokens = sum(trips * math.prod(rows.tokens.shape[1:]) for rows in batch)
  kinds = {
    "masters": state.params,
    "critic": state.critic,
    "moments": state.opt_state,
    "reference": reference,
    "batch": batch,
  }
  out = [
    program.Program(
      "train step",
      step,
      (state, reference, batch),
      {},
      tokens=tokens,
      trips=trips,
      kinds=kinds,
      reads=(state.trained, reference),
    )
  ]
  if a.lora is None and reference is not None:
    score = train_step.make_scorer(a, sharding=placed.rows, **how)
    out.append(
      program.Program(
        "reference pass",
        score,
        (reference, None, batch),
        {},
        tokens=tokens,
        trips=trips,
        kinds={"reference": reference, "batch": batch},
      )
    )
  if critic is not None:
    estimator = ppo.Estimator(a, critic, sharding=placed.rows, **how)
    base = None if a.lora is None else reference
    out.append(
      program.Program(
        "value pass",
        estimator.value,
        (state.critic, base, batch),
        {},
        tokens=tokens,
        trips=trips,
        kinds={"critic": state.critic, "reference": base, "batch": batch},
      )
    )
  return out


def _engine(
  config: config_lib.ExperimentConfig, placed: placement.Placement
) -> list[program.Program]:
  """Returns prefill and decode, with all rows at full context."""
  a, c, mesh = placed.a, config.engine, placed.rollout
  cut = sharding.shardings(a, mesh)
  base = _cast(table.base_rows(a), cut, _base_dtype(config, placed))
  if a.lora is not None:
    base = lora.combine(base, _cast(table.adapter_rows(a), cut, placed.dtype))
  params = jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    jax.eval_shape(functools.partial(decoder.apart, a=a), base),
    _apart(a, base),
  )
  parts = mesh.shape["data"]
  store = jax.eval_shape(
    functools.partial(
      paged_attention.empty,
      a,
      kv_memory.pages(c, parts=parts) * parts,
      c.page,
      placed.dtype,
    )
  )
  pages = kv_store.sharding(a, mesh)
  store = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=pages), store
  )
  kinds = {"engine weights": params, "KV cache": store}
  by_rows = jax.sharding.NamedSharding(mesh, jax.P("data"))
  columns = kv_memory.pages_of(c.max_context, c)
  paged = kv_store.paged(c, a, mesh, dtype=placed.dtype)
  blocks = math.ceil(c.max_context / max(paged.block, c.page))
  same = {"a": a, "dtype": placed.dtype, "paged": paged}

  def rows(*shape, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=by_rows)

  p, r = c.prefill_lanes, c.lanes[-1]
  return [
    program.Program(
      "prefill",
      kv_store.prefill,
      (
        params,
        store,
        rows(p, columns),
        rows(p, c.prefill_chunk),
        *[rows(p) for _ in ("starts", "counts")],
      ),
      same,
      tokens=p * c.prefill_chunk,
      trips=1,
      kinds=kinds,
      reads=(params, _read_pages(store, p * columns)),
      blocks=blocks,
    ),
    program.Program(
      "decode",
      kv_store.decode,
      (
        params,
        store,
        rows(r, columns),
        *[rows(r) for _ in ("tokens", "starts", "limits")],
        jax.ShapeDtypeStruct((), jnp.int32),
        rows(r, 5, dtype=jnp.uint32),
        rows(r),
        jax.ShapeDtypeStruct((a.vocab_size,), jnp.bool_),
        jax.eval_shape(lambda: jax.random.key(0)),
      ),
      same | {"steps": c.decode_steps, "sampling": config.sampling},
      tokens=r * c.decode_steps,
      trips=c.decode_steps,
      kinds=kinds,
      reads=(params, _read_pages(store, r * columns)),
      blocks=blocks,
    ),
  ]


def _apart(
  a: architecture_lib.Architecture, params: decoder.Params
) -> decoder.Params:
  """Returns the shardings of weights after their layers are unstacked."""
  layers = jax.tree.map(
    lambda x: jax.sharding.NamedSharding(
      x.sharding.mesh, jax.P(*x.sharding.spec[1:])
    ),
    params[table.LAYERS],
  )
  others = {
    k: jax.tree.map(lambda x: x.sharding, v)
    for k, v in params.items()
    if k != table.LAYERS
  }
  return others | {table.LAYERS: [layers] * a.layers}


def _read_pages(
  store: paged_attention.Pools, pages: int
) -> paged_attention.Pools:
  """Returns the part of the cache that one call reads at most."""
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      (x.shape[0], min(pages, x.shape[1]), *x.shape[2:]),
      x.dtype,
      sharding=x.sharding,
    ),
    store,
  )


def _reference(
  config: config_lib.ExperimentConfig, placed: placement.Placement
) -> decoder.Params | None:
  """Returns the KL reference or frozen base, as `learner.Learner` keeps it."""
  a = placed.a.without_lora()
  penalized = config.objective.kl_coefficient or config.critic.reward_kl
  if placed.a.lora is None and not penalized:
    return None
  cut = sharding.shardings(a, placed.trainer)
  return _cast(table.rows(a), cut, _base_dtype(config, placed))


def _base_dtype(
  config: config_lib.ExperimentConfig, placed: placement.Placement
) -> Any:
  return placed.dtype if placed.a.lora is None else config.lora.base_dtype


def _cast(
  rows: Sequence[weights.Weight], shardings: dict, dtype: Any
) -> decoder.Params:
  """Returns abstract weights in `dtype`, except float32 scales of norms."""

  def leaf(row: weights.Weight) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
      row.shape,
      jnp.float32 if row.init is None else dtype,
      sharding=weights.get(shardings, row.path),
    )

  return weights.tree(rows, leaf)


def _placed(shapes: Any, shardings: Any) -> Any:
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    shapes,
    shardings,
  )
