"""Compares loading and export with transformers; times checkpoints.

    python -m bench.loading [--size=1.5b] [--state=0.5b] [--pairs=3]

Makes a random checkpoint of the size of Qwen2.5-1.5B (3 GB, bfloat16, in
--folder, removed at the end) and loads it in fresh processes, in turns with
this project and with `transformers.from_pretrained`, to float32 and to
bfloat16, from a warm page cache. Prints seconds, peak memory of the process and
ratios. Then it times the export of the loaded policy, and how long a checkpoint
of a train state (parameters and Adam's moments) blocks, takes to save and takes
to restore. Needs 20 GB of memory and of disk.
"""

from __future__ import annotations

import functools
import json
import pathlib
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

from absl import flags

from launch import flags as launch_flags

_SIZE = flags.DEFINE_enum("size", "1.5b", ["0.5b", "1.5b"], "Loaded, exported.")
_STATE = flags.DEFINE_enum("state", "0.5b", ["0.5b", "1.5b"], "Checkpointed.")
_PAIRS = flags.DEFINE_integer("pairs", 3, "Pairs of measurements.")
_FOLDER = flags.DEFINE_string("folder", "", "Where; default: temporary.")
# The measurement that a child process makes: its name, then its arguments.
_CHILD = flags.DEFINE_list("child", [], "Internal.")

# Qwen2.5's published sizes.
_SIZES = {
  "0.5b": {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
  },
  "1.5b": {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
  },
}
_DEADLINE_S = 1800


def main(argv) -> None:
  del argv
  if _CHILD.value:
    name, *arguments = _CHILD.value
    print(json.dumps(_CHILDREN[name](*arguments)))
    return
  root = pathlib.Path(tempfile.mkdtemp(dir=_FOLDER.value or None))
  try:
    measure(root)
  finally:
    shutil.rmtree(root)


def measure(root: pathlib.Path) -> None:
  source = root / "source"
  made = child("make", _SIZE.value, source)
  print(
    f"checkpoint: {made['parameters'] / 1e9:.2f} G parameters, "
    f"{made['bytes'] / 1e9:.2f} GB in {made['files']} files"
  )
  print(f"{'':<24}{'ours':>10}{'transformers':>14}{'ratio':>9}")
  for dtype, width in (("float32", 4), ("bfloat16", 2)):
    ours, theirs = [], []
    for _ in range(_PAIRS.value):
      ours.append(child("ours", source, dtype))
      theirs.append(child("theirs", source, dtype))
    arrays = made["parameters"] * width
    show(f"load {dtype}, s", "seconds", ours, theirs)
    show(f"  peak, GB (arrays {arrays / 1e9:.2f})", "peak_gb", ours, theirs)
  ours, theirs = [], []
  for _ in range(_PAIRS.value):
    for side, name in ((ours, "export"), (theirs, "their_export")):
      side.append(child(name, source, root / "export"))
      shutil.rmtree(root / "export")
  show("export bfloat16, s", "seconds", ours, theirs)
  shutil.rmtree(source)
  state = child("checkpoint", _STATE.value, root / "checkpoints")
  print(
    f"checkpoint of {state['bytes'] / 1e9:.2f} GB ({_STATE.value}, float32 "
    f"parameters and moments): save blocks {state['blocked']:.1f} s, done "
    f"after {state['saved']:.1f} s; restored in {state['restored']:.1f} s, of "
    f"which {state['checked']:.1f} s verify it"
  )


def show(name: str, key: str, ours: list, theirs: list) -> None:
  a, b = (statistics.median(m[key] for m in side) for side in (ours, theirs))
  ratio = statistics.median(
    x[key] / y[key] for x, y in zip(ours, theirs, strict=True)
  )
  print(f"{name:<24}{a:>10.2f}{b:>14.2f}{ratio:>8.2f}x")


def child(name: str, *arguments: object) -> dict:
  """Runs one measurement in its own process."""
  command = [sys.executable, "-m", "bench.loading"]
  command.append(f"--child={','.join(map(str, [name, *arguments]))}")
  done = subprocess.run(
    command, capture_output=True, text=True, timeout=_DEADLINE_S, check=False
  )
  if done.returncode:
    sys.exit(f"{name} failed:\n{done.stderr[-2000:]}")
  return json.loads(done.stdout.splitlines()[-1])


def config(size: str) -> dict:
  return _SIZES[size] | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 151_936,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
  }


def make(size: str, folder: str) -> dict:
  """Writes a random checkpoint with a tokenizer of two words."""
  import jax.numpy as jnp
  import ml_dtypes
  import numpy as np
  import tokenizers
  import transformers
  from tokenizers import models

  from anysearch_jax.policy import architecture, table, tensor_files
  from anysearch_jax.policy import parameters as weights

  path = pathlib.Path(folder)
  path.mkdir()
  (path / "config.json").write_text(json.dumps(config(size)))
  inner = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, "a"))
  transformers.PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(
    path
  )
  rows = table.base_rows(architecture.from_hf(config(size)))
  noise = np.random.default_rng(0).normal(size=1 << 20)
  noise = (0.02 * noise).astype(ml_dtypes.bfloat16)
  tensor_files.save(
    path,
    weights.tree(rows, lambda row: np.resize(noise, row.shape)),
    rows,
    dtype=jnp.bfloat16,
    shard_bytes=2 * 10**9,
  )
  return {"parameters": weights.count(rows), **_size_of(path)}


