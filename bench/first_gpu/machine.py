"""The installation, and what the device can do at most."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import shutil
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from bench import harness
from bench.first_gpu import engine, running

if TYPE_CHECKING:
  import jax
from typing import NamedTuple

import jax
import numpy as np

from anysearch_jax.policy.attention import paged_attention, self_attention
from anysearch_jax.policy.attention import pages as pages_lib

_KERNEL_CALLS = 10
_NAMES = ("out", "dq", "dk", "dv")
_DIM = 768
WIKI_18 = 21_015_324  # Passages of the paper's corpus.
_PACKAGES = (
  "jax",
  "jaxlib",
  "jax-cuda12-plugin",
  "jax-cuda13-plugin",
  "nvidia-cudnn-cu12",
  "nvidia-cudnn-cu13",
  "libtpu",
  "flax",
  "optax",
  "orbax-checkpoint",
  "chex",
  "numpy",
  "safetensors",
  "tokenizers",
  "transformers",
  "absl-py",
)
_SMI = "name,driver_version,memory.total,power.limit,clocks.max.sm"
_CALLS = 20
_WARM = 3


def doctor(notes: running.Notes) -> None:
  """Reports versions, devices and what launch.doctor finds."""
  notes.add({name: found for name in _PACKAGES if (found := _version(name))})
  devices = jax.local_devices()
  notes.add(
    {
      "python": platform.python_version(),
      "cores": os.cpu_count(),
      "backend": jax.default_backend(),
      "devices": len(devices),
      "device": devices[0].device_kind,
      "compute capability": str(
        getattr(devices[0], "compute_capability", "none")
      ),
      "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
    }
  )
  if stats := devices[0].memory_stats():
    limit = stats.get("bytes_limit", 0)
    notes.add({"memory that JAX may use, GiB": limit / 2**30})
  notes.case("nvidia-smi", _nvidia_smi)
  notes.case("launch.doctor", _launch_doctor)


def _version(package: str) -> str | None:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return None


def _nvidia_smi() -> Mapping[str, Any]:
  if shutil.which("nvidia-smi") is None:
    raise running.SkippedError("there is no nvidia-smi")
  done = subprocess.run(
    ["nvidia-smi", f"--query-gpu={_SMI}", "--format=csv,noheader"],
    capture_output=True,
    text=True,
    timeout=30,
    check=True,
  )
  return dict(zip(_SMI.split(","), done.stdout.splitlines()[0].split(", ")))


def _launch_doctor() -> Mapping[str, Any]:
  """Returns findings that are not ok; packages that the bench lacks count."""
  from launch import doctor
  from launch import doctor as doctor_lib

  found = [x for x in doctor_lib.examine(None) if x.level != doctor.OK]
  return {f"finding {i}": str(x) for i, x in enumerate(found, 1)}


def peaks(notes: running.Notes) -> None:
  """Measures matrix products, at sizes of training and decode, and copies."""
  large, rows = (256, 8) if notes.rehearse else (8192, 128)
  products: tuple[tuple[str, tuple[int, int, int], str], ...] = (
    ("square bfloat16", (large, large, large), "bfloat16"),
    ("square float32", (large // 2, large // 2, large // 2), "float32"),
    # Qwen3-4B's gate and up, for a micro-batch and for a decode step.
    ("training bfloat16", (2 * large, 2560, 9728), "bfloat16"),
    ("decode bfloat16", (rows, 2560, 9728), "bfloat16"),
  )
  for name, (m, k, n), dtype in products:
    if notes.rehearse:
      k, n = min(k, large), min(n, large)
    notes.case(name, functools.partial(_product, m, k, n, dtype))
  for size in (22, 24) if notes.rehearse else (28, 32):
    notes.case(
      f"copy of 2^{size} bytes",
      functools.partial(_copy, 2**size),
    )
  notes.case(
    "from the host", lambda: _transfer(2**22 if notes.rehearse else 2**30)
  )


def _copy(size: int) -> Mapping[str, Any]:
  return {"GB/s": harness.bandwidth(size) / 1e9}


def _product(m: int, k: int, n: int, dtype: str) -> Mapping[str, Any]:
  a = jax.random.normal(jax.random.key(0), (m, k), dtype)
  b = jax.random.normal(jax.random.key(1), (k, n), dtype)
  product = jax.jit(jnp.matmul)
  seconds = _each(lambda: product(a, b))
  moved = a.nbytes + b.nbytes + m * n * a.dtype.itemsize
  return {
    "shape": f"{m} x {k} x {n}",
    "ms": 1e3 * seconds,
    "TFLOP/s": 2 * m * k * n / seconds / 1e12,
    "GB/s at least": moved / seconds / 1e9,
  }


def _each(call: Callable[[], jax.Array]) -> float:
  """Returns the seconds of one of many calls that wait for each other only."""
  for _ in range(_WARM):
    jax.block_until_ready(call())

  def calls() -> None:
    jax.block_until_ready([call() for _ in range(_CALLS)])

  return min(harness.seconds(calls) for _ in range(3)) / _CALLS


def _transfer(size: int) -> Mapping[str, Any]:
  """Measures copies between the host and the device."""
  import numpy as np

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
  """Compares searches of random vectors with the bandwidth of a copy."""
  all_vectors = 4000 if notes.rehearse else WIKI_18
  for share in (1, 4):
    vectors = all_vectors // share
    notes.case(
      f"{vectors} vectors",
      functools.partial(_measure, vectors, rehearse=notes.rehearse),
    )


def _measure(vectors: int, *, rehearse: bool) -> dict[str, object]:
  # The vectors, the copy that is timed beside them, and scores of a block.
  engine.need(2 * vectors * _DIM + 2**33)
  return _times(
    vectors=vectors,
    dim=_DIM,
    k=3,
    queries=(1, 8) if rehearse else (1, 8, 32, 128),
    block=1024 if rehearse else 32768,
    calls=2 if rehearse else 7,
  )


def _times(
  *,
  vectors: int,
  dim: int,
  k: int,
  queries: Sequence[int],
  block: int,
  calls: int,
) -> dict[str, object]:
  """Times searches of random vectors on the first device.

  Args:
    vectors: number of vectors.
    dim: numbers of a vector.
    k: rows that a query finds.
    queries: numbers of queries of a call.
    block: rows that are scored at a time.
    calls: timed calls of each number of queries.
  """
  import jax
  import numpy as np

  from retrieval.index import flat

  values = _vectors(vectors, dim, block)
  mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("rows",))
  search = functools.partial(
    flat.held,
    values=values,
    k=k,
    mesh=mesh,
    count=vectors,
    each=len(values),
    block=block,
  )
  speed = harness.bandwidth(min(values.nbytes, 1 << 32))
  floor = vectors * dim * values.dtype.itemsize / speed
  out: dict[str, object] = {
    "device": jax.devices()[0].device_kind,
    "vectors": vectors,
    "dim": dim,
    "bandwidth of a copy, GB/s": speed / 1e9,
    "limit by bytes, ms": 1e3 * floor,
  }
  for count in queries:
    asked = _units(jax.random.key(1), (count, dim))
    call = functools.partial(_searched, search, asked)
    call()
    took = statistics.median(harness.seconds(call) for _ in range(calls))
    out[f"{count} queries, ms"] = 1e3 * took
    out[f"{count} queries, times the limit"] = took / floor
  return out


def _searched(search: Callable[[jax.Array], object], asked: jax.Array) -> None:
  import jax

  jax.block_until_ready(search(asked))


def _vectors(count: int, dim: int, block: int) -> jax.Array:
  """Makes vectors block by block; all of them in float32 would not fit."""
  import jax
  import jax.numpy as jnp

  blocks = -(-count // block)

  @jax.jit
  def make(key: jax.Array) -> jax.Array:
    return jax.lax.map(
      lambda i: _units(jax.random.fold_in(key, i), (block, dim)).astype(
        jnp.bfloat16
      ),
      jnp.arange(blocks),
    ).reshape(blocks * block, dim)

  return jax.block_until_ready(make(jax.random.key(0)))


def _units(key: jax.Array, shape: tuple[int, int]) -> jax.Array:
  import jax
  import jax.numpy as jnp

  x = jax.random.normal(key, shape)
  return x / jnp.linalg.norm(x, axis=1, keepdims=True)


class Heads(NamedTuple):
  """Query heads, kv heads and the size of a head."""

  query: int
  kv: int
  size: int

  def __str__(self) -> str:
    return f"heads {self.query}:{self.kv} of {self.size}"


# Qwen3 (4:1), Qwen2.5-7B (7:1), Qwen2.5-1.5B's ratio of 6, 8:1; both sizes.
_HEADS = (
  Heads(8, 2, 128),
  Heads(7, 1, 128),
  Heads(8, 1, 128),
  Heads(8, 2, 64),
  Heads(7, 1, 64),
)


def attention(notes: running.Notes) -> None:
  """Compares every implementation that runs here with float64."""
  length = 64 if notes.rehearse else 2048
  heads = _HEADS[:1] if notes.rehearse else _HEADS
  for each in heads:
    for segments in (1, 4) if notes.rehearse else (1, 4, 16):
      notes.case(
        f"training, {each}, {segments} segments",
        functools.partial(_training, each, length, segments),
      )
  contexts = (100,) if notes.rehearse else (1000, 8000)
  for each in heads:
    for context in contexts:
      for name, tokens in (("decode", 1), ("prefill", 64)):
        notes.case(
          f"{name}, {each}, context {context}",
          functools.partial(_paged, each, context, tokens),
        )


def _training(heads: Heads, length: int, segments: int) -> Mapping[str, Any]:
  """Returns errors of outputs and gradients, and milliseconds."""
  rng = np.random.default_rng(0)
  ids = np.repeat(np.arange(segments) + 1, length // segments)[None]
  ids = np.pad(ids, ((0, 0), (0, length - ids.shape[1]))).astype(np.int32)
  q, k, v, g = (
    jnp.asarray(rng.normal(size=(1, length, n, heads.size)), jnp.bfloat16)
    for n in (heads.query, heads.kv, heads.kv, heads.query)
  )
  exact = _float64(
    ids[0], *(np.asarray(x[0], np.float64) for x in (q, k, v, g))
  )
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
  out: dict[str, Any] = {}
  for implementation in dict.fromkeys((best, "xla")):
    run = jax.jit(functools.partial(_pulled, implementation=implementation))
    found = jax.block_until_ready(run(q, k, v, g, ids))
    for name, ours, truth in zip(_NAMES, found, exact, strict=True):
      out[f"{implementation} {name} error"] = _error(ours[0], truth)
    out[f"{implementation} ms"] = _ms(run, q, k, v, g, ids)
  return out


def _pulled(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  g: jax.Array,
  ids: jax.Array,
  *,
  implementation: str,
) -> tuple[jax.Array, ...]:
  """Returns attention's output and its gradients."""
  out, pullback = jax.vjp(
    lambda q, k, v: self_attention.self_attention(
      q, k, v, ids, implementation=implementation, chunk=512, max_segments=16
    ),
    q,
    k,
    v,
  )
  return out, *pullback(g)


