"""Tests bytes on a device by kind, and against the compilers' reports."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import planned
import pytest

from anysearch_jax.planning import compilation, programs, targets

pytestmark = pytest.mark.usefixtures("optimized")

# Each layer has two matrices.
PARAMETERS = planned.LAYERS * 2 * planned.WIDTH * planned.HIDDEN


def test_a_device_holds_its_shard():
  mesh = planned.mesh(jax.devices(), 2, 4)

  def array(*spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(
      (16, 32), dtype, sharding=jax.NamedSharding(mesh, jax.P(*spec))
    )

  assert compilation.on_device(array("fsdp", "tensor")) == 16 * 32 * 4 // 8
  assert compilation.on_device(array(None, "tensor")) == 16 * 32 * 4 // 4
  assert compilation.on_device(array(dtype=jnp.bfloat16)) == 16 * 32 * 2
  assert compilation.on_device([array(), {"x": array("fsdp")}]) == 16 * 32 * 6
  # Arrays without a sharding count in full; real arrays like abstract ones.
  assert compilation.on_device(jax.ShapeDtypeStruct((3,), jnp.int32)) == 12
  assert compilation.on_device(jnp.zeros((4, 4))) == 64
  assert compilation.on_device(jax.eval_shape(lambda: jax.random.key(0))) == 8


def test_kinds_are_counted_separately():
  train = planned.train_step(jax.devices(), 4, 2)
  assert compilation.kinds(train) == {
    "masters": 4 * PARAMETERS // 8,
    "moments": 8 * PARAMETERS // 8,
    "reference": 2 * PARAMETERS // 8,
    # Rows are sharded over `fsdp` only; counts are replicated.
    "batch": 4 * planned.ROWS * planned.WIDTH * 4 // 4 + 4,
  }


def test_arrays_of_other_programs_on_the_same_devices_are_held():
  devices = jax.devices()
  train = planned.train_step(devices, 2, 2)
  beside = planned.sampler(devices[2:], 2, 2)
  apart = planned.sampler(devices[4:], 2, 2)
  weights = planned.WIDTH * planned.HIDDEN * 2 // 4
  cache = 9 * planned.WIDTH * 4
  # Two of four devices are shared; the batch is freed everywhere.
  assert compilation.held(train, [beside]) == {
    "engine weights": weights,
    "KV cache": cache,
  }
  assert set(compilation.held(beside, [train])) == {
    "masters",
    "moments",
    "reference",
  }
  assert compilation.held(train, [apart]) == {}


def test_what_is_freed_or_in_host_memory_is_not_held():
  devices = jax.devices()
  train = planned.train_step(devices, 2, 2)
  decode = planned.sampler(devices, 2, 2)
  freed = train._replace(freed=frozenset(["KV cache"]))
  assert set(compilation.held(freed, [decode])) == {"engine weights"}
  assert compilation.offloaded(freed, [decode]) == 0
  moved = decode._replace(offloaded=frozenset(["masters", "moments"]))
  assert set(compilation.held(moved, [train])) == {"reference"}
  # Float32 masters and two moments, over four devices.
  assert compilation.offloaded(moved, [train]) == 12 * PARAMETERS // 4
  # Kinds of its own are not another program's.
  own = moved._replace(offloaded=frozenset(["KV cache"]))
  assert compilation.offloaded(own, [train, decode]) == 0


def test_a_kind_of_the_same_name_is_the_same_arrays():
  train = planned.train_step(jax.devices(), 2, 2)
  scorer = train._replace(
    name="scorer",
    kinds={"reference": train.kinds["reference"], "cache": train.args[2]},
  )
  assert set(compilation.held(train, [scorer, scorer])) == {"cache"}


@pytest.mark.parametrize("name", ["h100:4", "h200:4", "a100:4", "v5p:2x2x1"])
def test_the_compiler_finds_the_arguments_that_are_counted_by_hand(name):
  planned.need(name)
  target = targets.parse(name)
  train = planned.train_step(targets.devices(target), 2, 2)
  part = compilation.measure(train, [train], target)
  # Small arrays, such as the count of micro-batches, are padded.
  assert part.arguments == pytest.approx(
    compilation.on_device(train.args), rel=1e-3
  )
  # The whole state is donated: no output has a buffer of its own.
  assert part.peak < part.arguments + part.temporary + part.kinds["masters"]
  assert part.gradients == part.kinds["masters"]
  assert part.peak >= part.arguments + part.gradients
  assert part.total == part.peak
  assert part.predicted is not None
  assert part.tokens_per_second == pytest.approx(
    planned.ROWS * 2 / part.predicted.total
  )


def test_a_program_that_the_tpu_compiler_refuses_does_not_fit():
  planned.need("v5e")
  target = targets.parse("v5e:2x2")
  mesh = planned.mesh(targets.devices(target), 2, 2)
  # 64 GiB over four devices of 15.75 GiB.
  big = jax.ShapeDtypeStruct(
    (2**20, 2**14), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P("fsdp"))
  )
  program = programs.Program(
    "big",
    jax.jit(jnp.sin, donate_argnums=0, out_shardings=big.sharding),
    (big,),
    {},
    1,
    1,
    {"masters": big},
  )
  part = compilation.measure(program, [program], target)
  assert part.traffic is None
  assert part.peak == pytest.approx(32 * 2**30, rel=0.01)
  assert not part.fits(target)
  assert part.predicted is None
  assert part.tokens_per_second is None


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
