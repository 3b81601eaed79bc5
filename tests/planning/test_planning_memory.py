"""Tests bytes on a device by kind, and against the compilers' reports."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import planned
import pytest

from anysearch_jax.planning import compilation, programs, targets

pytestmark = pytest.mark.usefixtures("optimized")


def array(mesh, *spec, shape=(16, 32), dtype=jnp.float32):
  placed = jax.NamedSharding(mesh, jax.P(*spec))
  return jax.ShapeDtypeStruct(shape, dtype, sharding=placed)


def program(devices, *names):
  """Returns a program with 128 bytes of each kind on each of four devices."""
  mesh = planned.mesh(devices, 2, 2)
  kinds = {name: array(mesh, "fsdp", "tensor", shape=(8, 16)) for name in names}
  return programs.Program("p", None, (), {}, kinds)


def test_a_device_holds_its_shard():
  array_of = functools.partial(array, planned.mesh(jax.devices(), 2, 4))
  for tree, size in (
    (array_of("fsdp", "tensor"), 16 * 32 * 4 // 8),
    (array_of(None, "tensor"), 16 * 32 * 4 // 4),
    (array_of(dtype=jnp.bfloat16), 16 * 32 * 2),
    ([array_of(), {"x": array_of("fsdp")}], 16 * 32 * 6),
    # Arrays without a sharding count in full; real arrays like abstract ones.
    (jax.ShapeDtypeStruct((3,), jnp.int32), 12),
    (jnp.zeros((4, 4)), 64),
    (jax.eval_shape(lambda: jax.random.key(0)), 8),
  ):
    assert compilation.on_device(tree) == size


TRAINING = ("masters", "moments", "reference", programs.BATCH)
SAMPLING = ("engine weights", "KV cache")


def test_arrays_of_other_programs_on_the_same_devices_are_held():
  devices = jax.devices()
  train = program(devices, *TRAINING)
  assert compilation.kinds(train) == dict.fromkeys(TRAINING, 128)
  beside = program(devices[2:], *SAMPLING)
  apart = program(devices[4:], *SAMPLING)
  # Two of four devices are shared; the batch is freed everywhere.
  held = compilation.held_by_others(train, [train, beside])
  assert held == dict.fromkeys(SAMPLING, 128)
  assert set(compilation.held_by_others(beside, [train])) == set(TRAINING[:3])
  assert compilation.held_by_others(train, [apart]) == {}
  # A kind of the same name is the same arrays.
  scorer = program(devices, "reference", "cache")
  assert set(compilation.held_by_others(train, [scorer, scorer])) == {"cache"}


def test_what_is_freed_or_in_host_memory_is_not_held():
  devices = jax.devices()
  train, decode = program(devices, *TRAINING), program(devices, *SAMPLING)
  freed = train._replace(freed=frozenset(["KV cache"]))
  assert set(compilation.held_by_others(freed, [decode])) == {"engine weights"}
  assert compilation.offloaded(freed, [decode]) == 0
  moved = decode._replace(offloaded=frozenset(["masters", "moments"]))
  assert set(compilation.held_by_others(moved, [train])) == {"reference"}
  assert compilation.offloaded(moved, [train]) == 2 * 128
  # Kinds of its own are not another program's.
  own = moved._replace(offloaded=frozenset(["KV cache"]))
  assert compilation.offloaded(own, [train, decode]) == 0


@pytest.mark.parametrize("name", ["h100:4", "a100:4", "v5p:2x2x1"])
def test_compilers_find_the_arguments_that_are_counted_by_hand(name):
  planned.need(name)
  target = targets.parse(name)
  mesh = planned.mesh(targets.devices(target), 2, 2)
  # Shards of whole tiles of a TPU, which pads what is narrower.
  w, m, v = state = (array(mesh, "fsdp", "tensor", shape=(256, 512)),) * 3
  batch = array(mesh, "fsdp", shape=(64, 256))

  def step(state, batch):
    w, m, v = state
    g = jax.grad(lambda w: jnp.sum(jnp.sin(batch @ w)))(w)
    return w - m / (1 + v), 0.9 * m + g, 0.9 * v + g * g

  shardings = jax.tree.map(lambda x: x.sharding, state)
  donating = jax.jit(step, donate_argnums=0, out_shardings=shardings)
  kinds = {"masters": w, "moments": (m, v), "batch": batch}
  train = programs.Program("p", donating, (state, batch), {}, kinds)
  part = compilation.measure(train, [train], target)
  assert part.kinds == {
    "masters": 256 * 512,
    "moments": 2 * 256 * 512,
    "batch": 64 * 256 * 2,
  }
  assert part.arguments == pytest.approx(sum(part.kinds.values()), rel=1e-3)
  # The whole state is donated: no output has a buffer of its own.
  assert part.peak < part.arguments + part.temporary + part.kinds["masters"]
  assert part.total == part.peak >= part.arguments


def test_a_program_that_the_tpu_compiler_refuses_does_not_fit():
  planned.need("v5e")
  target = targets.parse("v5e:2x2")
  mesh = planned.mesh(targets.devices(target), 2, 2)
  # 64 GiB over four devices of 15.75 GiB.
  big = jax.ShapeDtypeStruct(
    (2**20, 2**14), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P("fsdp"))
  )
  fn = jax.jit(jnp.sin, donate_argnums=0, out_shardings=big.sharding)
  program = programs.Program("big", fn, (big,), {}, {"masters": big})
  part = compilation.measure(program, [program], target)
  assert part.refused
  assert part.peak == pytest.approx(32 * 2**30, rel=0.01)
  assert not part.fits(target)


@pytest.mark.parametrize(
  ("message", "size"),
  [
    (
      "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, "
      "the total memory required for HLO temporaries (22.71G) exceeds "
      "available HBM (15.75G). HLO module: jit_step.",
      22.71 * 2**30,
    ),
    (
      "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 512.50M "
      "of 15.75G hbm. Exceeded",
      512.5 * 2**20,
    ),
    ("INTERNAL: something else (22.71G)", None),
  ],
)
def test_refused_bytes_are_parsed_from_the_error(message, size):
  found = compilation.refused_bytes(message)
  assert found == (None if size is None else int(size))
