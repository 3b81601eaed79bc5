"""Errors and speed of attention on this device, beside float64 on the host."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from anysearch_jax.policy.attention import paged_attention, self_attention
from bench import harness
from bench.first_gpu import notes as notes_lib

_CALLS = 10
_NAMES = ("out", "dq", "dk", "dv")


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


def attention(notes: notes_lib.Notes) -> None:
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
  pages = paged_attention.Pages(
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
  q: np.ndarray, pages: paged_attention.Pages, table: np.ndarray, length: int
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
    for _ in range(_CALLS)
  )


def _error(found: jax.Array, truth: np.ndarray) -> float:
  """Returns the root mean square of the error, relative to that of `truth`."""
  wrong = np.asarray(found, np.float64) - truth
  return float(np.sqrt(np.mean(wrong**2) / np.mean(truth**2)))
