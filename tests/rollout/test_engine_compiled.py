"""Decode and prefill, compiled for accelerators that are absent.

The optimized programs must not rewrite weights or pages: a decode step reads
each weight once, and nothing but its new tokens changes in the cache.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import pathlib
import re
import tempfile

import compiled_loops
import jax
import jax.numpy as jnp
import planned
import pytest

from anysearch_jax import config as config_lib
from anysearch_jax.planning import compilation, programs, targets
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import lora, parameters, serving, table
from anysearch_jax.training import placement

# Two layers of sizes that no activation has. Weights and pages are bfloat16.
ENGINE = config_lib.EngineConfig(
  slots=64,
  max_context=4096,
  page=64,
  lanes=(64,),
  prefill_lanes=32,
  prefill_chunk=64,
  decode_steps=16,
)
FAMILIES = {
  "qwen2": {"qkv_bias": True},
  "qwen3": {"qk_norm": True},
  "llama": {},
  "smollm3": {"unrotated": (1,)},
  "olmo3": {
    **{"qk_norm": True, "joint_norm": True, "norms": "after"},
    **{"window": 1024, "windowed": (0,), "windowed_theta": 5e5},
  },
  "gemma3_text": {
    **{"qk_norm": True, "norms": "around", "norm_offset": 1.0, "gelu": True},
    **{"scaled": True, "window": 1024, "windowed": (0,), "windowed_theta": 1e4},
  },
}
EXPERTS = {
  "qwen3_moe": {"qk_norm": True, "experts": 16, "active": 4},
  "gpt_oss": {
    **{"sinks": True, "clamped": True, "experts": 16, "active": 4},
    **{"qkv_bias": True, "window": 128, "windowed": (0,)},
  },
}
TARGETS = ("h100:1", "v5p:2x2x1")
# Allowed temporary memory, MiB: far below one layer's pages. A window's pages
# are gathered in blocks.
TEMPORARY, WINDOWED = 64, 192
# Allowed size of a float32 array of prefill, MiB; scores would be the largest.
FLOAT32 = 32


@functools.cache
def compiled(target_name, family, adapted, name, **engine):
  """Returns a program's text and temporary bytes, and what it must not write.

  The last are numbers of elements on a device: of each weight, and of a layer's
  keys.
  """
  planned.need(target_name)
  target = targets.parse(target_name)
  devices = targets.devices(target)
  a = architecture_lib.Architecture(
    family=family,
    vocab_size=32768,
    d_model=2560,
    layers=2,
    heads=32,
    kv_heads=8,
    head_dim=128,
    mlp_dim=9728,
    tied=True,
    **(FAMILIES | EXPERTS)[family],
  )
  adapters = config_lib.LoraConfig(rank=16 if adapted else 0)
  placed = placement.Placement.of(
    lora.attach(a, adapters),
    config_lib.ExperimentConfig(mesh=config_lib.MeshConfig(fsdp=len(devices))),
    devices,
  )
  found = programs.sampling(
    dataclasses.replace(ENGINE, **engine),
    config_lib.SamplingConfig(),
    placed,
    "bfloat16",
  )
  (program,) = (each for each in found if each.name == name)
  text, analysis = _optimized(program, target)
  sizes = weights(a, placed.rollout)
  pages = {
    math.prod(x.sharding.shard_shape(x.shape))
    for x in jax.tree.leaves(program.kinds["KV cache"])
  }
  return text, analysis.temp_size_in_bytes, sizes, pages


def _optimized(program, target):
  """Returns the optimized text of a program and the analysis of its memory.

  The TPU compiler dumps its text, because it is of another release than JAX and
  may write syntax that JAX's parser does not know.
  """
  if target.hardware.platform != "tpu":
    executable, _ = compilation.compile_program(program, target)
    return executable.as_text(), executable.memory_analysis()
  with tempfile.TemporaryDirectory() as folder:
    executable, _ = compilation.compile_program(
      program, target, xla_dump_to=folder, xla_dump_hlo_as_text=True
    )
    # The dump also has small modules; the program's own is the longest.
    dumps = pathlib.Path(folder).glob("*.after_optimizations.txt")
    text = max((path.read_text() for path in dumps), key=len)
  return text, executable.memory_analysis()


def weights(a, mesh):
  """Returns numbers of elements of matrices on a device, fused and not."""
  rows = parameters.abstract(table.rows(a), None, jnp.bfloat16)
  sizes = set()
  for fused in (False, True):
    prepared = jax.eval_shape(
      functools.partial(serving.prepare, a=a, dtype="bfloat16", fused=fused),
      rows,
    )
    cut = serving.shardings(a, mesh, fused=fused)
    sizes |= set(
      jax.tree.leaves(
        jax.tree.map(
          lambda x, s: math.prod(s.shard_shape(x.shape)), prepared, cut
        )
      )
    )
  return {size for size in sizes if size > 2**20}


def cases(*more):
  """Each family on one target, and one on both; the others are slow."""
  every = itertools.product(TARGETS, FAMILIES, (False, True))
  for target, family, adapted in every:
    once = target == TARGETS[0] or family == "qwen3"
    quick = once and not adapted
    marks = () if quick else pytest.mark.slow
    yield pytest.param(target, family, adapted, *more, marks=marks)


@pytest.mark.parametrize(
  ("target", "family", "adapted", "engine"),
  [
    *cases({}),
  ],
)
def test_decode_rewrites_no_weight_and_writes_pages_in_place(
  target, family, adapted, engine
):
  text, temporary, sizes, pages = compiled(
    target, family, adapted, "decode", **engine
  )
  written = compiled_loops.written(text)
  again = [x for x in written if x.elements in sizes]
  assert sum(2 * x.elements for x in again) == 0, again
  found = [x for x in written if x.elements in pages]
  assert len(found) == 4, found  # Keys and values of two layers.
  assert all(re.search("scatter|mpmd_map", x.name) for x in found), found
  allowed = WINDOWED if FAMILIES[family].get("window") else TEMPORARY
  assert temporary < allowed * 2**20


@pytest.mark.parametrize(
  ("target", "family"),
  [
    pytest.param(
      target,
      family,
      marks=()
      if (target == TARGETS[0]) == (family == "gpt_oss")
      else pytest.mark.slow,
    )
    for target in TARGETS
    for family in EXPERTS
  ],
)
def test_decode_reads_experts_where_they_are(target, family):
  text, temporary, sizes, _ = compiled(target, family, False, "decode")
  again = [x for x in compiled_loops.written(text) if x.elements in sizes]
  assert not again, again
  allowed = WINDOWED if EXPERTS[family].get("window") else TEMPORARY
  assert temporary < allowed * 2**20


def test_a_layer_of_decode_is_11_kernels_on_hopper():
  text, _, _, _ = compiled("h100:1", "qwen3", False, "decode")
  kernels = re.findall(
    r"%(\S+) = .* (?:fusion|custom-call|copy)\(.*/FusedBlock/", text
  )
  # Norm, product, norm of heads with rotary positions, write, attention, its
  # parts of keys joined (not from 128 rows on), product, and 4 of the MLP. All
  # layers share one pad.
  assert 0 < len(kernels) <= 2 * 11 + 1, kernels


def prefilled():
  """One family on each target; the others, which take long, are slow."""
  for target, family in itertools.product(TARGETS, FAMILIES | EXPERTS):
    marks = () if family == "qwen3" else pytest.mark.slow
    yield pytest.param(target, family, False, marks=marks)
    if family in FAMILIES:
      yield pytest.param(target, family, True, marks=pytest.mark.slow)


@pytest.mark.parametrize(("target", "family", "adapted"), prefilled())
def test_prefill_has_no_large_block_and_writes_pages_in_place(
  target, family, adapted
):
  text, temporary, _, pages = compiled(target, family, adapted, "prefill")
  written = compiled_loops.written(text, everywhere=True)
  numbers = [x for x in written if x.dtype == "f32"]
  large = [x for x in numbers if 4 * x.elements > FLOAT32 * 2**20]
  assert written and not large, large
  if (family, adapted) == ("qwen3", False):
    found = [x for x in written if x.elements in pages]
    assert len(found) == 4, found  # Keys and values of two layers.
    assert all(re.search("scatter|mpmd_map", x.name) for x in found), found
    assert temporary < min(pages) * jnp.bfloat16.dtype.itemsize


KERNELS = {
  "h100:1": r'custom_call_target="mosaic_gpu_v2".*paged_attention/mpmd',
  "v5p:2x2x1": r'custom_call_target="tpu_custom_call"',
}


# The last layer of prefill only writes its keys and values.
@pytest.mark.parametrize(("name", "kernels"), [("prefill", 1), ("decode", 2)])
@pytest.mark.parametrize("target", TARGETS)
def test_attention_is_one_kernel_a_layer(target, name, kernels):
  text, _, _, _ = compiled(target, "qwen3", False, name)
  assert len(re.findall(KERNELS[target], text)) == kernels


@pytest.mark.parametrize(
  "name", ["decode", pytest.param("prefill", marks=pytest.mark.slow)]
)
def test_float8_pages_are_written_in_place(name):
  text, temporary, _, pages = compiled(
    "h100:1", "qwen3", False, name, kv_dtype="float8"
  )
  written = compiled_loops.written(text, everywhere=name == "prefill")
  found = [x for x in written if x.elements in pages]
  # Keys and values of two layers with their scales.
  assert sorted(x.dtype for x in found) == ["bf16"] * 4 + ["f8e4m3fn"] * 4
  assert all("scatter" in x.name for x in found), found
  assert temporary < max(pages)  # A layer's keys.
