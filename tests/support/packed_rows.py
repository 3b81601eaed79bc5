"""Packed rows, and attention over them written out as sums."""

from __future__ import annotations

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np

from anysearch_jax.policy.attention import self_attention

COLLECTIVE = re.compile(r" (all-|collective-|reduce-scatter)")
NAMES = ("out", "dq", "dk", "dv")
# Segment lengths for rows of 37: with padding, full, short segments, empty.
ROWS = ((10, 20), (37,), (1, 1, 33, 2), ())


def inputs(*rows, length, n=4, k=2, h=8, dtype=jnp.float32):
  """Draws q, k, v, segment ids and a cotangent of the output.

  Args:
    *rows: lengths of each row's segments; padding follows.
    length: row length T.
    n: number of query heads.
    k: number of kv heads.
    h: dimension of a head.
    dtype: dtype of all arrays except the ids.
  """
  ids = np.zeros((len(rows), length), np.int32)
  for row, sizes in zip(ids, rows, strict=True):
    row[: sum(sizes)] = np.repeat(np.arange(len(sizes)) + 1, sizes)
  rng = np.random.default_rng(0)
  q, keys, v, g = (
    jnp.asarray(rng.normal(size=(*ids.shape, heads, h)), dtype)
    for heads in (n, k, k, n)
  )
  return q, keys, v, ids, g


def attend(q, k, v, ids, g, *, policy=None, **kwargs):
  """Returns the output and the gradients of queries, keys and values."""
  kwargs = {"implementation": "xla", "chunk": q.shape[1]} | kwargs
  forward = functools.partial(self_attention.self_attention, **kwargs)
  if policy is not None:
    forward = jax.checkpoint(forward, policy=policy)
  out, pullback = jax.vjp(lambda *x: forward(*x, ids), q, k, v)
  return out, *pullback(g)


def run(*inputs, **kwargs):
  """Runs `attend`, compiled with little optimization."""
  compiled = jax.jit(
    functools.partial(attend, **kwargs),
    compiler_options={"xla_backend_optimization_level": 0},
  )
  return compiled(*inputs)


def written_out(q, k, v, g):
  """Computes causal attention of one segment and its gradients, head by head.

  All arrays are `[T, heads, H]`, in float64.
  """
  q, k, v, g = (np.asarray(x, np.float64) for x in (q, k, v, g))
  t, n, h = q.shape
  out, dq, dk, dv = (np.zeros_like(x) for x in (q, q, k, v))
  for i in range(n):
    j = i // (n // k.shape[1])
    scores = np.where(np.tri(t), q[:, i] @ k[:, j].T / math.sqrt(h), -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    out[:, i] = p @ v[:, j]
    dp = g[:, i] @ v[:, j].T
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) / math.sqrt(h)
    dq[:, i] = ds @ k[:, j]
    dk[:, j] += ds.T @ q[:, i]
    dv[:, j] += p.T @ g[:, i]
  return out, dq, dk, dv


def expected(q, k, v, ids, g):
  """Applies `written_out` to each segment; padding is zero."""
  found = [np.zeros(x.shape) for x in (q, q, k, v)]
  for b, row in enumerate(ids):
    for segment in set(row.tolist()) - {0}:
      here = np.s_[b, row == segment]
      parts = written_out(q[here], k[here], v[here], g[here])
      for whole, part in zip(found, parts):
        whole[here] = part
  return found


def assert_equal(found, expected):
  """Asserts that arrays agree within 2e-6 of their largest value."""
  for name, x, y in zip(NAMES, found, expected, strict=True):
    tolerance = 2e-6 * np.abs(y).max()
    np.testing.assert_allclose(x, y, atol=tolerance, err_msg=name)


def equations(jaxpr):
  """Yields all equations of a jaxpr, including nested ones."""
  for equation in jaxpr.eqns:
    yield equation
    for value in jax.tree.leaves(
      equation.params, is_leaf=lambda x: hasattr(x, "eqns")
    ):
      inner = getattr(value, "jaxpr", value)
      if hasattr(inner, "eqns"):
        yield from equations(inner)


def traced(*inputs, **kwargs):
  """Returns the jaxpr of `attend`."""
  return jax.make_jaxpr(functools.partial(attend, **kwargs))(*inputs).jaxpr
