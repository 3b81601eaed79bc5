"""Mosaic's kernel of paged attention, interpreted and compiled for absent GPUs.

The interpreter runs the kernel's copies, barriers and warpgroups on a CPU. Its
matrix products are NumPy's; those of the GPU are only compiled.
"""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import paged_cases
import planned
import pytest
from jax._src.pallas.mosaic_gpu.interpret import params

from anysearch_jax.planning import targets
from anysearch_jax.policy.attention import mosaic_attention
from anysearch_jax.policy.attention import pages as pages_lib

attend = functools.partial(
  mosaic_attention.attend, interpret=params.InterpretGPUParams()
)
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
  ("heads", "kv", "ends", "new", "size"),
  [
    # Two warpgroups, of which the second one is not full.
    ((4, 128), 1, (20, 200), 20, 64),
    slow((7, 64), 2, (100, 40), 33, 16),
    slow((3, 128), 2, (300, 20), 20, 128),
    slow((8, 64), 1, (300, 70), 1, 128),
  ],
)
def test_is_as_exact_as_xla(heads, kv, ends, new, size):
  arguments = paged_cases.case(
    heads=heads, kv=kv, ends=ends, new=new, size=size, columns=512 // size
  )
  paged_cases.assert_as_exact_as_xla(attend, arguments)


def test_parts_of_a_row_are_joined(monkeypatch):
  # Two parts a row, of which the second one of the first row has no block.
  monkeypatch.setattr(mosaic_attention, "_PROGRAMS", 4)
  arguments = paged_cases.case(
    heads=(7, 128), ends=(1, 400), new=1, columns=16, size=32
  )
  paged_cases.assert_as_exact_as_xla(attend, arguments)
  traced = jax.make_jaxpr(mosaic_attention.attend)(*arguments)
  assert "f32[2,1,2,7,128]" in str(traced)


def test_a_row_depends_on_no_other_row_to_the_bit():
  q, pages, table, positions = paged_cases.case(
    heads=(4, 64), ends=(100, 300), new=2, columns=8
  )

  def first(last):
    at = positions.copy()
    at[1] = (last - 1, last)
    return np.asarray(attend(q, pages, table, at), np.float32)[0]

  np.testing.assert_array_equal(first(3), first(299))


def test_written_pages_and_queries_equal_those_without_the_kernel():
  rng = np.random.default_rng(0)
  heads, k, v = (
    jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
    for shape in ((2, 3, 2, 5, 64), *[(2, 6, 16, 64)] * 2)
  )
  pages, table = pages_lib.Pages(k, v), np.array([[1, 2], [4, 3]])
  places = np.array([[14, 15, 16], [0, 1, 1]]), np.arange(6).reshape(2, 3) < 5
  write = functools.partial(
    mosaic_attention.write, interpret=params.InterpretGPUParams()
  )
  q, found = jax.jit(write)(heads, pages, table, *places)
  new = heads[..., 3, :], heads[..., 4, :]
  wanted = pages_lib.write(pages, *new, table, *places)
  np.testing.assert_array_equal(q, heads[..., :3, :].reshape(q.shape))
  jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_too_many_query_heads_are_refused():
  arguments = paged_cases.case(heads=(65, 64), ends=(9,), new=1, columns=1)
  with pytest.raises(ValueError, match="found 65 query heads to a kv head"):
    attend(*arguments)


@pytest.mark.parametrize("rows_and_tokens", [(64, 1), (32, 64)])
@pytest.mark.parametrize(
  ("n", "kv", "h", "size"),
  [
    (32, 8, 128, 64),  # Qwen3-4B, Llama-3.1-8B.
    slow(16, 8, 128, 16),  # Qwen3-0.6B and 1.7B.
    slow(28, 4, 128, 128),  # Qwen2.5-7B.
    slow(14, 2, 64, 32),  # Qwen2.5-0.5B.
  ],
)
def test_compiles_for_hopper_without_spilling(
  n, kv, h, size, rows_and_tokens, monkeypatch, capfd
):
  planned.need("h100:1")
  monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
  devices = targets.devices(targets.parse("h100:1"))
  mesh = jax.sharding.Mesh(np.array(devices), ("data",))

  def array(*shape, dtype=jnp.bfloat16):
    sharding = jax.sharding.NamedSharding(mesh, jax.P())
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

  b, t = rows_and_tokens
  pool, columns = array(kv, 1000, size, h), 4096 // size
  jax.jit(mosaic_attention.attend).trace(
    array(b, t, n, h),
    pages_lib.Pages(pool, pool),
    array(b, columns, dtype=jnp.int32),
    array(b, t, dtype=jnp.int32),
  ).lower(lowering_platforms=("cuda",)).compile()
  report = "".join(capfd.readouterr())
  assert "'sm_90a'" in report
  assert re.findall(r"(\d+) bytes spill stores", report) == ["0"]
