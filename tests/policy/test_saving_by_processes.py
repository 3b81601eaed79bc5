"""Folders that several processes save: the first one writes the files."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
import waits

_ROOT = pathlib.Path(__file__).parents[2]
# A process of a run: saves a sharded policy, and says which files it wrote.
_PROCESS = """
import pathlib, sys
import jax
address, count, process, folder, full = sys.argv[1:]
if int(count) > 1:
  jax.distributed.initialize(address, int(count), int(process))
import random_models
from anysearch_jax.policy import hf, sharding, tensor_files
a = random_models.architecture("llama", num_key_value_heads=4)
mesh = sharding.mesh(fsdp=4)
params = jax.device_put(
  random_models.params(a), sharding.shardings(a, mesh)
)

save_file = tensor_files.safetensors_numpy.save_file

def noted(tensors, path, metadata):
  print("wrote", path.name, flush=True)
  if full == process:
    raise OSError(28, "No space left on device")
  save_file(tensors, path, metadata)

tensor_files.safetensors_numpy.save_file = noted
class Tokenizer:
  end_of_turn_ids = {1}
source = pathlib.Path(folder).parent / "source"
policy = hf.Policy(params, a, Tokenizer(), source)
try:
  hf.save(folder, policy, dtype="bfloat16", shard_bytes=4096)
except OSError as error:
  print("failed", error, flush=True)
"""


def _save(folder, *, count, full="none"):
  """Saves by `count` processes; returns the lines that each has printed."""
  source = folder.parent / "source"
  source.mkdir(exist_ok=True)
  (source / "config.json").write_text("{}")
  address = f"127.0.0.1:{waits.free_port()}"
  environment = os.environ | {
    "JAX_PLATFORMS": "cpu",
    "PYTHONPATH": f"{_ROOT}:{_ROOT / 'tests' / 'support'}",
    "XLA_FLAGS": os.environ["XLA_FLAGS"].replace("=8", f"={4 // count}"),
  }
  started = [
    subprocess.Popen(
      [sys.executable, "-c", _PROCESS, address, str(count), str(i)]
      + [str(folder), full],
      env=environment,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for i in range(count)
  ]
  try:
    ended = [process.communicate(timeout=300) for process in started]
  finally:
    for process in started:
      process.kill()
  for process, (_, error) in zip(started, ended, strict=True):
    assert process.returncode == 0, error[-3000:]
  # Collectives print lines too.
  return [
    [x for x in out.splitlines() if x.startswith(("wrote", "failed"))]
    for out, _ in ended
  ]


def _files(folder):
  return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_of_two_processes_the_first_writes_the_bytes_of_one(tmp_path):
  (alone,) = _save(tmp_path / "one", count=1)
  assert len(alone) > 2
  both = _save(tmp_path / "two", count=2)
  assert both == [alone, []]
  assert _files(tmp_path / "two") == _files(tmp_path / "one")


@pytest.mark.slow
def test_a_full_disk_of_one_process_is_an_error_of_both(tmp_path):
  both = _save(tmp_path / "two", count=2, full="0")
  for lines in both:
    assert "No space left on device" in lines[-1]
  assert not (tmp_path / "two").exists()
  assert not list(tmp_path.glob("*.writing"))
