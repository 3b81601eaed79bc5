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
import shutil
import statistics
import tempfile
import time
from typing import Any

from absl import flags

from bench import harness

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


def main() -> dict[str, object]:
  root = pathlib.Path(tempfile.mkdtemp(dir=flags.FLAGS.folder or None))
  try:
    return measure(root)
  finally:
    shutil.rmtree(root)


def measure(root: pathlib.Path) -> dict[str, object]:
  f = flags.FLAGS
  source = root / "source"
  made = harness.in_worker("make", f.size, source)
  print(
    f"checkpoint: {made['parameters'] / 1e9:.2f} G parameters, "
    f"{made['bytes'] / 1e9:.2f} GB in {made['files']} files"
  )
  table = harness.Table("", "ours", "transformers", "ratio")
  out: dict[str, object] = {"made": made}
  for dtype, width in (("float32", 4), ("bfloat16", 2)):
    found = harness.in_turns(
      ("ours", "theirs"),
      functools.partial(_load, source=source, dtype=dtype),
      rounds=f.pairs,
    )
    arrays = made["parameters"] * width
    _show(table, f"load {dtype}, s", "seconds", found)
    _show(table, f"  peak, GB (arrays {arrays / 1e9:.2f})", "peak_gb", found)
    out[f"load {dtype}"] = found.each
  found = harness.in_turns(
    ("ours", "theirs"),
    lambda side: _export(side, source, root / "export"),
    rounds=f.pairs,
  )
  _show(table, "export bfloat16, s", "seconds", found)
  shutil.rmtree(source)
  state = harness.in_worker("checkpoint", f.state, root / "checkpoints")
  print(
    f"checkpoint of {state['bytes'] / 1e9:.2f} GB ({f.state}, float32 "
    f"parameters and moments): save blocks {state['blocked']:.1f} s, done "
    f"after {state['saved']:.1f} s; restored in {state['restored']:.1f} s, of "
    f"which {state['checked']:.1f} s verify it"
  )
  return out | {"export": found.each, "checkpoint": state}


def _load(side: str, *, source: pathlib.Path, dtype: str) -> harness.Numbers:
  return harness.in_worker(side, source, dtype)


def _export(
  side: str, source: pathlib.Path, folder: pathlib.Path
) -> harness.Numbers:
  worker = {"ours": "export", "theirs": "their_export"}[side]
  numbers = harness.in_worker(worker, source, folder)
  shutil.rmtree(folder)
  return numbers


def _show(
  table: harness.Table, name: str, key: str, found: harness.Rounds
) -> None:
  table.row(
    name,
    *(found.medians(side)[key] for side in ("ours", "theirs")),
    f"{statistics.median(found.ratios(key, 'ours', 'theirs')):.2f}x",
  )


def config(size: str) -> dict[str, Any]:
  return _SIZES[size] | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 151_936,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
  }


def make(size: str, folder: str) -> dict[str, Any]:
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


def ours(folder: str, dtype: str) -> dict[str, Any]:
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


def theirs(folder: str, dtype: str) -> dict[str, Any]:
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


def export(source: str, folder: str) -> dict[str, Any]:
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


def their_export(source: str, folder: str) -> dict[str, Any]:
  import torch
  import transformers

  model = transformers.AutoModelForCausalLM.from_pretrained(
    source, dtype=torch.float32
  )
  started = time.perf_counter()
  model = model.bfloat16()
  model.save_pretrained(folder)
  return _measured(started)


def checkpoint(size: str, folder: str) -> dict[str, Any]:
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
  from anysearch_jax.training import optimizers, train_step

  experiment = config_lib.ExperimentConfig()
  a = architecture.from_hf(config(size))
  tx = optimizers.adamw(a, experiment.optimizer)
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


def _measured(started: float) -> dict[str, Any]:
  seconds = time.perf_counter() - started
  return {"seconds": seconds, "peak_gb": harness.peak_memory() / 1e9}


def _size_of(folder: pathlib.Path) -> dict[str, Any]:
  sizes = [p.stat().st_size for p in folder.glob("*.safetensors")]
  return {"bytes": sum(sizes), "files": len(sizes)}


if __name__ == "__main__":
  flags.DEFINE_enum("size", "1.5b", list(_SIZES), "Loaded and exported.")
  flags.DEFINE_enum("state", "0.5b", list(_SIZES), "Checkpointed.")
  flags.DEFINE_integer("pairs", 3, "Pairs of measurements.")
  flags.DEFINE_string("folder", "", "Where; default: temporary.")
  harness.run(
    main,
    workers={
      "make": make,
      "ours": ours,
      "theirs": theirs,
      "export": export,
      "their_export": their_export,
      "checkpoint": checkpoint,
    },
  )
