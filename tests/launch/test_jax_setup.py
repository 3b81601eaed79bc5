"""How commands set JAX up: flags, memory, devices."""

from __future__ import annotations

import functools
import json
import os

import pytest
import source_tree

from anysearch_jax.launch import jax_setup

# Sets JAX up on a machine whose platform is the first argument, without
# starting JAX, and prints what was set.
CODE = """
import json, os, sys, types
sys.modules["jax"] = types.ModuleType("jax")
from anysearch_jax.host import platforms
from anysearch_jax.launch import jax_setup
platform, devices, threads = sys.argv[1:]
if platform != "own":
  platforms.expected = lambda: platform
arenas = []
jax_setup._keep_freed_memory = lambda: arenas.append(1)
jax_setup.configure(threads=int(threads), cache="", devices=devices)
print(json.dumps({"kept": bool(arenas), **os.environ}))
"""


def python(code, *arguments, **variables):
  """Runs code without settings of JAX, and returns what it printed."""
  own = ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")
  environment = {k: v for k, v in os.environ.items() if k not in own}
  done = source_tree.python("-c", code, *arguments, env=environment | variables)
  assert done.returncode == 0, done.stderr
  return done.stdout, done.stderr


@functools.cache
def configured(platform, devices="all", threads=0, **variables):
  printed, _ = python(CODE, platform, devices, str(threads), **variables)
  return json.loads(printed)


@pytest.mark.parametrize(
  ("platform", "kept"), [("cpu", True), ("cuda", False), ("tpu", False)]
)
def test_freed_memory_is_kept_on_the_cpu_only(platform, kept):
  assert configured(platform)["kept"] == kept


def test_flags_of_gpus_are_set_on_gpus_and_give_way_to_the_users():
  hiding = "--xla_gpu_enable_latency_hiding_scheduler"
  assert f"{hiding}=true" in configured("cuda")["XLA_FLAGS"].split()
  assert hiding not in configured("cpu").get("XLA_FLAGS", "")
  found = configured("cuda", XLA_FLAGS=f"{hiding}=false")["XLA_FLAGS"]
  assert f"{hiding}=false" in found and f"{hiding}=true" not in found


def test_this_jaxlib_knows_every_flag():
  # XLA ends a process that names a flag it does not know.
  flags = {**jax_setup.XLA_FLAGS["cuda"], **jax_setup.ONE_THREAD}
  named = {
    "XLA_FLAGS": jax_setup.merge_xla_flags(flags, ""),
    "JAX_PLATFORMS": "cpu",
  }
  python("import jax; jax.devices()", **named)


def test_accelerators_are_left_to_others():
  assert configured("own", devices="cpu")["JAX_PLATFORMS"] == "cpu"


def test_one_thread_is_one_for_xla_too():
  code = """
import os
from anysearch_jax.launch import jax_setup
jax_setup.configure(threads=1, cache="")
import jax
jax.block_until_ready(jax.numpy.ones((64, 64)) @ jax.numpy.ones((64, 64)))
names = [
  open(f"/proc/self/task/{task}/comm").read().strip()
  for task in os.listdir("/proc/self/task")
]
print(sum(name.startswith("tf_XLAEigen") for name in names))
"""
  printed, _ = python(code, JAX_PLATFORMS="cpu")
  assert printed.split() == ["1"]
  assert configured("cpu", threads=1)["PJRT_NPROC"] == "1"
  assert "PJRT_NPROC" not in configured("cpu")
