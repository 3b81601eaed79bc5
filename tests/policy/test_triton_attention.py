"""The GPU's attention kernel, interpreted, against float64 NumPy.

Its error must not exceed that of XLA's path, on the same bfloat16 values.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anysearch_jax.policy.attention import paged_attention, triton_attention

# Query heads to a kv head, and numbers of a head: Qwen3, Qwen2.5-0.5B, others.
HEADS = [
  (4, 128),
  (7, 64),
  *(
    pytest.param(heads, marks=pytest.mark.slow)
    for heads in ((8, 128), (7, 128), (4, 64), (8, 64))
  ),
]


def case(*, heads, ends, new, columns, size=64, kv=1):
  """Returns queries, pages, their table and positions.

  Args:
    heads: query heads to a kv head, and H.
    ends: tokens of each row, the `new` last of which have a query.
    new: T.
    columns: pages of a row.
    size: tokens of a page.
    kv: number of kv heads.
  """
  (group, h), rng = heads, np.random.default_rng(0)
  table = 1 + rng.permutation(len(ends) * columns)
  shape = (kv, 1 + len(ends) * columns, size, h)
  pages = paged_attention.Pages(
    *(jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for _ in range(2))
  )
  q = jnp.asarray(
    rng.normal(size=(len(ends), new, kv * group, h)), jnp.bfloat16
  )
  positions = np.maximum(np.asarray(ends)[:, None] - new + np.arange(new), 0)
  table = table.reshape(len(ends), columns).astype(np.int32)
  return q, pages, table, positions.astype(np.int32)


def truth(q, pages, table, positions):
  """Attends in float64, one row and head after the other."""
  b, _, n, h = q.shape
  k, v = (
    np.asarray(x, np.float64)[:, table].reshape(len(x), b, -1, h) for x in pages
  )
  q, out = np.asarray(q, np.float64), np.zeros(q.shape)
  for row, head in np.ndindex(b, n):
    kv = head // (n // len(k))
    scores = q[row, :, head] @ k[kv, row].T / np.sqrt(h)
    seen = np.arange(k.shape[2]) <= positions[row][:, None]
    scores = np.where(seen, scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    out[row, :, head] = p / p.sum(-1, keepdims=True) @ v[kv, row]
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


interpreted = functools.partial(triton_attention.attend, interpret=True)


def assert_as_exact_as_xla(arguments, tolerance=1.0):
  wanted = truth(*arguments)
  ours = error(interpreted(*arguments), wanted)
  xla = error(paged_attention._xla(*arguments, block=512), wanted)
  assert ours <= tolerance * xla
  # Half of the last bit of bfloat16 is .0039 of a number at most.
  assert xla < 0.003


@pytest.mark.parametrize("heads", HEADS)
def test_decode_is_as_exact_as_xla(heads):
  ends = (1, 65, 8192)
  assert_as_exact_as_xla(case(heads=heads, ends=ends, new=1, columns=128))


@pytest.mark.parametrize("heads", HEADS)
def test_prefill_of_ragged_rows_is_as_exact_as_xla(heads):
  """Each row is a chunk of another sequence, of 1 to 1500 tokens."""
  ends = (64, 65, 100, 640, 1500)
  assert_as_exact_as_xla(case(heads=heads, ends=ends, new=64, columns=24))


@pytest.mark.slow
def test_long_prefill_is_as_exact_as_xla():
  arguments = case(heads=(4, 128), ends=(8192,), new=64, columns=128)
  assert_as_exact_as_xla(arguments)


@pytest.mark.parametrize("size", [16, 128])
@pytest.mark.parametrize(("new", "end"), [(1, 200), (20, 300)])
def test_pages_of_any_size_and_tiles_that_are_not_full(size, new, end):
  arguments = case(
    heads=(3, 64),
    ends=(end, new),
    new=new,
    columns=512 // size,
    size=size,
    kv=2,
  )
  # Where there is one block both round the same numbers.
  assert_as_exact_as_xla(arguments, tolerance=1.01)


@pytest.mark.parametrize("new", [1, 32])
def test_a_row_depends_on_no_other_row_to_the_bit(new):
  q, pages, table, positions = case(
    heads=(4, 64), ends=(100, 40, 500), new=new, columns=8
  )

  def first(last):
    at = positions.copy()
    at[2] = np.arange(last - new, last)
    return np.asarray(interpreted(q, pages, table, at), np.float32)[:2]

  np.testing.assert_array_equal(first(new), first(500))


def test_partial_results_are_float32():
  arguments = case(heads=(4, 128), ends=(1000,), new=1, columns=16)
  traced = jax.make_jaxpr(interpreted)(*arguments)
  (call,) = [x for x in traced.jaxpr.eqns if x.primitive.name == "pallas_call"]
  assert [x.aval.dtype for x in call.outvars] == [jnp.float32] * 3
