"""The installation, and what the device can do at most."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from anysearch_jax.policy.attention import paged_attention, self_attention
from anysearch_jax.policy.attention import pages as pages_lib
from anysearch_jax.retrieval.index import flat
from bench import harness
from bench.first_gpu import engine, running

_NAMES = ("out", "dq", "dk", "dv")
_DIM = 768
WIKI_18 = 21_015_324  # Passages of the paper's corpus.
_PACKAGES = re.compile(r"jax|nvidia|libtpu|flax|optax|orbax|transformers")
_CALLS = 20
_WARM = 3


def doctor(notes: running.Notes) -> None:
  """Reports versions, devices and what launch.doctor finds."""
  for found in importlib.metadata.distributions():
    if _PACKAGES.match(found.name):
      notes.add({found.name: found.version})
  device = jax.local_devices()[0]
  notes.add(
    {
      "cores": os.cpu_count(),
      "backend": jax.default_backend(),
      "device": device.device_kind,
      "compute capability": str(getattr(device, "compute_capability", "none")),
    }
  )
  if stats := device.memory_stats():
    limit = stats.get("bytes_limit", 0)
    notes.add({"memory that JAX may use, GiB": limit / 2**30})
  # With nvidia-smi's table.
  notes.add({"environment": jax.print_environment_info(return_string=True)})
  notes.case("anysearch_jax.launch.doctor", _launch_doctor)


def _launch_doctor() -> Mapping[str, Any]:
  """Returns findings that are not ok; packages that the bench lacks count."""
  from anysearch_jax.launch import doctor as doctor_lib

  found = [x for x in doctor_lib.examine(None) if x.level != doctor_lib.OK]
  return {f"finding {i}": str(x) for i, x in enumerate(found, 1)}


def peaks(notes: running.Notes) -> None:
  """Measures matrix products, at sizes of training and decode, and copies."""
  large, rows = (256, 8) if notes.rehearse else (8192, 128)
  wide, deep = (large, large) if notes.rehearse else (2560, 9728)
  for name, m, k, n, dtype in (
    ("square bfloat16", large, large, large, "bfloat16"),
    ("square float32", large // 2, large // 2, large // 2, "float32"),
    # Qwen3-4B's gate and up, for a micro-batch and for a decode step.
    ("training bfloat16", 2 * large, wide, deep, "bfloat16"),
    ("decode bfloat16", rows, wide, deep, "bfloat16"),
  ):
    notes.case(name, functools.partial(_product, m, k, n, dtype))
  for size in (22, 24) if notes.rehearse else (28, 32):
    read = functools.partial(_read, 2**size)
    notes.case(f"sum of 2^{size} bytes", read)
  size = 2**22 if notes.rehearse else 2**30
  notes.case("from the host", functools.partial(_transfer, size))


def _read(size: int) -> Mapping[str, Any]:
  return {"GB/s": harness.bandwidth(size) / 1e9}


def _product(m: int, k: int, n: int, dtype: str) -> Mapping[str, Any]:
  a = jax.random.normal(jax.random.key(0), (m, k), dtype)
  b = jax.random.normal(jax.random.key(1), (k, n), dtype)
  seconds = _seconds(jax.jit(jnp.matmul), a, b)
  moved = a.nbytes + b.nbytes + m * n * a.dtype.itemsize
  return {
    "shape": f"{m} x {k} x {n}",
    "ms": 1e3 * seconds,
    "TFLOP/s": 2 * m * k * n / seconds / 1e12,
    "GB/s at least": moved / seconds / 1e9,
  }


def _seconds(run: Callable[..., Any], *arguments: Any) -> float:
  """Returns the seconds of a call among many that are in flight."""

  def calls() -> None:
    jax.block_until_ready([run(*arguments) for _ in range(_CALLS)])

  jax.block_until_ready(run(*arguments))
  return min(harness.seconds(calls) for _ in range(_WARM)) / _CALLS


def _transfer(size: int) -> Mapping[str, Any]:
  """Measures copies between the host and the device."""
  host = np.ones(size // 4, np.float32)
  jax.device_put(host).block_until_ready()
  there = harness.seconds(lambda: jax.device_put(host).block_until_ready())
  on_device = jax.device_put(host) + 1
  on_device.block_until_ready()
  back = harness.seconds(lambda: np.asarray(on_device))
  return {
    "to the device, GB/s": size / there / 1e9,
    "to the host, GB/s": size / back / 1e9,
  }


def search(notes: running.Notes) -> None:
  """Compares searches of random vectors with the bandwidth of reads."""
  all_vectors = 4000 if notes.rehearse else WIKI_18
  for share in (1, 4):
    count = all_vectors // share
    measure = functools.partial(_search, count, rehearse=notes.rehearse)
    notes.case(f"{count} vectors", measure)


def _search(count: int, *, rehearse: bool) -> dict[str, object]:
  block, calls = (1024, 2) if rehearse else (32768, 7)
  # The vectors, the copy that is timed beside them, and scores of a block.
  engine.need(2 * count * _DIM + 2**33)
  blocks = -(-count // block)

  @jax.jit
  def make(key: jax.Array) -> jax.Array:
    """Makes vectors block by block; all in float32 would not fit."""
    return jax.lax.map(
      lambda i: _units(jax.random.fold_in(key, i), block).astype(jnp.bfloat16),
      jnp.arange(blocks),
    ).reshape(blocks * block, _DIM)

  values = jax.block_until_ready(make(jax.random.key(0)))
  find = functools.partial(
    flat.held,
    values=values,
    k=3,
    mesh=jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("rows",)),
    count=count,
    each=len(values),
    block=block,
  )
  speed = harness.bandwidth(min(values.nbytes, 1 << 32))
  floor = count * _DIM * values.dtype.itemsize / speed
  out: dict[str, object] = {
    "device": jax.devices()[0].device_kind,
    "vectors": count,
    "dim": _DIM,
    "bandwidth of reads, GB/s": speed / 1e9,
    "limit by bytes, ms": 1e3 * floor,
  }
  for queries in (1, 8) if rehearse else (1, 8, 32, 128):
    asked = _units(jax.random.key(1), queries)

    def call(asked: jax.Array = asked) -> None:
      jax.block_until_ready(find(asked))

    call()
    took = statistics.median(harness.seconds(call) for _ in range(calls))
    out[f"{queries} queries, ms"] = 1e3 * took
    out[f"{queries} queries, times the limit"] = took / floor
  return out


def _units(key: jax.Array, count: int) -> jax.Array:
  x = jax.random.normal(key, (count, _DIM))
  return x / jnp.linalg.norm(x, axis=1, keepdims=True)


class Heads(NamedTuple):
  """Query heads, kv heads and the size of a head."""

  query: int
  kv: int
  size: int

  def __str__(self) -> str:
    return f"heads {self.query}:{self.kv} of {self.size}"


# Of Qwen3-4B and Llama-3.1-8B, of Qwen2.5-7B, of Qwen2.5-0.5B.
_HEADS = (Heads(32, 8, 128), Heads(28, 4, 128), Heads(14, 2, 64))


def attention(notes: running.Notes) -> None:
  """Compares every implementation that runs here with XLA's in float32."""
  length, rows, context = (64, 4, 96) if notes.rehearse else (8192, 128, 2048)
  lanes, chunk = (2, 8) if notes.rehearse else (32, 64)
  for each in (Heads(4, 2, 64),) if notes.rehearse else _HEADS:
    for name, count, tokens in (("decode", rows, 1), ("prefill", lanes, chunk)):
      notes.case(
        f"{name}, {each}, {count} rows of {context}",
        functools.partial(_paged, each, context, count, tokens),
      )
    for segments in (1, 4):
      notes.case(
        f"training, {each}, {segments} segments of {length // segments}",
        functools.partial(_training, each, length, segments),
      )


