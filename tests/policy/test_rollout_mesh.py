"""How many devices share a copy of the policy that is sampled."""

from __future__ import annotations

import dataclasses

import planned
import pytest

from anysearch_jax import config as config_lib
from anysearch_jax.host import hardware
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import parameters, sharding, table

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


@pytest.mark.parametrize(
  ("times", "expected"),
  [
    (100, (4, 1)),
    (8, (4, 1)),  # A copy takes an eighth.
    (7.9, (2, 2)),
    (4, (2, 2)),
    (3.9, (1, 4)),
    (0.1, (1, 4)),
  ],
)
def test_a_copy_takes_an_eighth_of_a_device_at_most(memory, times, expected):
  memory(times)
  assert sizes(trainer=(0,), rollout=(4, 5, 6, 7)) == expected


def test_adapters_are_merged_and_take_nothing(memory):
  memory(8)
  adapted = dataclasses.replace(
    A, lora=architecture_lib.Lora(rank=64, alpha=1.0, targets=("q", "gate"))
  )
  assert sizes(adapted, trainer=(0,), rollout=(4, 5, 6, 7)) == (4, 1)


@pytest.mark.parametrize(
  "values",
  [
    {"data": 4},  # They train too.
    {"data": 2, "trainer": (6, 7), "rollout": (4, 5, 6, 7)},
  ],
)
def test_devices_that_train_hold_as_little_as_possible(memory, values):
  memory(100)
  assert sizes(**values) == (1, 4)


def test_devices_of_unknown_memory_share_one_copy():
  assert sizes(trainer=(0,), rollout=(4, 5, 6, 7)) == (1, 4)
  assert sizes(trainer=(0,), rollout=(1, 2, 3, 4, 5, 6)) == (3, 2)


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_the_configured_number_is_taken(memory, tensor):
  memory(1)
  found = sizes(trainer=(0,), rollout=(4, 5, 6, 7), rollout_tensor=tensor)
  assert found == (4 // tensor, tensor)


@pytest.mark.parametrize("tensor", [3, 8])
def test_a_number_that_does_not_divide_is_refused(tensor):
  with pytest.raises(ValueError, match=f"rollout_tensor: found {tensor} for 4"):
    sizes(trainer=(0,), rollout=(4, 5, 6, 7), rollout_tensor=tensor)


def test_the_papers_policies_on_gpus_of_their_own(monkeypatch):
  """By hand: 4 billion parameters are 8 GB, 8 billion 16, of 85 or 151 GB."""
  large = {
    "qwen3_4b": (dict(vocab_size=151936, d_model=2560, layers=36), 9728, 8, 32),
    "qwen2_5_7b": (
      dict(vocab_size=152064, d_model=3584, layers=28),
      18944,
      4,
      28,
    ),
  }
  found = {}
  for name, (shape, mlp, kv, heads) in large.items():
    a = dataclasses.replace(
      A,
      **shape,
      mlp_dim=mlp,
      kv_heads=kv,
      heads=heads,
      head_dim=128,
      tied=name == "qwen3_4b",
    )
    for kind in ("h100", "h200"):
      monkeypatch.setattr(
        hardware, "of_kind", lambda _, kind=kind: hardware.HARDWARE[kind]
      )
      found[name, kind] = sizes(a, trainer=(0,), rollout=(4, 5, 6, 7))
  assert found == {
    ("qwen3_4b", "h100"): (4, 1),
    ("qwen3_4b", "h200"): (4, 1),
    ("qwen2_5_7b", "h100"): (2, 2),
    ("qwen2_5_7b", "h200"): (4, 1),
  }
