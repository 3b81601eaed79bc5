"""Device calls of an engine run in order and cannot block process exit."""

from __future__ import annotations

import asyncio
import gc
import pathlib
import subprocess
import sys
import threading
import weakref

import jax
import pytest
import small_engine

from anysearch_jax import types
from anysearch_jax.environment import protocol
from anysearch_jax.rollout.jax_engine import kv_store

_HANGS = """
import queue, threading, time
from anysearch_jax.rollout.jax_engine import kv_device
calls = queue.SimpleQueue()
threading.Thread(target=kv_device._serve, args=(calls,), daemon=True).start()
import concurrent.futures
future = concurrent.futures.Future()
calls.put((future, lambda: time.sleep(3600)))
while not future.running():
  time.sleep(0.01)
print("leaves")
"""


def test_hanging_call_does_not_keep_the_process_alive():
  done = subprocess.run(
    [sys.executable, "-c", _HANGS],
    cwd=pathlib.Path(__file__).parents[2],
    capture_output=True,
    text=True,
    timeout=60,
  )
  assert (done.returncode, done.stdout) == (0, "leaves\n"), done.stderr


def test_deleted_engine_leaves_no_thread():
  before = set(threading.enumerate())
  engine = small_engine.engine(small_engine.params())
  (thread,) = set(threading.enumerate()) - before
  del engine
  gc.collect()
  thread.join(10)
  assert not thread.is_alive()


def test_old_weights_are_gone_before_new_ones_are_made(monkeypatch):
  engine = small_engine.engine(small_engine.params())
  layers = engine._device._params["layers"]
  old = [weakref.ref(x) for x in jax.tree.leaves(layers)]
  del layers
  alive = []
  prepare = kv_store.Model.prepare

  def watched(self, params, a):
    alive.append(sum(x() is not None for x in old))
    return prepare(self, params, a)

  monkeypatch.setattr(kv_store.Model, "prepare", watched)
  engine.set_params(small_engine.params(), 1)
  assert old and alive == [0]


def test_a_freed_cache_is_allocated_again_with_the_same_results():
  engine = small_engine.engine(small_engine.params())
  assert engine.free_cache() == 0  # No call has needed it.
  order = [(question, sample) for question in range(2) for sample in range(3)]
  first = small_engine.play(engine, order)
  # 12 slots of 38 pages and the padding page, of 4 tokens; keys and values of
  # two layers with two heads of 8 float32 numbers.
  assert engine.free_cache() == (12 * 38 + 1) * 4 * 2 * 2 * 2 * 8 * 4
  assert engine.free_cache() == 0
  assert small_engine.play(engine, order) == first


def test_calls_compile_once_wherever_the_weights_were():
  programs = kv_store.prefill, kv_store.decode
  before = [program._cache_size() for program in programs]
  # No other engine has these shapes, and these weights are on no mesh.
  engine = small_engine.engine(small_engine.params(), slots=11, decode_steps=3)
  order = [(question, sample) for question in range(2) for sample in range(3)]
  for _ in range(2):
    small_engine.play(engine, order)
  after = [program._cache_size() for program in programs]
  assert [a - b for a, b in zip(after, before, strict=True)] == [1, 1]


def test_a_cache_that_an_episode_holds_is_not_freed():
  engine = small_engine.engine(small_engine.params())
  address = types.Address(0, 0, 0)
  request = types.GenerateRequest(
    address, 0, small_engine.prompt(0), 4, protocol.STOPS
  )
  asyncio.run(engine.generate(request))
  with pytest.raises(RuntimeError, match="release them before the cache is"):
    engine.free_cache()
  engine.release(address)
  assert engine.free_cache() > 0
