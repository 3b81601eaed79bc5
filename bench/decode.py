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

import contextlib
import functools
import pathlib
import statistics
from typing import TYPE_CHECKING

from absl import flags

from anysearch_jax import config as config_lib
from anysearch_jax.host import json_files
from bench import harness
from launch import jax_setup

if TYPE_CHECKING:
  import numpy as np

  from anysearch_jax.policy import architecture as architecture_lib
  from anysearch_jax.policy import decoder
  from anysearch_jax.rollout.jax_engine import kv_store

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


def prepared(
  weights: decoder.Params, a: architecture_lib.Architecture, dtype: str
) -> decoder.Params:
  """Returns weights as the engine prepares them for one device.

  Args:
    weights: laid out by `table.rows(a)`.
    a: the architecture, adapters included.
    dtype: compute type.
  """
  from anysearch_jax.policy import sharding

  engine = config_lib.EngineConfig()
  model = kv_store.make_model(engine, a, sharding.mesh(), dtype=dtype)
  return model.prepare(weights, a)


class Decoder:
  """Decode calls over rows of the same length, with random weights.

  Args:
    a: the policy's architecture, with its adapters.
    engine: `slots` rows are decoded, `decode_steps` tokens a call. With fewer
      `kv_tokens` than rows at full context, contexts must be shorter.
    dtype: of weights, keys and values.
    params: weights as `prepared` returns them; by default random ones.
  """

  def __init__(
    self,
    a: architecture_lib.Architecture,
    engine: config_lib.EngineConfig,
    *,
    dtype: str,
    params: decoder.Params | None = None,
  ):
    import jax
    import jax.numpy as jnp
    import numpy as np

    from anysearch_jax.policy import sharding
    from anysearch_jax.rollout.jax_engine import kv_memory, kv_store
    from bench import policies

    self.a, self.rows, self.steps = a, engine.slots, engine.decode_steps
    self.dtype = jnp.dtype(dtype)
    mesh = sharding.mesh()
    self._model = kv_store.make_model(engine, a, mesh, dtype=self.dtype)
    if params is None:
      params = prepared(policies.weights_of(a, dtype=self.dtype), a, dtype)
    self.params = params
    pages = kv_memory.pages(engine, shards=1)
    self._pages = kv_store.allocator(
      a, pages, engine.page, self.dtype, mesh=mesh
    )()
    # Each row has the same share of the pages; page 0 is for padding.
    columns = kv_memory.pages_of(engine.max_context, engine)
    each = min((pages - 1) // self.rows, columns)
    self._table = np.zeros((self.rows, columns), np.int32)
    self._table[:, :each] = 1 + np.arange(self.rows * each).reshape(-1, each)
    self._gathered = kv_store.empty_rows(
      self._model,
      self._pages,
      lanes=self.rows,
      columns=columns,
      steps=self.steps,
    )
    self._draws = kv_store.Draws(
      jnp.zeros(a.vocab_size, jnp.uint32), jax.random.key(0)
    )

  @property
  def attention(self) -> str:
    """The implementation of attention that the engine chose."""
    return self._model.paged.implementation

  def __call__(self, context: int) -> None:
    """Decodes `steps` tokens for rows of `context` tokens, and waits."""
    import jax
    import numpy as np

    jax.block_until_ready(self.sample(np.ones(self.rows, np.int32), context))

  def prefill(self, tokens: np.ndarray) -> None:
    """Writes int `[rows, T]` as the beginning of the rows."""
    import numpy as np

    from anysearch_jax.rollout.jax_engine import kv_store

    rows, count = tokens.shape
    self._pages = kv_store.prefill(
      self.params,
      self._pages,
      kv_store.Chunks(
        self._table,
        tokens=tokens,
        starts=np.zeros(rows, np.int32),
        counts=np.full(rows, count, np.int32),
      ),
      model=self._model,
    )

  def sample(self, tokens: np.ndarray, context: int) -> kv_store.Decoded:
    """Samples `steps` tokens after `context` cached ones and `tokens`."""
    import numpy as np

    from anysearch_jax.rollout.jax_engine import kv_store
    from anysearch_jax.rollout.jax_engine import sampling as sampling_lib

    rows = self.rows
    self._pages, self._gathered, decoded = kv_store.decode(
      self.params,
      self._pages,
      self._gathered,
      kv_store.Turns(
        self._table,
        tokens=tokens,
        starts=np.full(rows, context, np.int32),
        limits=np.full(rows, self.steps, np.int32),
        addresses=np.zeros((rows, 5), np.uint32),
        sampled=np.zeros(rows, np.int32),
        stops=np.ones(rows, np.uint32),
        settings=sampling_lib.settings([config_lib.SamplingConfig()] * rows),
      ),
      np.int32(0),
      self._draws,
      model=self._model,
      steps=self.steps,
      restricted=False,
    )
    return decoded

  def weight_bytes(self) -> int:
    """Returns the bytes of weights that each step reads."""
    import jax

    # The embedding is looked up, not read, unless the head is the same array.
    return sum(
      x.nbytes
      for path, x in jax.tree_util.tree_flatten_with_path(self.params)[0]
      if path[0].key != "embed" or self.a.tied
    )

  def cache_bytes(self, context: int) -> int:
    """Returns the bytes of keys and values that each step reads."""
    a = self.a
    numbers = self.rows * context * a.layers * 2 * a.kv_heads * a.head_dim
    return numbers * self.dtype.itemsize


def measure(
  decoder: Decoder, *, context: int, calls: int, profile: str | None = None
) -> dict[str, object]:
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
    "bandwidth of a copy, GB/s": speed / 1e9,
    "limit by bytes, ms": 1e3 * limit,
    "share of the limit": limit / step,
    "GFLOP a step": 2e-9 * decoder.rows * (read // decoder.dtype.itemsize),
  }


def main() -> dict[str, object]:
  f = flags.FLAGS
  jax_setup.configure(threads=f.threads, cache="")
  from anysearch_jax.policy import architecture

  shape = json_files.read(pathlib.Path(f.shape)) if f.shape else SMALL
  engine = config_lib.EngineConfig(
    slots=f.rows,
    max_context=f.context + f.steps * (f.calls + 2),
    page=f.page,
    lanes=(f.rows,),
    decode_steps=f.steps,
    attention=f.attention,
  )
  decoder = Decoder(architecture.from_hf(shape), engine, dtype=f.dtype)
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
