"""The mesh of sampling, and loading onto a mesh: no block is read twice."""

from __future__ import annotations

import collections
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import packed_rows
import planned
import pytest
import random_models

from anysearch_jax import config as config_lib
from anysearch_jax.host import hardware
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import (
  hf,
  lora,
  parameters,
  sharding,
  table,
  tensor_files,
)
from anysearch_jax.policy import parameters as weights
from anysearch_jax.policy import tokenizer as tokenizer_lib

# No mesh axis divides the 61 rows of the embedding.
SIZES = {
  "hidden_size": 64,
  "num_attention_heads": 8,
  "num_key_value_heads": 2,
  "head_dim": 4,
  "intermediate_size": 48,
}
CASES = ["qwen2-tied", "qwen3", "qwen3-moe", "llama-biased", "gpt-oss"]
CASES += ["smollm3", "olmo3", "gemma3-tied"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
  """Each case, saved as a folder of several bfloat16 shards."""
  tokenizer = tokenizer_lib.Tokenizer(random_models.tokenizer())
  out = {}
  for case in CASES:
    out[case] = tmp_path_factory.mktemp(case)
    a = random_models.architecture(case, **SIZES)
    policy = hf.Policy(random_models.params(a), a, tokenizer)
    hf.save(out[case], policy, dtype=jnp.bfloat16, shard_bytes=30_000)
    assert len(list(out[case].glob("*.safetensors"))) > 1
  return out


@pytest.fixture
def reads(monkeypatch):
  """Records the sizes of blocks that are read, and of whole tensors."""
  seen = collections.defaultdict(list)
  read = tensor_files._read

  def counting(tensor, block):
    found = read(tensor, block)
    seen[tensor.name].append((found.size, math.prod(tensor.shape)))
    return found

  monkeypatch.setattr(tensor_files, "_read", counting)
  return seen


@pytest.mark.parametrize(
  ("case", "shape"),
  [
    ("qwen2-tied", {"fsdp": 8}),
    ("qwen3", {"data": 2, "fsdp": 2, "tensor": 2}),
    ("llama-biased", {"fsdp": 2, "tensor": 4}),
    ("qwen3", {"tensor": 8}),
    ("llama-biased", {"fsdp": 5}),
    ("qwen3-moe", {"fsdp": 2, "expert": 2, "tensor": 2}),
    ("gpt-oss", {"fsdp": 2, "expert": 2, "tensor": 2}),
    ("smollm3", {"fsdp": 8}),
    ("olmo3", {"fsdp": 4, "tensor": 2}),
    ("gemma3-tied", {"data": 2, "fsdp": 2, "tensor": 2}),
  ],
)
def test_mesh_holds_the_same_values_as_one_device(folders, reads, case, shape):
  single = hf.load(folders[case])
  assert all(len(parts) == 1 for parts in reads.values())
  reads.clear()
  mesh = sharding.mesh(**shape)
  spread = hf.load(folders[case], mesh=mesh)
  wanted = sharding.shardings(spread.architecture, mesh)

  rows = table.base_rows(spread.architecture)
  for row in rows:
    found = weights.get(spread.params, row.path)
    assert found.dtype == jnp.float32
    assert found.sharding == weights.get(wanted, row.path), row.path
    one = np.asarray(weights.get(single.params, row.path))
    for shard in found.addressable_shards:
      np.testing.assert_array_equal(shard.data, one[shard.index])
  # Devices that hold the same block do not read it twice.
  assert reads.keys() == {name for name, _, _ in weights.tensors(rows)}
  for tensor, parts in reads.items():
    assert sum(size for size, _ in parts) == parts[0][1], tensor


def test_no_device_reads_more_of_a_matrix_than_its_shard(folders, reads):
  hf.load(folders["qwen3"], mesh=sharding.mesh(fsdp=8))
  matrices = {k: v for k, v in reads.items() if "norm" not in k}
  assert len(matrices) == 2 + 2 * 7
  for tensor, parts in matrices.items():
    assert [size * 8 for size, _ in parts] == [parts[0][1]] * 8, tensor


def test_mesh_larger_than_the_devices_is_refused():
  with pytest.raises(ValueError, match="data 1 x fsdp 4 x tensor 4 needs 16"):
    sharding.mesh(fsdp=4, tensor=4)


@pytest.mark.parametrize(
  ("shape", "rank"),
  [
    ({"fsdp": 4, "tensor": 2}, 0),
    ({"fsdp": 4, "tensor": 2}, 4),
    ({"tensor": 8}, 0),
  ],
)
def test_saving_needs_no_collectives(shape, rank):
  """Weights can then be saved for SGLang servers during a train step.

  Two programs with collectives, started on two threads, could deadlock.
  """
  base = random_models.architecture("llama-biased", **SIZES)
  a = lora.attach(base, config_lib.LoraConfig(rank=rank))
  params = random_models.params(base)
  if rank:
    params = lora.combine(params, lora.initialize(a, 0))
  mesh = sharding.mesh(**shape)
  params = jax.device_put(params, sharding.shardings(a, mesh))
  made = jax.jit(
    lambda p: [
      lora.merged_weight(p, a, row, (0,) * len(row.stack))
      for row in table.base_rows(a)
    ]
  )
  compiled = made.lower(params).compile().as_text()
  assert not packed_rows.COLLECTIVE.search(compiled)


# The mesh of sampling.

A = dataclasses.replace(planned.A, heads=8, kv_heads=4)
BYTES = 2 * parameters.count(table.rows(A))


def sizes(a=A, **values):
  mesh = sharding.rollout_mesh(config_lib.MeshConfig(**values), a)
  return mesh.shape["data"], mesh.shape["tensor"]


@pytest.fixture
def memory(monkeypatch):
  """Sets the memory of this process's devices, in sizes of the weights."""

  def set_memory(times):
    known = dataclasses.replace(planned.CPU, memory=round(times * BYTES))
    monkeypatch.setattr(hardware, "of_kind", lambda kind: known)

  return set_memory


# Four devices that do not train.
OWN = {"trainer": (0,), "rollout": (4, 5, 6, 7)}


@pytest.mark.parametrize(
  ("times", "values", "expected"),
  [
    # A copy takes an eighth of a device at most.
    (8, OWN, (4, 1)),
    (7.9, OWN, (2, 2)),
    (4, OWN, (2, 2)),
    (3.9, OWN, (1, 4)),
    (0.1, OWN, (1, 4)),
    # Devices that train hold as little as possible.
    (100, {"data": 4}, (1, 4)),
    (100, {"data": 2, "trainer": (6, 7), "rollout": (4, 5, 6, 7)}, (1, 4)),
    # The configured number is taken.
    (1, OWN | {"rollout_tensor": 1}, (4, 1)),
    (100, OWN | {"rollout_tensor": 4}, (1, 4)),
  ],
)
def test_a_copy_is_on_as_few_devices_as_it_fits(
  memory, times, values, expected
):
  memory(times)
  assert sizes(**values) == expected


def test_adapters_are_merged_and_take_nothing(memory):
  memory(8)
  adapted = dataclasses.replace(
    A, lora=architecture_lib.Lora(rank=64, alpha=1.0, targets=("q", "gate"))
  )
  assert sizes(adapted, **OWN) == (4, 1)


def test_devices_of_unknown_memory_share_one_copy():
  assert sizes(**OWN) == (1, 4)
  assert sizes(trainer=(0,), rollout=(1, 2, 3, 4, 5, 6)) == (3, 2)


@pytest.mark.parametrize("tensor", [3, 8])
def test_a_number_that_does_not_divide_is_refused(tensor):
  with pytest.raises(ValueError, match=f"rollout_tensor: found {tensor} for 4"):
    sizes(**OWN, rollout_tensor=tensor)
