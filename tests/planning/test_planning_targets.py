"""Tests hardware by name, and its compile-only devices."""

from __future__ import annotations

import planned
import pytest

from anysearch_jax.host import hardware
from anysearch_jax.planning import targets
from anysearch_jax.training import throughput


@pytest.mark.parametrize(
  ("text", "count", "hosts", "written"),
  [
    ("h100:4", 4, 1, "h100:4"),
    (" H200:1", 1, 1, "h200:1"),
    ("a100:16", 16, 2, "a100:16"),
    ("v5p:2x2x1", 4, 1, "v5p:2x2x1"),
    ("v6e:4x4", 16, 1, "v6e:4x4"),
  ],
)
def test_a_target_is_hardware_and_a_count(text, count, hosts, written):
  target = targets.parse(text)
  assert (target.count, target.hosts, str(target)) == (count, hosts, written)


@pytest.mark.parametrize(
  ("text", "sentence"),
  [
    (
      "b300:1",
      "expected one of h100, h800, h200, a100, b200, rtx3090, rtx4090, rtx5090",
    ),
    ("h100", "expected a count of GPUs, as in h100:4"),
    ("h100:0", "expected a count of GPUs"),
    ("h100:2x2", "expected a count of GPUs"),
    ("h100:12", "at most 8 .one host. or a multiple of 8"),
    ("v5p:8", "3 dimensions, for example v5p:1x1x1, v5p:2x2x1"),
    ("v5e:2x2x1", "2 dimensions, for example v5e:1x1, v5e:2x2, v5e:2x4"),
    ("v6e:2x", "the shape of a slice"),
  ],
)
def test_an_unknown_target_is_refused(text, sentence):
  with pytest.raises(ValueError, match=sentence):
    targets.parse(text)


@pytest.mark.parametrize(
  ("text", "gib"),
  [
    # 80 GB cards: 0.92 of the 79.1 GiB that CUDA reports.
    ("h100:8", 0.92 * 79.1),
    # The TPU compiler has its own limit: 15.75 GiB of 16.
    ("v5e:4x4", 15.75),
  ],
)
def test_capacity_of_a_device(text, gib):
  target = targets.parse(text)
  assert target.capacity == pytest.approx(gib * 2**30, rel=1e-6)


@pytest.mark.parametrize(
  ("text", "package"), [("h100:1", "jax-cuda12-plugin"), ("v5e:1x1", "libtpu")]
)
def test_a_missing_package_is_named_with_its_command(
  text, package, monkeypatch
):
  monkeypatch.setattr(targets, "_installed", lambda name: "nvcc" in name)
  with pytest.raises(
    ModuleNotFoundError, match=rf"{package}, .*pip install -e '\.\[plan\]'"
  ):
    targets.devices(targets.parse(text))


GPUS = [
  gpu for gpu in hardware.HARDWARE.values() if isinstance(gpu, hardware.Gpu)
]


@pytest.mark.parametrize("name", [gpu.name for gpu in GPUS])
def test_an_absent_gpu_has_compile_only_devices(name):
  planned.need(name)
  devices = targets.devices(targets.parse(f"{name}:4"))
  assert len(devices) == 4
  assert {d.platform for d in devices} == {"gpu"}
  capability = "{}.{}".format(*hardware.HARDWARE[name].capability)
  assert {d.compute_capability for d in devices} == {capability}


def test_each_gpu_is_known_by_what_jax_calls_it():
  kinds = {gpu.name: hardware.of_kind(gpu.description) for gpu in GPUS}
  # An H800 describes itself by its own name, and its chip as an H100.
  assert kinds.pop("h800") is hardware.HARDWARE["h100"]
  assert {name: kind.name for name, kind in kinds.items()} == {
    name: name for name in kinds
  }


def test_hosts_of_gpus_are_processes():
  planned.need("h100")
  devices = targets.devices(targets.parse("h100:16"))
  assert [d.process_index for d in devices] == [0] * 8 + [1] * 8


@pytest.mark.parametrize(
  "name",
  [
    f"{tpu.name}:{shape}"
    for tpu in hardware.HARDWARE.values()
    if isinstance(tpu, hardware.Tpu)
    for shape in tpu.shapes
  ],
)
def test_every_slice_that_errors_recommend_is_accepted(name):
  planned.need(name)
  target = targets.parse(name)
  devices = targets.devices(target)
  assert len(devices) == target.count
  assert {hardware.of_kind(d.device_kind) for d in devices} == {target.hardware}


def test_an_unknown_tpu_slice_is_refused():
  planned.need("v5e")
  with pytest.raises(ValueError, match="no slice .*2x3.*try one of v5e:1x1"):
    targets.devices(targets.parse("v5e:2x3"))


def test_work_takes_the_longer_of_computing_and_reading():
  # Peaks of 1e12 FLOP/s and 1e11 bytes/s.
  efficiency = targets.Efficiency(
    products=0.5, attention=0.25, memory=0.5, passes=3.0
  )

  def predicted(read, **sizes):
    nothing = throughput.Operations(products=0, attention=0, activations=0)
    return targets.seconds(
      planned.CPU,
      nothing._replace(**sizes),
      read=read,
      efficiency=efficiency,
    )

  # What is computed adds up.
  assert predicted(0, products=1e12) == pytest.approx(2.0)
  assert predicted(0, attention=1e12) == pytest.approx(4.0)
  assert predicted(0, activations=1e10) == pytest.approx(3 * 2e10 / 5e10)
  both = predicted(0, products=1e12, attention=1e12, activations=1e10)
  assert both == pytest.approx(2 + 4 + 1.2)
  # Weights are read meanwhile.
  assert predicted(1e10, products=1e12) == pytest.approx(2.0)
  assert predicted(1e12, products=1e12) == pytest.approx(20.0)
