r"""Compares decode calls of the in-process engine with the memory bandwidth.

    python -m bench.decode --shape=configs/shapes/Qwen3-4B.json \
        --rows=128 --context=2048 --dtype=bfloat16
        on one GPU: random weights of Qwen3-4B, 128 rows of 2048 tokens
    python -m bench.decode
        on a CPU: a policy of 19 M parameters

A decode step reads every weight once for all rows, and the keys and values of
every row. The lower bound of its time is these bytes divided by the bandwidth
of one large copy, measured in the same process.
"""

from __future__ import annotations

import json
import pathlib
import statistics
import time

from absl import flags

from launch import flags as launch_flags
from launch import jax_setup

_SHAPE = flags.DEFINE_string("shape", None, "config.json of the policy.")
_ROWS = flags.DEFINE_integer("rows", 32, "Of a decode call.")
_CONTEXT = flags.DEFINE_integer("context", 256, "Tokens in each row.")
_STEPS = flags.DEFINE_integer("steps", 32, "Tokens a call samples.")
_PAGE = flags.DEFINE_integer("page", 64, "Tokens of a page.")
_DTYPE = flags.DEFINE_string("dtype", "float32", "float32 or bfloat16.")
_ATTENTION = flags.DEFINE_string("attention", "auto", "As engine.attention.")
_CALLS = flags.DEFINE_integer("calls", 7, "Timed calls.")
_THREADS = flags.DEFINE_integer("threads", 0, "CPU threads; 0: all.")
_PROFILE = flags.DEFINE_string("profile", None, "Folder of a profiler trace.")

_SMALL = {
  "architectures": ["Qwen2ForCausalLM"],
  "hidden_size": 384,
  "intermediate_size": 1024,
  "num_hidden_layers": 8,
  "num_attention_heads": 6,
  "num_key_value_heads": 2,
  "vocab_size": 8192,
  "rope_theta": 1e6,
  "rms_norm_eps": 1e-6,
  "tie_word_embeddings": False,
  "max_position_embeddings": 4096,
}


def main(argv) -> None:
  del argv
  jax_setup.configure(threads=_THREADS.value, cache="")
  import contextlib

  import jax
  import jax.numpy as jnp
  import numpy as np

  from anysearch_jax import config as config_lib
  from anysearch_jax.host import json_files
  from anysearch_jax.policy import architecture, sharding, table
  from anysearch_jax.policy import parameters as weights
  from anysearch_jax.rollout.jax_engine import kv_memory, kv_store
  from bench import copying

  shape = (
    json_files.read(pathlib.Path(_SHAPE.value)) if _SHAPE.value else _SMALL
  )
  a = architecture.from_hf(shape)
  dtype, rows, steps = jnp.dtype(_DTYPE.value), _ROWS.value, _STEPS.value
  engine = config_lib.EngineConfig(
    slots=rows,
    max_context=_CONTEXT.value + steps * (_CALLS.value + 2),
    page=_PAGE.value,
    lanes=(rows,),
    decode_steps=steps,
    attention=_ATTENTION.value,
  )
  mesh = sharding.mesh()

  @jax.jit
  def fresh():
    tree = weights.tree(
      table.rows(a),
      lambda row: (
        jnp.ones(row.shape)
        if row.init is None
        else row.init * jax.random.normal(jax.random.key(0), row.shape, dtype)
      ),
    )
    return tree

  params = kv_store.apart(fresh(), a=a)
  pages = kv_store.empty(
    a, kv_memory.pages(engine, shards=1), engine.page, dtype, mesh=mesh
  )
  columns = kv_memory.pages_of(engine.max_context, engine)
  page_table = 1 + np.arange(rows * columns, dtype=np.int32).reshape(rows, -1)
  model = kv_store.model(engine, a, mesh, dtype=dtype)
  draws = kv_store.Draws(jnp.zeros(a.vocab_size, bool), jax.random.key(0))

  def call(context: int):
    nonlocal pages
    pages, decoded = kv_store.decode(
      params,
      pages,
      kv_store.Turns(
        page_table,
        tokens=np.ones(rows, np.int32),
        starts=np.full(rows, context, np.int32),
        limits=np.full(rows, steps, np.int32),
        addresses=np.zeros((rows, 5), np.uint32),
        sampled=np.zeros(rows, np.int32),
      ),
      np.int32(0),
      draws,
      model=model,
      steps=steps,
      sampling=config_lib.SamplingConfig(),
    )
    jax.block_until_ready(decoded)

  started = time.perf_counter()
  call(_CONTEXT.value)
  first = time.perf_counter() - started
  trace = (
    jax.profiler.trace(_PROFILE.value)
    if _PROFILE.value
    else contextlib.nullcontext()
  )
  seconds = []
  with trace:
    for i in range(_CALLS.value):
      started = time.perf_counter()
      call(_CONTEXT.value + i * steps)
      seconds.append((time.perf_counter() - started) / steps)
  step = statistics.median(seconds)
  middle = _CONTEXT.value + (_CALLS.value * steps) // 2
  # The embedding is looked up, not read, unless the head is the same array.
  read = sum(
    x.nbytes
    for path, x in jax.tree_util.tree_flatten_with_path(params)[0]
    if path[0].key != "embed" or a.tied
  )
  cache = rows * middle * a.layers * 2 * a.kv_heads * a.head_dim
  cache *= dtype.itemsize
  speed = copying.bandwidth(min(2**30, max(2**27, read)))
  limit = (read + cache) / speed
  out = {
    "device": jax.devices()[0].device_kind,
    "parameters": weights.count(table.rows(a)),
    "attention": model.paged.implementation,
    "rows": rows,
    "tokens in each row": middle,
    "first call, s": first,
    "step, ms": 1e3 * step,
    "slowest, ms": 1e3 * max(seconds),
    "tokens/s": rows / step,
    "weights, GB a step": read / 1e9,
    "keys and values, GB a step": cache / 1e9,
    "bandwidth of a copy, GB/s": speed / 1e9,
    "limit by bytes, ms": 1e3 * limit,
    "share of the limit": limit / step,
    "GFLOP a step": 2e-9 * rows * (read // dtype.itemsize),
  }
  for name, value in out.items():
    shown = f"{value:.4g}" if isinstance(value, float) else value
    print(f"{name:30}{shown}")
  print(json.dumps(out))


if __name__ == "__main__":
  launch_flags.run(main)
