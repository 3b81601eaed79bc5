"""Compares the train step on a mesh with the same step on one device."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest
import random_models

from anysearch_jax import config as config_lib
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import decoder, experts, lora, sharding
from anysearch_jax.training import batching, train_step

FAMILIES = ("qwen2", "qwen3-tied", "llama", "smollm3", "olmo3", "gemma3-tied")
EXPERTS = ("qwen3-moe", "gpt-oss")
# (data, fsdp, expert, context, tensor, sequence parallelism).
MESHES = {
  "fsdp8": (1, 8, 1, 1, 1, False),
  "fsdp4-tensor2": (1, 4, 1, 1, 2, False),
  "fsdp4-tensor2-sequence": (1, 4, 1, 1, 2, True),
  "context8": (1, 1, 1, 8, 1, False),
  "fsdp2-context4": (1, 2, 1, 4, 1, False),
  "fsdp2-context2-tensor2-sequence": (1, 2, 1, 2, 2, True),
  "data2-fsdp2-tensor2": (2, 2, 1, 1, 2, False),
  "expert8": (1, 1, 8, 1, 1, False),
  "fsdp2-expert2-tensor2-sequence": (1, 2, 2, 1, 2, True),
  "data2-fsdp2-tensor2-sequence": (2, 2, 1, 1, 2, True),
}
BATCH = config_lib.BatchConfig(
  row_lengths=(32,), micro_batch_tokens=256, max_micro_batches=3
)
OBJECTIVE = config_lib.ObjectiveConfig(kl_coefficient=0.05)
# Deep enough that the layers run in a loop, not unrolled.
SIZES = {"vocab_size": 64, "num_hidden_layers": 5}
# An optimizer whose state is the last gradient.
KEEP = optax.trace(0.0)


def architecture(case, **sizes):
  if case in EXPERTS:
    sizes = {"num_experts": 8, **sizes}
  if case in ("olmo3", "gemma3-tied", "gpt-oss"):
    sizes = {"layer_types": None, **sizes}
  return random_models.architecture(case, **SIZES | sizes)


def batch(seed=0, trajectories=44):
  """Off-policy trajectories, several to a row, in two micro-batches."""
  rng = np.random.default_rng(seed)
  examples = []
  for _ in range(trajectories):
    size = int(rng.integers(4, 33))
    mask = rng.random(size) < 0.7
    mask[:2] = False, True
    examples.append(
      batching.Example(
        token_ids=rng.integers(0, 61, size).astype(np.int32),
        weights=(mask / mask.sum() / trajectories).astype(np.float32),
        logps=(mask * rng.normal(-4, 0.5, size)).astype(np.float32),
        advantage=float(rng.normal()),
      )
    )
  return batching.pack(examples, config=BATCH, multiple=8)


def layout_of(mesh):
  *axes, sequence = mesh
  mesh = sharding.mesh(**dict(zip(sharding.AXES, axes, strict=True)))
  return sharding.Layout(mesh, sequence)


def run(
  a,
  trained,
  reference,
  batches,
  *,
  layout=None,
  objective=OBJECTIVE,
  tx=KEEP,
  **compute,
):
  """Returns states and metrics by batch, the last state and the jitted step."""
  if layout is not None and layout.context:
    compute["attention"] = "ring"
  if a.experts:
    objective = dataclasses.replace(objective, router_balance=0.3)
  compute = decoder.Compute(
    layout=layout, attention_chunk=8, logprob_chunk=8, **compute
  )
  shardings = None
  if layout is not None:
    shardings = train_step.shardings(a, tx, layout.mesh)
    if reference is not None:
      reference = jax.device_put(
        reference, sharding.shardings(a.without_lora(), layout.mesh)
      )
    trained = jax.device_put(trained, shardings.params)
  loss = train_step.grpo_loss(a, objective, temperature=0.8, compute=compute)
  step = train_step.make(loss, tx, shardings)
  state, out = train_step.init(trained, tx, shardings), []
  for rows in batches:
    state, metrics = step(state, reference, rows)
    out.append((jax.device_get(state), jax.device_get(metrics)))
  return out, state, step


@functools.cache
def params_of(case, **sizes):
  a = architecture(case, **sizes)
  trained = random_models.params(a)
  reference = jax.tree.map(lambda p: 0.9 * p, trained)
  return a, trained, reference


@functools.cache
def on_one_device(case, **sizes):
  (result,), _, _ = run(*params_of(case, **sizes), [batch()])
  return result


def assert_same(found, expected, tolerance=1e-5):
  (state, metrics), (expected_state, expected_metrics) = found, expected
  for name, value in expected_metrics.items():
    np.testing.assert_allclose(
      metrics[name],
      value,
      rtol=1e-6 if "loss/total" in name else 1e-5,
      atol=1e-6,
      err_msg=name,
    )
  jax.tree_util.tree_map_with_path(
    lambda path, g, whole: np.testing.assert_allclose(
      g, whole, rtol=0, atol=tolerance * np.abs(whole).max(), err_msg=str(path)
    ),
    state.opt_state.trace,
    expected_state.opt_state.trace,
  )
  assert all(
    np.abs(g).max() > 0 for g in jax.tree.leaves(expected_state.opt_state.trace)
  )


def slow(*values):
  """A case that only `make test-all` runs."""
  return pytest.param(*values, marks=pytest.mark.slow)


# Every mesh, and every family on a mesh with and without a tensor axis. One
# family on the mesh with all axes protects most.
ALL = "data2-fsdp2-tensor2-sequence"
BOTH = ("fsdp8", ALL)


@pytest.mark.parametrize(
  ("case", "mesh"),
  [("llama", ALL)]
  + [("gpt-oss", "fsdp2-expert2-tensor2-sequence")]
  + [slow("qwen3-moe", "fsdp2-expert2-tensor2-sequence")]
  + [slow("gpt-oss", mesh) for mesh in (*BOTH, "expert8")]
  + [slow("qwen3-moe", mesh) for mesh in (*BOTH, "expert8", "context8")]
  + [slow("llama", mesh) for mesh in MESHES if mesh != ALL]
  + [slow(case, mesh) for case in FAMILIES if case != "llama" for mesh in BOTH],
)
def test_a_mesh_gives_the_loss_and_gradients_of_one_device(
  case, mesh, capfd, monkeypatch
):
  monkeypatch.setattr(experts, "_FEW", 0)
  monkeypatch.setattr(experts, "_BLOCK", 16)
  layout = layout_of(MESHES[mesh])
  a, trained, reference = params_of(case)
  batches = [batch(), batch(seed=1, trajectories=30)]
  results, state, step = run(a, trained, reference, batches, layout=layout)
  # Gemma 3's activations are larger, and so are their roundings.
  tolerance = 5e-5 if case.startswith("gemma3") else 1e-5
  assert_same(results[0], on_one_device(case), tolerance)
  assert step._cache_size() == 1
  wanted = train_step.shardings(a, KEEP, layout.mesh)
  for x, sharding_ in zip(jax.tree.leaves(state), jax.tree.leaves(wanted)):
    assert x.sharding.is_equivalent_to(sharding_, x.ndim)
  assert "full rematerialization" not in capfd.readouterr().err


CASES = {
  # An odd vocabulary is replicated, under sequence parallelism too.
  "odd-vocabulary": ("qwen2", {"vocab_size": 61}, (1, 2, 1, 1, 2, True)),
  "odd-vocabulary-untied": (
    "llama",
    {"vocab_size": 61},
    (2, 2, 1, 1, 1, False),
  ),
  # More devices than kv heads: devices that share a head get copies of it.
  "tensor-above-kv-heads": ("qwen3", {}, (1, 2, 1, 1, 4, True)),
  "heads-that-are-normed-together": ("olmo3", {}, (1, 2, 1, 1, 4, True)),
  # A width that fsdp does not divide is replicated.
  "odd-width": ("qwen3-tied", {"hidden_size": 36}, (1, 8, 1, 1, 1, False)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_axes_that_do_not_divide_are_replicated(name, capfd):
  case, sizes, mesh = CASES[name]
  sizes = SIZES | sizes
  (result,), _, _ = run(
    *params_of(case, **sizes), [batch()], layout=layout_of(mesh)
  )
  assert_same(result, on_one_device(case, **sizes))
  assert "full rematerialization" not in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("remat", decoder.REMAT)
def test_recomputation_changes_nothing(remat):
  (result,), _, _ = run(
    *params_of("qwen2"),
    [batch()],
    layout=layout_of((1, 2, 1, 1, 2, True)),
    remat=remat,
  )
  assert_same(result, on_one_device("qwen2"))


@pytest.mark.slow
def test_adapters_on_a_mesh_are_those_of_one_device():
  a = dataclasses.replace(
    architecture("qwen2"),
    lora=architecture_lib.Lora(4, 8.0, ("q", "v", "o", "down")),
  )
  rng = np.random.default_rng(1)
  adapters = jax.tree.map(
    lambda p: (p + 0.1 * rng.normal(size=p.shape)).astype(np.float32),
    lora.initialize(a, 0),
  )
  base = params_of("qwen2")[1]
  (one,), _, _ = run(a, adapters, base, [batch()])
  (cut,), _, _ = run(
    a, adapters, base, [batch()], layout=layout_of((2, 2, 1, 1, 2, True))
  )
  assert_same(cut, one)


@pytest.mark.slow
def test_a_loss_with_a_bonus_and_without_a_reference_is_the_same_on_a_mesh():
  a, trained, _ = params_of("qwen2")
  objective = dataclasses.replace(
    OBJECTIVE, kl_coefficient=0.0, entropy_coefficient=2.0
  )
  one, cut = (
    run(a, trained, None, [batch()], objective=objective, layout=layout)[0][0]
    for layout in (None, layout_of((2, 2, 1, 1, 2, True)))
  )
  assert_same(cut, one)
  assert one[1]["loss/total"] < on_one_device("qwen2")[1]["loss/total"] - 1


def test_the_score_of_a_batch_is_what_the_step_sees():
  """On a mesh, with the sharding of the batch, so that the step can use it."""
  a, trained, reference = params_of("llama")
  layout = layout_of((2, 2, 1, 1, 2, True))
  rows = batch()
  placed = jax.sharding.NamedSharding(
    layout.mesh, jax.P(None, sharding.BATCH, None)
  )
  found, expected = (
    train_step.make_scorer(
      a,
      temperature=0.8,
      compute=decoder.Compute(layout=on, logprob_chunk=8),
      sharding=where,
    )(trained, None, rows)
    for on, where in ((layout, placed), (None, None))
  )
  for of_rows, on_mesh, on_one in zip(rows, found, expected):
    assert on_mesh.sharding.is_equivalent_to(placed, 3)
    real = of_rows.segment_ids > 0
    np.testing.assert_allclose(on_mesh[real], on_one[real], atol=1e-5)
    assert (np.asarray(on_one)[int(of_rows.used) :] == 0).all()
  old = tuple(r._replace(old_logp=np.asarray(x)) for r, x in zip(rows, found))
  objective = dataclasses.replace(OBJECTIVE, old_logp="trainer")
  (before,), _, _ = run(a, trained, reference, [old], objective=objective)
  metrics = before[1]
  # No step was taken yet, so every ratio is 1.
  np.testing.assert_allclose(metrics["loss/ratio_max"], 1, atol=1e-5)
  # Marked as its own, the step's log-probs give the same without that pass.
  own = tuple(
    r._replace(old_logp=np.full_like(r.old_logp, batching.OWN)) for r in rows
  )
  (of_own,), _, _ = run(a, trained, reference, [own], objective=objective)
  assert of_own[1]["loss/ratio_max"] == 1
  assert_same(of_own, before)


@pytest.mark.parametrize(
  ("sizes", "tensor", "sentence"),
  [
    ({}, 8, "found 8, expected a divisor of the policy's heads, 4"),
    (
      {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3},
      2,
      "kv_heads, 3",
    ),
  ],
)
def test_heads_that_do_not_divide_are_refused(sizes, tensor, sentence):
  with pytest.raises(ValueError, match=sentence):
    sharding.validate(
      architecture("qwen2", **sizes), sharding.mesh(tensor=tensor)
    )
