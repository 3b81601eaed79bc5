"""The programs of a run with abstract arguments: nothing is allocated."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from anysearch_jax import config as config_lib
from anysearch_jax import weights
from anysearch_jax.planning import program
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import lora, sharding, table, transformer
from anysearch_jax.rollout import kv_store
from anysearch_jax.training import batching, placement, train_step


def programs(
  config: config_lib.ExperimentConfig,
  a: architecture_lib.Architecture,
  *,
  devices: Sequence[jax.Device],
  micro_batches: int,
) -> list[program.Program]:
  """Train step, reference pass, prefill and decode of a configuration.

  Args:
    config: the whole of it; `lora` is attached to `a` here.
    a: the policy's architecture.
    devices: of the target. Training takes `config.mesh` of them; sampling as
      many as `config.mesh.rollout` names, or those of training.
    micro_batches: that one optimizer step fills.

  Raises:
    ValueError: a mesh that the devices or the policy do not allow.
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
  tx = train_step.optimizer(a, config.optimizer)
  shardings = train_step.shardings(a, tx, placed.trainer)
  trained = weights.abstract(
    table.trainable_rows(a), shardings.params, jnp.float32
  )
  state = _placed(
    jax.eval_shape(functools.partial(train_step.init, tx=tx), trained),
    shardings,
  )
  reference = _reference(config, placed)
  batch = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=placed.rows if x.shape else placed.whole
    ),
    batching.abstract(config.batch, multiple=placed.row_multiple),
  )
  step = train_step.make(
    train_step.grpo_loss(
      a,
      config.objective,
      on_policy=config.curriculum.steps_per_rollout == 1,
      **how,
    ),
    tx,
    shardings,
  )
  # Every row length has a loop of its own; together they run this often.
  trips = math.ceil(micro_batches / len(batch))
  tokens = sum(trips * math.prod(rows.tokens.shape[1:]) for rows in batch)
  kinds = {
    "masters": state.params,
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
      reads=(state.params, reference),
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
  return out


def _engine(
  config: config_lib.ExperimentConfig, placed: placement.Placement
) -> list[program.Program]:
  """Prefill and decode at the longest bucket."""
  a, c = placed.a, config.engine
  length, lanes = c.kv_buckets[-1], c.lanes[-1]
  cut = sharding.shardings(a, placed.rollout)
  base = _cast(table.base_rows(a), cut, _base_dtype(config, placed))
  params, kinds = base, {"engine weights": base}
  if a.lora is not None:
    adapters = _cast(table.adapter_rows(a), cut, placed.dtype)
    params = lora.combine(base, adapters)
    # A base that lies the same for both is one: `Placement.to_engine`.
    shared = cut == sharding.shardings(a, placed.trainer)
    kinds = (
      {"reference": base, "engine weights": adapters}
      if shared
      else {"engine weights": params}
    )
  store = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=kv_store.sharding(a, placed.rollout)
    ),
    jax.eval_shape(
      functools.partial(
        transformer.empty_caches, a, c.slots + 1, length, placed.dtype
      )
    ),
  )
  kinds["KV cache"] = store
  shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
  same = {"a": a, "length": length, "dtype": placed.dtype}
  p = c.prefill_lanes
  return [
    program.Program(
      "prefill",
      kv_store.prefill,
      (params, store, shape((p,)), shape((p, c.prefill_chunk)), shape((p,))),
      same,
      tokens=p * c.prefill_chunk,
      trips=1,
      kinds=kinds,
      reads=(params, _first_rows(store, p)),
    ),
    program.Program(
      "decode",
      kv_store.decode,
      (
        params,
        store,
        *[shape((lanes,)) for _ in ("rows", "tokens", "starts", "limits")],
        jax.ShapeDtypeStruct((lanes, 5), jnp.uint32),
        shape((lanes,)),
        jax.ShapeDtypeStruct((a.vocab_size,), jnp.bool_),
        jax.eval_shape(lambda: jax.random.key(0)),
      ),
      same | {"steps": c.decode_steps, "sampling": config.sampling},
      tokens=lanes * c.decode_steps,
      trips=c.decode_steps,
      kinds=kinds,
      reads=(params, _first_rows(store, lanes)),
    ),
  ]


def _first_rows(store: kv_store.Caches, rows: int) -> kv_store.Caches:
  """What one call reads of the store."""
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      (rows, *x.shape[1:]), x.dtype, sharding=x.sharding
    ),
    store,
  )


def _reference(
  config: config_lib.ExperimentConfig, placed: placement.Placement
) -> transformer.Params | None:
  """What stands beside the state: see `loop.Trainer`."""
  a = placed.a.without_lora()
  if placed.a.lora is None and not config.objective.kl_coefficient:
    return None
  cut = sharding.shardings(a, placed.trainer)
  return _cast(table.rows(a), cut, _base_dtype(config, placed))


def _base_dtype(
  config: config_lib.ExperimentConfig, placed: placement.Placement
) -> Any:
  return placed.dtype if placed.a.lora is None else config.lora.base_dtype


def _cast(
  rows: Sequence[weights.Weight], shardings: dict, dtype: Any
) -> transformer.Params:
  """Abstract weights as `Placement` casts them: scales of norms stay."""

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