def _float64(
  ids: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray
) -> tuple[np.ndarray, ...]:
  """Computes outputs and gradients of one row, head by head."""
  t, n, h = q.shape
  shared = n // k.shape[1]
  mask = (ids[:, None] == ids) & np.tri(t, dtype=bool) & (ids > 0)[:, None]
  out, dq, dk, dv = (np.zeros_like(x) for x in (q, q, k, v))
  real = (ids > 0)[:, None]
  for head in range(n):
    kv = head // shared
    scores = np.where(mask, q[:, head] @ k[:, kv].T * h**-0.5, -1e30)
    p = np.exp(scores - scores.max(-1, keepdims=True)) * mask
    p /= np.maximum(p.sum(-1, keepdims=True), 1e-300)
    cotangent = g[:, head] * real
    out[:, head] = p @ v[:, kv]
    dv[:, kv] += p.T @ cotangent
    dp = cotangent @ v[:, kv].T
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) * h**-0.5
    dq[:, head] = ds @ k[:, kv]
    dk[:, kv] += ds.T @ q[:, head]
  return out, dq, dk, dv


def _paged(heads: Heads, context: int, tokens: int) -> Mapping[str, Any]:
  """Returns errors of each row's last tokens over paged keys and values."""
  size, rows = 64, 4
  rng = np.random.default_rng(0)
  columns = -(-context // size)
  table = 1 + rng.permutation(rows * columns).reshape(rows, columns)
  table = table.astype(np.int32)
  pages = pages_lib.Pages(
    *(
      jnp.asarray(
        rng.normal(size=(heads.kv, 1 + rows * columns, size, heads.size)),
        jnp.bfloat16,
      )
      for _ in range(2)
    )
  )
  q, k, v = (
    jnp.asarray(rng.normal(size=(rows, tokens, n, heads.size)), jnp.bfloat16)
    for n in (heads.query, heads.kv, heads.kv)
  )
  lengths = np.asarray(
    [context, context - 1, max(context // 2, tokens), tokens]
  )
  positions = (lengths[:, None] - tokens + np.arange(tokens)).astype(np.int32)
  # Some are enough: float64 on the host takes its time.
  checked = range(0, tokens, max(1, tokens // 4))
  best = paged_attention.choose(
    "auto",
    platform=jax.default_backend(),
    head_dim=heads.size,
    dtype=jnp.bfloat16,
    page=size,
  )
  real = np.ones((rows, tokens), bool)
  arguments = (q, k, v, pages, table, positions, real)
  out: dict[str, Any] = {}
  for implementation in dict.fromkeys((best, "xla")):
    paged = paged_attention.Paged(implementation, block=512)
    run = jax.jit(paged.__call__)
    found, written = run(*arguments)
    truth = np.stack(
      [
        _token(
          np.asarray(q[r, t], np.float64),
          written,
          table[r],
          positions[r, t] + 1,
        )
        for r in range(rows)
        for t in checked
      ]
    )
    found = found[:, np.asarray(checked)].reshape(truth.shape)
    out[f"{implementation} error"] = _error(found, truth)
    out[f"{implementation} ms"] = _ms(run, *arguments)
  return out


def _token(
  q: np.ndarray, pages: pages_lib.Pages, table: np.ndarray, length: int
) -> np.ndarray:
  """Attends from one token, `[N, H]`, to the cached ones, in float64."""
  n, h = q.shape
  k, v = (
    np.asarray(x[:, table], np.float64).reshape(x.shape[0], -1, h)[:, :length]
    for x in pages
  )
  shared = n // k.shape[0]
  out = np.zeros_like(q)
  for head in range(n):
    scores = k[head // shared] @ q[head] * h**-0.5
    p = np.exp(scores - scores.max())
    out[head] = p / p.sum() @ v[head // shared]
  return out


def _ms(run: Callable[..., Any], *arguments: Any) -> float:
  """Returns the milliseconds of the fastest of some calls."""
  call = functools.partial(run, *arguments)
  return 1e3 * min(
    harness.seconds(lambda: jax.block_until_ready(call()))
    for _ in range(_KERNEL_CALLS)
  )


def _error(found: jax.Array, truth: np.ndarray) -> float:
  """Returns the root mean square of the error, relative to that of `truth`."""
  wrong = np.asarray(found, np.float64) - truth
  return float(np.sqrt(np.mean(wrong**2) / np.mean(truth**2)))
