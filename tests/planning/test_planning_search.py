"""Tests the search for the fastest step that fits, over invented candidates."""

from __future__ import annotations

import jax
import planned

from anysearch_jax import config as config_lib
from anysearch_jax.host import hardware
from anysearch_jax.planning import planner, programs, search, targets


class _Fake:
  """Replaces `programs.programs` and `planner.measure` by invented sizes.

  The state has 16 GiB over the devices that shard it. A row of 128 tokens on a
  device keeps 4 GiB, half of it with `dots`, a quarter with `attention`, an
  eighth with `full`, in order of falling speed. Tensor parallelism is slow.
  """

  keeps = {"none": 1, "dots": 1 / 2, "attention": 1 / 4, "full": 1 / 8}
  speed = {"none": 1.0, "dots": 0.9, "attention": 0.85, "full": 0.75}

  def __init__(self):
    self.tried = []

  def programs(self, config, a, *, devices, micro_batches, segment):
    mesh = config.mesh
    size = 4 * hardware.GIB // (mesh.fsdp * mesh.tensor)
    cut = jax.ShapeDtypeStruct((size,), "int8")
    kinds = {"masters": cut, "moments": (cut, cut)}
    return [
      planned.program.Program(
        "train step", config, (), {}, micro_batches, 1, kinds
      )
    ]

  def measure(self, train, together, target):
    config = train.fn
    mesh, batch = config.mesh, config.batch
    self.tried.append((mesh.data, mesh.fsdp, mesh.tensor, batch.remat))
    rows = batch.micro_batch_tokens / 128 / (mesh.data * mesh.fsdp)
    state = 16 / (mesh.fsdp * mesh.tensor)
    total = state + 4 * rows * self.keeps[batch.remat]
    # Larger micro-batches are faster.
    speed = self.speed[batch.remat] * (1 + rows / 100) / mesh.tensor
    tokens = batch.micro_batch_tokens * batch.max_micro_batches
    return planned.part(
      total=total,
      kinds={"masters": state / 4, "moments": state / 2},
      tokens=tokens,
      predicted=targets.Prediction(0, 0, 0, tokens / speed, 0),
    )


def _search(monkeypatch, memory):
  fake = _Fake()
  monkeypatch.setattr(programs, "programs", fake.programs)
  monkeypatch.setattr(planner, "measure", fake.measure)
  target = planned.on_cpu(monkeypatch, memory=int(2 * memory * hardware.GIB))
  lines = []
  best = search.best(planned.CONFIG, planned.A, target, log=lines.append)
  return best, fake.tried, lines


def test_the_search_finds_the_fastest_that_fits(monkeypatch):
  # Of 10 GiB, fsdp 4 leaves 6 for activations.
  best, tried, lines = _search(monkeypatch, 10)
  c = best.config
  # One row without recomputation: 8 GiB, faster than two rows with `dots`.
  assert (c.mesh.data, c.mesh.fsdp, c.mesh.tensor) == (1, 4, 1)
  assert (c.batch.remat, c.batch.micro_batch_tokens) == ("none", 512)
  # An optimizer step still has 4 x 512 tokens.
  assert c.batch.max_micro_batches == best.micro_batches == 4
  assert "--config.mesh.fsdp=4" in best.words
  assert "--config.batch.remat=none" in best.words
  # No candidate with replicated state, 16 GiB, was compiled.
  assert not [mesh for mesh in tried if mesh[1] * mesh[2] == 1]
  assert any("at least 16.0 GiB a device by hand" in x for x in lines)
  assert len(lines) >= len(tried)


def test_the_search_skips_candidates_larger_than_a_failed_one(monkeypatch):
  _, tried, _ = _search(monkeypatch, 10)
  four = [remat for *mesh, remat in tried if mesh == [1, 4, 1]]
  # One row; two rows from `none` on; four rows from `dots` on.
  assert four[:3] == ["none", "none", "dots"]
  assert four.count("none") == 2


def test_a_candidate_that_does_not_compile_is_skipped(monkeypatch):
  measure = _Fake.measure

  def failing(self, train, together, target):
    if train.fn.batch.remat == "none":
      raise jax.errors.JaxRuntimeError("INTERNAL: no tiles\nand more")
    return measure(self, train, together, target)

  monkeypatch.setattr(_Fake, "measure", failing)
  best, _, lines = _search(monkeypatch, 10)
  assert best.config.batch.remat == "dots"
  assert any(line.endswith("compile: INTERNAL: no tiles") for line in lines)


def test_the_search_returns_none_if_nothing_fits(monkeypatch):
  best, tried, lines = _search(monkeypatch, 1)
  assert best is None
  assert tried == []
  assert lines


def test_meshes_are_all_shapes_over_the_same_devices():
  found = list(search.meshes(config_lib.MeshConfig(fsdp=2, tensor=2)))
  shapes = {(m.data, m.fsdp, m.tensor) for m in found}
  assert shapes == {
    (1, 4, 1),
    (1, 2, 2),
    (1, 1, 4),
    (2, 2, 1),
    (2, 1, 2),
    (4, 1, 1),
  }
  assert len(found) == 6