def ours(folder: str, dtype: str) -> dict:
  from launch import jax_setup

  jax_setup.configure(threads=0, cache=".jax_cache")  # As every command does.
  import jax
  import jax.numpy as jnp

  from anysearch_jax.policy import hf

  _warm(folder)
  jnp.zeros(1).block_until_ready()
  started = time.perf_counter()
  policy = hf.load(folder, dtype=jnp.dtype(dtype))
  jax.block_until_ready(policy.params)
  return _measured(started)


def theirs(folder: str, dtype: str) -> dict:
  import torch
  import transformers

  _warm(folder)
  started = time.perf_counter()
  model = transformers.AutoModelForCausalLM.from_pretrained(
    folder, dtype=getattr(torch, dtype)
  )
  # The arrays may be memory-mapped, so loading includes touching them.
  for parameter in model.parameters():
    parameter.sum()
  return _measured(started)


def export(source: str, folder: str) -> dict:
  from launch import jax_setup

  jax_setup.configure(threads=0, cache=".jax_cache")
  import jax
  import jax.numpy as jnp

  from anysearch_jax.policy import hf

  policy = hf.load(source)
  jax.block_until_ready(policy.params)
  started = time.perf_counter()
  hf.save(folder, policy, dtype=jnp.bfloat16)
  return _measured(started)


def their_export(source: str, folder: str) -> dict:
  import torch
  import transformers

  model = transformers.AutoModelForCausalLM.from_pretrained(
    source, dtype=torch.float32
  )
  started = time.perf_counter()
  model.to(torch.bfloat16).save_pretrained(folder)
  return _measured(started)


def checkpoint(size: str, folder: str) -> dict:
  """Times a complete checkpoint, including its manifest and verification."""
  from launch import jax_setup

  jax_setup.configure(threads=0, cache=".jax_cache")
  import jax
  import jax.numpy as jnp
  import numpy as np

  from anysearch_jax import config as config_lib
  from anysearch_jax.algorithms import curriculum
  from anysearch_jax.policy import architecture, table
  from anysearch_jax.policy import parameters as weights
  from anysearch_jax.training import checkpoint as checkpoint_lib
  from anysearch_jax.training import train_step

  experiment = config_lib.ExperimentConfig()
  a = architecture.from_hf(config(size))
  tx = train_step.optimizer(a, experiment.optimizer)
  shapes = jax.eval_shape(
    lambda: train_step.init(
      weights.tree(table.rows(a), lambda row: jnp.zeros(row.shape)), tx
    )
  )
  # Noise, because compressible data would be written faster than a policy.
  rng = np.random.default_rng(0)
  state = jax.tree.map(
    lambda x: jnp.asarray(
      rng.random(x.shape, np.float32) if x.ndim else 0, x.dtype
    ),
    shapes,
  )
  saved = checkpoint_lib.Saved(
    1, state, curriculum.init(experiment.curriculum, 0), {}
  )
  jax.block_until_ready(state)
  opened = functools.partial(
    checkpoint_lib.Checkpoints,
    folder,
    config={},
    keep=experiment.checkpoint,
  )
  started = time.perf_counter()
  with opened() as checkpoints:
    checkpoints.save(saved, 0.0)
    blocked = time.perf_counter() - started
  done = time.perf_counter() - started
  saved = saved._replace(state=shapes)
  del state
  started = time.perf_counter()
  with opened() as checkpoints:
    checked = time.perf_counter() - started
    jax.block_until_ready(checkpoints.restore(saved.rollout, saved).state)
  restored = time.perf_counter() - started
  return {
    "bytes": sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes)),
    "blocked": blocked,
    "saved": done,
    "checked": checked,
    "restored": restored,
  }


def _warm(folder: str) -> None:
  for path in pathlib.Path(folder).glob("*.safetensors"):
    with path.open("rb") as file:
      while file.read(1 << 24):
        pass


def _measured(started: float) -> dict:
  seconds = time.perf_counter() - started
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return {"seconds": seconds, "peak_gb": peak * 1024 / 1e9}


def _size_of(folder: pathlib.Path) -> dict:
  sizes = [p.stat().st_size for p in folder.glob("*.safetensors")]
  return {"bytes": sum(sizes), "files": len(sizes)}


_CHILDREN = {
  "make": make,
  "ours": ours,
  "theirs": theirs,
  "export": export,
  "their_export": their_export,
  "checkpoint": checkpoint,
}


if __name__ == "__main__":
  launch_flags.run(main)
