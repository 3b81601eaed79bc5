"""Tests what is in device memory while a run samples and while it trains.

Runs that free the KV cache or move their state to host memory must give the
bits of one that does neither.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import planned
import pytest
import small_run

from anysearch_jax import config as config_lib
from anysearch_jax.methods import systems
from anysearch_jax.planning import targets
from anysearch_jax.rollout.jax_engine import kv_device
from anysearch_jax.training import learner, loop, placement

KEPT = config_lib.changed(
  small_run.CONFIG, engine={"free_kv_while_training": False}
)


def offloaded(kind):
  return dataclasses.replace(
    small_run.CONFIG, pipeline=config_lib.PipelineConfig(offload=kind)
  )


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


@pytest.mark.parametrize(
  ("config", "freed", "moved"),
  [
    (KEPT, False, set()),
    (offloaded("state"), True, {"opt_state", "params"}),
    pytest.param(
      offloaded("moments"), True, {"opt_state"}, marks=pytest.mark.slow
    ),
    pytest.param(small_run.CONFIG, True, set(), marks=pytest.mark.slow),
  ],
)
def test_the_state_and_the_cache_move_and_nothing_changes(
  config, freed, moved, trained, parts, tmp_path, monkeypatch
):
  """The cache is freed while training, the state moved while sampling."""
  watch = Watch(monkeypatch)
  small_run.train(tmp_path, parts, config)
  assert watch.sampling == {frozenset(moved)}
  assert watch.training == {(freed, frozenset())}
  small_run.assert_same_bits(tmp_path, trained)


def test_a_run_stopped_while_sampling_saves_and_resumes(
  trained, parts, tmp_path
):
  config = offloaded("state")
  trainer = loop.Trainer(
    config, method=systems.trained(config), folder=tmp_path, **parts
  )
  small_run.share_programs(trainer, config)
  made, stops = trainer._learner, []
  move = made.move

  def stop_in_the_second_rollout(what, memory):
    freed = move(what, memory)
    stops.extend([what] * (memory != "device"))
    if len(stops) == 2:
      trainer.stop()
    return freed

  made.move = stop_in_the_second_rollout
  assert not trainer.run()
  assert jax.tree.leaves(made.state.params)[0].sharding.memory_kind != "device"
  small_run.train(tmp_path, parts, config)
  small_run.assert_same_bits(tmp_path, trained)


def test_phases_take_turns_only_on_shared_devices_and_in_order(parts):
  def turns(async_level=0, **mesh):
    placed = placement.Placement.of(
      parts["policy"].architecture,
      config_lib.ExperimentConfig(mesh=config_lib.MeshConfig(**mesh)),
    )
    return placement.take_turns(placed, async_level=async_level)

  assert turns()
  assert turns(data=2, trainer=(0, 1), rollout=(1,))
  assert not turns(data=2, trainer=(0, 1), rollout=(2,))
  assert not turns(async_level=1)


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
