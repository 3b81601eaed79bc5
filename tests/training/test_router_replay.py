"""Recorded choices of experts, and what training does with them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_models
import small_engine
import small_run

from anysearch_jax import config as config_lib
from anysearch_jax.policy import (
  decoder,
  experts,
  hf,
  sharding,
  table,
  tensor_files,
)
from anysearch_jax.rollout import engines
from anysearch_jax.rollout.jax_engine import engine as engine_lib
from anysearch_jax.training import batching, logprobs, train_step

A = random_models.architecture("qwen3-moe", vocab_size=len(small_engine.TEXTS))
REPLAY = config_lib.ObjectiveConfig(router="replay")
EPISODES = [(q, s) for q in range(3) for s in range(3)]


def engine(params, a=A, mesh=None, **changes):
  config = dataclasses.replace(small_engine.CONFIG, **changes)
  return engine_lib.JaxEngine(
    hf.Policy(params, a, small_engine.Tokenizer()),
    config=config,
    sampling=config_lib.SamplingConfig(),
    seed=7,
    mesh=mesh,
    records=True,
  )


@pytest.fixture(scope="module", params=["qwen3-moe", "gpt-oss"])
def policy(request, torch, tmp_path_factory):
  """The torch model of the oracle, its parameters and architecture."""
  folder, size = tmp_path_factory.mktemp("moe"), A.vocab_size
  model = random_models.make(request.param, folder, vocab_size=size)
  a = random_models.architecture(request.param, vocab_size=size)
  mesh = sharding.mesh()
  read = tensor_files.load(
    folder, table.base_rows(a), shardings=sharding.shardings(a, mesh)
  )
  read = hf.cast(read, a, jnp.float32)
  return model, read, a


def chosen_by(torch, model, context, active):
  """Returns the experts of each token in one pass of transformers, sorted."""
  with torch.no_grad():
    out = model(torch.tensor([context]), output_router_logits=True)
  top = [x.topk(active).indices for x in out.router_logits]
  return np.sort(torch.stack(top, 1).numpy(), -1)


@pytest.mark.parametrize(
  "changes",
  [
    {"kv_tokens": 200},
    pytest.param({}, marks=pytest.mark.slow),
    pytest.param({"mesh": {"data": 2}}, marks=pytest.mark.slow),
  ],
  ids=str,
)
def test_turns_have_the_experts_of_one_pass_over_their_context(
  torch, policy, changes
):
  """Prompts are shared, prefilled in chunks; rows are preempted."""
  model, params, a = policy
  if "mesh" in changes:
    mesh = sharding.mesh(**changes["mesh"])
    params = jax.device_put(params, sharding.shardings(a, mesh))
    changes = {"mesh": mesh}
  sampler = engine(params, a, **changes)
  for context, turns in small_engine.play(sampler, EPISODES).values():
    wanted = chosen_by(torch, model, context, a.active)
    end = len(context)
    for turn in reversed(turns):
      end -= len(small_engine.ENVIRONMENT)
      assert turn.experts.dtype == np.uint8
      assert turn.experts.shape == (end - 1, a.layers, a.active)
      np.testing.assert_array_equal(np.sort(turn.experts), wanted[: end - 1])
      end -= len(turn.token_ids)
  assert sampler.counters["shared_tokens"]
  assert bool(sampler.counters["preemptions"]) == ("kv_tokens" in changes)


@pytest.mark.parametrize("trains", [True, False])
def test_only_turns_that_are_trained_on_have_experts(policy, trains):
  made = config_lib.ExperimentConfig(
    engine=small_engine.CONFIG, objective=REPLAY
  )
  loaded = hf.Policy(*policy[1:], small_engine.Tokenizer())
  sampler = engines.make(loaded, made, seed=7, trains=trains)
  for _, turns in small_engine.play(sampler, EPISODES[:1]).values():
    assert all((turn.experts is not None) == trains for turn in turns)


def rows(seed=0, tokens=(30, 17), multiple=1):
  """Packed rows with random experts, but of some tokens none."""
  rng = np.random.default_rng(seed)
  examples = []
  for size in tokens:
    ids = rng.permuted(
      np.tile(np.arange(A.experts, dtype=np.uint8), (size, A.layers, 1)), axis=2
    )[..., : A.active]
    ids[:2] = 255
    examples.append(
      batching.Example(
        rng.integers(0, A.vocab_size, size).astype(np.int32),
        np.full(size, 1 / sum(tokens), np.float32),
        rng.normal(-3, 0.3, size).astype(np.float32),
        float(rng.normal()),
        experts=ids,
      )
    )
  config = config_lib.BatchConfig(
    row_lengths=(32,), micro_batch_tokens=64, max_micro_batches=4
  )
  return batching.pack(
    examples, config=config, multiple=multiple, experts=experts.record(A)
  )


def scored(params, packed, **compute):
  return logprobs.with_use(
    *(params, A, *packed.inputs),
    temperature=1.0,
    compute=decoder.Compute(**compute),
  )


def test_replay_uses_the_recorded_experts_and_trains_the_router():
  params = random_models.params(A)
  packed = train_step.micro_batch(jax.tree.map(jnp.asarray, rows()[0]), 0)
  logp, _, use = scored(params, packed)
  own, _, of_own = scored(params, packed, replays=False)
  assert np.abs(logp - own).max() > 1e-2
  # All but two of the inputs of each trajectory.
  np.testing.assert_allclose(use.recorded, 41 / 45, rtol=1e-6)
  assert (of_own.mismatch > 0.3).all()
  # Where no token has a record, routers choose themselves.
  unknown = packed._replace(experts=jnp.full_like(packed.experts, 255))
  np.testing.assert_array_equal(scored(params, unknown)[0], own)
  # What was recorded is what is used.
  known = np.asarray(packed.experts)[np.asarray(packed.segment_ids) > 0]
  counts = [
    np.bincount(x[x < 255], minlength=A.experts)
    for x in known.swapaxes(0, 1).reshape(A.layers, -1)
  ]
  total = use.load[:, 0] * 45 * A.active
  assert (total >= np.array(counts) - 1e-3).all()
  np.testing.assert_allclose(total.sum(-1), 45 * A.active, rtol=1e-5)

  def loss(router):
    layers = params["layers"] | {"router": router}
    return scored(params | {"layers": layers}, packed)[0].sum()

  router = params["layers"]["router"]
  gradient = jax.grad(loss)(router)
  way = np.random.default_rng(1).standard_normal(router.shape) * 1e-3
  slope = (loss(router + way) - loss(router - way)) / 2
  np.testing.assert_allclose(jnp.sum(gradient * way), slope, rtol=2e-2)
  assert abs(slope) > 1e-3


def test_a_mesh_replays_as_one_device(monkeypatch, capfd):
  monkeypatch.setattr(experts, "_FEW", 0)
  monkeypatch.setattr(experts, "_BLOCK", 16)
  params = random_models.params(A)
  packed = rows(tokens=(30, 17, 25, 9, 31, 28, 20, 11, 29), multiple=4)

  def result(layout):
    compute = decoder.Compute(layout=layout, remat="full")
    loss = train_step.grpo_loss(A, REPLAY, temperature=1.0, compute=compute)
    run = jax.jit(jax.value_and_grad(loss, has_aux=True))
    given = params
    if layout is not None:
      given = jax.device_put(params, sharding.shardings(A, layout.mesh))
    return run(given, params, train_step.micro_batch(packed[0], 0))

  mesh = sharding.mesh(fsdp=2, expert=2, tensor=2)
  (found, more), gradient = result(sharding.Layout(mesh, True))
  (wanted, expected), alone = result(None)
  np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
  for name, value in expected.items():
    np.testing.assert_allclose(more[name], value, rtol=1e-4, atol=1e-6)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), gradient, alone
  )
  assert "full rematerialization" not in capfd.readouterr().err


def test_a_policy_without_experts_has_none_to_replay():
  with pytest.raises(ValueError, match=r"objective.router: found replay"):
    train_step.grpo_loss(small_engine.A, REPLAY, temperature=1.0)


@pytest.mark.parametrize("router", ["replay", "compare"])
def test_a_run_replays_what_its_engine_recorded(tmp_path, router):
  parts = small_run.parts()
  policy = parts["policy"]
  a = random_models.architecture(
    "qwen3-moe", vocab_size=policy.architecture.vocab_size, num_hidden_layers=1
  )
  params = random_models.params(a)
  parts["policy"] = policy._replace(params=params, architecture=a)
  base = small_run.CONFIG
  config = dataclasses.replace(
    base,
    objective=dataclasses.replace(
      base.objective, router=router, old_logp="trainer"
    ),
    curriculum=dataclasses.replace(base.curriculum, total_steps=4),
  )
  small_run.train(tmp_path, parts, config)
  steps = small_run.records(tmp_path, "steps.jsonl")
  assert len(steps) == 4
  for step in steps:
    assert step["finite"] == 1
    assert step["router/recorded"] > 0.9
  # The first step's weights are the sampler's.
  assert steps[0]["router/mismatch"] < 1e-3
