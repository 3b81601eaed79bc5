"""Paged attention at tiny and at real sizes, beside float64 NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from anysearch_jax.policy.attention import paged_attention
from anysearch_jax.policy.attention import pages as pages_lib


def case(*, heads, ends, new, columns, size=64, kv=1, float8=False):
  """Returns queries, pages, their table and positions.

  Args:
    heads: query heads to a kv head, and H.
    ends: tokens of each row, the `new` last of which have a query.
    new: T.
    columns: pages of a row.
    size: tokens of a page.
    kv: number of kv heads.
    float8: whether pages are float8 with scales.
  """
  (group, h), rng = heads, np.random.default_rng(0)
  table = 1 + rng.permutation(len(ends) * columns)
  shape = (kv, 1 + len(ends) * columns, size, h)
  pages = pages_lib.Pages(
    *(jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for _ in range(2))
  )
  if float8:
    (k, k_scale), (v, v_scale) = map(pages_lib.quantised, pages[:2])
    pages = pages_lib.Pages(k, v, k_scale, v_scale)
  q = jnp.asarray(
    rng.normal(size=(len(ends), new, kv * group, h)), jnp.bfloat16
  )
  positions = np.maximum(np.asarray(ends)[:, None] - new + np.arange(new), 0)
  table = table.reshape(len(ends), columns).astype(np.int32)
  return q, pages, table, positions.astype(np.int32)


def truth(q, pages, table, positions, sinks=None, window=np.inf):
  """Attends in float64, one row and head after the other."""
  b, _, n, h = q.shape
  k, v, *scales = (np.asarray(x, np.float64) for x in jax.tree.leaves(pages))
  if scales:
    k, v = (x * scale[..., None] for x, scale in zip((k, v), scales))
  k, v = (x[:, table].reshape(len(x), b, -1, h) for x in (k, v))
  q, out = np.asarray(q, np.float64), np.zeros(q.shape)
  for row, head in np.ndindex(b, n):
    kv = head // (n // len(k))
    scores = q[row, :, head] @ k[kv, row].T / np.sqrt(h)
    ages = positions[row][:, None] - np.arange(k.shape[2])
    scores = np.where((ages >= 0) & (ages < window), scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    p = np.exp(scores - top)
    total = p.sum(-1, keepdims=True)
    if sinks is not None:
      total += np.exp(sinks[head] - top)
    out[row, :, head] = p / total @ v[kv, row]
  return out


def error(found, wanted):
  """Returns the mean of the rows' errors, each relative to its row's size.

  Both are root mean squares. The results of long rows are smaller.
  """
  wrong = np.asarray(found, np.float64) - wanted
  axes = tuple(range(1, wanted.ndim))
  return np.mean(
    np.sqrt(np.mean(wrong**2, axis=axes) / np.mean(wanted**2, axis=axes))
  )


def assert_as_exact_as_xla(attend, arguments):
  """Compares a kernel's error with that of XLA's path on the same values.

  Both round the same numbers in another order: a handful that round otherwise
  are a percent.
  """
  wanted = truth(*arguments)
  ours = error(attend(*arguments), wanted)
  xla = error(paged_attention._xla(*arguments, block=512), wanted)
  assert ours <= 1.01 * xla
  # Half of the last bit of bfloat16 is .0039 of a number at most.
  assert xla < 0.003
