"""Tests hardware by name, and its compile-only devices."""

from __future__ import annotations

import jax
import planned
import pytest
from jax.experimental import topologies

from anysearch_jax.host import hardware
from anysearch_jax.planning import targets


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
      "b200:1",
      "expected one of h100, h800, h200, a100, rtx4090, v5e, v5p, v6e",
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


def test_capacity_leaves_room_for_uncounted_memory():
  # 80 GB cards: 0.92 of the 79.1 GiB that CUDA reports.
  assert targets.parse("h100:1").capacity == pytest.approx(
    0.92 * 79.1 * 2**30, rel=1e-6
  )
  # The TPU compiler has its own limit: 15.75 GiB of 16.
  assert targets.parse("v5e:1x1").capacity == 15.75 * 2**30


def test_an_h800_differs_from_an_h100_in_its_links():
  h100, h800 = (hardware.HARDWARE[name] for name in ("h100", "h800"))
  assert h800.link_bandwidth == 200e9
  assert h100.link_bandwidth == 450e9
  assert h800.flops == h100.flops
  assert targets.target_config(h800) == targets.target_config(h100)


def test_several_hosts_use_the_bandwidth_of_the_network():
  assert targets.parse("h100:8").link_bandwidth == 450e9
  assert targets.parse("h100:16").link_bandwidth == 50e9
  assert targets.parse("v5e:4x4").link_bandwidth == 100e9


@pytest.mark.parametrize(
  ("text", "package"),
  [
    ("h100:1", "jax-cuda12-plugin"),
    ("v5e:1x1", "libtpu"),
  ],
)
def test_a_missing_package_is_named_with_its_command(
  text, package, monkeypatch
):
  monkeypatch.setattr(targets, "_installed", lambda name: "nvcc" in name)
  with pytest.raises(
    ModuleNotFoundError,
    match=rf"{package}, .*pip install -e '\.\[plan\]'",
  ):
    targets.devices(targets.parse(text))


@pytest.mark.parametrize(
  ("name", "capability"),
  [
    ("h100", "9.0"),
    ("h800", "9.0"),
    ("h200", "9.0"),
    ("a100", "8.0"),
    ("rtx4090", "8.9"),
  ],
)
def test_an_absent_gpu_has_compile_only_devices(name, capability):
  planned.need(name)
  devices = targets.devices(targets.parse(f"{name}:4"))
  assert len(devices) == 4
  assert {d.platform for d in devices} == {"gpu"}
  assert {d.compute_capability for d in devices} == {capability}


def test_hosts_of_gpus_are_processes():
  planned.need("h100")
  devices = targets.devices(targets.parse("h100:16"))
  assert [d.process_index for d in devices] == [0] * 8 + [1] * 8


@pytest.mark.parametrize(
  ("text", "kind"),
  [
    ("v5e:2x4", "TPU v5 lite"),
    ("v5p:2x2x1", "TPU v5"),
    ("v6e:2x4", "TPU v6 lite"),
  ],
)
def test_an_absent_tpu_has_compile_only_devices(text, kind):
  planned.need("v5e")
  target = targets.parse(text)
  devices = targets.devices(target)
  assert len(devices) == target.count
  assert {d.device_kind for d in devices} == {kind}


def test_an_unknown_tpu_slice_is_refused():
  planned.need("v5e")
  with pytest.raises(ValueError, match="no slice .*2x3.*try one of v5e:1x1"):
    targets.devices(targets.parse("v5e:2x3"))


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
  assert len(targets.devices(target)) == target.count


def test_a_refused_slice_is_not_recommended(monkeypatch):
  planned.need("v5e")

  def refuse(**_):
    raise jax.errors.JaxRuntimeError("unknown")

  monkeypatch.setattr(topologies, "get_topology_desc", refuse)
  with pytest.raises(ValueError, match="v5e:2x2 is no slice") as caught:
    targets.devices(targets.parse("v5e:2x2"))
  _, recommended = str(caught.value).split("try")
  assert "v5e:2x2" not in recommended
  assert "v5e:2x4" in recommended
