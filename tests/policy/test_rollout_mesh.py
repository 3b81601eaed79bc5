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