def _training(heads: Heads, length: int, segments: int) -> Mapping[str, Any]:
  """Returns errors of outputs and gradients, and milliseconds."""
  rng = np.random.default_rng(0)
  ids = jnp.repeat(jnp.arange(segments) + 1, length // segments)[None]
  arguments = [
    jnp.asarray(rng.normal(size=(1, length, n, heads.size)), jnp.bfloat16)
    for n in (heads.query, heads.kv, heads.kv, heads.query)
  ]
  device = jax.local_devices()[0]
  capability = getattr(device, "compute_capability", None)
  best = self_attention.choose(
    "auto",
    platform=device.platform,
    head_dim=heads.size,
    dtype=jnp.bfloat16,
    length=length,
    compute_capability=None if capability is None else float(capability),
  )

  def made(implementation: str) -> Callable[..., tuple[jax.Array, ...]]:
    def attend(*qkv: jax.Array) -> jax.Array:
      return self_attention.self_attention(
        *(*qkv, ids), implementation=implementation, chunk=512, max_segments=16
      )

    def run(*qkvg: jax.Array) -> tuple[jax.Array, ...]:
      out, pullback = jax.vjp(attend, *qkvg[:3])
      return out, *pullback(qkvg[3])

    return jax.jit(run)

  exact = _exact(made("xla"), arguments)
  # Two products forward and four backward, over the scores of causal segments.
  products = 6 * 2 * heads.query * heads.size * length
  flops = products * (length // segments + 1) / 2
  out: dict[str, Any] = {}
  for implementation in dict.fromkeys((best, "xla")):
    run = made(implementation)
    found = jax.block_until_ready(run(*arguments))
    for name, ours, truth in zip(_NAMES, found, exact, strict=True):
      out[f"{implementation} {name} error"] = _error(ours, truth)
    seconds = _seconds(run, *arguments)
    out[f"{implementation} ms"] = 1e3 * seconds
    out[f"{implementation} TFLOP/s"] = flops / seconds / 1e12
  return out


def _exact(run: Callable[..., Any], arguments: Sequence[Any]) -> Any:
  """Returns the results for the same numbers, computed in float32."""
  wide = jax.tree.map(
    lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x,
    tuple(arguments),
  )
  # Devices multiply float32 in fewer bits unless told otherwise.
  with jax.default_matmul_precision("highest"):
    return run(*wide)


def _paged(
  heads: Heads, context: int, rows: int, tokens: int
) -> Mapping[str, Any]:
  """Returns errors and speeds of rows' last tokens over paged keys and values.

  The last two rows are shorter, for the errors.
  """
  size = 64
  rng = np.random.default_rng(0)

  def normal(*shape: int) -> jax.Array:
    return jnp.asarray(rng.normal(size=shape), jnp.bfloat16)

  columns = -(-context // size)
  table = 1 + rng.permutation(rows * columns).reshape(rows, columns)
  table = table.astype(np.int32)
  shape = (heads.kv, 1 + rows * columns, size, heads.size)
  pages = pages_lib.Pages(normal(*shape), normal(*shape))
  group = heads.query // heads.kv
  qkv = normal(rows, tokens, heads.kv, group + 2, heads.size)
  lengths = np.full(rows, context)
  lengths[-2:] = max(context // 2, tokens), tokens
  positions = (lengths[:, None] - tokens + np.arange(tokens)).astype(np.int32)
  best = paged_attention.choose(
    "auto",
    platform=jax.default_backend(),
    capability=getattr(jax.local_devices()[0], "compute_capability", None),
    head_dim=heads.size,
    dtype=jnp.bfloat16,
    page=size,
  )
  arguments = (qkv, pages, table, positions, np.ones((rows, tokens), bool))

  def made(implementation: str) -> Callable[..., tuple[jax.Array, Any]]:
    paged = paged_attention.Paged(implementation, block=512)
    # Joined heads, as in the engine, so that its kernel writes to the pages.
    return jax.jit(lambda qkv, *rest: paged(qkv, None, None, *rest))

  exact, _ = _exact(made("xla"), arguments)
  # Keys and values; two products of queries with each.
  read = 4 * int(lengths.sum()) * heads.kv * heads.size
  flops = 4 * int(lengths.sum()) * tokens * heads.query * heads.size
  out: dict[str, Any] = {}
  for implementation in dict.fromkeys((best, "xla")):
    run = made(implementation)
    out[f"{implementation} error"] = _error(run(*arguments)[0], exact)
    # As in the engine, the next call writes to the same pages.
    again = jax.jit(run, donate_argnums=1)
    held = jax.tree.map(jnp.copy, pages)

    def calls(again=again) -> None:
      nonlocal held
      for _ in range(_CALLS):
        found, held = again(qkv, held, *arguments[2:])
      jax.block_until_ready(found)

    calls()
    seconds = min(harness.seconds(calls) for _ in range(_WARM)) / _CALLS
    out[f"{implementation} ms"] = 1e3 * seconds
    out[f"{implementation} GB/s"] = read / seconds / 1e9
    out[f"{implementation} TFLOP/s"] = flops / seconds / 1e12
  return out


def _error(found: jax.Array, truth: jax.Array) -> float:
  """Returns the root mean square of the error, relative to that of `truth`."""
  wrong = found.astype(jnp.float32) - truth
  return float(jnp.sqrt(jnp.mean(wrong**2) / jnp.mean(truth**2)))
