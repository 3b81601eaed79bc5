"""Tests the search for the fastest step that fits, over invented candidates."""

from __future__ import annotations

import jax
import planned
import pytest

from anysearch_jax.host import hardware
from anysearch_jax.planning import compilation, planner, programs, targets

# A row keeps a share of its 4 GiB, in order of falling speed.
KEEPS = {"none": 1, "dots": 1 / 2, "attention": 1 / 4, "full": 1 / 8}
SPEED = {"none": 1.0, "dots": 0.9, "attention": 0.85, "full": 0.75}


def _programs(config, a, *, devices, micro_batches, segment):
  """Returns a train step whose state has 16 GiB over what shards it."""
  mesh = config.mesh
  size = 4 * hardware.GIB // (mesh.fsdp * mesh.tensor)
  cut = jax.ShapeDtypeStruct((size,), "int8")
  kinds = {"masters": cut, "moments": (cut, cut)}
  return [
    programs.Program("train step", config, (), {}, micro_batches, 1, kinds)
  ]


@pytest.fixture
def searched(monkeypatch):
  """Returns a search on devices of a number of GiB; tensor axes are slow.

  Its results are the best trial, what was compiled, and the log. Recomputation
  policies in `failing` do not compile.
  """

  def run(memory, failing=()):
    tried, lines = [], []

    def measure(train, together, target):
      mesh, batch = train.fn.mesh, train.fn.batch
      tried.append((mesh.data, mesh.fsdp, mesh.tensor, batch.remat))
      if batch.remat in failing:
        raise jax.errors.JaxRuntimeError("INTERNAL: no tiles\nand more")
      rows = batch.micro_batch_tokens / 128 / (mesh.data * mesh.fsdp)
      state = 16 / (mesh.fsdp * mesh.tensor)
      # Larger micro-batches are faster.
      speed = SPEED[batch.remat] * (1 + rows / 100) / mesh.tensor
      tokens = batch.micro_batch_tokens * batch.max_micro_batches
      return planned.part(
        total=state + 4 * rows * KEEPS[batch.remat],
        kinds={"masters": state / 4, "moments": state / 2},
        tokens=tokens,
        predicted=targets.Prediction(0, 0, 0, tokens / speed, 0),
      )

    monkeypatch.setattr(programs, "programs", _programs)
    monkeypatch.setattr(compilation, "measure", measure)
    target = planned.on_cpu(monkeypatch, memory=int(2 * memory * hardware.GIB))
    best = planner.best(planned.CONFIG, planned.A, target, log=lines.append)
    return best, tried, lines

  return run


def test_the_search_finds_the_fastest_that_fits(searched):
  # Of 10 GiB, fsdp 4 leaves 6 for activations.
  best, tried, lines = searched(10)
  c = best.config
  # One row without recomputation: 8 GiB, faster than two rows with `dots`.
  assert (c.mesh.data, c.mesh.fsdp, c.mesh.tensor) == (1, 4, 1)
  assert (c.batch.remat, c.batch.micro_batch_tokens) == ("none", 512)
  # An optimizer step still has 4 x 512 tokens.
  assert c.batch.max_micro_batches == 4
  assert "--config.mesh.fsdp=4" in best.words
  assert "--config.batch.remat=none" in best.words
  # No candidate with replicated state, 16 GiB, was compiled.
  assert not [mesh for mesh in tried if mesh[1] * mesh[2] == 1]
  assert any("at least 16.0 GiB a device by hand" in x for x in lines)
  # One row; two rows from `none` on; four rows from `dots` on, because what
  # failed with fewer rows is skipped.
  four = [remat for *mesh, remat in tried if mesh == [1, 4, 1]]
  assert four[:3] == ["none", "none", "dots"]
  assert four.count("none") == 2


def test_a_candidate_that_does_not_compile_is_skipped(searched):
  best, _, lines = searched(10, failing=["none"])
  assert best.config.batch.remat == "dots"
  assert any(line.endswith("compile: INTERNAL: no tiles") for line in lines)


def test_the_search_returns_none_if_nothing_fits(searched):
  best, tried, lines = searched(1)
  assert best is None
  assert tried == []
  assert lines
