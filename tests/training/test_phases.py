"""Tests what is in device memory while a run samples and while it trains.

Runs that free the KV cache or move their state to host memory must give the
bits of one that does neither.
"""

from __future__ import annotations

import dataclasses
import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import planned
import pytest
import small_run

from anysearch_jax import config as config_lib
from anysearch_jax.planning import targets
from anysearch_jax.policy import hf
from anysearch_jax.rollout.jax_engine import kv_device
from anysearch_jax.training import learner, loop, placement, validation

KEPT = dataclasses.replace(
  small_run.CONFIG,
  curriculum=dataclasses.replace(small_run.CONFIG.curriculum, total_steps=6),
  engine=dataclasses.replace(
    small_run.CONFIG.engine, free_kv_while_training=False
  ),
)
FREED = dataclasses.replace(KEPT, engine=small_run.CONFIG.engine)
PASSING = ("time/", "compile/", "train/tokens_per_second")


def offloaded(kind, config=FREED):
  pipeline = config_lib.PipelineConfig(offload=kind)
  return dataclasses.replace(config, pipeline=pipeline)


def metrics(folder):
  lines = (folder / "metrics.jsonl").read_text().splitlines()
  return [
    {n: x for n, x in json.loads(line).items() if not n.startswith(PASSING)}
    for line in lines
  ]


def assert_same_bits(folder, expected):
  assert metrics(folder) == metrics(expected)
  ours, theirs = (hf.load(f / "policy").params for f in (folder, expected))
  jax.tree.map(np.testing.assert_array_equal, ours, theirs)


class Watch:
  """Records, whenever a step is taken and a token sampled, what is where."""

  def __init__(self, patch):
    self.training: set[tuple[bool, frozenset[str]]] = set()
    self.sampling: set[frozenset[str]] = set()
    self._learner = self._device = None
    self._patch(patch, learner.Learner, "steps", self._train)
    self._patch(patch, kv_device.KvDevice, "decode", self._sample)
    self._patch(patch, kv_device.KvDevice, "__init__", self._engine)
    self._patch(patch, learner.Learner, "__init__", self._made)

  def _patch(self, patch, where, name, look):
    inner = getattr(where, name)

    def watched(itself, *args, **kwargs):
      look(itself)
      return inner(itself, *args, **kwargs)

    patch.setattr(where, name, watched)

  def _made(self, made):
    self._learner = made

  def _engine(self, made):
    self._device = made

  def _on_host(self):
    return frozenset(
      name
      for name in ("opt_state", "params")
      for x in jax.tree.leaves(getattr(self._learner.state, name))
      if x.sharding.memory_kind != "device"
    )

  def _train(self, _):
    self.training.add((self._device._pages is None, self._on_host()))

  def _sample(self, _):
    self.sampling.add(self._on_host())


@pytest.fixture(scope="module")
def parts():
  return small_run.parts()


@pytest.fixture(scope="module")
def kept(parts, tmp_path_factory):
  """A run that keeps everything on the device."""
  folder = tmp_path_factory.mktemp("kept")
  with pytest.MonkeyPatch.context() as patch:
    watch = Watch(patch)
    small_run.train(folder, parts, KEPT)
  assert watch.training == {(False, frozenset())}
  assert watch.sampling == {frozenset()}
  return folder


def test_the_cache_is_freed_while_training_and_nothing_changes(
  kept, parts, tmp_path, monkeypatch, caplog
):
  watch = Watch(monkeypatch)
  with caplog.at_level(logging.INFO, logger="absl"):
    small_run.train(tmp_path / "run", parts, FREED)
  assert watch.training == {(True, frozenset())}
  assert_same_bits(tmp_path / "run", kept)
  told = [r.message for r in caplog.records if "of KV cache" in r.message]
  assert len(told) == 1  # Not every rollout.


@pytest.mark.parametrize(
  ("kind", "moved"),
  [("moments", {"opt_state"}), ("state", {"opt_state", "params"})],
)
def test_the_state_is_in_host_memory_only_while_sampling(
  kept, parts, tmp_path, monkeypatch, kind, moved
):
  watch = Watch(monkeypatch)
  small_run.train(tmp_path / "run", parts, offloaded(kind))
  assert watch.sampling == {frozenset(moved)}
  assert watch.training == {(True, frozenset())}
  assert_same_bits(tmp_path / "run", kept)
  last = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1]
  assert json.loads(last)["compile/train_step"] == 1


def test_a_run_stopped_while_sampling_saves_and_resumes(kept, parts, tmp_path):
  config, folder = offloaded("state"), tmp_path / "run"
  folder.mkdir()
  trainer = loop.Trainer(config, folder=folder, **parts)
  made, stops = trainer._learner, []
  offload = made.offload

  def stop_in_the_second_rollout(kind):
    freed = offload(kind)
    stops.append(kind)
    if len(stops) == 2:
      trainer.stop()
    return freed

  made.offload = stop_in_the_second_rollout
  assert not trainer.run()
  assert {x.sharding.memory_kind for x in jax.tree.leaves(made.state.params)}
  assert jax.tree.leaves(made.state.params)[0].sharding.memory_kind != "device"
  small_run.train(folder, parts, config)
  assert_same_bits(folder, kept)


def test_phases_take_turns_only_on_shared_devices_and_in_order():
  a = small_run.parts()["policy"].architecture

  def turns(async_level=0, **mesh):
    placed = placement.Placement.of(
      a, config_lib.MeshConfig(**mesh), dtype="float32"
    )
    return placement.take_turns(placed, async_level=async_level)

  assert turns()
  assert turns(data=2, trainer=(0, 1), rollout=(1,))
  assert not turns(data=2, trainer=(0, 1), rollout=(2,))
  assert not turns(async_level=1)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"offload": "everything"}, "expected one of none, moments, state"),
    ({"offload": "state", "async_level": 1}, "pipeline.async_level 1"),
  ],
)
def test_offloading_that_cannot_work_is_refused(changes, message):
  objective = config_lib.ObjectiveConfig(old_logp="engine")
  config = dataclasses.replace(
    FREED, pipeline=config_lib.PipelineConfig(**changes), objective=objective
  )
  with pytest.raises(ValueError, match=message):
    validation.validate(config)


def test_the_compiler_places_the_moved_state_in_host_memory():
  # Arrays of several processes are moved by such a program. The compiler for
  # GPUs ignores the memory kinds of arguments if no device is present.
  name = "v5p:2x2x1"
  planned.need(name)
  devices = targets.devices(targets.parse(name))
  placed = jax.NamedSharding(planned.mesh(devices, 2, 2), jax.P("fsdp"))
  host = placed.with_memory_kind("pinned_host")

  def compiled(source, target):
    x = jax.ShapeDtypeStruct((4096, 4096), jnp.float32, sharding=source)
    moved = jax.jit(lambda x: x, out_shardings=target)
    lowered = moved.trace(x).lower(lowering_platforms=("tpu",))
    return lowered.compile().memory_analysis()

  size = 4096 * 4096 * 4 // 2
  away, back = compiled(placed, host), compiled(host, placed)
  assert away.argument_size_in_bytes == back.output_size_in_bytes == size
  assert away.host_output_size_in_bytes == size
  assert back.host_argument_size_in_bytes == size
  assert away.output_size_in_bytes == back.argument_size_in_bytes == 0
  assert max(away.temp_size_in_bytes, back.temp_size_in_bytes) < 2**20
