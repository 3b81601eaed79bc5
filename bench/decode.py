r"""Compares decode calls of the in-process engine with the memory bandwidth.

    python -m bench.decode --shape=configs/shapes/Qwen3-4B.json \
        --rows=128 --context=2048 --dtype=bfloat16
        on one GPU: random weights of Qwen3-4B, 128 rows of 2048 tokens
    python -m bench.decode
        on a CPU: a policy of 19 M parameters

A decode step reads every weight once for all rows, and the keys and values of
every row. The lower bound of its time is these bytes divided by the bandwidth
of one large sum, measured in the same process.
"""

from __future__ import annotations

import contextlib
import functools
import pathlib
import statistics
from typing import TYPE_CHECKING, Any

from absl import flags

from anysearch_jax import config as config_lib
from anysearch_jax.host import json_files
from bench import harness
from launch import jax_setup

if TYPE_CHECKING:
  from bench import policies

SMALL = {
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


def measure(
  decoder: policies.Decoder,
  *,
  context: int,
  calls: int,
  profile: str | None = None,
) -> dict[str, Any]:
  """Times decode calls that start at `context` tokens, and their lower bound.

  Args:
    decoder: with pages for `calls + 2` more calls.
    context: tokens of each row before the first call.
    calls: number of timed calls.
    profile: folder of a profiler trace of the timed calls.
  """
  import jax

  from anysearch_jax.policy import parameters as weights
  from anysearch_jax.policy import table

  first = harness.seconds(lambda: decoder(context))
  with jax.profiler.trace(profile) if profile else contextlib.nullcontext():
    seconds = [
      harness.seconds(functools.partial(decoder, context + i * decoder.steps))
      / decoder.steps
      for i in range(calls)
    ]
  step = statistics.median(seconds)
  middle = context + (calls * decoder.steps) // 2
  read, cache = decoder.weight_bytes(), decoder.cache_bytes(middle)
  speed = harness.bandwidth(min(2**30, max(2**27, read)))
  limit = (read + cache) / speed
  return {
    "device": jax.devices()[0].device_kind,
    "parameters": weights.count(table.rows(decoder.a)),
    "attention": decoder.attention,
    "rows": decoder.rows,
    "tokens in each row": middle,
    "first call, s": first,
    "step, ms": 1e3 * step,
    "slowest, ms": 1e3 * max(seconds),
    "tokens/s": decoder.rows / step,
    "weights, GB a step": read / 1e9,
    "keys and values, GB a step": cache / 1e9,
    "bandwidth of reads, GB/s": speed / 1e9,
    "limit by bytes, ms": 1e3 * limit,
    "share of the limit": limit / step,
    "GFLOP a step": 2e-9 * decoder.rows * (read // decoder.dtype.itemsize),
  }


def main() -> dict[str, object]:
  f = flags.FLAGS
  jax_setup.configure(threads=f.threads, cache="")
  from anysearch_jax.policy import architecture
  from bench import policies

  shape = json_files.read(pathlib.Path(f.shape)) if f.shape else SMALL
  engine = config_lib.EngineConfig(
    slots=f.rows,
    max_context=f.context + f.steps * (f.calls + 2),
    page=f.page,
    lanes=(f.rows,),
    decode_steps=f.steps,
    attention=f.attention,
  )
  decoder = policies.Decoder(architecture.from_hf(shape), engine, dtype=f.dtype)
  out = measure(decoder, context=f.context, calls=f.calls, profile=f.profile)
  harness.print_numbers(out)
  return out


if __name__ == "__main__":
  flags.DEFINE_string("shape", None, "config.json of the policy.")
  flags.DEFINE_integer("rows", 32, "Of a decode call.")
  flags.DEFINE_integer("context", 256, "Tokens in each row.")
  flags.DEFINE_integer("steps", 32, "Tokens a call samples.")
  flags.DEFINE_integer("page", 64, "Tokens of a page.")
  flags.DEFINE_string("dtype", "float32", "float32 or bfloat16.")
  flags.DEFINE_string("attention", "auto", "As engine.attention.")
  flags.DEFINE_integer("calls", 7, "Timed calls.")
  flags.DEFINE_integer("threads", 0, "CPU threads; 0: all.")
  flags.DEFINE_string("profile", None, "Folder of a profiler trace.")
  harness.run(main)
